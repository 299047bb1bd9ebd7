"""Every op again in a few lines of plain PyTorch: same names and arguments, fp64 included; the oracle of the tests.

Nothing here is fast or small in memory. What is masked is computed from zeros and then dropped.
"""

import torch

from fused_rl.linear import LinearTokenLoss
from fused_rl.logprobs import TokenLogprobs

__all__ = ["linear_token_logprobs", "linear_token_loss", "token_logprobs"]


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


def linear_token_logprobs(
    hidden, weight, targets, *, bias=None, temperature=1.0, mask=None, softcap=None, workspace_mb=None
):
    """As `fused_rl.linear_token_logprobs`, in the inputs' dtype; `workspace_mb` has no effect."""
    hidden = hidden if mask is None else torch.where(mask[..., None], hidden, 0)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return token_logprobs(logits, targets, temperature=temperature, mask=mask, softcap=softcap)


def linear_token_loss(hidden, weight, targets, token_loss, *per_token, mask=None, **options):
    """As `fused_rl.linear_token_loss`; `options` as in `linear_token_logprobs`."""
    logprobs, entropy, _ = linear_token_logprobs(hidden, weight, targets, mask=mask, **options)
    kept = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    loss = token_loss(logprobs[kept], entropy[kept], *(values[kept] for values in per_token)).sum()
    return LinearTokenLoss(loss, logprobs.detach(), entropy.detach())
