"""Exact KL(P || Q) of rows of logits x, y in one sweep over both.

With d = x - y, any reference c and u = (d - c) / T, S = E_P[u] and F = E_P[exp(-u) - 1 + u],

    KL(P || Q) = log E_P[exp(-u)] + S = log1p(f),    f = exp(S) (F - (exp(-S) - 1 + S)),

for any two rows, however far apart. Every term of F is >= 0, and so is f, F about the mean of u. The closer c is to the
mean, the less the difference loses: c is d where P is largest, and where F is more than 8 times what is left of it, the
columns are read once more about the mean.

Fast kernel: a program of one warp per row and segment. A lane holds w = sum p, s = sum p v, v = d - c, and F in two
parts, sum p (exp(-u) - 1 + u) where |u| < 1 and what is beyond. All lanes share c and the maximum m, which move when a
tile of K windows has a larger x. p = 2^(x k - ref), k = log2(e) / T, and p exp(-u) = G 2^(y k - ref_y) is taken from y,
which does not underflow where p does; ref and ref_y are rounded, and G makes up for it. Where |u| < 1,

    exp(-u) - 1 + u = u^2 exp(-u) 2^(log2(e) u + L(u)),    L a polynomial,

and u = 1 makes the right side exp(-1) to fp32: further off, the same instructions with 1 for u give exp(-u), to which
u - 1 is added. Columns meet in lanes as in `logprob.py`, and lanes are summed free of order, so that a row has the same
bits in any batch, at any stride and alignment.

Banned columns (-inf), NaN and overflow make w NaN. The careful kernel does such segments again; it holds back nothing:
f is kept as scale F with scale = exp((m - n) / T - c), n = max y. The merge kernel joins a row's segments, each about
its own mean, about the common one, h further:

    F(c + h) = exp(h) F(c) + W (exp(h) - 1 - h),    a sum of terms >= 0.

Bytes: both rows once; segments with banned columns twice.
"""

import torch
import triton
import triton.language as tl

from fused_rl.kernels.js import (
    ALL_NAN,
    BANNED,
    FLOOR,
    LOG2E,
    NONE,
    RUNTIME,
    _difference,
    _excess,
    _is_masked,
    _load,
    arguments,
    js_fwd,
    kl_bwd,
)
from fused_rl.kernels.logprob import capability, load_lanes
from fused_rl.kernels.online import exact_sum, log1p

__all__ = ["STATE", "js_fwd", "kl_bwd", "kl_fwd"]

LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(1e3)  # of F in a lane: beyond, n is too far below the maximum of y for q's last digits
TINY = tl.constexpr(1e-30)  # P's mass on columns that Q allows, below which it counts as none

A0, A1, A2, A3, A4 = (
    tl.constexpr(a) for a in (0.961796666, 0.0400748977, -1.78088060e-03, -1.11450983e-04, 2.07738236e-05)
)

SEGMENT = 16  # tiles of a program

# What the forward leaves per row, one (N,) fp32 row each of `state`.
STATE = ("m", "w", "w_all", "offset", "c", "n", "f", "s", "k")


@triton.jit
def _references(m, c, inv_t):
    """n = fl(m - c), and of the references ref = fl(m k), ref_y = fl(n k) what rounding takes, and 1 / G."""
    k = inv_t * LOG2E
    n = m - c
    ref, ref_y = tl.fma(m, k, 0.0), tl.fma(n, k, 0.0)
    lost, lost_y = tl.fma(m, k, -ref), tl.fma(n, k, -ref_y)
    gap = lost - lost_y - _difference(m, c, n, True) * k
    g = tl.where(tl.abs(gap) < 64, tl.exp2(-gap), float("nan"))
    return n, ref, ref_y, lost, lost_y, g


@triton.jit
def _exp_excess(h):
    """exp(h) - 1 - h"""
    return tl.where(tl.abs(h) < 1, _excess(-h), tl.exp2(h * LOG2E) - 1 - h)


@triton.jit
def _move(lanes, about, m_new, c_new, inv_t):
    """The lanes about another maximum and another c."""
    w, s, f, r, noise = lanes
    m, c, ref, ref_y, b = about
    _, ref_new, ref_y_new, _, _, g = _references(m_new, c_new, inv_t)
    fresh = m == FLOOR
    a, a_y = tl.exp2(ref - ref_new), tl.where(fresh, 0.0, tl.exp2(ref_y - ref_y_new))
    by = tl.where(fresh, 0.0, c_new - c)
    h = by * inv_t
    e = _exp_excess(h)
    b_new = g * 2 / inv_t
    by_w, by_s = a * b_new / inv_t * e, a * b_new * (e + h)
    f = tl.fma(w, by_w, tl.fma(s, -by_s, f * a_y))
    noise = tl.fma(tl.abs(s), tl.abs(2 * by_s), noise * a_y)
    s = a * tl.fma(w, -by, s)
    return (w * a, s, f, r * (a_y * b / b_new), noise), (m_new, c_new, ref_new, ref_y_new, b_new)


@triton.jit
def _likeliest(rows, first, top, m, K: tl.constexpr, LANES: tl.constexpr):
    """x - y where x = m, the maximum of the K windows from `first` on; `top`: the maximum of each lane."""
    x_ptr, y_ptr, head, y_head, V, _ = rows
    lane = tl.max(tl.where(top == m, (tl.arange(0, LANES) - head) & (LANES - 1), 0), 0)
    window = tl.arange(0, 8)
    column = (first + window) * LANES + lane
    inside = (window < K) & (column < V)
    x = tl.load(x_ptr + (column + head), mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + (column + y_head), mask=inside, other=0.0).to(tl.float32)
    return m - tl.max(tl.where(inside & (x == m), y, -float("inf")), 0)


@triton.jit
def _tile(lanes, about, xs, ys, rows, first, K: tl.constexpr, LANES: tl.constexpr):
    """K windows of each row into the lanes; the first is the row's `first`."""
    inv_t = rows[5]
    EXACT: tl.constexpr = rows[0].dtype.element_ty != tl.bfloat16
    top = xs[0]
    for i in tl.static_range(1, K):
        top = tl.maximum(top, xs[i])
    m_tile = tl.max(top, 0)
    if m_tile > about[0]:
        lanes, about = _move(lanes, about, m_tile, _likeliest(rows, first, top, m_tile, K, LANES), inv_t)
    w, s, f, r, noise = lanes
    _, c, ref, ref_y, _ = about
    k, t, t_2 = inv_t * LOG2E, 1 / inv_t, inv_t * inv_t
    a0, a1, a2, a3, a4 = inv_t * A0, t_2 * A1, t_2 * inv_t * A2, t_2 * t_2 * A3, t_2 * t_2 * inv_t * A4
    for i in tl.static_range(K):
        v = _difference(xs[i], ys[i], c, EXACT)
        p = tl.exp2(tl.fma(xs[i], k, -ref))
        w += p
        s = tl.fma(p, v, s)
        u = tl.where(tl.abs(v) < t, v, t)
        e = tl.fma(u, tl.fma(u, tl.fma(u, tl.fma(u, a4, a3), a2), a1), a0)
        f = tl.fma(u * u, tl.exp2(tl.fma(u, e, tl.fma(ys[i], k, -ref_y))), f)
        r = tl.fma(p, v - u, r)
    return (w, s, f, r, noise), about


@triton.jit
def _windows(ptr, first, LANES: tl.constexpr, VEC: tl.constexpr, K: tl.constexpr):
    zs = ()
    for i in tl.static_range(K):
        zs = zs + (load_lanes(ptr + (first + i) * LANES, None, LANES, VEC),)
    return zs


@triton.jit
def _rotated(zs, carry, head, LANES: tl.constexpr, K: tl.constexpr):
    """Windows of a row that begins `head` elements into its first, each column in its lane; and the last one."""
    out = ()
    for i in tl.static_range(K):
        out = out + (tl.where(tl.arange(0, LANES) < head, zs[i], carry),)
        carry = zs[i]
    return out, carry


@triton.jit
def _sweep(rows, first, stop, m, c, LANES: tl.constexpr, VEC: tl.constexpr, K: tl.constexpr):
    """The lanes over the tiles from `first` to `stop`, about m and c or where they move to."""
    x_ptr, y_ptr, head, y_head, V, inv_t = rows
    lane = tl.arange(0, LANES)
    zero = tl.zeros((LANES,), tl.float32)
    lanes = (zero, zero, zero, zero, zero)
    _, ref, ref_y, _, _, g = _references(m, c, inv_t)
    about = (m, c, ref, ref_y, g * 2 / inv_t)
    # tiles that lie in the row together with the window after them
    whole = tl.where(head == y_head, tl.minimum(stop, tl.maximum(V - LANES, 0) // (K * LANES)), first)
    if head == 0:
        for i in tl.range(first, whole, num_stages=1):
            xs, ys = _windows(x_ptr, i * K, LANES, VEC, K), _windows(y_ptr, i * K, LANES, VEC, K)
            lanes, about = _tile(lanes, about, xs, ys, rows, i * K, K, LANES)
    else:
        at = first * (K * LANES) + lane
        before = (lane >= head) & (first < whole)
        x_carry = tl.load(x_ptr + at, mask=before, other=0.0).to(tl.float32)
        y_carry = tl.load(y_ptr + at, mask=before, other=0.0).to(tl.float32)
        for i in tl.range(first, whole, num_stages=1):
            xs, x_carry = _rotated(_windows(x_ptr, i * K + 1, LANES, VEC, K), x_carry, head, LANES, K)
            ys, y_carry = _rotated(_windows(y_ptr, i * K + 1, LANES, VEC, K), y_carry, head, LANES, K)
            lanes, about = _tile(lanes, about, xs, ys, rows, i * K, K, LANES)
    for i in tl.range(whole, stop, num_stages=1):
        xs, ys = (), ()
        for j in tl.static_range(K):
            column = (i * K + j) * LANES + ((lane - head) & (LANES - 1))
            x = tl.load(x_ptr + (column + head), mask=column < V, other=0.0).to(tl.float32)
            y = tl.load(y_ptr + (column + y_head), mask=column < V, other=0.0).to(tl.float32)
            xs, ys = xs + (tl.where(column < V, x, BANNED),), ys + (tl.where(column < V, y, BANNED),)
        lanes, about = _tile(lanes, about, xs, ys, rows, i * K, K, LANES)
    return lanes, about


@triton.jit
def _max(v):  # over the columns of a thread
    return tl.max(tl.max(v, 2), 0)


@triton.jit
def _sum(v):
    return tl.sum(tl.sum(v, 2), 0)


@triton.jit
def _scale(w, m, c, n, offset, k):
    """exp(m / T - c - n / T), 0 where P has no mass: bounded, because w scale <= the number of columns."""
    return tl.where(w > 0, tl.exp2(_difference(m, n, offset, True) * k - c * LOG2E), 0.0)


@triton.jit
def _joined(own, w, scale, h, some):
    """What a part with weight w adds to f by moving by h: w scale (exp(h) - 1 - h), whose first term is `own`."""
    near = w * scale * _excess(-h)
    return tl.where(tl.abs(h) < tl.where(some, 1.0, -1.0), near, own - w * scale * (1 + h))


@triton.jit
def _join(m, w, w_all, c, left, n, f, d_max, m_2, w_2, w_all_2, c_2, left_2, n_2, f_2, d_max_2, offset, inv_t):
    """Two parts, each about its own mean, about their common one."""
    k = inv_t * LOG2E
    m_new, n_new = tl.maximum(m, m_2), tl.maximum(n, n_2)
    own, own_2 = w * _scale(w, m, c, n_new, offset, k), w_2 * _scale(w_2, m_2, c_2, n_new, offset, k)
    a, a_2 = tl.exp2((m - m_new) * k), tl.exp2((m_2 - m_new) * k)
    w, w_2 = w * a, w_2 * a_2
    w_new = w + w_2
    some = w_new > TINY
    c_new = tl.where(some, c + (c_2 - c) * (w_2 / w_new), 0.0)
    left = tl.where(some, (w * ((c - c_new) + left) + w_2 * ((c_2 - c_new) + left_2)) / w_new, 0.0)
    w_new = tl.where(some, w_new, 0.0)
    scale = _scale(w_new, m_new, c_new, n_new, offset, k)
    f = f * tl.exp2((n - n_new) * k) + f_2 * tl.exp2((n_2 - n_new) * k)
    f += _joined(own, w, scale, c_new - c, some) + _joined(own_2, w_2, scale, c_new - c_2, some)
    return m_new, w_new, w_all * a + w_all_2 * a_2, c_new, left, n_new, f, tl.maximum(d_max, d_max_2)


@triton.jit
def _careful_tile(m, n, x, y, offset, inv_t, EXACT: tl.constexpr):
    """The part of one tile of x and y, (K, threads, VEC), in each thread; m, n: the maxima so far."""
    k = inv_t * LOG2E
    m = tl.maximum(m, _max(x))
    n = tl.maximum(n, _max(y))
    p = tl.exp2((x - m[None, :, None]) * k)
    w_all = _sum(p)
    p = tl.where(y > BANNED, p, 0.0)
    d = _difference(x, y, offset, EXACT)
    w = _sum(p)
    some = w > TINY
    c = tl.where(some, _sum(p * d) / w * inv_t, 0.0)
    w = tl.where(some, w, 0.0)  # NaN in f tells that this was NaN
    scale = _scale(w, m, c, n, offset, k)
    u = tl.fma(d, inv_t, -c[None, :, None])
    left = tl.where(some, _sum(p * u) / w, 0.0)  # what fp32 leaves out of c
    near = tl.abs(u) < tl.where(some, 1.0, -1.0)[None, :, None]
    e_y = _sum(tl.where(near, 0.0, tl.exp2((y - n[None, :, None]) * k)))
    f = e_y + scale * _sum(p * tl.where(near, _excess(u), u - 1))
    return m, w, w_all, c, left, n, f, _max(d)


@triton.jit
def _merge(m, w, w_all, c, left, n, f, d_max, offset, inv_t):
    """The parts of all threads, (threads,), into one."""
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
    f = tl.sum(f * tl.exp2((n - n_row) * k) + _joined(own, w, scale, c_row - c, some), 0)
    return m_row, w_row, tl.sum(w_all * a, 0), c_row, left, n_row, f, tl.max(d_max, 0)


@triton.jit
def _careful(x_row, y_row, first, stop, V, offset, inv_t, THREADS: tl.constexpr, K: tl.constexpr, VEC: tl.constexpr):
    """The part of the columns from `first` to `stop`: banned ones, NaN, and rows far apart."""
    EXACT: tl.constexpr = x_row.dtype.element_ty != tl.bfloat16
    cols = (
        tl.arange(0, K)[:, None, None] * (THREADS * VEC)
        + tl.arange(0, THREADS)[None, :, None] * VEC
        + tl.arange(0, VEC)[None, None, :]
    )
    m = tl.full((THREADS,), FLOOR, tl.float32)
    w = tl.zeros((THREADS,), tl.float32)
    n, w_all, c, left, f, d_max = m, w, w, w, w, w
    for start in tl.range(first, stop, THREADS * K * VEC, num_stages=1):
        x, y = _load(x_row, y_row, start + cols, V, True)
        m_2, w_2, w_all_2, c_2, left_2, n_2, f_2, d_2 = _careful_tile(m, n, x, y, offset, inv_t, EXACT)
        m, w, w_all, c, left, n, f, d_max = _join(
            m, w, w_all, c, left, n, f, d_max, m_2, w_2, w_all_2, c_2, left_2, n_2, f_2, d_2, offset, inv_t
        )
    return _merge(m, w, w_all, c, left, n, f, d_max, offset, inv_t)


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
def _fast(rows, first, stop, LANES: tl.constexpr, VEC: tl.constexpr, K: tl.constexpr):
    """m, w, mean - c, c, n, f of the tiles from `first` to `stop`; NaN in w where only the careful kernel can tell."""
    inv_t = rows[5]
    half = 0.5 * inv_t * inv_t
    m, c = tl.full((), FLOOR, tl.float32), tl.full((), 0.0, tl.float32)
    w, mean, f = c, c, c
    tries = 2
    while tries > 0:
        # the same numbers, but left in the loop: what follows from them would fill the registers of every sweep
        heads = (tl.minimum(rows[2], tries * VEC), tl.minimum(rows[3], tries * VEC))
        lanes, about = _sweep(
            (rows[0], rows[1], heads[0], heads[1], rows[4], inv_t), first, stop, m, c + mean, LANES, VEC, K
        )
        m, c, _, _, b = about
        w = exact_sum(lanes[0])
        mean = (
            exact_sum(tl.where(lanes[1] > 0, lanes[1], 0.0)) - exact_sum(tl.where(lanes[1] > 0, 0.0, -lanes[1]))
        ) / w
        f = tl.fma(lanes[3], b, lanes[2])
        bounded = (half * (tl.abs(f) + lanes[4]) < FAR) & (tl.abs(lanes[1]) < 1e24)
        f = tl.where(bounded, f, float("nan"))
        noise = half * exact_sum(tl.abs(f) + lanes[4])
        f = half * exact_sum(f)
        f = tl.maximum(f - w * (0.5 * b * inv_t) * _exp_excess(-mean * inv_t), 0.0, propagate_nan=ALL_NAN)
        tries = tl.where((tries == 2) & (noise > 8 * f), 1, 0)
    n, _, _, lost, lost_y, _ = _references(m, c, inv_t)
    return m, w * tl.exp2(-lost) + (f - f), mean * inv_t, c, n, f * tl.exp2(-lost_y)


@triton.jit(do_not_specialize=RUNTIME)
def kl_fwd_kernel(
    x_ptr,  # (B, T, V)
    y_ptr,  # (B, T, V)
    mask_ptr,  # (N,) bool or None, N = B T
    inv_t_ptr,  # (N,) fp32 or None
    parts_ptr,  # (segments, 9, N) fp32
    x_shift,  # x begins so many elements after x_ptr, which is aligned to 16 bytes; y likewise
    y_shift,
    N,
    T,
    V,
    stride_xb: tl.int64,
    stride_xt: tl.int64,
    stride_yb: tl.int64,
    stride_yt: tl.int64,
    inv_t,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,  # elements in 16 bytes
    K: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    LANES: tl.constexpr = THREADS * VEC
    row = tl.program_id(0)
    if _is_masked(mask_ptr, row):
        return
    if inv_t_ptr is not None:
        inv_t = tl.load(inv_t_ptr + row)
    row = row.to(tl.int64)
    x_at = x_shift + (row // T) * stride_xb + (row % T) * stride_xt
    y_at = y_shift + (row // T) * stride_yb + (row % T) * stride_yt
    heads = (x_at % VEC).to(tl.int32), (y_at % VEC).to(tl.int32)
    rows = (x_ptr + x_at // VEC * VEC, y_ptr + y_at // VEC * VEC, heads[0], heads[1], V, inv_t)
    first = tl.program_id(1) * SEGMENT
    m, w, mean, c, n, f = _fast(rows, first, tl.minimum(first + SEGMENT, tl.cdiv(V, K * LANES)), LANES, VEC, K)
    offset = _offset(x_ptr + x_at, y_ptr + y_at, V)
    d = c - offset
    c = tl.fma(d, inv_t, mean)
    at = parts_ptr + tl.program_id(1).to(tl.int64) * 9 * N + row
    part = (m, w, w, c, tl.fma(d, inv_t, -c) + mean, n, f, 0.0, offset)
    for i in tl.static_range(9):
        tl.store(at + i * N, part[i])


@triton.jit(do_not_specialize=["segments", "columns", *RUNTIME])
def kl_careful_kernel(
    x_ptr,  # (B, T, V)
    y_ptr,  # (B, T, V)
    mask_ptr,  # (N,) bool or None, N = B T
    inv_t_ptr,  # (N,) fp32 or None
    parts_ptr,  # (segments, 9, N) fp32
    segments,
    columns,  # of a segment
    x_shift,
    y_shift,
    N,
    T,
    V,
    stride_xb: tl.int64,
    stride_xt: tl.int64,
    stride_yb: tl.int64,
    stride_yt: tl.int64,
    inv_t,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,
):
    row = tl.program_id(0)
    if _is_masked(mask_ptr, row):
        return
    if inv_t_ptr is not None:
        inv_t = tl.load(inv_t_ptr + row)
    row = row.to(tl.int64)
    parts_ptr += row + N
    left_out = 0  # segments whose w is NaN
    for start in tl.range(0, segments, 32, num_stages=1):
        segment = start + tl.arange(0, 32)
        w = tl.load(parts_ptr + segment.to(tl.int64) * 9 * N, mask=segment < segments, other=0.0)
        left_out += tl.sum((w != w).to(tl.int32), 0)
    if left_out == 0:
        return
    x_ptr += x_shift + (row // T) * stride_xb + (row % T) * stride_xt
    y_ptr += y_shift + (row // T) * stride_yb + (row % T) * stride_yt
    offset = _offset(x_ptr, y_ptr, V)
    for segment in tl.range(tl.program_id(1), segments, tl.num_programs(1), num_stages=1):
        at = parts_ptr + segment * (N * tl.full((), 9, tl.int64))
        w = tl.load(at)
        if w != w:
            first = segment * columns
            part = _careful(x_ptr, y_ptr, first, tl.minimum(first + columns, V), V, offset, inv_t, THREADS, 2, 4)
            for i in tl.static_range(8):
                tl.store(at + (i - 1) * N, part[i])


@triton.jit
def _divergence(m, w, c, n, f, offset, inv_t):
    """log1p(F / W) over the columns that both allow, without overflow of F; 0 where there is none."""
    z = c * LOG2E - _difference(m, n, offset, True) * (inv_t * LOG2E)
    r = tl.where(w > 0, f / w, 1.0)
    far = z * LN2 + tl.log(tl.where(r > 0, r, 1.0))
    return tl.where(w > 0, tl.where(z > 40, far, log1p(r * tl.exp2(tl.minimum(z, 40.0)))), 0.0)


@triton.jit
def _part(at, N, real):
    part = ()
    for i in tl.static_range(9):
        part = part + (tl.load(at + i * N, mask=real, other=0.0),)
    return part


@triton.jit(do_not_specialize=["segments", "N", "inv_t"])
def kl_merge_kernel(
    mask_ptr,  # (N,) bool or None
    inv_t_ptr,  # (N,) fp32 or None
    parts_ptr,  # (segments, 9, N) fp32
    kl_ptr,  # (N,) fp32
    state_ptr,  # (9, N) fp32, see STATE
    segments,
    N,
    inv_t,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < N
    real = inside
    if mask_ptr is not None:
        real = inside & (tl.load(mask_ptr + row, mask=inside, other=0) != 0)
    if inv_t_ptr is not None:
        inv_t = tl.load(inv_t_ptr + row, mask=inside, other=1.0)
    at = parts_ptr + row
    m, w, w_all, c, left, n, f, d_max, offset = _part(at, N, real)
    for _ in tl.range(1, segments, num_stages=1):
        at += 9 * N.to(tl.int64)
        m_2, w_2, w_all_2, c_2, left_2, n_2, f_2, d_2, _ = _part(at, N, real)
        m, w, w_all, c, left, n, f, d_max = _join(
            m, w, w_all, c, left, n, f, d_max, m_2, w_2, w_all_2, c_2, left_2, n_2, f_2, d_2, offset, inv_t
        )
    s = f + w * _scale(w, m, c, n, offset, inv_t * LOG2E)
    kl = _divergence(m, w, c, n, f, offset, inv_t)
    lone = d_max > -0.5 * BANNED  # Q bans a column that P does not, however little its mass
    nan = (w_all - w_all) + (s - s)  # 0, or NaN where a logit is NaN or inf: the rest of the state may have dropped it
    tl.store(kl_ptr + row, tl.where(real, tl.where(lone, float("inf"), kl) + nan, 0.0), mask=inside)
    # c / inv_t goes into the offset, so that c + left is small and keeps its bits for the gradient
    mean = offset + c / inv_t
    c = tl.fma(offset - mean, inv_t, c) + left
    # delta = u + k; without a mean, every column that is not P's alone belongs to Q alone
    k = tl.where(w > 0, kl + tl.where(lone, tl.log(w / w_all), 0.0), NONE)
    state = (m, w, w_all, mean, c, n, f, s, k)
    for i in tl.static_range(9):
        tl.store(state_ptr + i * N + row, state[i], mask=real)


def kl_fwd(x, y, mask, inv_t):
    """(B, T, V) twice, (N,) bool | None, float | (N,) fp32 -> KL(P || Q) (N,) fp32, state (9, N) fp32."""
    n = x.shape[0] * x.shape[1]
    kl = torch.empty(n, device=x.device, dtype=torch.float32)
    state = torch.empty(len(STATE), n, device=x.device, dtype=torch.float32)
    if n == 0:
        return kl, state
    x, y, inv_t_ptr, numbers, launch = arguments(x, y, inv_t)
    # a smaller tile where eight windows would not fit the registers
    k = 8 >> (torch.version.hip is not None or capability(x.device) >= (10, 0)) >> (x.dtype == torch.float16)
    columns = SEGMENT * k * launch["THREADS"] * launch["VEC"]
    segments = triton.cdiv(numbers[4], columns)
    parts = torch.empty(segments, len(STATE), n, device=x.device, dtype=torch.float32)
    rows = (x, y, mask, inv_t_ptr, parts)
    with torch.cuda.device_of(x):
        kl_fwd_kernel[(n, segments)](*rows, *numbers, K=k, SEGMENT=SEGMENT, **launch)
        kl_careful_kernel[(n, 1)](*rows, segments, columns, *numbers, **launch)
        kl_merge_kernel[(triton.cdiv(n, 32),)](*rows[2:], kl, state, segments, n, numbers[-1], ROWS=32, num_warps=1)
    return kl, state
