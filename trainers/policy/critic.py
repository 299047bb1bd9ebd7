"""The critic of PPO, and the credit of each token: rewards from scores and KL, advantages, and returns.

Before each token the critic estimates the reward that the rest of the response will bring. It is a reward model that is
read at every token, and it is saved as one, so that either can be the start of the other. Left out: heads of more than
one layer, distributions over values, and a value head on the backbone of the policy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

import fused_rl

from ..base import engine, ranks
from ..base.optim import OptimConfig
from ..base.options import (
    Finite,
    NonNegative,
    NonNegativeInt,
    Positive,
    Requirement,
    Unit,
    may_change,
    without,
)
from ..base.screen import phase
from ..data.batch import Batch
from ..models.packing import unpad
from ..models.reward_model import Critic, check_reads_policy, load_reward_model
from ..options import RunConfig
from ..rollouts.roll_out import rollout_metrics
from ..rollouts.solved import win_rate
from ..rollouts.types import Rollout
from ..run.metrics import Sums
from .before_update import BeforeUpdate, MicroBatch
from .options import KLConfig, RolloutConfig

# Options that the critic may have of its own, as critic_lr and critic_warmup_steps.
OWN_OPTIONS = ("lr", "warmup_steps")
LARGEST_ERROR = 0.2  # of the KL in the controller of kl_coef, as a fraction of its target


class CriticConfig(OptimConfig):
    """The start and the optimizer of the critic."""

    critic: str | None = may_change(None)
    """Where the critic starts: a causal language model (with a head of zeros), a reward model or a saved critic (with
    their heads); None is the policy's starting model."""
    critic_lr: NonNegative | None = may_change(None)
    """Peak learning rate of the critic; None is the policy's."""
    critic_warmup_steps: NonNegativeInt | None = may_change(None)
    """Optimizer updates of the critic with a rising learning rate; None is the policy's."""
    value_clip: NonNegative | None = 0.2
    """Largest distance of a value from its value before the update that the loss still rewards; None is no bound."""
    critic_only: NonNegativeInt = 0
    """Train the critic alone, on this many rollouts of the unchanged policy, and save it; 0 trains both."""


class CriticRunConfig(CriticConfig, RunConfig):
    """What the critic is loaded and trained by."""


def load_critic(config: CriticRunConfig, tokenizer, device: torch.device, updates: int):
    """Return the critic in a DeepSpeed engine with an optimizer of its own, for `updates` optimizer steps.

    Raises:
        InputError: the critic has another tokenizer than the policy.
    """
    start = config
    if config.critic is not None:
        check_reads_policy("critic", config.critic, tokenizer, config.model)
        # The option `revision` belongs to the policy's model, and has no meaning for another one.
        start = config.replace(model=config.critic, revision=None)
    for option in OWN_OPTIONS:
        value = getattr(config, f"critic_{option}")
        if value is not None:
            start = start.replace(**{option: value})
    with phase("loaded the critic"):
        critic = load_reward_model(start, device, kind=Critic)
        return engine.initialize(critic, start, updates)


def values_of(critic, batch: Batch) -> torch.Tensor:
    """Return the critic's value before each token of a micro-batch, (b, T - 1) fp32, 0 where masked; differentiable."""
    costs = critic.module.unpadded_costs
    return critic(**batch.inputs(None if costs is None else unpad(batch, costs)))


class CreditConfig(KLConfig, RolloutConfig):
    """How scores become the reward, the advantage and the return of each token."""

    gamma: Unit = 1.0
    """Discount per token."""
    gae_lambda: Unit = 0.95
    """Lambda of the policy's advantages: 1 is the whole return minus the value, 0 the next value alone."""
    value_gae_lambda: Unit | None = None
    """Lambda of the critic's targets; None is gae_lambda."""
    whiten_advantages: bool = True
    """Give the advantages of a rollout mean 0 and variance 1, over all ranks, after the returns are computed."""
    whiten_rewards: bool = False
    """Give the rewards of a rollout variance 1, and keep their mean, before everything else."""
    kl_in: Literal["reward", "loss"] = "reward"
    """reward: subtracted from each token's reward, by k1; loss: in the loss, by rk3. It is measured in any case."""
    kl_target: Positive | None = None
    """Adapt kl_coef so that the KL per response becomes this many nats (arXiv:1909.08593, section 2.2)."""
    kl_horizon: Positive = 10_000.0
    """Number of responses over which kl_coef changes by a factor of at most e^0.2."""
    missing_eos_score: Finite | None = None
    """Score of a truncated response; None keeps its own."""
    missing_eos_penalty: NonNegative = 0.0
    """Penalty on the score of a truncated response."""

    needs: ClassVar = (
        Requirement(
            "kl_target",
            lambda config: config.kl_coef > 0,
            "has no meaning with kl_coef=0: no factor moves a zero; give --kl_coef, its first value",
        ),
        Requirement(
            "kl_horizon", lambda config: config.kl_target is not None, without("--kl_target")
        ),
        Requirement(
            "kl_horizon",
            lambda config: (
                config.kl_horizon > LARGEST_ERROR * config.prompts_per_step * config.group_size
            ),
            f"lets one step turn the sign of kl_coef; give more than {LARGEST_ERROR} * prompts_per_step * group_size",
        ),
    )


@dataclass
class Experience:
    """A rollout with all that the update needs.

    Tensors are (B, T - 1) fp32 and 0 where masked, unless their docstrings say otherwise.
    """

    rollout: Rollout
    measured: BeforeUpdate
    mask: torch.Tensor
    """(B, T - 1) bool, True for the tokens that are trained on."""
    scores: torch.Tensor
    """(B,), after the penalty for a missing stop token."""
    kl: torch.Tensor
    """The KL to the reference in nats, by the estimator in use."""
    values: torch.Tensor
    """The critic's values before the update."""
    advantages: torch.Tensor
    returns: torch.Tensor
    """The targets of the critic."""

    def select(self, micro: MicroBatch) -> "Experience":
        """Return the part of a micro-batch; the rollout and its scores stay whole."""
        names = ("mask", "kl", "values", "advantages", "returns")
        token_values = {name: micro.select(getattr(self, name)) for name in names}
        return replace(self, measured=self.measured.select(micro), **token_values)


def token_rewards(
    scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float
) -> torch.Tensor:
    """Return the reward of each token, (B, T - 1): minus its KL times `kl_coef`, plus the score at the last token.

    Args:
        scores: (B,) the score of each response; that of an empty response is paid to no token.
        kl: (B, T - 1) nats.
        mask: (B, T - 1) bool, the tokens that count.
        kl_coef: the weight of the KL.
    """
    # The score is paid once, at the last token that counts; paid at each token it would grow with the length.
    remaining = mask.flip(1).cumsum(1).flip(1)  # tokens of the response from this one on
    scores = scores[:, None].to(kl.device, non_blocking=True)
    return -kl_coef * kl + torch.where(mask & (remaining == 1), scores, 0)


def advantages_and_returns(
    config: CreditConfig, rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, (B, T - 1) each, which may have lambdas of their own.

    Args:
        config: the options; whitening is over all ranks.
        rewards: (B, T - 1) the reward of each token.
        values: (B, T - 1) the critic's value before each token.
        mask: (B, T - 1) bool, the tokens that count.
    """
    whiten = fused_rl.whiten
    rank_group = ranks.all_ranks()
    # Rewards keep their mean: a shift would reward or punish every further token by the same amount.
    if config.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False, process_group=rank_group)
    # Advantages: arXiv:1506.02438, eq. 16. The critic's targets are these plus its values.
    advantages, returns = fused_rl.gae(
        rewards, values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda
    )
    if config.value_gae_lambda is not None:
        gae_lambda = config.value_gae_lambda
        _, returns = fused_rl.gae(rewards, values, mask, gamma=config.gamma, gae_lambda=gae_lambda)
    # Advantages are whitened last, so that the returns keep the scale of the rewards.
    return whiten(
        advantages, mask, process_group=rank_group
    ) if config.whiten_advantages else advantages, returns


@dataclass
class KLController:
    """The weight of the KL: constant, or adapted so that the KL reaches a target (arXiv:1909.08593, section 2.2)."""

    kl_coef: float
    target: float | None = None
    """KL per response in nats; None keeps the weight constant."""
    horizon: float = math.inf
    """Number of responses over which the weight changes by a factor of at most e^0.2."""

    def update(self, kl: float, responses: int) -> None:
        """Adapt the weight after `responses` responses whose KL was `kl` nats on average."""
        if self.target is None:
            return
        # The error is clipped, so that no single step changes the weight by much (arXiv:1909.08593, section 2.2).
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.kl_coef *= 1 + error * responses / self.horizon

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint keeps."""
        return {"kl_coef": self.kl_coef}


def experience_metrics(experience: Experience, group_size: int, step: int) -> dict[str, float]:
    """Return the metrics of a rollout and its credit, over all ranks."""
    rollout = experience.rollout
    measured = experience.measured
    # Each of these is summed over the tokens of a response, and averaged over responses.
    columns = {
        "objective/scores": experience.scores,
        "objective/kl": experience.kl,
        "objective/kl_exact": measured.kl,
        "objective/entropy": -measured.old_logprobs,
    }
    metrics = rollout_metrics(rollout, columns, step)
    # The value loss is called for its moments, because these add up over ranks and explained variances do not.
    values = experience.values
    mask = experience.mask
    tokens = int(ranks.global_sum(mask.sum()).item())
    sums = Sums(step)
    sums.add(
        fused_rl.value_loss(values, values, experience.returns, mask, num_tokens=tokens)[1],
        rollout.batch.where,
    )
    metrics["val/var_explained"] = explained_variance(sums.over_ranks())
    return metrics | win_rate(experience.scores, rollout.solved, group_size)


def explained_variance(sums: Mapping[str, float]) -> float:
    """Return 1 - Var(R - v) / Var(R) of returns R and values v; NaN if R is constant.

    `sums` are the moments that `fused_rl.value_loss` returns as metrics.
    """
    error = sums["value_error_square"] - sums["value_error"] ** 2
    spread = sums["return_square"] - sums["return"] ** 2
    return 1 - error / spread if spread > 0 else float("nan")
