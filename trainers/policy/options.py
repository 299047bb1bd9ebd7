"""The options that PPO and GRPO share: rollouts (which distillation has, too), the loss, and the KL to a reference."""

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

import fused_rl
from fused_rl.objectives.estimators import KLEstimator
from fused_rl.objectives.options import check_names
from fused_rl.objectives.presets import BOUNDS, PolicyLossOptions, PresetName, resolve_options
from fused_rl.objectives.surrogates import SURROGATES, SurrogateOptions

from .. import options as config
from ..base.options import (
    NonNegativeInt,
    Options,
    PositiveFraction,
    PositiveInt,
    Requirement,
    may_change,
    options_from,
    without,
)
from ..base.text import InputError, load_function, users_function
from ..options import RunConfig
from ..rollouts.options import SamplerConfig
from ..scorers.options import ScorerConfig

# Of a single surrogate, which `surrogate_options` has; a threshold in nats, which a run computes by `top_entropy`; and
# impossible tokens, which no sampler draws.
LEFT_OUT = {*SurrogateOptions.__dataclass_fields__, "entropy_threshold", "skip_impossible"}
LOSS = [name for name in PolicyLossOptions.__dataclass_fields__ if name not in LEFT_OUT]
# What a surrogate is called with.
SURROGATE_PARAMETERS = ("log_ratio", "advantages", "logprobs", "sequences", "options")
# Options that only some surrogates read.
OF_SURROGATES = {name for surrogate in SURROGATES.values() for name in surrogate.reads}
# The options of the loss default to None, which takes the preset's value. The two weights are numbers, because other
# options depend on them.
if TYPE_CHECKING:

    class _OfTheLoss(PolicyLossOptions, Options):  # pyright: ignore
        """The options of the loss, as a type checker sees them."""

else:
    _OfTheLoss = options_from(PolicyLossOptions, LEFT_OUT, kl_coef=0.0, entropy_coef=0.0)
NO_REFERENCE = (
    "has no meaning with kl_coef=0 and kl_every=0, where no reference is loaded; "
    "leave it out, or give --kl_coef"
)
MAIN = (*config.MAIN, "verifiers", "prompts_per_step", "max_new_tokens", "temperature")


class RolloutConfig(SamplerConfig):
    """The prompts of a rollout, and the length of their responses."""

    batch_option: ClassVar[str] = "prompts_per_step"
    prompt_column: str | None = None
    """Text or messages; None takes the first of prompt, messages, conversations, question, instruction and problem that
    a row has."""
    prompts_per_step: PositiveInt = 32
    """Prompts per rollout, over all ranks."""
    group_size: PositiveInt = 1
    """Responses per prompt; each has its own advantages."""
    max_new_tokens: PositiveInt = 256
    """Maximum response length in tokens. Longer responses are truncated and scored as they are."""


class LossConfig(_OfTheLoss):
    """The loss of a policy, and how often a rollout is trained on. An option that is None is the preset's."""

    surrogate_options: dict[str, Any] | None = None
    """Options that only this surrogate reads (docs/losses.md), or further arguments of your own one, as YAML or JSON:
    {sapo_temperature_pos: 0.9}."""
    preset: PresetName = "grpo"
    """A row of fused_rl.PRESETS: it chooses ratio, surrogate, clipping, aggregation and advantages."""
    mask_truncated: bool = False
    """Leave truncated responses out of the loss."""
    minibatches: PositiveInt = 2
    """Optimizer updates per pass over a rollout."""
    epochs: PositiveInt = 1
    """Passes over a rollout."""

    def has_meaning(self, name: str) -> bool:
        """Return True if the loss with these options reads the option of this name."""
        if name in OF_SURROGATES:
            # A user's own surrogate may read any of these, so all of them are accepted beside it.
            surrogate = SURROGATES.get(str(loss_options(self).surrogate))
            return surrogate is None or name in surrogate.reads
        for switch, bounds in BOUNDS.items():
            if name in bounds:
                return getattr(loss_options(self), switch) is not None
        return super().has_meaning(name)


class SamplingRunConfig(RolloutConfig, RunConfig):
    """Rollouts, and their evaluation."""

    eval_samples: PositiveInt = may_change(4)
    """Sampled responses per held-out problem: k of pass@k."""

    needs: ClassVar = (
        Requirement(
            "lag",
            lambda config: config.zero_stage < 3 or config.server is not None,
            "with zero_stage=3 would draw from weights that ranks must gather together, while they train on them; give "
            "--server, or --zero_stage 2",
        ),
    )

    @property
    def updates_per_step(self) -> int:
        """The optimizer updates on a rollout."""
        return 1

    @property
    def trained_column(self) -> str | None:
        """The column of completions that are trained on beside sampled ones; None if all responses are sampled."""
        return None

    def check_row(self, row: dict) -> None:
        """Raise `InputError` for a row that lacks what the options need beside its prompt and the scorers' columns."""

    @property
    def longest_sequence(self) -> int:
        return self.max_prompt_length + self.max_new_tokens

    @property
    def sampled_tokens(self) -> int:
        return self.max_new_tokens


class ScoredRunConfig(ScorerConfig, SamplingRunConfig):
    """Rollouts that are scored."""


class PolicyConfig(LossConfig, SamplingRunConfig):
    """Rollouts, their evaluation, and the policy loss."""

    @property
    def updates_per_step(self) -> int:
        return self.minibatches * self.epochs

    @property
    def may_divide_updates(self) -> bool:
        """True unless the surrogate needs all tokens of an update at once."""
        surrogate = SURROGATES.get(str(loss_options(self).surrogate))
        return not getattr(surrogate, "needs_batch", False)


def loss_options(config: LossConfig, **changes) -> PolicyLossOptions:
    """Return the options of `fused_rl.policy_loss`, from the preset, the config's own values and `changes`.

    Raises:
        InputError: the options contradict each other, or a user's surrogate cannot be loaded.
    """
    options = {name: value for name, value in config if name in LOSS and value is not None}
    options.setdefault("kl_estimator", PolicyLossOptions.kl_estimator)
    # A user's own surrogate is named module:function. Wrapped with its arguments, it keeps its name and declarations.
    if ":" in str(options.get("surrogate")):
        options["surrogate"] = load_function("surrogate", str(options["surrogate"]))
    surrogate_options = config.surrogate_options or {}
    if surrogate_options and callable(function := options.get("surrogate")):
        options["surrogate"] = functools.update_wrapper(
            functools.partial(function, **surrogate_options), function
        )
        surrogate_options = {}
    if callable(function := options.get("surrogate")):
        users_function("surrogate", None, function, *SURROGATE_PARAMETERS)
    try:
        check_names(surrogate_options, SurrogateOptions)
        return resolve_options(config.preset, options | surrogate_options | changes)
    except ValueError as error:
        raise InputError(str(error)) from error


class KLConfig(LossConfig):
    """Where the KL to the reference counts: in the loss or in the reward."""

    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the KL is added to the loss per token, by rk3 unless kl_estimator is given; reward: it is subtracted from
    the reward before the advantages are computed, by k1. It is measured in any case."""

    needs: ClassVar = (
        Requirement(
            "kl_in",
            lambda config: config.kl_coef > 0,
            "has no meaning with kl_coef=0, where no KL is paid for; leave it out, or give --kl_coef",
        ),
    )

    @property
    def estimator(self) -> KLEstimator:
        """The estimator that is chosen, or else the right one for `kl_in`."""
        # In a reward, k1 is the unbiased estimate. In a loss its expected gradient would be 0, whereas rk3 has the
        # gradient of the KL itself.
        in_the_loss = fused_rl.PolicyLossOptions.kl_estimator
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else in_the_loss)

    def loss_options(self, kl_coef: float) -> PolicyLossOptions:
        """Return the options of the loss with `kl_coef` as the weight of the KL."""
        # A KL that is already subtracted from the rewards must not be counted again in the loss.
        in_loss = kl_coef if self.kl_in == "loss" else 0.0
        return loss_options(self, kl_estimator=self.estimator, kl_coef=in_loss)

    def kl_of_tokens(
        self, old: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the KL of each token in the reward, (B, T - 1) nats, 0 where masked.

        Args:
            old: (B, T - 1) the policy's log-probabilities before the update.
            reference: (B, T - 1) those of the reference.
            mask: (B, T - 1) bool, the tokens that count.
        """
        # Before the update the policy is the one that sampled, so the ratio in k4 and rk3 is 1.
        estimate = fused_rl.kl_estimate(old, reference, self.estimator, old_logprobs=old)
        return torch.where(mask, estimate, 0)


class ReferenceConfig(KLConfig):
    """The reference: when the KL to it is measured, and when it is updated."""

    kl_every: NonNegativeInt = may_change(1)
    """Steps between measurements of the exact KL to the reference, each of which takes one more pass of both models. 0
    never measures it, and loads no reference unless kl_coef needs it."""
    ref_sync_every: NonNegativeInt = 0
    """Steps between updates of the reference, which is at first the starting model, from the policy; 0 never updates
    it."""
    ref_mixup_alpha: PositiveFraction = 1.0
    """alpha of such an update: reference = alpha * policy + (1 - alpha) * reference; 1 copies the policy."""

    needs: ClassVar = (
        Requirement(
            "ref_sync_every",
            lambda config: config.lora_rank == 0,
            "needs a reference of its own, but with lora_rank it is the policy without its adapters; drop one of them",
        ),
        *(
            Requirement(option, lambda config: config.needs_reference, NO_REFERENCE)
            for option in ("ref_sync_every", "kl_estimator")
        ),
        Requirement(
            "ref_mixup_alpha",
            lambda config: config.ref_sync_every > 0,
            without("--ref_sync_every"),
        ),
    )

    @property
    def needs_reference(self) -> bool:
        """True if the run compares the policy with a reference."""
        return self.kl_coef > 0 or self.kl_every > 0
