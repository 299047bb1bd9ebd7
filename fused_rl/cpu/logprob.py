"""The CPU path of the row statistics and their gradient, with the functions of `fused_rl.kernels.logprob`.

A row is cut into blocks of the vocabulary that stay in the cache. Each keeps its own maximum, and the few numbers per
block are merged in fp64. The maximum is left out of the sum, so that entropy and log-probability keep their sign and
their last bits when one token holds all the mass; blocks also keep fp32 sums of many equal terms from drifting.

Large inputs go through Inductor (one pass over memory, compiled once per dtype in about 10 s, or 2 s from its cache),
small ones and machines without a C++ compiler through eager PyTorch, a few rows at a time. For one path, the bits of a
row depend on nothing but the row; the two paths differ in the last bits of exp.
"""

import torch

from fused_rl.cpu import compiled
from fused_rl.cpu.compiled import BLOCK, in_huge_pages
from fused_rl.kernels.states import RowStatistics

_FLAT = -200.0  # exp is 0 from here on; finite, so that 0 * s is 0 for banned tokens


def logprob_fwd(logits, targets, mask, inv_temperature, softcap):
    """(N, V), (N,) int64, (N,) bool | None, float | (N,) fp32 -> statistics, (N,) fp32 each."""
    n = logits.shape[0]
    rows = torch.arange(n) if mask is None else mask.nonzero()[:, 0]
    inv_t = torch.as_tensor(inv_temperature, dtype=torch.float64).expand(n)[rows]
    with torch.no_grad():
        m, rest, t = _merge(*_statistics(logits.detach(), rows, inv_t.float(), softcap), inv_t)
    x = _capped(logits[rows, targets[rows]], softcap, out=torch.empty(rows.numel())).double()
    s = ((x - _finite(m)) * inv_t).clamp_(max=0)  # a capped logit computed alone may lie an ulp above the maximum
    log1p = rest.log1p()
    found = s - log1p, log1p - t / (1 + rest), m * inv_t + log1p, m, rest
    if mask is None:
        return RowStatistics(*(x.float() for x in found))
    return RowStatistics(*(torch.zeros(n).index_copy_(0, rows, x.float()) for x in found))


def logprob_bwd(dlogprobs, dentropy, dlse, logits, targets, mask, entropy, m, rest, inv_temperature, softcap, out=None):
    """Gradient of the logits, (N, V) in their dtype; upstream gradients (N,) fp32 or None; `out` may be the logits."""
    n = logits.shape[0]
    out = in_huge_pages(torch.empty_like(logits)) if out is None else out
    live = m != -torch.inf if mask is None else mask & (m != -torch.inf)
    zero = torch.zeros(n, dtype=torch.float64)
    dlp, dh, dlse = (zero if d is None else d.double() for d in (dlogprobs, dentropy, dlse))
    inv_t = torch.as_tensor(inv_temperature, dtype=torch.float64).expand(n)
    rest, log1p = rest.double(), rest.double().log1p()
    mean = log1p - entropy.double()  # of s, so that log p + H = s - mean
    scale, a, b = 1 / (1 + rest), (dlse - dlp) * inv_t, dh * inv_t
    per_row = [x.float() for x in (m, inv_t, scale, mean, a, b)]

    # The column of the target, apart: 1 - p there is exact also when p is next to 1.
    at = live.nonzero()[:, 0]
    column = targets[at]
    x = _capped(logits[at, column], softcap, out=torch.empty(at.numel())).double()
    s = ((x - m[at]) * inv_t[at]).clamp_(_FLAT, 0)
    logp = s - log1p[at]
    dp = dlse[at] - dh[at] * (s - mean[at])
    d = dlp[at] * -logp.expm1() + logp.exp() * dp
    slope = inv_t[at]
    if softcap is not None:
        slope = slope * (1 - (x / softcap).square())
    d *= slope

    with torch.no_grad():
        _gradient(logits.detach(), out.detach(), live, per_row, softcap)
    out[at, column] = d.to(out.dtype)
    return out


def _finite(m):
    return torch.where(m == -torch.inf, 0.0, m)


def _selected_statistics(x, rows, inv_t):
    """(N, blocks, width), (R,), (R,) -> maximum, ties, others' sum of exp(s), sum of exp(s) s: (R, blocks) fp32."""
    x = x[rows].float()
    m = x.amax(-1)
    s = ((x - _finite(m)[..., None]) * inv_t[:, None, None]).clamp(min=_FLAT)
    p = s.exp()
    top = s == 0
    ties = top.float().sum(-1)
    others = torch.where(top, 0.0, p).sum(-1)
    return m, ties, others, (p * s).sum(-1)


def _row_gradient(x, out, live, m, inv_t, scale, mean, a, b):
    """out = p (a - b (s - mean)), p = exp(s) scale; rows that are not live become 0."""
    s = ((x.float() - m[:, None]) * inv_t[:, None]).clamp(min=_FLAT)
    dp = a[:, None] - b[:, None] * (s - mean[:, None])
    g = s.exp() * scale[:, None] * dp
    out.copy_(torch.where(live[:, None], g, 0.0))


def _inplace_gradient(x, *per_row):
    _row_gradient(x, x, *per_row)


def _chunked_statistics(x, rows, inv_t, softcap):
    """As `_selected_statistics`, in eager mode: every pass writes to memory that is warm already."""
    step = max(1, compiled.CHUNK // x[0].numel())
    every = rows.numel() == x.shape[0]
    found = torch.empty(4, rows.numel(), x.shape[1])
    work = torch.empty(3, min(step, rows.numel()), *x.shape[1:])
    for c in (slice(i, i + step) for i in range(0, rows.numel(), step)):
        m, ties, others, t = found[:, c]
        s, p, top = work[:, : m.shape[0]]
        _capped(x[c] if every else x[rows[c]], softcap, out=s)
        torch.amax(s, -1, out=m)
        s.sub_(_finite(m)[..., None]).mul_(inv_t[c, None, None]).clamp_(min=_FLAT)
        torch.floor(torch.exp(s, out=p), out=top)  # 1 for every tie with the maximum, 0 elsewhere
        torch.sum(top, -1, out=ties)
        torch.sum(p.sub_(top), -1, out=others)
        torch.sum(p.mul_(s), -1, out=t)
    return found


def _chunked_gradient(x, out, live, m, inv_t, scale, mean, a, b, softcap):
    """As `_row_gradient`, in eager mode."""
    step = max(1, compiled.CHUNK // x.shape[1])
    work = torch.empty(2, min(step, x.shape[0]), x.shape[1])
    for c in (slice(i, i + step) for i in range(0, x.shape[0], step)):
        s, p = work[:, : m[c].shape[0]]
        _capped(x[c], softcap, out=s)
        slope = None if softcap is None else 1 - (s / softcap).square()
        s.sub_(m[c, None]).mul_(inv_t[c, None]).clamp_(min=_FLAT)
        torch.exp(s, out=p).mul_(scale[c, None])
        s.sub_(mean[c, None]).mul_(-b[c, None]).add_(a[c, None])
        p.mul_(s)
        if slope is not None:
            p.mul_(slope)
        out[c] = p
    out.index_fill_(0, (~live).nonzero()[:, 0], 0)


def _capped(x, softcap, out):
    out.copy_(x)
    if softcap is not None:
        out.div_(softcap).tanh_().mul_(softcap)
    return out


def _statistics(logits, rows, inv_t, softcap):
    """Of these rows, per block: maximum, ties with it, the others' sum, the entropy's sum; (R, blocks) fp32 each."""
    vocab = logits.shape[1]
    tail = vocab % BLOCK
    parts = []
    if vocab >= BLOCK:
        blocks = logits[:, : vocab - tail].unflatten(1, (vocab // BLOCK, BLOCK))
        if softcap is None and compiled.compile_pays(rows.numel(), vocab):
            parts.append(compiled.by_inductor(_selected_statistics)(blocks, rows, inv_t))
        else:
            parts.append(_chunked_statistics(blocks, rows, inv_t, softcap))
    if tail:
        parts.append(_chunked_statistics(logits[:, None, vocab - tail :], rows, inv_t, softcap))
    return [torch.cat(columns, 1) for columns in zip(*parts, strict=True)]


def _merge(m, ties, others, t, inv_t):
    """Partial states, inverse temperatures (R,) fp64 -> maximum, sum of exp(s) without one maximum, t; (R,) fp64."""
    top = m.amax(1, keepdim=True)
    d = ((m.double() - _finite(top)) * inv_t[:, None]).clamp(min=1e3 * _FLAT)
    alpha, mass = d.exp(), ties + others.double()
    rest = torch.where(m == top, others, alpha * mass).sum(1)
    rest += (torch.where(m == top, ties, 0.0).sum(1) - 1).clamp_(min=0)  # no tie where all is -inf
    return top[:, 0].double(), rest, (alpha * (t + d * mass)).sum(1)


def _gradient(logits, out, live, per_row, softcap):
    if softcap is not None or not compiled.compile_pays(*logits.shape):
        _chunked_gradient(logits, out, live, *per_row, softcap)
    elif out.data_ptr() == logits.data_ptr():
        compiled.by_inductor(_inplace_gradient)(out, live, *per_row)
    else:
        compiled.by_inductor(_row_gradient)(logits, out, live, *per_row)
