"""What each token earned: scores, the price of the KL, advantages and returns; and what a rollout looks like in sum.

The options and the arithmetic of PPO's rewards, on tensors alone; the models and the update are in ppo.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

import fused_rl
from fused_rl.trainers.base import ranks
from fused_rl.trainers.options import Finite, InputError, Needs, NonNegative, Positive, Unit, without
from fused_rl.trainers.policy.options import RolloutConfig
from fused_rl.trainers.policy.policy import Measured, rows_of
from fused_rl.trainers.policy.reference import KLConfig
from fused_rl.trainers.rollouts.roll_out import scorer_metrics
from fused_rl.trainers.rollouts.types import Rollout
from fused_rl.trainers.run.metrics import Sums

LARGEST_ERROR = 0.2  # of the controller of kl_coef, as a fraction of its target


class CreditConfig(RolloutConfig, KLConfig):
    """How scores become the reward, the advantage and the return of each token."""

    gamma: Unit = 1.0
    """Discount per token."""
    gae_lambda: Unit = 0.95
    """Of the policy's advantages: 1 is the whole return less the value, 0 the next value alone."""
    gae_alpha: Positive | None = None
    """Takes 1 - 1 / (gae_alpha * length) of each response for gae_lambda (arXiv:2504.05118, section 4.2)."""
    value_gae_lambda: Unit | None = None
    """Of the returns that the critic is fitted to; None is gae_lambda (without gae_alpha)."""
    whiten_advantages: bool = True
    """Advantages of a rollout get mean 0 and variance 1, over all ranks, after the returns are taken."""
    whiten_rewards: bool = False
    """Rewards of a rollout get variance 1 and keep their mean, before everything else."""
    kl_in: Literal["reward", "loss"] = "reward"
    """reward: each token pays for its KL, by k1; loss: the loss has it, by the estimator rk3. It is measured in any
    case."""
    kl_target: Positive | None = None
    """Adapt kl_coef so that the KL per response comes to this many nats (arXiv:1909.08593, section 2.2)."""
    kl_horizon: Positive = 10_000.0
    """Responses over which kl_coef can change e^0.2-fold at most."""
    missing_eos_score: Finite | None = None
    """The score of a response that was cut; None keeps its own."""
    missing_eos_penalty: NonNegative = 0.0
    """Subtracted from the score of a response that was cut."""

    needs: ClassVar = (
        Needs(
            "kl_target",
            lambda config: config.kl_coef > 0,
            "has no meaning with kl_coef=0: no factor moves a zero; give --kl_coef, its first value",
        ),
        Needs("kl_horizon", lambda config: config.kl_target is not None, without("--kl_target")),
        Needs(
            "gae_lambda",
            lambda config: config.gae_alpha is None or config.value_gae_lambda is None,
            "has no meaning beside gae_alpha and value_gae_lambda, which take its place; leave it out",
        ),
    )


def check_credit(config: CreditConfig) -> None:
    """Refuse options that contradict each other."""
    if config.missing_eos_score is not None and config.missing_eos_penalty:
        raise InputError("missing_eos_score replaces a score, missing_eos_penalty subtracts from it: give one of them")
    responses = config.prompts_per_step * config.group_size
    horizon = config.kl_horizon
    least = 1 - LARGEST_ERROR * responses / horizon
    if config.kl_target is not None and least <= 0:
        raise InputError(
            f"kl_horizon={horizon:g}: {responses} responses per step can multiply kl_coef by 1 - {LARGEST_ERROR:g} * "
            f"{responses} / {horizon:g} = {least:g}, which turns its sign; give more than {LARGEST_ERROR * responses:g}"
        )


@dataclass
class Experience:
    """A rollout with all that the update needs of it; (B, T - 1) fp32, 0 where masked, unless it says otherwise."""

    rollout: Rollout
    measured: Measured
    mask: torch.Tensor
    """bool: the tokens that are trained on."""
    scores: torch.Tensor
    """(B,), with what a missing stop token costs."""
    kl: torch.Tensor
    """To the reference, by the estimator in use."""
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor

    def rows(self, index: torch.Tensor, width: int) -> "Experience":
        """Of the responses at `index`, in the first `width` columns; the rollout and its scores stay whole."""
        names = ("mask", "kl", "values", "advantages", "returns")
        of_tokens = {name: rows_of(getattr(self, name), index, width) for name in names}
        return replace(self, measured=self.measured.rows(index, width), **of_tokens)


def final_scores(config: CreditConfig, rollout: Rollout) -> torch.Tensor:
    """(B,): a missing stop token replaces the score, or subtracts from it."""
    cut = rollout.rewards - config.missing_eos_penalty
    if config.missing_eos_score is not None:
        cut = torch.full_like(cut, config.missing_eos_score)
    return torch.where(rollout.stopped, rollout.rewards, cut)


def token_rewards(scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """(B, T - 1): each token pays for its KL, and the last one gets the score (B,); an empty response gets nothing."""
    later = mask.flip(1).cumsum(1).flip(1)  # tokens of the response from here on
    scores = scores[:, None].to(kl.device, non_blocking=True)
    return -kl_coef * kl + torch.where(mask & (later == 1), scores, 0)


def advantages_and_returns(
    config: CreditConfig, rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both (B, T - 1), from `rewards` and `values` (B, T - 1): each with its own lambda; whitened over all ranks."""
    whiten = fused_rl.whiten
    everyone = ranks.all_ranks()
    if config.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False, process_group=everyone)
    advantages, returns = fused_rl.gae(rewards, values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda)
    if config.value_gae_lambda is not None:
        gae_lambda = config.value_gae_lambda
        _, returns = fused_rl.gae(rewards, values, mask, gamma=config.gamma, gae_lambda=gae_lambda)
    if config.gae_alpha is not None:
        lengths = mask.sum(1)
        for length in lengths.unique().tolist():
            rows = lengths == length
            gae_lambda = max(0.0, 1 - 1 / (config.gae_alpha * max(length, 1)))
            of_length = (x[rows] for x in (rewards, values, mask))
            advantages[rows], _ = fused_rl.gae(*of_length, gamma=config.gamma, gae_lambda=gae_lambda)
    return whiten(advantages, mask, process_group=everyone) if config.whiten_advantages else advantages, returns


def adapted(kl_coef: float, kl: float, responses: int, target: float, horizon: float) -> float:
    """The weight of the KL after `responses` whose KL was `kl` nats on average (arXiv:1909.08593, section 2.2)."""
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return kl_coef * (1 + error * responses / horizon)


def experience_metrics(experience: Experience, step: int) -> dict[str, float]:
    """What was sampled and what it earned, over all ranks."""
    rollout = experience.rollout
    measured = experience.measured
    mask = experience.mask
    lengths = rollout.lengths.double()
    columns = {
        "objective/scores": experience.scores,
        "objective/kl": experience.kl,
        "objective/kl_exact": measured.kl,
        "objective/entropy": -measured.old_logprobs,
        "completions/mean_length": lengths,
        "val/stop_rate": rollout.stopped,
    }
    count = len(lengths) * ranks.world_size()
    totals = ranks.global_sum(ranks.arrived([column.double().sum() for column in columns.values()]))
    metrics = dict(zip(columns, (totals / count).tolist(), strict=True))
    tokens = ranks.global_sum(mask.sum()).item()
    values = experience.values
    returns = experience.returns
    sums = Sums(step)
    sums.add(fused_rl.value_loss(values, values, returns, mask, num_tokens=tokens)[1], rollout.batch.where)
    metrics |= {
        "completions/min_length": -ranks.global_max(-lengths.min()),
        "completions/max_length": ranks.global_max(lengths.max()),
        "completions/clipped_ratio": 1 - metrics["val/stop_rate"],
        "val/num_eos_tokens": metrics["val/stop_rate"] * count,
        "val/var_explained": explained_variance(sums.over_ranks()),
        "episode": step * count,
    }
    return metrics | scorer_metrics(rollout.scores) | rollout.incidents | rollout.seconds


def explained_variance(sums: Mapping[str, float]) -> float:
    """Return 1 - Var(R - v) / Var(R) from the moments of `fused_rl.value_loss`; NaN if R is constant."""
    error = sums["value_error_square"] - sums["value_error"] ** 2
    spread = sums["return_square"] - sums["return"] ** 2
    return 1 - error / spread if spread > 0 else float("nan")
