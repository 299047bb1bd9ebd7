"""The differences between the sampler's log-probabilities and the policy's, before any correction.

Two programs that compute one model differ by rounding: by 1e-5 nats in fp32, by some hundredths in bfloat16, with mean
0. More, or another mean, is another model, another temperature or another precision of the head.
"""

import torch

import fused_rl
from fused_rl.objectives.presets import PolicyLossOptions

from ..base import ranks
from ..base.text import InputError
from .types import Rollout

# Nats that rounding explains: the largest difference in fp32, and the mean of the sizes in 16 bits.
EXACT, ON_AVERAGE = 1e-3, 0.05
ALLOWED = {True: f"{EXACT:g} at most, in fp32", False: f"{ON_AVERAGE:g} on average, in 16 bits"}


def agrees(differences: torch.Tensor, exact: bool) -> bool:
    """Return True if differences of log-probabilities are no more than rounding; `exact` for fp32 weights."""
    sizes = differences.abs()
    return bool(sizes.max() <= EXACT if exact else sizes.mean() <= ON_AVERAGE)


def check_bound(metrics: dict[str, float], exact: bool) -> None:
    """Refuse a step whose responses, on average over all tokens, do not have the policy's log-probabilities."""
    apart = metrics.get("rollout/logprob_diff_abs", 0.0)
    bound = EXACT if exact else ON_AVERAGE
    if not apart <= bound:
        raise InputError(
            f"the servers' log-probabilities of this step's responses are {apart:.2g} nats off the policy's on average "
            f"(allowed: {bound:g}): other weights, temperature, kept sets, dtype of the head, or a stale prefix cache; "
            "docs/rollouts.md says which flag to set"
        )


@torch.no_grad()
def mismatch(
    rollout: Rollout, old_logprobs: torch.Tensor, options: PolicyLossOptions
) -> dict[str, float]:
    """Return `rollout/*` over all ranks, against the policy's (B, T - 1) nats."""
    reported = rollout.rollout_logprobs
    mask = rollout.batch.response_mask
    assert reported is not None

    # Sums over tokens, and the largest difference.
    difference = torch.where(mask, reported - old_logprobs, 0)
    sums = {
        "rollout/logprob_diff_mean": difference.sum(),
        "rollout/logprob_diff_abs": difference.abs().sum(),
        "rollout/kl_k3": fused_rl.masked_sum(
            fused_rl.kl_estimate(reported, old_logprobs, "k3"), mask
        ),
    }

    # The tokens whose weight the correction clips to its range, or whose sequence it drops.
    if options.rollout_correction is not None:
        level = "token" if options.rollout_correction.startswith("token") else "sequence-sum"
        ratio = fused_rl.importance_ratio(old_logprobs, reported, mask, ratio_level=level)
        beyond = (ratio < options.rollout_low) | (ratio > options.rollout_high)
        sums["rollout/correction_cut"] = (mask & beyond).sum()
    totals = ranks.global_sums(sums | {"tokens": mask.sum()})
    tokens = totals.pop("tokens")
    if not tokens:
        return {}
    metrics = {name: total / tokens for name, total in totals.items()}
    return metrics | {"rollout/logprob_diff_max": ranks.global_max(difference.abs().max())}
