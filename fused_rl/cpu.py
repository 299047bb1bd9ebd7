"""The CPU path of the row statistics and their gradient, with the functions of `fused_rl.kernels.logprob`.

A row is cut into blocks of the vocabulary that stay in the cache. Each keeps its own maximum, and the few numbers per
block are merged in fp64. The maximum is left out of the sum, so that entropy and log-probability keep their sign and
their last bits when one token holds all the mass; blocks also keep fp32 sums of many equal terms from drifting.

Large inputs go through Inductor (one pass over memory, compiled once per dtype in about 10 s, or 2 s from its cache),
small ones and machines without a C++ compiler through eager PyTorch, a few rows at a time. For one path, the bits of a
row depend on nothing but the row; the two paths differ in the last bits of exp.
"""

import ctypes
import functools
import logging
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

_BLOCK = 512  # columns whose exponentials are summed in fp32: few enough for 1e-7, enough to hide the merge
_CHUNK = 1 << 18  # elements that eager passes over again and again, in the cache
_WORTH_COMPILING = 1 << 24  # elements; below, a hundred calls do not earn the compilation back
_HUGE = 1 << 25  # bytes; below, malloc may hand out memory that it has already touched
_MADV_HUGEPAGE = 14
_FLAT = -200.0  # exp is 0 from here on; finite, so that 0 * s is 0 for banned tokens

_log = logging.getLogger(__name__)


def in_huge_pages(fresh):
    """The tensor, large memory of it in huge pages where Linux gives them when asked.

    The first touch of 4 KiB pages takes 20 to 30 % of the time of a gradient kernel that writes to fresh memory.
    """
    size = fresh.numel() * fresh.element_size()
    if fresh.device.type == "cpu" and sys.platform == "linux" and size >= _HUGE:
        page = os.sysconf("SC_PAGE_SIZE")
        begin = -(-fresh.data_ptr() // page) * page
        end = (fresh.data_ptr() + size) // page * page
        # advice: where it is refused, the memory is as it was
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return fresh


def logprob_fwd(logits, targets, mask, inv_temperature, softcap):
    """(N, V), (N,) int64, (N,) bool | None, float | (N,) fp32 -> logprobs, entropy, lse, m, rest, each (N,) fp32."""
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
        return tuple(x.float() for x in found)
    return tuple(torch.zeros(n).index_copy_(0, rows, x.float()) for x in found)


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
    per_row = [x.float() for x in (m, inv_t, 1 / (1 + rest), mean, (dlse - dlp) * inv_t, dh * inv_t)]

    # The column of the target, apart: 1 - p there is exact also when p is next to 1.
    at = live.nonzero()[:, 0]
    column = targets[at]
    x = _capped(logits[at, column], softcap, out=torch.empty(at.numel())).double()
    s = ((x - m[at]) * inv_t[at]).clamp_(_FLAT, 0)
    logp = s - log1p[at]
    d = dlp[at] * -logp.expm1() + logp.exp() * (dlse[at] - dh[at] * (s - mean[at]))
    d *= inv_t[at] if softcap is None else inv_t[at] * (1 - (x / softcap).square())

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
    return m, top.float().sum(-1), torch.where(top, 0.0, p).sum(-1), (p * s).sum(-1)


def _row_gradient(x, out, live, m, inv_t, scale, mean, a, b):
    """out = p (a - b (s - mean)), p = exp(s) scale; rows that are not live become 0."""
    s = ((x.float() - m[:, None]) * inv_t[:, None]).clamp(min=_FLAT)
    g = s.exp() * scale[:, None] * (a[:, None] - b[:, None] * (s - mean[:, None]))
    out.copy_(torch.where(live[:, None], g, 0.0))


def _inplace_gradient(x, *per_row):
    _row_gradient(x, x, *per_row)


def _chunked_statistics(x, rows, inv_t, softcap):
    """As `_selected_statistics`, in eager mode: every pass writes to memory that is warm already."""
    step = max(1, _CHUNK // x[0].numel())
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
    step = max(1, _CHUNK // x.shape[1])
    work = torch.empty(2, min(step, x.shape[0]), x.shape[1])
    for c in (slice(i, i + step) for i in range(0, x.shape[0], step)):
        s, p = work[:, : m[c].shape[0]]
        _capped(x[c], softcap, out=s)
        slope = None if softcap is None else 1 - (s / softcap).square()
        s.sub_(m[c, None]).mul_(inv_t[c, None]).clamp_(min=_FLAT)
        torch.exp(s, out=p).mul_(scale[c, None])
        p.mul_(s.sub_(mean[c, None]).mul_(-b[c, None]).add_(a[c, None]))
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
    tail = vocab % _BLOCK
    parts = []
    if vocab >= _BLOCK:
        blocks = logits[:, : vocab - tail].unflatten(1, (vocab // _BLOCK, _BLOCK))
        if _compile_pays(rows.numel(), vocab, softcap):
            parts.append(_compiled(_selected_statistics)(blocks, rows, inv_t))
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
    if not _compile_pays(*logits.shape, softcap):
        _chunked_gradient(logits, out, live, *per_row, softcap)
    elif out.data_ptr() == logits.data_ptr():
        _compiled(_inplace_gradient)(out, live, *per_row)
    else:
        _compiled(_row_gradient)(logits, out, live, *per_row)


def _compile_pays(rows, vocab, softcap):
    large = rows > 1 and vocab >= 2 * _BLOCK and rows * vocab >= _WORTH_COMPILING
    return large and softcap is None and _compiler_found()


@functools.cache
def _compiler_found():
    """Whether Inductor can compile here: on Linux, with a C++ compiler and Python's headers, and not switched off."""
    compiler = os.environ.get("CXX", "g++")
    missing = [
        reason
        for reason, holds in (
            ("this is not Linux", sys.platform != "linux"),
            (f"no C++ compiler {compiler!r}", shutil.which(compiler) is None),
            ("no Python.h", not (Path(sysconfig.get_path("include")) / "Python.h").is_file()),
            ("TORCHDYNAMO_DISABLE=1", os.environ.get("TORCHDYNAMO_DISABLE") == "1"),
        )
        if holds
    ]
    path = f"eager: {', '.join(missing)}" if missing else "compiled by Inductor"
    _log.info("large logits on the CPU: %s", path)
    return not missing


@functools.cache
def _compiled(function):
    compiled = torch.compile(function, dynamic=True, fullgraph=True)

    def call(*args):
        # Each dtype, kind of strides and dispatch state is a variant; past the limit (8) the call would raise.
        with torch._dynamo.config.patch(recompile_limit=64), torch.no_grad():
            return compiled(*args)

    return call
