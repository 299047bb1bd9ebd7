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
        # no views
        logprobs = torch.empty(n, dtype=torch.float32, device="cpu")
        outputs = [logprobs, *map(torch.empty_like, [logprobs] * 4)]
        native.call(
            "logprob_fwd",
            logits.numel(),
            logits,
            logits.stride(0),
            native.DTYPES[logits.dtype],
            *logits.shape,
            targets.contiguous(),
            None if mask is None else mask.contiguous(),
            *either(inv_temperature),
            *outputs,
        )
        return RowStatistics(*outputs)

    # eager: fp32 sums of each block, merged in fp64
    rows = torch.arange(n, device="cpu") if mask is None else mask.nonzero()[:, 0]
    inv_t = fp64_per_row(inv_temperature, n)[rows]
    with torch.no_grad():
        blocks = _statistics(logits.detach(), rows, inv_t.float(), softcap)
        m, rest, t = _merge(inv_t, *blocks)

    # the target's log-probability, from its logit alone
    target_logits = logits[rows, targets[rows]]
    x = capped(target_logits, softcap).double()
    # a capped logit computed alone may lie an ulp above the maximum
    s = ((x - finite(m)) * inv_t).clamp_(max=0)
    log1p = rest.log1p()
    logprobs = s - log1p
    entropy = log1p - t / (1 + rest)  # two terms >= 0: t is a sum of e^s s, s <= 0
    lse = m * inv_t + log1p
    statistics = [z.float() for z in (logprobs, entropy, lse, m, rest)]
    if mask is not None:
        statistics = [z.new_zeros(n).index_copy_(0, rows, z) for z in statistics]
    return RowStatistics(*statistics)


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
        native.call(
            "logprob_bwd",
            logits.numel(),
            *_per_row(dlogprobs, dentropy, dlse),
            logits,
            logits.stride(0),
            out,
            out.stride(0),
            native.DTYPES[logits.dtype],
            native.DTYPES[out.dtype],
            *logits.shape,
            *_per_row(targets, mask, entropy, m, rest),
            *either(inv_temperature),
        )
        return out

    # what a row's columns share, in fp64; a row of -inf throughout has no distribution, and a gradient of 0
    live = m != -torch.inf
    if mask is not None:
        live = mask & live
    zero = m.new_zeros(n, dtype=torch.float64)
    dlp, dh, dlse = (zero if d is None else d.double() for d in (dlogprobs, dentropy, dlse))
    inv_t = fp64_per_row(inv_temperature, n)
    rest = rest.double()
    log1p = rest.log1p()
    mean = log1p - entropy.double()  # of s, so that log p + H = s - mean
    scale = 1 / (1 + rest)
    a = (dlse - dlp) * inv_t
    b = dh * inv_t
    per_row = [x.float() for x in (m, inv_t, scale, mean, a, b)]

    # The column of the target, apart: 1 - p there is exact also when p is next to 1.
    rows = live.nonzero()[:, 0]
    columns = targets[rows]
    x = capped(logits[rows, columns], softcap).double()
    slope = inv_t[rows]
    s = ((x - m[rows]) * slope).clamp_(FLAT, 0)
    logp = s - log1p[rows]
    dp = dlse[rows] - dh[rows] * (s - mean[rows])
    one_minus_p = -logp.expm1()
    dx = dlp[rows] * one_minus_p + logp.exp() * dp
    if softcap is not None:
        slope = slope * (1 - (x / softcap).square())
    dx *= slope

    # the target's column last: out may be the logits, and has been written throughout
    with torch.no_grad():
        _chunked_gradient(logits.detach(), out.detach(), live, softcap, *per_row)
    out[rows, columns] = dx.to(out.dtype)
    return out


def fp64_per_row(inv_temperature, n):
    """Return a number, or one per row, as (n,) fp64."""
    return torch.as_tensor(inv_temperature, dtype=torch.float64, device="cpu").expand(n)


def finite(m):
    """Return a row's maximum, or 0 for a row of -inf throughout, so that no -inf is taken off -inf."""
    return torch.where(m == -torch.inf, 0.0, m)


def _per_row(*tensors):
    return [None if x is None else x.contiguous() for x in tensors]


def either(inv_temperature):
    """Return the temperature as rows.c takes it: one per row or null, and a number."""
    if isinstance(inv_temperature, torch.Tensor):
        return inv_temperature.contiguous(), 1.0
    return None, float(inv_temperature)


def row_sums(x, inv_t):
    """(R, V), (R,) fp32 -> maximum and, without one maximum, sum of exp(s): (R,) fp64."""
    rows = torch.arange(len(x), device="cpu")
    m, rest, _ = _merge(inv_t.double(), *_statistics(x, rows, inv_t, None))
    return m, rest


def _chunked_statistics(x, rows, inv_t, softcap):
    """(N, blocks, width), (R,), (R,) -> maximum, ties, others' sum of exp(s), sum of exp(s) s: (4, R, blocks) fp32."""
    n = rows.numel()
    step = max(1, compiled.CHUNK // x.shape[1:].numel())
    every = n == x.shape[0]
    sums = inv_t.new_empty(4, n, x.shape[1])
    work = inv_t.new_empty(3, min(step, n), *x.shape[1:])
    for begin in range(0, n, step):
        c = slice(begin, begin + step)
        m, ties, others, t = sums[:, c]
        s, p, top = work[:, : m.shape[0]]
        capped(x[c] if every else x[rows[c]], softcap, out=s)
        torch.amax(s, -1, out=m)
        s.sub_(finite(m)[..., None])
        s.mul_(inv_t[c, None, None]).clamp_(min=FLAT)
        torch.exp(s, out=p)
        torch.floor(p, out=top)  # 1 for every tie with the maximum, 0 elsewhere
        torch.sum(top, -1, out=ties)
        torch.sum(p.sub_(top), -1, out=others)
        # the ties, which p lacks by now, would add nothing: their s is 0
        torch.sum(p.mul_(s), -1, out=t)
    return sums


def _chunked_gradient(x, out, live, softcap, m, inv_t, scale, mean, a, b):
    """out = p (a - b (s - mean)), p = exp(s) scale; rows that are not live become 0."""
    n, vocab = x.shape
    step = max(1, compiled.CHUNK // vocab)
    work = m.new_empty(2, min(step, n), vocab)
    for begin in range(0, n, step):
        c = slice(begin, begin + step)
        s, p = work[:, : m[c].shape[0]]
        capped(x[c], softcap, out=s)
        slope = None if softcap is None else 1 - (s / softcap).square()
        s.sub_(m[c, None]).mul_(inv_t[c, None])
        s.clamp_(min=FLAT)
        torch.exp(s, out=p).mul_(scale[c, None])
        # s becomes the factor of p
        s.sub_(mean[c, None]).mul_(-b[c, None])
        s.add_(a[c, None])
        p.mul_(s)
        if slope is not None:
            p.mul_(slope)
        out[c] = p
    # what these rows got so far may be NaN
    dead = (~live).nonzero()[:, 0]
    out.index_fill_(0, dead, 0)


def capped(x, softcap, out=None):
    """fp32 logits after the soft cap, in memory of their own."""
    out = x.new_empty(x.shape, dtype=torch.float32) if out is None else out
    out.copy_(x)
    if softcap is not None:
        out.div_(softcap).tanh_().mul_(softcap)
    return out


def _statistics(logits, rows, inv_t, softcap):
    """Return per row and block: maximum, ties with it, the others' sum, the entropy's sum; (R, blocks) fp32 each."""
    vocab = logits.shape[1]
    tail = vocab % BLOCK
    whole = vocab - tail
    parts = []
    if whole:
        blocks = logits[:, :whole].unflatten(1, (vocab // BLOCK, BLOCK))
        parts.append(_chunked_statistics(blocks, rows, inv_t, softcap))
    if tail:
        last_block = logits[:, None, whole:]
        parts.append(_chunked_statistics(last_block, rows, inv_t, softcap))
    return [torch.cat(columns, 1) for columns in zip(*parts, strict=True)]


def _merge(inv_t, m, ties, others, t):
    """Inverse temperatures (R,) fp64, partial states -> maximum, sum of exp(s) without one maximum, t; (R,) fp64."""
    top = m.amax(1, keepdim=True)
    below = (m.double() - finite(top)) * inv_t[:, None]
    d = below.clamp(min=1e3 * FLAT)  # finite, as FLAT is
    alpha = d.exp()
    mass = ties + others.double()

    # of blocks with the maximum the ties are counted apart, and one of them is left out
    holds_top = m == top
    rest = torch.where(holds_top, others, alpha * mass).sum(1)
    n_ties = torch.where(holds_top, ties, 0.0).sum(1)
    rest += (n_ties - 1).clamp_(min=0)  # no tie where all is -inf
    # the entropy's sum moves with its terms: e^(s + d) (s + d)
    t_row = (alpha * (t + d * mass)).sum(1)
    return top[:, 0].double(), rest, t_row
