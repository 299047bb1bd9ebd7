"""Gradients of KL(P || Q) and of the Jensen-Shannon divergence, and the latter's value, from the forward of `kl.py`.

With p, q the probabilities, delta = log(p / q) = u + k where k = KL and u is about its mean, a = log(p / mean(p, q)),
b = log(q / mean(p, q)) and g the upstream gradient:

    KL              dx = g p u / T                    dy = g (q - p) / T = g p expm1(-delta) / T
    Jensen-Shannon  dx = g p (a - sum(p a)) / (2 T)   dy = g q (b - sum(q b)) / (2 T)

Bytes: a gradient reads both rows and writes what is asked for. The terms of Jensen-Shannon need both normalisers first:
two more reads forward.
"""

import torch
import triton
import triton.language as tl

from fused_rl.kernels.logprob import aligned
from fused_rl.kernels.online import log1p

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
BANNED = tl.constexpr(-1e20)  # stands for -inf, and for whatever is below: differences stay finite
FLOOR = tl.constexpr(-5e19)  # the maximum of nothing: exp2(BANNED - FLOOR) is 0
NONE = tl.constexpr(-1e10)  # log(p / q) where P has no mass: far from BANNED, beyond every logit
TINY = tl.constexpr(1e-30)  # P's mass on columns that Q allows, below which it counts as none
ALL_NAN = tl.constexpr(tl.PropagateNan.ALL)

RUNTIME = ("x_shift", "y_shift", "N", "T", "V", "stride_xb", "stride_xt", "stride_yb", "stride_yt", "inv_t")


@triton.jit
def _excess(u):  # exp(-u) - 1 + u for |u| <= 1 by a polynomial (Chebyshev fit, 1.2e-7 relative): exp would cancel
    p = tl.fma(u, 2.5358644e-05, -2.0329202e-04)
    p = tl.fma(u, p, 1.3885394e-03)
    p = tl.fma(u, p, -8.3308844e-03)
    p = tl.fma(u, p, 4.1666735e-02)
    p = tl.fma(u, p, -1.6666697e-01)
    return u * u * tl.fma(u, p, 0.5)


@triton.jit
def _load(x_ptr, y_ptr, cols, V, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(x_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(x_ptr + cols).to(tl.float32)
        y = tl.load(y_ptr + cols).to(tl.float32)
    return tl.maximum(x, BANNED, propagate_nan=ALL_NAN), tl.maximum(y, BANNED, propagate_nan=ALL_NAN)


@triton.jit
def _difference(x, y, offset, EXACT: tl.constexpr):
    """x - y - offset, with what x - y rounds off (Knuth's TwoSum) but for bf16, where that is next to nothing."""
    d = x - y
    if not EXACT:
        return d - offset
    back = d - x
    return (d - offset) + ((x - (d - back)) - (y + back))


@triton.jit
def _is_masked(mask_ptr, row):
    return False if mask_ptr is None else tl.load(mask_ptr + row) == 0


@triton.jit
def _row(row, T, stride_b, stride_t, ALIGNED: tl.constexpr):
    row = row.to(tl.int64)
    offset = (row // T) * stride_b + (row % T) * stride_t
    return tl.multiple_of(offset, 16) if ALIGNED else offset


@triton.jit
def _p_q_delta(x, y, m, w_all, offset, c, n, s, k, inv_t, EXACT: tl.constexpr):
    """p, q, u, delta = u + k = log(p / q) of a tile, and expm1(-delta) where |delta| < 1."""
    p = tl.exp2((x - m) * (inv_t * LOG2E)) * tl.where(w_all == 0, 0.0, 1 / w_all)
    q = tl.exp2((y - n) * (inv_t * LOG2E)) * tl.where(s == 0, 0.0, 1 / s)
    u = tl.fma(_difference(x, y, offset, EXACT), inv_t, -c)
    delta = u + k
    return p, q, u, delta, _excess(delta) - delta


@triton.jit
def _js_logs(delta, expm1):
    """a = log(p / mean(p, q)), b = log(q / mean(p, q)) and |r| = |p - q| / (p + q)."""
    ratio = tl.exp2(-tl.abs(delta) * LOG2E)  # of the smaller to the larger
    r = tl.where(tl.abs(delta) < 1, tl.abs(expm1) / (2 + expm1), (1 - ratio) / (1 + ratio))
    larger = log1p(r)
    smaller = larger - tl.abs(delta)
    return tl.where(delta > 0, larger, smaller), tl.where(delta > 0, smaller, larger), r


@triton.jit
def _state(state_ptr, row, N):
    state_ptr += row
    m = tl.load(state_ptr)
    w_all = tl.load(state_ptr + 2 * N)
    offset = tl.load(state_ptr + 3 * N)
    c = tl.load(state_ptr + 4 * N)
    n = tl.load(state_ptr + 5 * N)
    s = tl.load(state_ptr + 7 * N)
    k = tl.load(state_ptr + 8 * N)
    return m, w_all, offset, c, n, s, k


@triton.jit
def _js_step(js, p_sum, q_sum, x, y, state, inv_t, EXACT: tl.constexpr):
    m, w_all, offset, c, n, s, k = state
    p, q, u, delta, expm1 = _p_q_delta(x, y, m, w_all, offset, c, n, s, k, inv_t, EXACT)
    a, b, r = _js_logs(delta, expm1)
    # mean(p, q) [(1 + r) log(1 + r) + (1 - r) log(1 - r)] / 2 in powers of r, |r| < 0.47: 4e-8 relative
    z = r * r
    j = tl.fma(z, tl.fma(z, tl.fma(z, tl.fma(z, 1 / 240, 1 / 182), 1 / 132), 1 / 90), 1 / 56)
    j = z * tl.fma(z, tl.fma(z, tl.fma(z, j, 1 / 30), 1 / 12), 0.5) * p * (1 + 0.5 * expm1)
    js += tl.where(tl.abs(delta) < 1, j, 0.5 * (p * a + q * b))
    return js, p_sum + p * a, q_sum + q * b


@triton.jit(do_not_specialize=RUNTIME[2:])
def js_kernel(
    x_ptr,  # (B, T, V)
    y_ptr,  # (B, T, V)
    mask_ptr,  # (N,) bool or None
    inv_t_ptr,  # (N,) fp32 or None
    state_ptr,  # (9, N) fp32, see STATE
    sums_ptr,  # (3, N) fp32: the divergence, sum p a, sum q b
    N,
    T,
    V,
    stride_xb: tl.int64,
    stride_xt: tl.int64,
    stride_yb: tl.int64,
    stride_yt: tl.int64,
    inv_t,
    ALIGNED: tl.constexpr,  # V and the strides are multiples of 16
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    sums_ptr += row
    if _is_masked(mask_ptr, row):
        tl.store(sums_ptr, 0.0)
        return
    if inv_t_ptr is not None:
        inv_t = tl.load(inv_t_ptr + row)
    x_ptr += _row(row, T, stride_xb, stride_xt, ALIGNED)
    y_ptr += _row(row, T, stride_yb, stride_yt, ALIGNED)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty != tl.bfloat16
    cols = tl.arange(0, BLOCK)
    state = _state(state_ptr, row, N)
    js = tl.zeros((BLOCK,), tl.float32)
    p_sum = tl.zeros((BLOCK,), tl.float32)
    q_sum = tl.zeros((BLOCK,), tl.float32)
    full = V // BLOCK * BLOCK
    for start in tl.range(0, full, BLOCK, num_stages=1):
        x, y = _load(x_ptr, y_ptr, start + cols, V, False)
        js, p_sum, q_sum = _js_step(js, p_sum, q_sum, x, y, state, inv_t, EXACT)
    if full < V:
        x, y = _load(x_ptr, y_ptr, full + cols, V, True)
        js, p_sum, q_sum = _js_step(js, p_sum, q_sum, x, y, state, inv_t, EXACT)
    tl.store(sums_ptr, tl.sum(js, 0))
    tl.store(sums_ptr + N, tl.sum(p_sum, 0))
    tl.store(sums_ptr + 2 * N, tl.sum(q_sum, 0))


@triton.jit
def _gradients(x, y, state, g, a_mean, b_mean, inv_t, JS: tl.constexpr, EXACT: tl.constexpr):
    m, w_all, offset, c, n, s, k = state
    p, q, u, delta, expm1 = _p_q_delta(x, y, m, w_all, offset, c, n, s, k, inv_t, EXACT)
    if JS:
        a, b, r = _js_logs(delta, expm1)
        return 0.5 * g * p * (a - a_mean), 0.5 * g * q * (b - b_mean)
    return g * p * u, g * tl.where(tl.abs(delta) < 1, p * expm1, q - p)


@triton.jit
def _store(dx_ptr, dy_ptr, dx, dy, cols, V, MASKED: tl.constexpr):
    mask = (cols < V) if MASKED else None
    if dx_ptr is not None:
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dy_ptr is not None:
        tl.store(dy_ptr + cols, dy.to(dy_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=RUNTIME[2:])
def kl_bwd_kernel(
    g_ptr,  # (N,) fp32, gradient of the divergence
    x_ptr,  # (B, T, V)
    y_ptr,  # (B, T, V)
    mask_ptr,  # (N,) bool or None
    inv_t_ptr,  # (N,) fp32 or None
    divergence_ptr,  # (N,) fp32
    state_ptr,  # (9, N) fp32, see STATE
    sums_ptr,  # (3, N) fp32 of js_kernel, or None: KL
    dx_ptr,  # (N, V) or None
    dy_ptr,  # (N, V) or None
    N,
    T,
    V,
    stride_xb: tl.int64,
    stride_xt: tl.int64,
    stride_yb: tl.int64,
    stride_yt: tl.int64,
    inv_t,
    ALIGNED: tl.constexpr,  # V and the strides are multiples of 16
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    full = V // BLOCK * BLOCK
    out = row.to(tl.int64) * V
    out = tl.multiple_of(out, 16) if ALIGNED else out
    dx_ptr = None if dx_ptr is None else dx_ptr + out
    dy_ptr = None if dy_ptr is None else dy_ptr + out
    if _is_masked(mask_ptr, row):
        zeros = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, full, BLOCK, num_stages=1):
            _store(dx_ptr, dy_ptr, zeros, zeros, start + cols, V, False)
        _store(dx_ptr, dy_ptr, zeros, zeros, full + cols, V, True)
        return
    if inv_t_ptr is not None:
        inv_t = tl.load(inv_t_ptr + row)
    g = tl.load(g_ptr + row) * inv_t
    none = tl.load(state_ptr + 2 * N + row) == 0  # P bans everything
    g = tl.where((tl.load(divergence_ptr + row) == float("inf")) | none, 0.0, g)
    a_mean = 0.0
    b_mean = 0.0
    if sums_ptr is not None:
        a_mean = tl.load(sums_ptr + N + row)
        b_mean = tl.load(sums_ptr + 2 * N + row)
    state = _state(state_ptr, row, N)
    x_ptr += _row(row, T, stride_xb, stride_xt, ALIGNED)
    y_ptr += _row(row, T, stride_yb, stride_yt, ALIGNED)
    JS: tl.constexpr = sums_ptr is not None
    for start in tl.range(0, full, BLOCK, num_stages=1):
        x, y = _load(x_ptr, y_ptr, start + cols, V, False)
        dx, dy = _gradients(x, y, state, g, a_mean, b_mean, inv_t, JS, x_ptr.dtype.element_ty != tl.bfloat16)
        _store(dx_ptr, dy_ptr, dx, dy, start + cols, V, False)
    if full < V:
        x, y = _load(x_ptr, y_ptr, full + cols, V, True)
        dx, dy = _gradients(x, y, state, g, a_mean, b_mean, inv_t, JS, x_ptr.dtype.element_ty != tl.bfloat16)
        _store(dx_ptr, dy_ptr, dx, dy, full + cols, V, True)


def _common(x, y, inv_t):
    """inv_t_ptr or None; sizes, strides, inv_t and ALIGNED as every kernel here takes them."""
    b, t, vocab = x.shape
    per_row = isinstance(inv_t, torch.Tensor)
    strides = [*x.stride()[:2], *y.stride()[:2]]
    aligned = all(number % 16 == 0 for number in (vocab, *strides))
    return (inv_t if per_row else None), (b * t, t, vocab, *strides, 1.0 if per_row else inv_t, aligned)


def arguments(x, y, inv_t):
    """x and y from 16-byte boundaries on, inv_t_ptr or None, the numbers and the options that every launch takes."""
    (b, t, vocab), per_row = x.shape, isinstance(inv_t, torch.Tensor)
    vec, strides = 16 // x.element_size(), (*x.stride()[:2], *y.stride()[:2])
    (x, x_shift), (y, y_shift) = aligned(x), aligned(y)
    numbers = (x_shift, y_shift, b * t, t, vocab, *strides, 1.0 if per_row else inv_t)
    launch = {"THREADS": 64 if torch.version.hip else 32, "VEC": vec, "num_warps": 1, "num_stages": 1}
    return x, y, (inv_t if per_row else None), numbers, launch


def _common(x, y, inv_t):
    """inv_t_ptr or None; sizes, strides, inv_t and ALIGNED as every kernel here takes them."""
    b, t, vocab = x.shape
    per_row = isinstance(inv_t, torch.Tensor)
    strides = [*x.stride()[:2], *y.stride()[:2]]
    aligned = all(number % 16 == 0 for number in (vocab, *strides))
    return (inv_t if per_row else None), (b * t, t, vocab, *strides, 1.0 if per_row else inv_t, aligned)


def js_fwd(x, y, mask, inv_t, state):
    """Sums over the vocabulary, (3, N) fp32: the divergence, sum p a, sum q b; with the state of `kl_fwd`."""
    n = x.shape[0] * x.shape[1]
    sums = torch.empty(3, n, device=x.device, dtype=torch.float32)
    inv_t, numbers = _common(x, y, inv_t)
    if n:
        with torch.cuda.device_of(x):
            js_kernel[(n,)](x, y, mask, inv_t, state, sums, *numbers, BLOCK=1024, num_warps=4)
    return sums


def kl_bwd(g, x, y, mask, inv_t, divergence, state, sums, wants_dx, wants_dy):
    """Gradients (B, T, V) of x and of y, None where not wanted; g (N,) fp32; `sums` of `js_fwd`, or None for KL."""
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype) if wants_dx else None
    dy = torch.empty(y.shape, device=y.device, dtype=y.dtype) if wants_dy else None
    inv_t, numbers = _common(x, y, inv_t)
    if numbers[0]:
        arguments = (g, x, y, mask, inv_t, divergence, state, sums, dx, dy, *numbers)
        with torch.cuda.device_of(x):
            kl_bwd_kernel[(numbers[0],)](*arguments, BLOCK=1024, num_warps=4)
    return dx, dy
