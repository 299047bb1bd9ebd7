"""The CPU path of the row statistics and their gradient, with the functions of `fused_rl.kernels.logprob`.

A row is cut into blocks of the vocabulary that stay in the cache. Each keeps its own maximum, and the few numbers per
block are merged in fp64. The maximum is left out of the sum, so that entropy and log-probability keep their sign and
their last bits when one token holds all the mass; blocks also keep fp32 sums of many equal terms from drifting.

Large inputs go through Inductor (one pass over memory, compiled once per dtype in about 10 s, or 2 s from its cache),
small ones and machines without a C++ compiler through eager PyTorch, a few rows at a time. For one path, the bits of a
row depend on nothing but the row; the two paths differ in the last bits of exp.
"""

import functools
import logging
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

_BLOCK = 512  # columns whose exponentials are summed in fp32: few enough for 1e-7, enough to hide the merge
_CHUNK = 3 << 18  # elements that eager passes over again and again: fp32 copies of them fit into the cache
_WORTH_COMPILING = 1 << 24  # elements; below, a hundred calls do not earn the compilation back
_FLAT = -200.0  # exp is 0 from here on; finite, so that 0 * s is 0 for banned tokens

_log = logging.getLogger(__name__)


def logprob_fwd(logits, targets, mask, inv_temperature, softcap):
    """(N, V), (N,) int64, (N,) bool | None, float | (N,) fp32 -> logprobs, entropy, lse, m, rest, each (N,) fp32."""
    n = logits.shape[0]
    rows = torch.arange(n) if mask is None else mask.nonzero()[:, 0]
    inv_t = torch.as_tensor(inv_temperature, dtype=torch.float64).expand(n)[rows]
    with torch.no_grad():
        m, rest, t = _merge(*_statistics(logits.detach(), rows, inv_t.float(), softcap), inv_t)
    x = logits[rows, targets[rows]].double()
    x = x if softcap is None else _cap(x.float(), softcap).double()
    # a capped logit recomputed alone may lie an ulp above the maximum
    s = ((x - _finite(m)) * inv_t).clamp_(max=0)
    log1p = rest.log1p()
    found = s - log1p, log1p - t / (1 + rest), m * inv_t + log1p, m, rest
    if mask is None:
        return tuple(x.float() for x in found)
    return tuple(torch.zeros(n).index_copy_(0, rows, x.float()) for x in found)


def logprob_bwd(dlogprobs, dentropy, dlse, logits, targets, mask, entropy, m, rest, inv_temperature, softcap, out=None):
    """Gradient of the logits, (N, V) in their dtype; upstream gradients (N,) fp32 or None; `out` may be the logits."""
    n = logits.shape[0]
    out = torch.empty_like(logits) if out is None else out
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
    x = logits[at, column].float()
    capped = x if softcap is None else _cap(x, softcap)
    s = ((capped.double() - m[at]) * inv_t[at]).clamp_(_FLAT, 0)
    logp = s - log1p[at]
    d = dlp[at] * -logp.expm1() + logp.exp() * (dlse[at] - dh[at] * (s - mean[at]))
    d *= inv_t[at] if softcap is None else inv_t[at] * (1 - (capped.double() / softcap).square())

    with torch.no_grad():
        _gradient(logits.detach(), out.detach(), live, per_row, softcap)
    out[at, column] = d.to(out.dtype)
    return out


def _cap(x, softcap):
    return softcap * torch.tanh(x / softcap)


def _finite(m):
    return torch.where(m == -torch.inf, 0.0, m)


def _block_statistics(x, inv_t, softcap=None):
    """(R, blocks, width), (R,) -> maximum, ties with it, the others' sum of exp(s), sum of exp(s) s: (R, blocks) each."""
    x = x.float() if softcap is None else _cap(x.float(), softcap)
    m = x.amax(-1)
    s = ((x - _finite(m)[..., None]) * inv_t[:, None, None]).clamp(min=_FLAT)
    p = s.exp()
    top = s == 0
    return m, top.float().sum(-1), torch.where(top, 0.0, p).sum(-1), (p * s).sum(-1)


def _row_gradient(x, out, live, m, inv_t, scale, mean, a, b, softcap=None):
    """out = p (a - b (s - mean)), p = exp(s) scale; rows that are not live become 0."""
    x = x.float() if softcap is None else _cap(x.float(), softcap)
    s = ((x - m[:, None]) * inv_t[:, None]).clamp(min=_FLAT)
    g = s.exp() * scale[:, None] * (a[:, None] - b[:, None] * (s - mean[:, None]))
    g = g if softcap is None else g * (1 - (x / softcap).square())
    out.copy_(torch.where(live[:, None], g, 0.0))


def _selected_statistics(x, rows, inv_t):
    return _block_statistics(x[rows], inv_t)


def _inplace_gradient(x, *per_row):
    _row_gradient(x, x, *per_row)


def _statistics(logits, rows, inv_t, softcap):
    """Of the rows: maximum, ties, the others' sum and the entropy's sum per block, (R, blocks) fp32 each."""
    n, vocab = logits.shape
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


def _chunked_statistics(blocks, rows, inv_t, softcap):
    step = max(1, _CHUNK // blocks[0].numel())
    every = rows.numel() == blocks.shape[0]
    chunks = [slice(i, i + step) for i in range(0, max(rows.numel(), 1), step)]
    parts = [_block_statistics(blocks[c] if every else blocks[rows[c]], inv_t[c], softcap) for c in chunks]
    return [torch.cat(columns) for columns in zip(*parts, strict=True)]


def _merge(m, ties, others, t, inv_t):
    """Partial states (R, blocks) fp32, (R,) fp64 -> of a row: maximum, sum of exp(s) without one maximum, t; (R,) fp64."""
    top = m.amax(1, keepdim=True)
    d = ((m.double() - _finite(top)) * inv_t[:, None]).clamp(min=1e3 * _FLAT)
    alpha, mass = d.exp(), ties + others.double()
    rest = torch.where(m == top, others, alpha * mass).sum(1)
    rest += (torch.where(m == top, ties, 0.0).sum(1) - 1).clamp_(min=0)  # no tie where all is -inf
    return top[:, 0].double(), rest, (alpha * (t + d * mass)).sum(1)


def _gradient(logits, out, live, per_row, softcap):
    n, vocab = logits.shape
    same = out.data_ptr() == logits.data_ptr()
    if _compile_pays(n, vocab, softcap):
        if same:
            _compiled(_inplace_gradient)(out, live, *per_row)
        else:
            _compiled(_row_gradient)(logits, out, live, *per_row)
        return
    step = max(1, _CHUNK // vocab)
    for c in (slice(i, i + step) for i in range(0, n, step)):
        _row_gradient(logits[c], out[c], live[c], *(x[c] for x in per_row), softcap)


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
