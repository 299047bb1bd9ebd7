"""Exact KL(P || Q) of rows of logits x, y in one sweep over both, their Jensen-Shannon divergence, and the gradients.

With w = exp((x - m) / T), W = sum w, d = x - y, c = sum(w d) / (W T) the mean of d / T under P, and u = d / T - c,

    KL(P || Q) = log E_P[exp(-u)] = log1p(F / W),    F = sum w (exp(-u) - 1 + u),

for any two rows, however far apart. Every term of F is >= 0, so KL >= 0, and it is 0 when all d are equal; nothing
cancels when P and Q are close: the relative error is that of the terms. c is known at the end only, so partial sums
move from their own mean to the common one, h = c_new - c, as the variance does in Welford's algorithm:

    F(c_new) = exp(h) F(c) + W (exp(h) - 1 - h),    again a sum of terms >= 0.

exp(-u) overflows, so F is kept as f = scale F with scale = exp((m - n) / T - c), n = max y: what a column adds to f is
at most exp((y - n) / T), and that is what it adds where P is 0. E_P[exp(-u)] >= 1, so W scale <= number of columns.

Gradients, with p, q the probabilities, delta = log(p / q) = u + k where k = KL, a = log(p / mean(p, q)),
b = log(q / mean(p, q)) and g the upstream gradient:

    KL              dx = g p u / T                    dy = g (q - p) / T = g p expm1(-delta) / T
    Jensen-Shannon  dx = g p (a - sum(p a)) / (2 T)   dy = g q (b - sum(q b)) / (2 T)

Bytes: KL reads both rows once; a gradient reads both and writes what is asked for. The terms of Jensen-Shannon need
both normalisers first, so it sweeps twice: two more reads forward.
"""

import torch
import triton
import triton.language as tl

from fused_rl.kernels.online import log1p

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
BANNED = tl.constexpr(-1e20)  # stands for -inf, and for whatever is below: differences stay finite
FLOOR = tl.constexpr(-5e19)  # the maximum of nothing: exp2(BANNED - FLOOR) is 0
NONE = tl.constexpr(-1e10)  # log(p / q) where P has no mass: far from BANNED, beyond every logit
TINY = tl.constexpr(1e-30)  # P's mass on columns that Q allows, below which it counts as none
ALL_NAN = tl.constexpr(tl.PropagateNan.ALL)

THREADS = 128  # each holds the state of its own columns; 16-byte loads, 32 columns a step
COLUMNS = 32

# What the forward leaves per row, one (N,) fp32 row each of `state`.
STATE = ("m", "w", "w_all", "offset", "c", "n", "f", "s", "k")


# A new length, batch, vocabulary or temperature must not compile anything.
RUNTIME = ("N", "T", "V", "stride_xb", "stride_xt", "stride_yb", "stride_yt", "inv_t")


@triton.jit
def _max(v):  # over the columns of a thread
    return tl.max(tl.max(v, 2), 0)


@triton.jit
def _sum(v):
    return tl.sum(tl.sum(v, 2), 0)


@triton.jit
def _excess(u):  # exp(-u) - 1 + u for |u| <= 1 by a polynomial (Chebyshev fit, 1.2e-7 relative): exp would cancel
    p = tl.fma(u, 2.5358644e-05, -2.0329202e-04)
    p = tl.fma(u, p, 1.3885394e-03)
    p = tl.fma(u, p, -8.3308844e-03)
    p = tl.fma(u, p, 4.1666735e-02)
    p = tl.fma(u, p, -1.6666697e-01)
    return u * u * tl.fma(u, p, 0.5)


@triton.jit
def _scale(w, m, c, n, offset, k):
    """exp(m / T - c - n / T), 0 where P has no mass: bounded, because w scale <= the number of columns."""
    return tl.where(w > 0, tl.exp2(_difference(m, n, offset, True) * k - c * LOG2E), 0.0)


@triton.jit
def _moved(own, w, scale, h, some):
    """What a part with weight w adds to f by moving by h: w scale (exp(h) - 1 - h), whose first term is `own`."""
    near = w * scale * _excess(-h)
    return tl.where(tl.abs(h) < tl.where(some, 1.0, -1.0), near, own - w * scale * (1 + h))


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
def _step(m, w, w_all, c, left, n, s, f, d_max, x, y, offset, inv_t, EXACT: tl.constexpr):
    """One tile of x and y, (K, threads, VEC), into the state of each thread, (threads,)."""
    k = inv_t * LOG2E
    m_new = tl.maximum(m, _max(x))
    n_new = tl.maximum(n, _max(y))
    a = tl.exp2((m - m_new) * k)
    p = tl.exp2((x - m_new[None, :, None]) * k)
    w_all = w_all * a + _sum(p)
    p = tl.where(y > BANNED, p, 0.0)
    d = _difference(x, y, offset, EXACT)
    d_max = tl.maximum(d_max, _max(d))
    # the tile about its own mean
    w_t = _sum(p)
    some = w_t > TINY
    c_t = tl.where(some, _sum(p * d) / w_t * inv_t, 0.0)
    w_t = tl.where(some, w_t, 0.0)  # NaN in f tells that this was NaN
    scale = _scale(w_t, m_new, c_t, n_new, offset, k)
    u = tl.fma(d, inv_t, -c_t[None, :, None])
    left_t = tl.where(some, _sum(p * u) / w_t, 0.0)  # what fp32 leaves out of c_t
    near = tl.abs(u) < tl.where(some, 1.0, -1.0)[None, :, None]
    q = tl.exp2((y - n_new[None, :, None]) * k)
    a_y = tl.exp2((n - n_new) * k)
    s = s * a_y + _sum(q)  # = f + scale w, and right to the last bits also where the exponent of scale is large
    f_t = _sum(tl.where(near, 0.0, q)) + scale * _sum(p * tl.where(near, _excess(u), u - 1))
    # both about their common mean
    own = w * _scale(w, m, c, n_new, offset, k)
    own_t = w_t * scale
    w = w * a
    w_new = w + w_t
    some = w_new > TINY
    c_new = tl.where(some, c + (c_t - c) * (w_t / w_new), 0.0)
    left_new = tl.where(some, (w * ((c - c_new) + left) + w_t * ((c_t - c_new) + left_t)) / w_new, 0.0)
    w_new = tl.where(some, w_new, 0.0)
    scale = _scale(w_new, m_new, c_new, n_new, offset, k)
    f = f * a_y + f_t
    f += _moved(own, w, scale, c_new - c, some) + _moved(own_t, w_t, scale, c_new - c_t, some)
    return m_new, w_new, w_all, c_new, left_new, n_new, s, f, d_max


@triton.jit
def _merge(m, w, w_all, c, left, n, s, f, d_max, offset, inv_t):
    """The states of all threads, (threads,), into that of the row."""
    k = inv_t * LOG2E
    m_row = tl.max(m, 0)
    n_row = tl.max(n, 0)
    a = tl.exp2((m - m_row) * k)
    own = w * _scale(w, m, c, n_row, offset, k)
    w = w * a
    w_row = tl.sum(w, 0)
    some = w_row > TINY
    c_row = tl.where(some, tl.sum(w * c, 0) / w_row, 0.0)
    left = tl.where(some, tl.sum(w * ((c - c_row) + left), 0) / w_row, 0.0)
    w_row = tl.where(some, w_row, 0.0)
    scale = _scale(w_row, m_row, c_row, n_row, offset, k)
    a_y = tl.exp2((n - n_row) * k)
    f = tl.sum(f * a_y + _moved(own, w, scale, c_row - c, some), 0)
    return m_row, w_row, tl.sum(w_all * a, 0), c_row, left, n_row, tl.sum(s * a_y, 0), f, tl.max(d_max, 0)


@triton.jit
def _offset(x_ptr, y_ptr, V):
    """x - y at one of the first columns that both allow: a constant between the rows then costs c and u no bits."""
    offset = -float("inf")
    start = 0
    while (offset == -float("inf")) & (start < V):
        x, y = _load(x_ptr, y_ptr, start + tl.arange(0, 32), V, True)
        offset = tl.max(tl.where((x > BANNED) & (y > BANNED), x - y, -float("inf")), 0)
        start += 32
    return tl.where(offset == -float("inf"), 0.0, offset)


@triton.jit
def _divergence(m, w, c, n, f, offset, inv_t):
    """log1p(F / W) over the columns that both allow, without overflow of F; 0 where there is none."""
    z = c * LOG2E - _difference(m, n, offset, True) * (inv_t * LOG2E)
    r = tl.where(w > 0, f / w, 1.0)
    far = z * LN2 + tl.log(tl.where(r > 0, r, 1.0))
    return tl.where(w > 0, tl.where(z > 40, far, log1p(r * tl.exp2(tl.minimum(z, 40.0)))), 0.0)


@triton.jit
def _is_masked(mask_ptr, row):
    return False if mask_ptr is None else tl.load(mask_ptr + row) == 0


@triton.jit
def _row(row, T, stride_b, stride_t, ALIGNED: tl.constexpr):
    row = row.to(tl.int64)
    offset = (row // T) * stride_b + (row % T) * stride_t
    return tl.multiple_of(offset, 16) if ALIGNED else offset


@triton.jit(do_not_specialize=RUNTIME)
def kl_fwd_kernel(
    x_ptr,  # (B, T, V)
    y_ptr,  # (B, T, V)
    mask_ptr,  # (N,) bool or None, N = B T
    inv_t_ptr,  # (N,) fp32 or None
    kl_ptr,  # (N,) fp32
    state_ptr,  # (9, N) fp32, see STATE
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
    if _is_masked(mask_ptr, row):
        tl.store(kl_ptr + row, 0.0)
        return
    if inv_t_ptr is not None:
        inv_t = tl.load(inv_t_ptr + row)
    x_ptr += _row(row, T, stride_xb, stride_xt, ALIGNED)
    y_ptr += _row(row, T, stride_yb, stride_yt, ALIGNED)
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
        x, y = _load(x_ptr, y_ptr, start + cols, V, False)
        m, w, w_all, c, left, n, s, f, d_max = _step(m, w, w_all, c, left, n, s, f, d_max, x, y, offset, inv_t, EXACT)
    if full < V:
        x, y = _load(x_ptr, y_ptr, full + cols, V, True)
        m, w, w_all, c, left, n, s, f, d_max = _step(m, w, w_all, c, left, n, s, f, d_max, x, y, offset, inv_t, EXACT)
    m, w, w_all, c, left, n, s, f, d_max = _merge(m, w, w_all, c, left, n, s, f, d_max, offset, inv_t)
    kl = _divergence(m, w, c, n, f, offset, inv_t)
    lone = d_max > -0.5 * BANNED  # Q bans a column that P does not, however little its mass
    nan = (w_all - w_all) + (s - s)  # 0, or NaN where a logit is NaN or inf: the rest of the state may have dropped it
    tl.store(kl_ptr + row, tl.where(lone, float("inf"), kl) + nan)
    # c / inv_t goes into the offset, so that c + left is small and keeps its bits for the gradient
    mean = offset + c / inv_t
    c = tl.fma(offset - mean, inv_t, c) + left
    state_ptr += row
    tl.store(state_ptr, m)
    tl.store(state_ptr + N, w)
    tl.store(state_ptr + 2 * N, w_all)
    tl.store(state_ptr + 3 * N, mean)
    tl.store(state_ptr + 4 * N, c)
    tl.store(state_ptr + 5 * N, n)
    tl.store(state_ptr + 6 * N, f)
    tl.store(state_ptr + 7 * N, s)
    # delta = u + k; without a mean, every column that is not P's alone belongs to Q alone
    k = tl.where(w > 0, kl + tl.where(lone, tl.log(w / w_all), 0.0), NONE)
    tl.store(state_ptr + 8 * N, k)


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
def _far(state, inv_t):
    """The state about the rows' maxima where KL is large: u and k would cancel where the two distributions meet."""
    m, w_all, offset, c, n, s, k = state
    far = k > 8
    apart = m - n
    c = tl.where(far, _difference(m, n, apart, True) * inv_t, c)
    k = tl.where(far, tl.log(s / w_all), k)
    return m, w_all, tl.where(far, apart, offset), c, n, s, k


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


@triton.jit(do_not_specialize=RUNTIME)
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
    ALIGNED: tl.constexpr,  # V and the strides are multiples of 16, and so are the pointers' addresses
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
    state = _far(_state(state_ptr, row, N), inv_t)
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


@triton.jit(do_not_specialize=RUNTIME)
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
    JS: tl.constexpr = sums_ptr is not None
    if JS:
        state = _far(state, inv_t)
    x_ptr += _row(row, T, stride_xb, stride_xt, ALIGNED)
    y_ptr += _row(row, T, stride_yb, stride_yt, ALIGNED)
    for start in tl.range(0, full, BLOCK, num_stages=1):
        x, y = _load(x_ptr, y_ptr, start + cols, V, False)
        dx, dy = _gradients(x, y, state, g, a_mean, b_mean, inv_t, JS, x_ptr.dtype.element_ty != tl.bfloat16)
        _store(dx_ptr, dy_ptr, dx, dy, start + cols, V, False)
    if full < V:
        x, y = _load(x_ptr, y_ptr, full + cols, V, True)
        dx, dy = _gradients(x, y, state, g, a_mean, b_mean, inv_t, JS, x_ptr.dtype.element_ty != tl.bfloat16)
        _store(dx_ptr, dy_ptr, dx, dy, full + cols, V, True)


def _layout(dtype, aligned):
    """As many columns in each thread as its registers hold beside what exact differences need.

    Neighbouring columns in a thread where 16 bytes can be loaded at once, else in neighbouring threads.
    """
    vec = 16 // dtype.itemsize if aligned else 1
    columns = COLUMNS if dtype == torch.bfloat16 else COLUMNS // 2
    return {"THREADS": THREADS, "K": columns // vec, "VEC": vec, "num_warps": _warps()}


def _warps():
    return THREADS // (64 if torch.version.hip else 32)


def _common(x, y, inv_t):
    """x, y; inv_t_ptr or None; sizes, strides, inv_t and ALIGNED as every kernel here takes them."""
    b, t, vocab = x.shape
    aligned = vocab % 16 == 0
    if aligned:
        x, y = _from_16_bytes(x), _from_16_bytes(y)
    per_row = isinstance(inv_t, torch.Tensor)
    strides = [*x.stride()[:2], *y.stride()[:2]]
    return x, y, (inv_t if per_row else None), (b * t, t, vocab, *strides, 1.0 if per_row else inv_t, aligned)


def _from_16_bytes(x):
    """x, or a copy whose rows all begin at 16 bytes: wide loads, and columns in one order, hence one set of bits."""
    begins = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:2])
    return x if begins else x.clone(memory_format=torch.contiguous_format)


def kl_fwd(x, y, mask, inv_t):
    """(B, T, V) twice, (N,) bool | None, float | (N,) fp32 -> KL(P || Q) (N,) fp32, state (9, N) fp32."""
    n = x.shape[0] * x.shape[1]
    kl = torch.empty(n, device=x.device, dtype=torch.float32)
    state = torch.empty(len(STATE), n, device=x.device, dtype=torch.float32)
    x, y, inv_t, numbers = _common(x, y, inv_t)
    if n:
        with torch.cuda.device_of(x):
            kl_fwd_kernel[(n,)](x, y, mask, inv_t, kl, state, *numbers, **_layout(x.dtype, numbers[-1]))
    return kl, state


def js_fwd(x, y, mask, inv_t, state):
    """Sums over the vocabulary, (3, N) fp32: the divergence, sum p a, sum q b; with the state of `kl_fwd`."""
    n = x.shape[0] * x.shape[1]
    sums = torch.empty(3, n, device=x.device, dtype=torch.float32)
    x, y, inv_t, numbers = _common(x, y, inv_t)
    if n:
        with torch.cuda.device_of(x):
            js_kernel[(n,)](x, y, mask, inv_t, state, sums, *numbers, BLOCK=1024, num_warps=_warps())
    return sums


def kl_bwd(g, x, y, mask, inv_t, divergence, state, sums, wants_dx, wants_dy):
    """Gradients (B, T, V) of x and of y, None where not wanted; g (N,) fp32; `sums` of `js_fwd`, or None for KL."""
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype) if wants_dx else None
    dy = torch.empty(y.shape, device=y.device, dtype=y.dtype) if wants_dy else None
    x, y, inv_t, numbers = _common(x, y, inv_t)
    if numbers[0]:
        arguments = (g, x, y, mask, inv_t, divergence, state, sums, dx, dy, *numbers)
        with torch.cuda.device_of(x):
            kl_bwd_kernel[(numbers[0],)](*arguments, BLOCK=1024, num_warps=_warps())
    return dx, dy
