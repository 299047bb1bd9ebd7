"""The model that a policy is held to: how the KL to it is estimated and paid for, and when it moves to the policy."""

import warnings
from typing import ClassVar, Literal

import torch

import fused_rl
from fused_rl.trainers.options import Needs, NonNegativeInt, PositiveFraction, without
from fused_rl.trainers.policy.options import LossConfig
from fused_rl.trainers.policy.policy import Measured

NO_REFERENCE = (
    "has no meaning with kl_coef=0 and kl_every=0, where no reference is loaded; leave it out, or give --kl_coef"
)
NOTHING_PAID = "has no meaning with kl_coef=0, where no KL is paid for; leave it out, or give --kl_coef"


class KLConfig(LossConfig):
    """Where the KL to the reference is paid for."""

    kl_in: Literal["loss", "reward"] = "loss"
    """loss: token by token, by the estimator rk3 where none is given; reward: less reward for it before the advantages
    are taken, by k1. It is measured in any case."""

    needs: ClassVar = (Needs("kl_in", lambda config: config.kl_coef > 0, NOTHING_PAID),)

    @property
    def estimator(self) -> str:
        """What was chosen, or what is right for where the KL is paid."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else fused_rl.PolicyLossOptions.kl_estimator)

    def kl_in_loss(self, kl_coef: float) -> dict[str, object]:
        """The options of the loss, in which what the rewards have paid for is not paid for again."""
        return {"kl_estimator": self.estimator, "kl_coef": kl_coef if self.kl_in == "loss" else 0.0}

    def kl_of_tokens(self, measured: Measured, mask: torch.Tensor) -> torch.Tensor:
        """(B, T - 1) nats, before the update: what a reward pays for; 0 where masked."""
        old = measured.old_logprobs
        found = fused_rl.kl_estimate(old, measured.ref_logprobs, self.estimator, old_logprobs=old)
        return torch.where(mask, found, 0)

    def warn_of_estimator(self) -> None:
        """Say so where the choice is a bad one for where the KL is paid; k1 in the loss the loss itself tells."""
        if self.kl_in == "reward" and self.kl_estimator in ("k3", "rk3", "k3+"):
            warnings.warn(
                f"kl_estimator={self.kl_estimator} in the reward: it grows exponentially with a token's log-ratio, so "
                "a few tokens rule the advantages; k1 is unbiased there, and the default",
                stacklevel=2,
            )


class ReferenceConfig(KLConfig):
    """Which model the reference is, and when it is read."""

    kl_every: NonNegativeInt = 1
    """Measure the exact KL to the reference every so many steps, by one more pass of both models; 0 is never, and then
    the reference is loaded only where kl_coef needs it."""
    ref_sync_every: NonNegativeInt = 0
    """Every so many steps the reference, at first the starting model, moves to the policy; 0 is never."""
    ref_mixup_alpha: PositiveFraction = 1.0
    """How far: reference = alpha * policy + (1 - alpha) * reference. 1 is a copy."""

    needs: ClassVar = (
        Needs(
            "ref_sync_every",
            lambda config: config.lora_rank == 0,
            "needs a reference of its own, but with lora_rank it is the policy without its adapters; drop one of them",
        ),
        *(
            Needs(option, lambda config: needs_reference(config), NO_REFERENCE)
            for option in ("ref_sync_every", "kl_estimator")
        ),
        Needs(
            "ref_sync_every",
            lambda config: config.steps is None or config.ref_sync_every <= config.steps,
            "is more than steps: the reference would never move; choose fewer steps between, or leave it out",
        ),
        Needs(
            "ref_mixup_alpha",
            lambda config: config.ref_sync_every > 0,
            without("--ref_sync_every"),
        ),
    )


def needs_reference(config: ReferenceConfig) -> bool:
    """Whether anything is measured against a reference."""
    return config.kl_coef > 0 or config.kl_every > 0
