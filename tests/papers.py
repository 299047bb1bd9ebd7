"""The losses by their definitions, the policy losses as their papers have them, and small batches with every mask."""

import functools
import re
from pathlib import Path

import torch

from fused_rl import reference

F64 = torch.float64
B, T = 4, 6
# (B,), of two prompts, as prompt-mean needs them.
GROUP_LENGTHS = torch.tensor([2.5, 2.5, 4.0, 4.0])
MASKS = ("none", "partial", "one-sequence-masked", "packed")


def documented():
    """Of docs/losses.md: name -> surrogate, ratio level, aggregation, clip bounds or None, advantages, paper."""
    text = (Path(__file__).parent.parent / "docs" / "losses.md").read_text()
    section = text.split("## Presets")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip("` ") for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0][2:7] == ["ratio level", "surrogate", "aggregation", CLIPS, "advantages"]
    table = {}
    for name, _, level, surrogate, loss_agg, clips, advantage, paper in rows[2:]:
        bounds = None if clips == "—" else tuple(map(float, re.findall(r"[\d.e-]+", clips)[:2]))
        paper = re.sub(r"\[(\S+)\]\(https://arxiv.org/abs/\1\)", r"arXiv:\1", paper)
        assert name not in table, name
        table[name] = surrogate, level, loss_agg, bounds, advantage, paper
    return table


CLIPS = "clip_low, clip_high"
# Name -> surrogate, ratio level, aggregation, clip_low, clip_high; not read from PRESETS.
PAPERS = {name: (*row[:3], *(row[3] or (0.2, 0.2))) for name, row in documented().items()}


@functools.cache
def batch(kind):
    """mask, sequence_ids (B, T), advantages per sequence and spread (B, T), old and ref logprobs' distances."""
    generator = torch.Generator().manual_seed(MASKS.index(kind))
    mask = torch.ones(B, T, dtype=torch.bool)
    ids = torch.arange(B)[:, None].expand(B, T).clone()
    if kind != "none":
        mask[:3] = torch.rand(3, T, generator=generator) < 0.7
        mask[:, 0] = True
    if kind == "one-sequence-masked":
        mask[1] = False
    # Sequences of 1 to 4 tokens, pads (-1), and one that goes on in the next row.
    if kind == "packed":
        ids = torch.tensor(
            [[0, 0, 0, 1, 1, -1], [2, 3, 3, 3, 3, 4], [4, 4, -1, 5, 5, 5], [6, 6, 7, 7, 7, -1]]
        )
    count = 8 if kind == "packed" else B
    advantages = torch.randn(count, generator=generator, dtype=F64)
    spread = advantages[ids.clamp(min=0)]
    # Both sides of every clip range.
    drift = 0.3 * torch.randn(2, B, T, generator=generator, dtype=F64)
    return mask, ids, advantages, spread, drift


def _exp(x):
    """exp, from 20 nats on its tangent."""
    # At 20 itself clamp has a slope and relu has none, so the slopes do not add up there.
    return x.clamp(max=20).exp() * (1 + torch.relu(x - 20))


def _surrogate(lp, old, advantages, ratio_level, surrogate, clip_low, clip_high, delta):
    """The losses of one sequence, (n,) tensors, from the papers' equations (docs/losses.md)."""
    # The log-ratio at its level; all but the token's give every token of the sequence one value.
    log_r = lp - old
    if ratio_level == "sequence" and bool((advantages != advantages[0]).any()):  # GSPO-token
        log_r = log_r.mean().detach() + lp - lp.detach()
    elif ratio_level == "sequence":
        log_r = log_r.mean() * torch.ones_like(lp)
    elif ratio_level == "sequence-sum":
        log_r = log_r.sum() * torch.ones_like(lp)

    # The surrogate of each token, lower is better.
    r, a = _exp(log_r), advantages
    up = a >= 0
    if surrogate == "clip":
        bound = torch.where(up, (1 + clip_high) * a, (1 - clip_low) * a)
        value = torch.minimum(r * a, bound)
        return -value if delta is None else -torch.where(up, value, torch.maximum(value, delta * a))
    if surrogate == "cispo":
        return -r.detach().clip(1 - clip_low, 1 + clip_high) * a * lp
    if surrogate == "sapo":
        # The gate is steeper where the advantage is not positive (arXiv:2511.20347).
        tau = 1.05 - 0.05 * (a > 0).to(a.dtype)
        return -4 / (tau * (1 + torch.exp(-tau * (r - 1)))) * a
    if surrogate == "vespo":
        # Whole numbers, exact in any dtype.
        k, rate = torch.where(up, 2.0, 3.0), torch.where(up, 3.0, 2.0)
        return -(r**k * torch.exp(rate * (1 - r))).detach() * a * lp
    if surrogate == "geo-mean":
        kept = torch.where(
            up, torch.minimum(log_r, 0 * r + clip_high), torch.maximum(log_r, 0 * r - clip_low)
        )
        return -a * _exp(kept.mean())
    if surrogate == "policy-gradient":
        return -a * lp
    raise ValueError(f"surrogate {surrogate!r} has no reference; add its formula here")


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    sequence_ids,
    ratio_level,
    surrogate,
    loss_agg,
    clip_low=0.2,
    clip_high=0.2,
    delta=None,
    num_tokens=None,
    num_sequences=None,
    max_length=None,
    group_lengths=None,
    ref_logprobs=None,
    kl_coef=0.0,
    kl_estimator="rk3",
):
    """The loss of `fused_rl.policy_loss`, one sequence at a time; `advantages` (B, T), `sequence_ids` always given."""
    lp = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
    sequences = [i for i in sequence_ids.unique().tolist() if i >= 0]
    # Attached to the graph also where nothing counts.
    total, count = 0 * lp[mask].sum(), 0
    # One sequence at a time, as the papers write their sums.
    for i in sequences:
        tokens = mask & (sequence_ids == i)
        n = int(tokens.sum())
        if n == 0:
            continue
        losses = _surrogate(
            lp[tokens],
            old_logprobs[tokens],
            advantages[tokens],
            ratio_level,
            surrogate,
            clip_low,
            clip_high,
            delta,
        )
        if kl_coef:
            kl = reference.kl_estimate(
                lp[tokens], ref_logprobs[tokens], kl_estimator, old_logprobs=old_logprobs[tokens]
            )
            losses = losses + kl_coef * kl
        # What a sequence's sum is divided by, before the denominator of the step.
        over = {
            "seq-mean-token-mean": n,
            "prompt-mean": None if group_lengths is None else group_lengths[i],
        }
        total = total + losses.sum() / over.get(loss_agg, 1)
        count += n

    # A sequence without a token that counts is a sequence all the same.
    num_sequences = len(sequences) if num_sequences is None else num_sequences
    length = mask.shape[1] if max_length is None else max_length
    norm = length if loss_agg == "seq-mean-token-sum-norm" else 1
    denominator = (
        (count if num_tokens is None else num_tokens)
        if loss_agg == "token-mean"
        else num_sequences * norm
    )
    return total / (1 if loss_agg == "token-sum" else denominator)


def unpaired_preference_loss(
    scores,
    desirable,
    *,
    baseline,
    desirable_weight=1.0,
    undesirable_weight=1.0,
    num_sequences=None,
):
    """The loss of `fused_rl.unpaired_preference_loss`: arXiv:2402.01306, eq. 8, one response at a time."""
    total = 0 * scores.sum()
    for score, is_desirable in zip(scores, desirable.tolist(), strict=True):
        if is_desirable:
            total = total + desirable_weight * (1 - torch.sigmoid(score - baseline))
        else:
            total = total + undesirable_weight * (1 - torch.sigmoid(baseline - score))
    return total / max(len(scores) if num_sequences is None else num_sequences, 1)


def kl_baseline(scores):
    """`fused_rl.kl_baseline` of one rank."""
    return (scores.detach().sum() / max(len(scores), 1)).clamp(min=0)
