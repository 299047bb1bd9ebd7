"""Jensen-Shannon divergence with any weight of two output heads over the same tokens, from hidden states.

Plain PyTorch, some rows of logits at a time, which the backward pass forms again. The kernels have the weight of 1/2,
as `linear_token_kl(…, direction="jensen-shannon")`.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

__all__ = ["linear_token_jsd"]

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
) -> Tensor:
    """Jensen-Shannon divergence per token between a policy p and a reference q in nats: arXiv:2306.13649, eq. 1.

    It is beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p.

    Args:
        hidden, weight, bias: (N, H), (V, H), (V,) of the policy.
        ref_hidden, ref_weight, ref_bias: (N, H'), (V, H'), (V,) of the reference, which require no gradient.
        beta: above 0 and below 1, the weight of the reference in the mixture.
        temperature, softcap: of both.

    Returns:
        (N,) fp32, differentiable with respect to hidden, weight and bias.
    """
    blocks = []
    for rows, ref_rows in zip(hidden.split(ROWS), ref_hidden.split(ROWS), strict=True):
        sides = (rows, weight, bias), (ref_rows, ref_weight, ref_bias)
        blocks.append(checkpoint(_of_rows, *sides, beta, temperature, softcap, use_reentrant=False))
    return torch.cat(blocks)


def _of_rows(policy, reference, beta, temperature, softcap):
    p, q = (linear(*side).float() for side in (policy, reference))
    if softcap is not None:
        p, q = (softcap * torch.tanh(logits / softcap) for logits in (p, q))
    p, q = (torch.log_softmax(logits / temperature, -1) for logits in (p, q))
    m = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
    return beta * (q.exp() * (q - m)).sum(-1) + (1 - beta) * (p.exp() * (p - m)).sum(-1)
