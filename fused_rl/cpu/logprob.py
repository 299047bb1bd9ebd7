"""The CPU path of the row statistics and their gradient, with the functions of `fused_rl.kernels.logprob`.

The maximum is left out of the sum, so that entropy and log-probability keep their sign and their last bits when one
token holds all the mass.

Two paths: rows.c, one pass over memory and one call for all rows; and PyTorch, a few rows at a time, for
machines without a C compiler and for columns that are apart. Soft-capped logits are copied a few rows at a time on
both. For one path, the bits of a row depend on nothing but the row; the two differ in the last bits of exp.
"""

import torch

from fused_rl.cpu import compiled, native
from fused_rl.cpu.compiled import in_huge_pages
from fused_rl.kernels.states import RowStatistics

FLAT = -200.0  # exp is 0 from here on; finite, so that 0 * s is 0 for banned tokens


def logprob_fwd(logits, targets, mask, inv_temperature, softcap):
    """(N, V), (N,) int64, (N,) bool | None, float | (N,) fp32 -> statistics, (N,) fp32 each."""
    n = logits.shape[0]
    # plain loops and calls of torch: at a few rows each call of Python's counts
    # no views
    logprobs = torch.empty(n, dtype=torch.float32, device="cpu")
    outputs = [logprobs, *map(torch.empty_like, [logprobs] * 4)]
    if softcap is None and native.takes(logits):
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
    for output in outputs:
        output.zero_()
    for rows, x, inv_t in chunks(logits, mask=mask, inv_t=inv_temperature, softcap=softcap):
        function = logprob_fwd if native.takes(x) else _eager_fwd
        of_rows = function(x, targets[rows], None, inv_t, None)
        for output, values in zip(outputs, of_rows, strict=True):
            output[rows] = values.float()
    return RowStatistics(*outputs)


def _eager_fwd(x, targets, _, inv_temperature, __):
    inv_t = fp64_per_row(inv_temperature, len(x))
    m, top = x.max(-1, keepdim=True)
    about = finite(m)
    s = (x - about).mul_(inv_t.float()[:, None])
    p = s.exp()
    m, about = m[:, 0].double(), about[:, 0].double()
    rest = p.scatter(-1, top, 0).sum(-1, dtype=torch.float64) + (about - about)  # NaN for +inf
    t = p.mul_(s.clamp(min=FLAT)).sum(-1, dtype=torch.float64)
    log1p = rest.log1p()
    logprobs = s.gather(-1, targets[:, None])[:, 0] - log1p
    entropy = log1p - t / (1 + rest)  # two terms >= 0: t is a sum of e^s s, s <= 0
    return logprobs, entropy, m * inv_t + log1p, m, rest


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
    # a row of -inf throughout has no distribution, and a gradient of 0
    live = m != -torch.inf
    live = live if mask is None else mask & live
    target = out.detach()
    for rows, x, inv_t in chunks(logits, mask=live, inv_t=inv_temperature, softcap=softcap):
        function = logprob_bwd if native.takes(x) else _eager_bwd
        dlp, dh, dl = (None if d is None else d[rows] for d in (dlogprobs, dentropy, dlse))
        state = entropy[rows], m[rows], rest[rows]
        gradient = function(dlp, dh, dl, x, targets[rows], None, *state, inv_t, None)
        if softcap is not None:
            gradient *= 1 - (x / softcap).square()
        target[rows] = gradient.to(out.dtype)
    target[~live] = 0
    return out


def _eager_bwd(dlogprobs, dentropy, dlse, x, targets, _, entropy, m, rest, inv_temperature, __):
    zero = torch.zeros_like(m)
    per_row = dlogprobs, dentropy, dlse, entropy, rest
    dlp, dh, dlse, entropy, rest = (zero.double() if d is None else d.double() for d in per_row)
    inv_t = fp64_per_row(inv_temperature, len(m))
    log1p = rest.log1p()
    mean = log1p - entropy  # of s, so that log p + H = s - mean

    # the target's, where 1 - p is exact also when p is next to 1
    columns = targets[:, None]
    s_target = (x.gather(-1, columns)[:, 0] - m.double()) * inv_t
    logp = s_target.clamp_(min=FLAT) - log1p
    dp = dlse - dh * (s_target - mean)
    of_target = (logp.exp() * dp - dlp * logp.expm1()) * inv_t

    factors = 1 / (1 + rest), mean, dh * inv_t, (dlse - dlp) * inv_t, inv_t, m
    scale, mean, b, a, t, m = (z.float()[:, None] for z in factors)
    s = (x - m).mul_(t).clamp_(min=FLAT)
    dx = s.exp().mul_(scale).mul_(s.sub_(mean).mul_(-b).add_(a))
    return dx.scatter_(-1, columns, of_target.float()[:, None])


def chunks(*matrices, mask, inv_t, softcap):
    """Some rows that count at a time: which (R,), of each (..., V) the capped logits (R, V) fp32, 1 / temperature."""
    *leading, vocab = matrices[0].shape
    n = matrices[0].shape[:-1].numel()
    counted = torch.arange(n, device="cpu") if mask is None else mask.nonzero()[:, 0]
    for rows in counted.split(max(1, compiled.CHUNK // vocab)):
        if len(rows):
            index = torch.unravel_index(rows, leading)
            t = inv_t[rows] if isinstance(inv_t, torch.Tensor) else inv_t
            yield rows, *(capped(x.detach()[index], softcap) for x in matrices), t


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


def capped(x, softcap):
    """fp32 logits after the soft cap, in memory of their own."""
    out = x.to(torch.float32, copy=True)
    return out if softcap is None else out.div_(softcap).tanh_().mul_(softcap)
