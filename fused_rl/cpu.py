"""The CPU path of the row statistics and their gradient: a few rows at a time, so that every pass stays in the cache.

Same functions as `fused_rl.kernels.logprob`, same accumulation: the maximum is left out of the sum, so that entropy and
log-probability keep their sign and their last bits when one token holds all the mass.
"""

import torch

_CHUNK_BYTES = 6 << 20


def _chunks(n: int, vocab: int):
    rows = max(1, _CHUNK_BYTES // (8 * vocab))
    return (slice(i, min(i + rows, n)) for i in range(0, n, rows))


def _rows(inv_temperature, chunk):
    return inv_temperature[chunk, None] if isinstance(inv_temperature, torch.Tensor) else inv_temperature


def _shifted(x, m, inv_temperature, softcap):
    x = x.float()
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    return x.sub(m[:, None]).mul_(inv_temperature)


def logprob_fwd(logits, targets, mask, inv_temperature, softcap):
    """(N, V), (N,) int64, (N,) bool | None, float | (N,) fp32 -> logprobs, entropy, lse, m, rest, each (N,) fp32."""
    n, vocab = logits.shape
    logprobs, entropy, lse, m, rest = (torch.zeros(n, dtype=torch.float32) for _ in range(5))
    for c in _chunks(n, vocab):
        x, inv_t = logits[c].float(), _rows(inv_temperature, c)
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        m_c, at = x.max(1)
        s = (x - torch.where(m_c == -torch.inf, 0, m_c)[:, None]).mul_(inv_t)
        p = s.exp()
        p.scatter_(1, at[:, None], 0)
        rest_c = p.sum(1)
        t = p.mul_(s.clamp_(min=-1e30)).sum(1)
        target = targets[c] if mask is None else torch.where(mask[c], targets[c], 0)
        log1p = rest_c.log1p()
        logprobs[c] = s.gather(1, target[:, None])[:, 0] - log1p
        entropy[c] = log1p - t / (1 + rest_c)
        lse[c] = m_c * (inv_t if isinstance(inv_t, float) else inv_t[:, 0]) + log1p
        m[c], rest[c] = m_c, rest_c
    if mask is not None:
        for o in (logprobs, entropy, lse):
            o.masked_fill_(~mask, 0)
    return logprobs, entropy, lse, m, rest


def logprob_bwd(dlogprobs, dentropy, dlse, logits, targets, mask, entropy, m, rest, inv_temperature, softcap, out=None):
    """Gradient of the logits, (N, V) in their dtype; upstream gradients (N,) fp32 or None; `out` may be the logits."""
    n, vocab = logits.shape
    out = torch.empty_like(logits) if out is None else out
    zero = torch.zeros(n, dtype=torch.float32)
    dlp, dh, dlse = (zero if d is None else d for d in (dlogprobs, dentropy, dlse))
    for c in _chunks(n, vocab):
        inv_t = _rows(inv_temperature, c)
        logp = _shifted(logits[c], m[c], inv_t, softcap).sub_(rest[c].log1p()[:, None]).clamp_(min=-1e30)
        p = logp.exp()
        target = targets[c] if mask is None else torch.where(mask[c], targets[c], 0)
        g = p * ((dlse[c] - dlp[c] - dh[c] * entropy[c])[:, None] - dh[c, None] * logp)
        p_target = p.gather(1, target[:, None])
        one_minus = torch.where(p_target > 0.5, (rest[c] / (1 + rest[c]))[:, None], 1 - p_target)
        logp_t = logp.gather(1, target[:, None])
        at_target = dlp[c, None] * one_minus + p_target * (dlse[c, None] - dh[c, None] * (logp_t + entropy[c, None]))
        g.scatter_(1, target[:, None], at_target).mul_(inv_t)
        if softcap is not None:
            g.mul_(1 - torch.tanh(logits[c].float() / softcap).square())
        dead = (m[c] == -torch.inf) if mask is None else ~mask[c] | (m[c] == -torch.inf)
        out[c] = g.masked_fill_(dead[:, None], 0)
    return out
