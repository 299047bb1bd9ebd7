"""Exact KL(P || Q) of rows of logits x, y in one sweep over both, and its gradients.

With w = exp((x - m) / T), W = sum w, d = x - y, c = sum(w d) / (W T) the mean of d / T under P, and u = d / T - c,

    KL(P || Q) = log E_P[exp(-u)] = log1p(F / W),    F = sum w (exp(-u) - 1 + u),

for any two rows, however far apart. Every term of F is >= 0, so KL >= 0, and it is 0 when all d are equal; nothing
cancels when P and Q are close: the relative error is that of the terms. c is known at the end only, so partial sums
move from their own mean to the common one, h = c_new - c, as the variance does in Welford's algorithm:

    F(c_new) = exp(h) F(c) + W (exp(h) - 1 - h),    again a sum of terms >= 0.

exp(-u) overflows, so F is kept as f = scale F with scale = exp((m - n) / T - c), n = max y: what a column adds to f is
at most exp((y - n) / T), and that is what it adds where P is 0. E_P[exp(-u)] >= 1, so W scale <= number of columns.

Gradients, with p, q the probabilities, delta = log(p / q) = u + k where k = KL, and g the upstream gradient:

    dx = g p u / T    dy = g (q - p) / T = g p expm1(-delta) / T

`kl_bwd_kernel` forms those of Jensen-Shannon too, whose formulas are in `jensen_shannon.py`.

Bytes: the forward reads both rows once; a gradient reads both and writes what is asked for.
"""

import torch
import triton
import triton.language as tl

from fused_rl.kernels.jensen_shannon import AT_P_A, AT_Q_B, js_logs
from fused_rl.kernels.online import log1p, valid
from fused_rl.kernels.pair import (
    AT_C,
    AT_F,
    AT_K,
    AT_M,
    AT_N,
    AT_OFFSET,
    AT_S,
    AT_W,
    AT_W_ALL,
    BANNED,
    LOG2E,
    RUNTIME,
    THREADS,
    about_the_maxima,
    difference,
    excess,
    is_masked,
    launch_arguments,
    load,
    load_state,
    p_q_delta,
    row_offset,
    warps,
)
from fused_rl.kernels.states import KLState

FLOOR = tl.constexpr(-5e19)  # the maximum of nothing: exp2(BANNED - FLOOR) is 0
NONE = tl.constexpr(-1e10)  # log(p / q) where P has no mass: far from BANNED, beyond every logit
MOST = tl.constexpr(1e19)  # of a logit; above, d could not be told from that of a banned column
TOO_FAR = tl.constexpr(1e7)  # nats: the rounding of c has the size of what it is taken from
TINY = tl.constexpr(1e-30)  # P's mass on columns that Q allows, below which it counts as none

COLUMNS = 32  # of a thread per step, in 16-byte loads; each thread holds the state of its own columns


@triton.jit
def largest(v):  # over the columns of a thread
    return tl.max(tl.max(v, 2), 0)


@triton.jit
def total(v):
    return tl.sum(tl.sum(v, 2), 0)


@triton.jit
def _exponent(m, c, n, offset, inv_t):
    """(m - n - offset) / T - c, right to its own last bits, where its terms may be hundreds of nats."""
    d = m - n
    back = d - m
    low = (m - (d - back)) - (n + back)
    e = d - offset
    back = e - d
    low += (d - (e - back)) - (offset + back)
    return tl.fma(low, inv_t, tl.fma(e, inv_t, -c))


@triton.jit
def _scale(w, m, c, n, offset, inv_t):
    """exp(m / T - c - n / T), 0 where P has no mass: bounded, because w scale <= the number of columns."""
    return tl.where(w > 0, tl.exp2(_exponent(m, c, n, offset, inv_t) * LOG2E), 0.0)


@triton.jit
def _moved(own, w, scale, h, left, some):
    """What a part with weight w adds to f by moving by h: w scale (exp(h) - 1 - h), whose first term is `own`.

    `left`: its mean beyond its c, a first moment that counts where h is large.
    """
    near = w * scale * excess(-h)
    far = tl.fma(-own, left, own) - w * scale * (1 + (h - left))
    return tl.where(tl.abs(h) < tl.where(some, 1.0, -1.0), near, far)


@triton.jit
def _step(m, w, w_all, c, left, n, s, f, d_max, x, y, offset, inv_t, EXACT: tl.constexpr):
    """One tile of x and y, (K, threads, VEC), into the state of each thread, (threads,)."""
    k = inv_t * LOG2E
    m_new = tl.maximum(m, largest(x))
    n_new = tl.maximum(n, largest(y))
    a = tl.exp2((m - m_new) * k)
    p = tl.exp2((x - m_new[None, :, None]) * k)
    w_all = w_all * a + total(p)
    p = tl.where(y > BANNED, p, 0.0)
    d = difference(x, y, offset, EXACT)
    d_max = tl.maximum(d_max, largest(d))

    # the tile about its own mean
    w_t = total(p)
    some = w_t > TINY
    c_t = tl.where(some, total(p * d) / w_t * inv_t, 0.0)
    w_t = tl.where(some, w_t, 0.0)  # NaN in f tells that this was NaN
    scale = _scale(w_t, m_new, c_t, n_new, offset, inv_t)
    u = tl.fma(d, inv_t, -c_t[None, :, None])
    left_t = tl.where(some, total(p * u) / w_t, 0.0)  # what fp32 leaves out of c_t
    near = tl.abs(u) < tl.where(some, 1.0, -1.0)[None, :, None]
    q = tl.exp2((y - n_new[None, :, None]) * k)
    a_y = tl.exp2((n - n_new) * k)
    s = s * a_y + total(q)  # = f + scale w, and right to the last bits also where the exponent of scale is large
    f_t = total(tl.where(near, 0.0, q)) + scale * total(p * tl.where(near, excess(u), u - 1))

    # both about their common mean
    own = w * _scale(w, m, c, n_new, offset, inv_t)
    own_t = w_t * scale
    w = w * a
    w_new = w + w_t
    some = w_new > TINY
    c_new = tl.where(some, c + (c_t - c) * (w_t / w_new), 0.0)
    left_new = tl.where(some, (w * ((c - c_new) + left) + w_t * ((c_t - c_new) + left_t)) / w_new, 0.0)
    w_new = tl.where(some, w_new, 0.0)
    scale = _scale(w_new, m_new, c_new, n_new, offset, inv_t)
    f = f * a_y + f_t
    f += _moved(own, w, scale, c_new - c, left, some)
    f += _moved(own_t, w_t, scale, c_new - c_t, left_t, some)
    return m_new, w_new, w_all, c_new, left_new, n_new, s, f, d_max


@triton.jit
def _merge(m, w, w_all, c, left, n, s, f, d_max, offset, inv_t):
    """The states of all threads, (threads,), into that of the row."""
    k = inv_t * LOG2E
    m_row = tl.max(m, 0)
    n_row = tl.max(n, 0)
    a = tl.exp2((m - m_row) * k)
    own = w * _scale(w, m, c, n_row, offset, inv_t)
    w = w * a
    w_row = tl.sum(w, 0)
    some = w_row > TINY
    c_row = tl.where(some, tl.sum(w * c, 0) / w_row, 0.0)
    left_row = tl.where(some, tl.sum(w * ((c - c_row) + left), 0) / w_row, 0.0)
    w_row = tl.where(some, w_row, 0.0)
    scale = _scale(w_row, m_row, c_row, n_row, offset, inv_t)
    a_y = tl.exp2((n - n_row) * k)
    f = tl.sum(f * a_y + _moved(own, w, scale, c_row - c, left, some), 0)
    w_all = tl.sum(w_all * a, 0)
    s = tl.sum(s * a_y, 0)
    return m_row, w_row, w_all, c_row, left_row, n_row, s, f, tl.max(d_max, 0)


@triton.jit
def _offset(x_ptr, y_ptr, V):
    """x - y at one of the first columns that both allow: a constant between the rows then costs c and u no bits."""
    offset = -float("inf")
    start = 0
    while (offset == -float("inf")) & (start < V):
        x, y = load(x_ptr, y_ptr, start + tl.arange(0, 32), V, True)
        offset = tl.max(tl.where((x > BANNED) & (y > BANNED), x - y, -float("inf")), 0)
        start += 32
    return tl.where(offset == -float("inf"), 0.0, offset)


@triton.jit
def _divergence(m, w, c, left, n, f, offset, inv_t):
    """log1p(F / W) over the columns that both allow, without overflow of F; 0 where there is none.

    F is about c, which fp32 leaves h = `left` short of the mean: about the mean, F / W is e^h (F / W + 1 - h) - 1.
    """
    z = -_exponent(m, c, n, offset, inv_t)
    r = tl.where(w > 0, f / w, 1.0)
    far = z + left + tl.log(tl.where(r > 0, r, 1.0))
    a = r * tl.exp2(tl.minimum(z + left, 30.0) * LOG2E)
    series = -left * left * tl.fma(left, tl.fma(left, tl.fma(left, 1 / 30, 0.125), 1 / 3), 0.5)
    short = tl.where(tl.abs(left) < 0.1, series, tl.exp(left) * (1 - left) - 1)
    a += short
    near = log1p(tl.where(a < 0, 0.0, a))  # NaN is not < 0
    return tl.where(w > 0, tl.where(z > 28, far, near), 0.0)


@triton.jit(do_not_specialize=RUNTIME)
def kl_fwd_kernel(
    x_ptr,  # (B, T, V)
    y_ptr,  # (B, T, V)
    mask_ptr,  # (N,) bool or None, N = B T
    inv_t_ptr,  # (N,) fp32 or None
    kl_ptr,  # (N,) fp32
    state_ptr,  # (9, N) fp32, see KLState
    N,
    T,
    V,
    stride_xb: tl.int64,
    stride_xt: tl.int64,
    stride_yb: tl.int64,
    stride_yt: tl.int64,
    inv_t,
    ALIGNED: tl.constexpr,  # V and the strides are multiples of 16, and so are the pointers' addresses
    THREADS: tl.constexpr,
    K: tl.constexpr,
    VEC: tl.constexpr,
):
    row = tl.program_id(0)
    if is_masked(mask_ptr, row):
        tl.store(kl_ptr + row, 0.0)
        return
    if inv_t_ptr is not None:
        inv_t = valid(tl.load(inv_t_ptr + row))
    x_ptr += row_offset(row, T, stride_xb, stride_xt, ALIGNED)
    y_ptr += row_offset(row, T, stride_yb, stride_yt, ALIGNED)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty != tl.bfloat16
    cols = (
        tl.arange(0, K)[:, None, None] * (THREADS * VEC)
        + tl.arange(0, THREADS)[None, :, None] * VEC
        + tl.arange(0, VEC)[None, None, :]
    )
    offset = _offset(x_ptr, y_ptr, V)
    m = tl.full((THREADS,), FLOOR, tl.float32)
    n = tl.full((THREADS,), FLOOR, tl.float32)
    w = tl.zeros((THREADS,), tl.float32)
    w_all = tl.zeros((THREADS,), tl.float32)
    c = tl.zeros((THREADS,), tl.float32)
    left = tl.zeros((THREADS,), tl.float32)
    s = tl.zeros((THREADS,), tl.float32)
    f = tl.zeros((THREADS,), tl.float32)
    d_max = tl.zeros((THREADS,), tl.float32)
    full = V // (THREADS * K * VEC) * (THREADS * K * VEC)
    for start in tl.range(0, full, THREADS * K * VEC, num_stages=1):
        x, y = load(x_ptr, y_ptr, start + cols, V, False)
        m, w, w_all, c, left, n, s, f, d_max = _step(m, w, w_all, c, left, n, s, f, d_max, x, y, offset, inv_t, EXACT)
    if full < V:
        x, y = load(x_ptr, y_ptr, full + cols, V, True)
        m, w, w_all, c, left, n, s, f, d_max = _step(m, w, w_all, c, left, n, s, f, d_max, x, y, offset, inv_t, EXACT)
    m, w, w_all, c, left, n, s, f, d_max = _merge(m, w, w_all, c, left, n, s, f, d_max, offset, inv_t)
    kl = _divergence(m, w, c, left, n, f, offset, inv_t)
    distance = tl.abs(m - n) * inv_t
    kl = tl.where((w > 0) & (distance > TOO_FAR) & (kl < 0.01 * distance), float("nan"), kl)
    lone = d_max > -0.5 * BANNED  # Q bans a column that P does not, however little its mass
    nan = (w_all - w_all) + (s - s)  # 0, or NaN where a logit is NaN or inf: the rest of the state may have dropped it
    nan += tl.where(tl.maximum(m, n) > MOST, float("nan"), 0.0)
    tl.store(kl_ptr + row, tl.where(lone, float("inf"), kl) + nan)
    # c / inv_t goes into the offset, so that c + left is small and keeps its bits for the gradient
    mean = offset + c / inv_t
    moved = offset - mean
    c = tl.fma(moved, inv_t, c) + tl.fma(difference(offset, mean, moved, True), inv_t, left)
    state_ptr += row
    tl.store(state_ptr + AT_M * N, m)
    tl.store(state_ptr + AT_W * N, w)
    tl.store(state_ptr + AT_W_ALL * N, w_all)
    tl.store(state_ptr + AT_OFFSET * N, mean)
    tl.store(state_ptr + AT_C * N, c)
    tl.store(state_ptr + AT_N * N, n)
    tl.store(state_ptr + AT_F * N, f)
    tl.store(state_ptr + AT_S * N, s)
    # delta = u + k; without a mean, every column that is not P's alone belongs to Q alone
    k = tl.where(w > 0, kl + tl.where(lone, tl.log(w / w_all), 0.0), NONE)
    tl.store(state_ptr + AT_K * N, k)


@triton.jit
def _gradients(x, y, state, g, a_mean, b_mean, inv_t, JS: tl.constexpr, EXACT: tl.constexpr):
    m, w_all, offset, c, n, s, k = state
    p, q, u, delta, expm1 = p_q_delta(x, y, m, w_all, offset, c, n, s, k, inv_t, EXACT)
    if JS:
        a, b, r = js_logs(delta, expm1)
        return 0.5 * g * p * (a - a_mean), 0.5 * g * q * (b - b_mean)
    return g * p * u, g * tl.where(tl.abs(delta) < 1, p * expm1, q - p)


@triton.jit
def _store(dx_ptr, dy_ptr, dx, dy, cols, V, MASKED: tl.constexpr):
    mask = (cols < V) if MASKED else None
    if dx_ptr is not None:
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dy_ptr is not None:
        tl.store(dy_ptr + cols, dy.to(dy_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=RUNTIME)
def kl_bwd_kernel(
    g_ptr,  # (N,) fp32, gradient of the divergence
    x_ptr,  # (B, T, V)
    y_ptr,  # (B, T, V)
    mask_ptr,  # (N,) bool or None
    inv_t_ptr,  # (N,) fp32 or None
    divergence_ptr,  # (N,) fp32
    state_ptr,  # (9, N) fp32, see KLState
    sums_ptr,  # (3, N) fp32, see JensenShannonSums, or None: KL
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
    ALIGNED: tl.constexpr,  # V and the strides are multiples of 16, and so are the pointers' addresses
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    full = V // BLOCK * BLOCK
    out = row.to(tl.int64) * V
    out = tl.multiple_of(out, 16) if ALIGNED else out
    dx_ptr = None if dx_ptr is None else dx_ptr + out
    dy_ptr = None if dy_ptr is None else dy_ptr + out
    if is_masked(mask_ptr, row):
        zeros = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, full, BLOCK, num_stages=1):
            _store(dx_ptr, dy_ptr, zeros, zeros, start + cols, V, False)
        _store(dx_ptr, dy_ptr, zeros, zeros, full + cols, V, True)
        return
    if inv_t_ptr is not None:
        inv_t = valid(tl.load(inv_t_ptr + row))
    g = tl.load(g_ptr + row) * inv_t
    none = tl.load(state_ptr + AT_W_ALL * N + row) == 0  # P bans everything
    g = tl.where((tl.load(divergence_ptr + row) == float("inf")) | none, 0.0, g)
    a_mean = 0.0
    b_mean = 0.0
    if sums_ptr is not None:
        a_mean = tl.load(sums_ptr + AT_P_A * N + row)
        b_mean = tl.load(sums_ptr + AT_Q_B * N + row)
    state = load_state(state_ptr, row, N)
    JS: tl.constexpr = sums_ptr is not None
    if JS:
        state = about_the_maxima(state, inv_t)
    x_ptr += row_offset(row, T, stride_xb, stride_xt, ALIGNED)
    y_ptr += row_offset(row, T, stride_yb, stride_yt, ALIGNED)
    for start in tl.range(0, full, BLOCK, num_stages=1):
        x, y = load(x_ptr, y_ptr, start + cols, V, False)
        dx, dy = _gradients(x, y, state, g, a_mean, b_mean, inv_t, JS, x_ptr.dtype.element_ty != tl.bfloat16)
        _store(dx_ptr, dy_ptr, dx, dy, start + cols, V, False)
    if full < V:
        x, y = load(x_ptr, y_ptr, full + cols, V, True)
        dx, dy = _gradients(x, y, state, g, a_mean, b_mean, inv_t, JS, x_ptr.dtype.element_ty != tl.bfloat16)
        _store(dx_ptr, dy_ptr, dx, dy, full + cols, V, True)


def _layout(dtype, aligned):
    """As many columns in each thread as its registers hold beside what exact differences need.

    Neighbouring columns in a thread where 16 bytes can be loaded at once, else in neighbouring threads.
    """
    vec = 16 // dtype.itemsize if aligned else 1
    columns = COLUMNS if dtype == torch.bfloat16 else COLUMNS // 2
    return {"THREADS": THREADS, "K": columns // vec, "VEC": vec, "num_warps": warps()}


def kl_fwd(x, y, mask, inv_t):
    """(B, T, V) twice, (N,) bool | None, float | (N,) fp32 -> KL(P || Q) (N,) fp32, state (9, N) fp32."""
    n = x.shape[0] * x.shape[1]
    kl = torch.empty(n, device=x.device, dtype=torch.float32)
    state = torch.empty(len(KLState._fields), n, device=x.device, dtype=torch.float32)
    x, y, inv_t, numbers = launch_arguments(x, y, inv_t)
    if n:
        with torch.cuda.device_of(x):
            layout = _layout(x.dtype, aligned=numbers[-1])
            kl_fwd_kernel[(n,)](x, y, mask, inv_t, kl, state, *numbers, **layout)
    return kl, state


def kl_bwd(g, x, y, mask, inv_t, divergence, state, sums, wants_dx, wants_dy):
    """Gradients (B, T, V) of x and of y, None where not wanted; g (N,) fp32; `sums` of `js_fwd`, or None for KL."""
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype) if wants_dx else None
    dy = torch.empty(y.shape, device=y.device, dtype=y.dtype) if wants_dy else None
    x, y, inv_t, numbers = launch_arguments(x, y, inv_t)
    if numbers[0]:
        arguments = (g, x, y, mask, inv_t, divergence, state, sums, dx, dy, *numbers)
        with torch.cuda.device_of(x):
            kl_bwd_kernel[(numbers[0],)](*arguments, BLOCK=1024, num_warps=warps())
    return dx, dy
