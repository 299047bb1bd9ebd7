"""Accuracy (pass@k, without bias) and lengths of solved and unsolved responses, from sums that add up over ranks."""

import math
from collections.abc import Sequence

import torch

from ..base import ranks
from .types import Rollout, Scorer


def pass_at_k(right: torch.Tensor, k: int) -> torch.Tensor:
    """Return (P,) fp64: the probability that k of n responses, without replacement, hold a right one of (P, n) bool.

    1 - C(n - c, k) / C(n, k) with c right ones: unbiased, where "any of the first k" is only so for k = n
    (arXiv:2107.03374, eq. 1).
    """
    n = right.shape[1]
    num_subsets = math.comb(n, k)
    # By whole numbers, of which none cancels; there are only n + 1 counts, so a table has them all.
    probabilities = [1 - math.comb(n - c, k) / num_subsets for c in range(n + 1)]
    table = torch.tensor(probabilities, dtype=torch.float64)
    return table[right.sum(1).cpu()]


def pass_at(right: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `pass_at_<k>`, each (P,), of (P, n) right responses, for the k 1, 2, 4, … below n, and for n."""
    # Powers of two are what papers report, and n is what was sampled.
    n = right.shape[1]
    powers = [2**i for i in range(n.bit_length())]
    ks = [k for k in powers if k < n] + [n]
    return {f"pass_at_{k}": pass_at_k(right, k) for k in ks}


def outcome_sums(
    solved: torch.Tensor, lengths: torch.Tensor, stopped: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the sums over N responses, each argument (N,), from which `outcomes` computes means."""
    return {
        "responses": torch.tensor(float(len(solved))),
        "solved": solved.sum(),
        "truncated": (~stopped).sum(),
        "tokens": lengths.sum(),
        "tokens_solved": lengths[solved].sum(),
    }


def has_verdict(scorers: Sequence[Scorer], rollout: Rollout) -> torch.Tensor:
    """Return (B,) bool: True where a scorer that tells right from wrong applies."""
    is_judged = torch.zeros(len(rollout.samples), dtype=torch.bool)
    for scorer in scorers:
        if scorer.solved_at is not None:
            is_judged |= ~rollout.scores[scorer.name].isnan()
    return is_judged


def outcomes(sums: dict[str, float], is_judged: bool = True) -> dict[str, float]:
    """Return mean lengths and the truncated fraction; without the unsolved ones' unless it `is_judged`."""
    # A mean of no response does not exist, so its key is absent.
    unsolved = sums["responses"] - sums["solved"]
    tokens_unsolved = sums["tokens"] - sums["tokens_solved"]
    means = {
        "mean_length": sums["tokens"] / sums["responses"],
        "clipped_ratio": sums["truncated"] / sums["responses"],
    }
    if sums["solved"]:
        means["mean_length_solved"] = sums["tokens_solved"] / sums["solved"]
    if unsolved and is_judged:
        means["mean_length_unsolved"] = tokens_unsolved / unsolved
    return means


def win_rate(scores: torch.Tensor, solved: torch.Tensor, group_size: int) -> dict[str, float]:
    """Return how often a solved response scores above an unsolved one to the same prompt; {} without such pairs."""
    # Every response of a group against every other one; pairs of equal outcome say nothing, and a tie counts half.
    first, second = (-1, group_size, 1), (-1, 1, group_size)
    lead = scores.view(first) - scores.view(second)
    differ = solved.view(first) & ~solved.view(second)
    lead = lead[differ]
    ties = (lead == 0).double().sum()
    wins = (lead > 0).double().sum() + ties / 2
    sums = torch.stack([wins, differ.sum().double()])
    won, pairs = ranks.global_sum(sums).tolist()
    return {"val/win_rate": won / pairs} if pairs else {}
