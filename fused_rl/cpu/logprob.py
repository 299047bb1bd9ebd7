"""The CPU path of the row statistics and their gradient, with the functions of `fused_rl.kernels.logprob`.

A row is cut into blocks of the vocabulary that stay in the cache, and the few numbers per block are merged in fp64. The
maximum is left out of the sum, so that entropy and log-probability keep their sign and their last bits when one token
holds all the mass; blocks also keep fp32 sums of many equal terms from drifting.

Two paths: rows.c, one pass over memory and one call for all rows; and eager PyTorch, a few rows at a time, for
machines without a C compiler, for soft-capping, and for columns that are apart. For one path, the bits of a row depend
on nothing but the row; the two differ in the last bits of exp.
"""

import torch

from fused_rl.cpu import compiled, native
from fused_rl.cpu.compiled import BLOCK, in_huge_pages
from fused_rl.kernels.states import RowStatistics

FLAT = -200.0  # exp is 0 from here on; finite, so that 0 * s is 0 for banned tokens


def logprob_fwd(logits, targets, mask, inv_temperature, softcap):
    """(N, V), (N,) int64, (N,) bool | None, float | (N,) fp32 -> statistics, (N,) fp32 each."""
    n = logits.shape[0]
    if softcap is None and native.takes(logits):
        # plain loops and calls of torch: at a few rows each call of Python's counts
        outputs = list(map(torch.empty, [n] * len(RowStatistics._fields)))  # no views
        native.call(
            "logprob_fwd",
            logits.numel(),
            logits,
            logits.stride(0),
            native.DTYPES[logits.dtype],
            *logits.shape,
            targets.contiguous(),
            None if mask is None else mask.contiguous(),
            *_either(inv_temperature),
            *outputs,
        )
        return RowStatistics(*outputs)
    rows = torch.arange(n) if mask is None else mask.nonzero()[:, 0]
    inv_t = torch.as_tensor(inv_temperature, dtype=torch.float64).expand(n)[rows]
    with torch.no_grad():
        blocks = _statistics(logits.detach(), rows, inv_t.float(), softcap)
        m, rest, t = _merge(inv_t, *blocks)
    chosen = logits[rows, targets[rows]]
    x = capped(chosen, softcap).double()
    # a capped logit computed alone may lie an ulp above the maximum
    s = ((x - _finite(m)) * inv_t).clamp_(max=0)
    log1p = rest.log1p()
    found = s - log1p, log1p - t / (1 + rest), m * inv_t + log1p, m, rest
    if mask is None:
        return RowStatistics(*(x.float() for x in found))
    return RowStatistics(*(torch.zeros(n).index_copy_(0, rows, x.float()) for x in found))


def logprob_bwd(
    dlogprobs,
    dentropy,
    dlse,
    logits,
    targets,
    mask,
    entropy,
    m,
    rest,
    inv_temperature,
    softcap,
    out=None,
):
    """Gradient of the logits (N, V); upstream gradients are (N,) fp32 or None, `out` the logits or of any dtype."""
    n = logits.shape[0]
    out = in_huge_pages(torch.empty_like(logits)) if out is None else out
    if softcap is None and native.takes(logits, out):
        dtypes = native.DTYPES[logits.dtype], native.DTYPES[out.dtype]
        x = logits, logits.stride(0), out, out.stride(0), *dtypes, *logits.shape
        per_row = _per_row(targets, mask, entropy, m, rest)
        upstream = _per_row(dlogprobs, dentropy, dlse)
        native.call(
            "logprob_bwd", logits.numel(), *upstream, *x, *per_row, *_either(inv_temperature)
        )
        return out
    live = m != -torch.inf if mask is None else mask & (m != -torch.inf)
    zero = torch.zeros(n, dtype=torch.float64)
    dlp, dh, dlse = (zero if d is None else d.double() for d in (dlogprobs, dentropy, dlse))
    inv_t = torch.as_tensor(inv_temperature, dtype=torch.float64).expand(n)
    rest, log1p = rest.double(), rest.double().log1p()
    mean = log1p - entropy.double()  # of s, so that log p + H = s - mean
    scale = 1 / (1 + rest)
    a = (dlse - dlp) * inv_t
    b = dh * inv_t
    per_row = [x.float() for x in (m, inv_t, scale, mean, a, b)]

    # The column of the target, apart: 1 - p there is exact also when p is next to 1.
    at = live.nonzero()[:, 0]
    column = targets[at]
    x = capped(logits[at, column], softcap).double()
    s = ((x - m[at]) * inv_t[at]).clamp_(FLAT, 0)
    logp = s - log1p[at]
    dp = dlse[at] - dh[at] * (s - mean[at])
    d = dlp[at] * -logp.expm1() + logp.exp() * dp
    slope = inv_t[at]
    if softcap is not None:
        slope = slope * (1 - (x / softcap).square())
    d *= slope

    with torch.no_grad():
        _chunked_gradient(logits.detach(), out.detach(), live, softcap, *per_row)
    out[at, column] = d.to(out.dtype)
    return out


def _finite(m):
    return torch.where(m == -torch.inf, 0.0, m)


def _per_row(*tensors):
    return [None if x is None else x.contiguous() for x in tensors]


def _either(inv_temperature):
    """Return the temperature as rows.c takes it: one per row or null, and a number."""
    if isinstance(inv_temperature, torch.Tensor):
        return inv_temperature.contiguous(), 1.0
    return None, float(inv_temperature)


def _chunked_statistics(x, rows, inv_t, softcap):
    """(N, blocks, width), (R,), (R,) -> maximum, ties, others' sum of exp(s), sum of exp(s) s: (4, R, blocks) fp32."""
    step = max(1, compiled.CHUNK // x.shape[1:].numel())
    every = rows.numel() == x.shape[0]
    sums = torch.empty(4, rows.numel(), x.shape[1])
    work = torch.empty(3, min(step, rows.numel()), *x.shape[1:])
    for c in (slice(i, i + step) for i in range(0, rows.numel(), step)):
        m, ties, others, t = sums[:, c]
        s, p, top = work[:, : m.shape[0]]
        capped(x[c] if every else x[rows[c]], softcap, out=s)
        torch.amax(s, -1, out=m)
        s.sub_(_finite(m)[..., None]).mul_(inv_t[c, None, None]).clamp_(min=FLAT)
        torch.floor(torch.exp(s, out=p), out=top)  # 1 for every tie with the maximum, 0 elsewhere
        torch.sum(top, -1, out=ties)
        torch.sum(p.sub_(top), -1, out=others)
        torch.sum(p.mul_(s), -1, out=t)
    return sums


def _chunked_gradient(x, out, live, softcap, m, inv_t, scale, mean, a, b):
    """out = p (a - b (s - mean)), p = exp(s) scale; rows that are not live become 0."""
    step = max(1, compiled.CHUNK // x.shape[1])
    work = torch.empty(2, min(step, x.shape[0]), x.shape[1])
    for c in (slice(i, i + step) for i in range(0, x.shape[0], step)):
        s, p = work[:, : m[c].shape[0]]
        capped(x[c], softcap, out=s)
        slope = None if softcap is None else 1 - (s / softcap).square()
        s.sub_(m[c, None]).mul_(inv_t[c, None]).clamp_(min=FLAT)
        torch.exp(s, out=p).mul_(scale[c, None])
        s.sub_(mean[c, None]).mul_(-b[c, None]).add_(a[c, None])
        p.mul_(s)
        if slope is not None:
            p.mul_(slope)
        out[c] = p
    out.index_fill_(0, (~live).nonzero()[:, 0], 0)


def capped(x, softcap, out=None):
    """fp32 logits after the soft cap, in memory of their own."""
    out = torch.empty(x.shape) if out is None else out
    out.copy_(x)
    if softcap is not None:
        out.div_(softcap).tanh_().mul_(softcap)
    return out


def _statistics(logits, rows, inv_t, softcap):
    """Return per row and block: maximum, ties with it, the others' sum, the entropy's sum; (R, blocks) fp32 each."""
    vocab = logits.shape[1]
    tail = vocab % BLOCK
    parts = []
    if vocab >= BLOCK:
        blocks = logits[:, : vocab - tail].unflatten(1, (vocab // BLOCK, BLOCK))
        parts.append(_chunked_statistics(blocks, rows, inv_t, softcap))
    if tail:
        parts.append(_chunked_statistics(logits[:, None, vocab - tail :], rows, inv_t, softcap))
    return [torch.cat(columns, 1) for columns in zip(*parts, strict=True)]


def _merge(inv_t, m, ties, others, t):
    """Inverse temperatures (R,) fp64, partial states -> maximum, sum of exp(s) without one maximum, t; (R,) fp64."""
    top = m.amax(1, keepdim=True)
    d = ((m.double() - _finite(top)) * inv_t[:, None]).clamp(min=1e3 * FLAT)
    alpha = d.exp()
    mass = ties + others.double()
    rest = torch.where(m == top, others, alpha * mass).sum(1)
    rest += (torch.where(m == top, ties, 0.0).sum(1) - 1).clamp_(min=0)  # no tie where all is -inf
    return top[:, 0].double(), rest, (alpha * (t + d * mass)).sum(1)
