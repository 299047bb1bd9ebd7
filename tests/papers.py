"""The policy losses as their papers have them, and small batches with every kind of mask."""

import functools

import torch

F64 = torch.float64
B, T, V, H = 4, 6, 11, 5
# (B,), of two prompts, as prompt-mean needs them.
GROUP_LENGTHS = torch.tensor([2.5, 2.5, 4.0, 4.0])
MASKS = ("none", "partial", "one-sequence-masked", "packed")
# Written from the papers, not read from PRESETS: surrogate, ratio level, aggregation, clip_low, clip_high.
PAPERS = {
    "ppo": ("clip", "token", "token-mean", 0.2, 0.2),
    "grpo": ("clip", "token", "seq-mean-token-mean", 0.2, 0.2),
    "bnpo": ("clip", "token", "token-mean", 0.2, 0.2),
    "dr_grpo": ("clip", "token", "seq-mean-token-sum-norm", 0.2, 0.2),
    "dapo": ("clip", "token", "token-mean", 0.2, 0.28),
    "gspo": ("clip", "sequence", "seq-mean-token-mean", 3e-4, 4e-4),
    "cispo": ("cispo", "token", "token-mean", 1.0, 4.0),
    "sapo": ("sapo", "token", "seq-mean-token-mean", 0.2, 0.2),
    "luspo": ("clip", "sequence", "seq-mean-token-sum", 2e-3, 2.5e-3),
    "vespo": ("vespo", "sequence-sum", "token-mean", 0.2, 0.2),
    "rloo": ("policy-gradient", "token", "seq-mean-token-sum", 0.2, 0.2),
    "reinforce++": ("clip", "token", "token-mean", 0.2, 0.2),
    "gmpo": ("geo-mean", "token", "seq-mean-token-mean", 0.4, 0.4),
    "scalerl": ("cispo", "token", "prompt-mean", 1.0, 4.0),
}


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


@functools.cache
def head():
    """hidden (B, T, H), weight (V, H), targets (B, T), in fp32."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(B, T, H, generator=generator).requires_grad_()
    weight = torch.randn(V, H, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(V, (B, T), generator=generator)
