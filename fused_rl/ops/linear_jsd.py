"""Jensen-Shannon divergence with any weight of two output heads over the same tokens, from hidden states.

Plain PyTorch, some rows of logits at a time; for a weight of 1/2 `linear_token_kl` has kernels.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

ROWS = 256  # whose logits exist at once


def linear_token_jsd(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    beta: float,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Jensen-Shannon divergence per token between a policy p and a reference q in nats: arXiv:2306.13649, eq. 1.

    It is beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p.

    Args:
        hidden, weight, bias: (N, H), (V, H), (V,) of the policy.
        ref_hidden, ref_weight, ref_bias: (N, H'), (V, H'), (V,) of the reference, which require no gradient.
        beta: above 0 and below 1, the weight of the reference in the mixture.
        temperature, softcap: of both.
        logits_dtype: torch.float32 to form the logits in fp32; None for the dtype of hidden and weight.

    Returns:
        (N,) fp32, differentiable with respect to hidden, weight and bias.
    """
    heads = (weight, bias), (ref_weight, ref_bias)
    heads = [[x if x is None else x.to(logits_dtype or x.dtype) for x in head] for head in heads]
    blocks = []
    for both in zip(hidden.split(ROWS), ref_hidden.split(ROWS), strict=True):
        sides = [
            (rows.to(logits_dtype or rows.dtype), *head)
            for rows, head in zip(both, heads, strict=True)
        ]
        blocks.append(checkpoint(_of_rows, *sides, beta, temperature, softcap, use_reentrant=False))
    return torch.cat(blocks)


def _of_rows(policy, reference, beta, temperature, softcap):
    p, q = (linear(*side).float() for side in (policy, reference))
    if softcap is not None:
        p, q = (softcap * torch.tanh(logits / softcap) for logits in (p, q))
    p, q = (torch.log_softmax(logits / temperature, -1) for logits in (p, q))
    with torch.no_grad():
        d = (p - q).clamp(-80, 80)  # beyond, what is clamped has no weight
        above_p = beta * torch.expm1(-d)  # m / p - 1
        above_q = (1 - beta) * torch.expm1(d)  # m / q - 1
        log_p, log_q = -torch.log1p(above_p), -torch.log1p(above_q)  # log(p / m), log(q / m)
        # Of close columns add m - p and m - q, which together are 0: no term is negative then, and none cancels.
        close = d.abs() < 1
        of_p, of_q = log_p + above_p.where(close, 0), log_q + above_q.where(close, 0)
        value = (1 - beta) * (p.exp() * of_p).sum(-1) + beta * (q.exp() * of_q).sum(-1)
    slope = (1 - beta) * (p.exp() * log_p).sum(-1)  # m has no part in the gradient
    return value + (slope - slope.detach())
