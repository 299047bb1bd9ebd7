"""Every op again in a few lines of plain PyTorch: same names and arguments, fp64 included; the oracle of the tests.

Nothing here is fast or small in memory. What is masked is computed from zeros and then dropped.
"""

import torch

from fused_rl.logprobs import TokenLogprobs

__all__ = ["token_logprobs"]


def token_logprobs(logits, targets, *, temperature=1.0, mask=None, softcap=None, shift=False, inplace=False):
    """As `fused_rl.token_logprobs`, in the dtype of `logits`, by `torch.log_softmax`; `inplace` has no effect."""
    if shift:
        logits, targets = logits[:, :-1], targets[:, 1:]
    mask = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    mask = mask & (logits.detach() > -torch.inf).any(-1) if softcap is None else mask
    x = torch.where(mask[..., None], logits, 0)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    x = x / (temperature[..., None] if isinstance(temperature, torch.Tensor) and temperature.dim() else temperature)
    logp = torch.log_softmax(x, -1)
    # p * log p is 0 at banned tokens: where() on the input, so that 0 * inf reaches neither value nor gradient
    entropy = -(logp.exp() * torch.where(logp.isinf(), 0, logp)).sum(-1)
    chosen = logp.gather(-1, torch.where(mask, targets, 0)[..., None])[..., 0]
    outputs = (chosen, entropy, torch.logsumexp(x, -1))
    return TokenLogprobs(*(torch.where(mask, o, 0) for o in outputs))
