"""Log-probability, entropy and log-sum-exp of each row of logits: one read forward, one read and one write backward.

For one row, x = logits / temperature, m = max x, p = softmax(x), H the entropy, dlp, dH, dlse the upstream gradients:

    dx_j = [ dlp (1{j = target} - p_j) - dH p_j (log p_j + H) + dlse p_j ] / temperature

Both backends (`fused_rl.kernels.logprob` for GPU tensors, `fused_rl.cpu` for CPU tensors) have the same two functions,
`logprob_fwd` and `logprob_bwd`; what they exchange is O(N): the raw maximum m and rest = sum(exp(x - m)) - 1.
"""

import os
from typing import NamedTuple

import torch

__all__ = ["TokenLogprobs", "token_logprobs"]


class TokenLogprobs(NamedTuple):
    """Per-row outputs of `token_logprobs`, each fp32, in nats, of the shape of the targets, 0 where masked."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    lse: torch.Tensor


def row_backend(device: torch.device):
    """The module whose `logprob_fwd` and `logprob_bwd` serve tensors of this device."""
    if device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        from fused_rl.kernels import logprob

        return logprob
    from fused_rl import cpu

    return cpu


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, mask, inv_temperature, softcap):  # (N, V), (N,), (N,) | None, float | (N,) fp32
        backend = row_backend(logits.device)
        logprobs, entropy, lse, m, rest = backend.logprob_fwd(logits, targets, mask, inv_temperature, softcap)
        ctx.save_for_backward(logits, targets, mask, entropy, m, rest)
        ctx.inv_temperature, ctx.softcap = inv_temperature, softcap
        ctx.set_materialize_grads(False)
        return logprobs, entropy, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dlogprobs, dentropy, dlse):
        logits, targets, mask, entropy, m, rest = ctx.saved_tensors
        if dlogprobs is None and dentropy is None and dlse is None:
            return None, None, None, None, None
        dlogits = row_backend(logits.device).logprob_bwd(
            dlogprobs, dentropy, dlse, logits, targets, mask, entropy, m, rest, ctx.inv_temperature, ctx.softcap
        )
        return dlogits, None, None, None, None


def token_logprobs(logits, targets, *, temperature=1.0, mask=None, softcap=None, shift=False, inplace=False):
    """Log-probability of each target, entropy and log-sum-exp of each row of logits. (First form; see reference.)"""
    if shift:
        logits, targets = logits[:, :-1], targets[:, 1:]
    shape = targets.shape
    inv_temperature = 1.0 / temperature
    if isinstance(inv_temperature, torch.Tensor):
        inv_temperature = inv_temperature.float().expand(shape).reshape(-1)
    mask = None if mask is None else mask.reshape(-1)
    out = _TokenLogprobs.apply(logits.flatten(0, -2), targets.reshape(-1), mask, inv_temperature, softcap)
    return TokenLogprobs(*(o.view(shape) for o in out))
