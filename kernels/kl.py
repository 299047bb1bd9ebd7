"""Exact KL(P || Q) of rows of logits x, y in one sweep over both, and its gradients.

With w = exp((x - m) / T), W = sum w, d = x - y, c = sum(w d) / (W T) the mean of d / T under P, and u = d / T - c,

    KL(P || Q) = log E_P[exp(-u)] = log1p(F / W),    F = sum w (exp(-u) - 1 + u),

for any two rows, however far apart. Every term of F is >= 0, so KL >= 0, and it is 0 when all d are equal. Nothing
cancels when P and Q are close, so the relative error is that of the terms. c is known only at the end, so partial sums
move from their own mean to the common one, by h = c_new - c, as the variance does in Welford's algorithm:

    F(c_new) = exp(h) F(c) + W (exp(h) - 1 - h),    again a sum of terms >= 0.

exp(-u) may overflow, so F is kept as f = scale F with scale = exp((m - n) / T - c) and n = max y. A column then adds at
most exp((y - n) / T) to f, and exactly that where P is 0. As E_P[exp(-u)] >= 1, W scale <= the number of columns.

The gradients, with p, q the probabilities, delta = log(p / q) = u + k where k = KL, and g the upstream gradient, are

    dx = g p u / T    dy = g (q - p) / T = g p expm1(-delta) / T

`kl_lanes.py` has the sums and `kl_gradient.py` the gradients.

Bytes: both rows are read once; where V is no multiple of 16, a second time from the cache. A segment of a row that the
fast sums cannot represent is read three times more, from the cache: one with a banned column, or with q / p or its
inverse beyond 2^60 times their typical value in the lane.

A row has the same bits in any batch: V alone decides which columns meet in a lane and in which order, and segments
merge lane by lane, in one program or in many.
"""

import torch
import triton
import triton.language as tl

from .kl_gradient import kl_bwd
from .kl_lanes import (
    FLOOR,
    MAX_MEAN,
    NOWHERE,
    NUMBERS,
    careful,
    exponent,
    held,
    merge,
    reduce_lanes,
    settled,
    start,
    step,
    within,
)
from .lanes import cap
from .launch import SHORT, cdiv, choose_unsplit_rows, launch, launch_options, slots
from .online import log1p, valid
from .pair import (
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
    difference,
    is_masked,
    launch_arguments,
    load,
    load_rotated,
    load_together,
    row_offset,
)
from .states import KLState

__all__ = ["kl_bwd", "kl_fwd"]

NONE = tl.constexpr(-1e10)  # log(p / q) where P has no mass: far from BANNED, and beyond any logit
MOST = tl.constexpr(1e19)  # the largest logit; above it d could be that of a banned column
# nats between the maxima of two rows; beyond it c is rounded by about as much as a small KL between them
TOO_FAR = tl.constexpr(1e7)

# Registers per thread, as in `launch.REGISTERS`. On sm_100 the kernel needs no more than four programs leave it.
REGISTERS = (168, 128)
CAPPED_REGISTERS = (232, 232)  # a soft cap computes two more tanh per column
K = 4  # windows of 16 bytes that a thread reads at once from each row
SEGMENT = 8  # tiles of K windows per thread


@triton.jit
def _offset(x_ptr, y_ptr, V, inv_t, softcap):
    """Return x - y at one of the first columns that both rows allow, so that a constant between them costs no bits.

    Of these columns it is the one whose smaller probability is largest. If x and y are far apart even there, one of the
    two may be a mask such as -1e9, which says nothing about the other columns. Then the difference of the rows' maxima
    is returned, which takes one more look at each column.
    """
    offset = -float("inf")
    begin = 0
    while (offset == -float("inf")) & (begin < V):
        x, y = load(x_ptr, y_ptr, begin + tl.arange(0, 32), V, softcap)
        both = (x > BANNED) & (y > BANNED)
        likely = tl.minimum(x - tl.max(x, 0), y - tl.max(y, 0))
        likely = tl.where(both, likely, -float("inf"))
        offset = tl.max(tl.where(both & (likely == tl.max(likely, 0)), x - y, -float("inf")), 0)
        begin += 32
    offset = tl.where(offset == -float("inf"), 0.0, offset)
    if tl.abs(offset) * inv_t > MAX_MEAN:
        COLUMNS: tl.constexpr = 1024
        m, n = tl.full((COLUMNS,), FLOOR, tl.float32), tl.full((COLUMNS,), FLOOR, tl.float32)
        for begin in tl.range(0, V, COLUMNS, num_stages=1):
            x, y = load(x_ptr, y_ptr, begin + tl.arange(0, COLUMNS), V, softcap)
            m, n = tl.maximum(m, x), tl.maximum(n, y)
        offset = tl.max(m, 0) - tl.max(n, 0)
    return offset


@triton.jit
def _divergence(m, w, c, left, n, f, offset, inv_t):
    """Return log1p(F / W) over the columns that both rows allow, without overflow of F, or 0 if there are none.

    F is relative to c, which in fp32 is short of the true mean by h = `left`; relative to the true mean, F / W is
    e^h (F / W + 1 - h) - 1. Where the row is apart (`kl_lanes.py`), f is the sum of q, and KL = log(sum q / W).
    """
    z = -exponent(m, c, n, offset, inv_t)
    r = tl.where(w > 0, f / w, 1.0)
    far = z + left + tl.log(tl.where(r > 0, r, 1.0))
    a = r * tl.exp2(tl.minimum(z + left, 30.0) * LOG2E)
    series = -left * left * tl.fma(left, tl.fma(left, tl.fma(left, 1 / 30, 0.125), 1 / 3), 0.5)
    short = tl.where(tl.abs(left) < 0.1, series, tl.exp(left) * (1 - left) - 1)
    a += short
    near = log1p(tl.where(a < 0, 0.0, a))  # NaN is not < 0
    far = tl.where(far < 0, 0.0, far)
    return tl.where(w > 0, tl.where((z > 28) | (within(c) == 0), far, near), 0.0)


@triton.jit
def _inside(ptr, mask, softcap):
    """Return a tile (lanes, columns) of a row in fp32, capped, with NOWHERE past the end of the row."""
    x = tl.load(ptr, mask=mask, other=NOWHERE).to(tl.float32)
    return x if softcap is None else tl.where(mask, cap(x, softcap), NOWHERE)


@triton.jit
def _half(x_apart, y_apart, apart, at, stop, softcap, WHOLE: tl.constexpr, K: tl.constexpr):
    """Return K windows of both rows from column `at` on, as tuples; they are not masked if they lie in the rows."""
    xs, ys = (), ()
    for _ in tl.static_range(K):
        if WHOLE:
            xs = xs + (cap(tl.load(x_apart + at).to(tl.float32), softcap),)
            ys = ys + (cap(tl.load(y_apart + at).to(tl.float32), softcap),)
        else:
            xs = xs + (_inside(x_apart + at, at + apart < stop, softcap),)
            ys = ys + (_inside(y_apart + at, at + apart < stop, softcap),)
        at += apart.shape[0] * apart.shape[1]
    return xs, ys


@triton.jit
def _segment(
    x_row,
    y_row,
    x_wide,
    y_wide,
    x_head,
    y_head,
    segment,
    V,
    wide,
    offset,
    inv_t,
    softcap,
    THREADS: tl.constexpr,
    K: tl.constexpr,
    VEC: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Return the `Lane` of the columns of a segment."""
    EXACT: tl.constexpr = True if softcap is not None else x_row.dtype.element_ty != tl.bfloat16
    TILE: tl.constexpr = THREADS * K * VEC
    first = segment * SEGMENT
    # the loads of rows that begin anywhere end VEC columns later
    first_masked = tl.minimum((V if wide else V - VEC) // TILE, first + SEGMENT)
    first_masked = tl.maximum(first_masked, first)
    k = inv_t * LOG2E
    m, w, c, a, f, far = start(THREADS)
    # whole tiles: a thread has 16 bytes of neighbouring columns, wherever the rows begin
    apart = tl.arange(0, THREADS)[:, None] + tl.arange(0, VEC)[None, :] * THREADS
    x_apart, y_apart = x_row + apart, y_row + apart
    if wide:
        for i in tl.range(first, first_masked, num_stages=1):
            xs, ys = (), ()
            for j in tl.static_range(K):
                at = (i * K + j) * (THREADS * VEC)
                xs = xs + (cap(load_together(x_wide + at, THREADS, VEC), softcap),)
                ys = ys + (cap(load_together(y_wide + at, THREADS, VEC), softcap),)
            m, w, c, a, f, far = step(m, w, c, a, f, far, xs, ys, (), offset, k, EXACT, K)
    else:
        for i in tl.range(first, first_masked, num_stages=1):
            xs, ys = (), ()
            for j in tl.static_range(K):
                at = (i * K + j) * (THREADS * VEC)
                xs = xs + (cap(load_rotated(x_wide + at, x_head, THREADS, VEC), softcap),)
                ys = ys + (cap(load_rotated(y_wide + at, y_head, THREADS, VEC), softcap),)
            m, w, c, a, f, far = step(m, w, c, a, f, far, xs, ys, (), offset, k, EXACT, K)
    # the end of the row, a tile at most, where neighbouring threads read neighbouring columns; its first half is masked
    # only if the row ends there
    begin, stop = first_masked * TILE, tl.minimum(V, (first + SEGMENT) * TILE)
    if begin < stop:
        middle = begin + TILE // 2
        if middle <= stop:
            xs, ys = _half(x_apart, y_apart, apart, begin, stop, softcap, True, K // 2)
        else:
            xs, ys = _half(x_apart, y_apart, apart, begin, stop, softcap, False, K // 2)
        x_rest, y_rest = _half(x_apart, y_apart, apart, middle, stop, softcap, False, K // 2)
        inside = ()
        for j in tl.static_range(K):
            inside = inside + (begin + j * (THREADS * VEC) + apart < stop,)
        m, w, c, a, f, far = step(
            m, w, c, a, f, far, xs + x_rest, ys + y_rest, inside, offset, k, EXACT, K
        )
    # where V is up to VEC more than whole tiles, the end is more than a tile
    right = held(m, w, a, f, far, k) & (stop - begin <= TILE)
    if not EXACT:  # x - y is rounded, which is accurate enough only if the offset is small
        right = right & (tl.abs(offset) * inv_t <= MAX_MEAN)
    m, w, w_all, c, left, n, s, f, banned_in_q = settled(m, w, c, a, f, offset, k, inv_t)
    if right == 0:
        m, w, w_all, c, left, n, s, f, banned_in_q = careful(
            x_row, y_row, first * TILE, stop, offset, inv_t, softcap, THREADS
        )
    return m, w, w_all, c, left, n, s, f, banned_in_q


@triton.jit
def _store_row(kl_ptr, state_ptr, row, N, lanes, offset, inv_t):
    """Reduce the lanes of a row and store its divergence and its `KLState`."""
    m, w, w_all, c, left, n, s, f, banned_in_q = reduce_lanes(lanes, offset, inv_t)
    kl = _divergence(m, w, c, left, n, f, offset, inv_t)
    distance = tl.abs(m - n) * inv_t
    kl = tl.where((w > 0) & (distance > TOO_FAR) & (kl < 0.01 * distance), float("nan"), kl)
    # Q bans a column that P allows: KL is infinite, however little mass P has there
    banned_in_q = banned_in_q > 0
    # `nan` is 0, or NaN if a logit is NaN or inf, which the other numbers may have lost
    nan = (w_all - w_all) + (s - s)
    nan += tl.where(tl.maximum(m, n) > MOST, float("nan"), 0.0)
    tl.store(kl_ptr + row, tl.where(banned_in_q, float("inf"), kl) + nan)
    # F about the mean, which follows from KL = log1p(F / W)
    f = tl.where(within(c), f, s * (1 - tl.exp(-kl)))
    # c / inv_t moves into the offset, so that c + left is small and keeps its bits for the gradient
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
    # delta = u + k; where no column is allowed by both rows, each belongs to one of them alone
    k = tl.where(w > 0, kl + tl.where(banned_in_q, tl.log(w / w_all), 0.0), NONE)
    tl.store(state_ptr + AT_K * N, k)


@triton.jit
def _nothing(LANES: tl.constexpr):
    """Return the `Lane` of no columns."""
    zero = tl.zeros((LANES,), tl.float32)
    return zero + FLOOR, zero, zero, zero, zero, zero + FLOOR, zero, zero, zero


@triton.jit(do_not_specialize=[*RUNTIME, "begin"])
def kl_fwd_kernel(
    x_ptr,  # (B, T, V)
    y_ptr,  # (B, T, V)
    mask_ptr,  # (N,) bool or None, N = B T
    inv_t_ptr,  # (N,) fp32 or None
    kl_ptr,  # (N,) fp32
    state_ptr,  # (9, N) fp32, see KLState
    lanes_ptr,  # (n, segments, 9, THREADS) fp32, where each program leaves the lanes of a segment; None: one per row
    begin,  # the first of the n rows of this launch
    N,
    T,
    V,
    x_shift,
    y_shift,
    stride_xb: tl.int64,
    stride_xt: tl.int64,
    stride_yb: tl.int64,
    stride_yt: tl.int64,
    inv_t,
    wide,
    softcap,
    THREADS: tl.constexpr,
    K: tl.constexpr,
    VEC: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    row = begin + tl.program_id(0)
    if is_masked(mask_ptr, row):
        if lanes_ptr is None:
            tl.store(kl_ptr + row, 0.0)
        return
    if inv_t_ptr is not None:
        inv_t = valid(tl.load(inv_t_ptr + row))
    x_at = row_offset(row, T, stride_xb, stride_xt, x_shift)
    y_at = row_offset(row, T, stride_yb, stride_yt, y_shift)
    x_row, x_wide, x_head = x_ptr + x_at, x_ptr + x_at // VEC * VEC, (x_at % VEC).to(tl.int32)
    y_row, y_wide, y_head = y_ptr + y_at, y_ptr + y_at // VEC * VEC, (y_at % VEC).to(tl.int32)
    offset = _offset(x_row, y_row, V, inv_t, softcap)
    # a program with one segment leaves its lanes to `kl_merge_kernel`; one with the whole row merges them itself
    if lanes_ptr is not None:
        segment = tl.program_id(1)
        segment_lanes = _segment(
            x_row,
            y_row,
            x_wide,
            y_wide,
            x_head,
            y_head,
            segment,
            V,
            wide,
            offset,
            inv_t,
            softcap,
            THREADS,
            K,
            VEC,
            SEGMENT,
        )
        nth = tl.program_id(0).to(tl.int64)
        at = (nth * tl.num_programs(1) + segment) * NUMBERS * THREADS + tl.arange(0, THREADS)
        for i in tl.static_range(NUMBERS):
            tl.store(lanes_ptr + at + i * THREADS, segment_lanes[i])
    else:
        m, w, w_all, c, left, n, s, f, banned_in_q = _nothing(THREADS)
        for segment in tl.range(0, tl.cdiv(V, SEGMENT * K * VEC * THREADS), num_stages=1):
            segment_lanes = _segment(
                x_row,
                y_row,
                x_wide,
                y_wide,
                x_head,
                y_head,
                segment,
                V,
                wide,
                offset,
                inv_t,
                softcap,
                THREADS,
                K,
                VEC,
                SEGMENT,
            )
            lanes = (m, w, w_all, c, left, n, s, f, banned_in_q)
            m, w, w_all, c, left, n, s, f, banned_in_q = merge(lanes, segment_lanes, offset, inv_t)
        _store_row(
            kl_ptr, state_ptr, row, N, (m, w, w_all, c, left, n, s, f, banned_in_q), offset, inv_t
        )


@triton.jit(do_not_specialize=[*RUNTIME, "begin", "segments"])
def kl_merge_kernel(
    x_ptr,  # (B, T, V)
    y_ptr,  # (B, T, V)
    mask_ptr,  # (N,) bool or None
    inv_t_ptr,  # (N,) fp32 or None
    kl_ptr,  # (N,) fp32
    state_ptr,  # (9, N) fp32
    lanes_ptr,  # (n, segments, 9, THREADS) fp32
    begin,
    segments,
    N,
    T,
    V,
    x_shift,
    y_shift,
    stride_xb: tl.int64,
    stride_xt: tl.int64,
    stride_yb: tl.int64,
    stride_yt: tl.int64,
    inv_t,
    wide,
    softcap,
    THREADS: tl.constexpr,
):
    row = begin + tl.program_id(0)
    if is_masked(mask_ptr, row):
        tl.store(kl_ptr + row, 0.0)
        return
    if inv_t_ptr is not None:
        inv_t = valid(tl.load(inv_t_ptr + row))
    x_row = x_ptr + row_offset(row, T, stride_xb, stride_xt, x_shift)
    y_row = y_ptr + row_offset(row, T, stride_yb, stride_yt, y_shift)
    offset = _offset(x_row, y_row, V, inv_t, softcap)
    m, w, w_all, c, left, n, s, f, banned_in_q = _nothing(THREADS)
    for segment in tl.range(0, segments, num_stages=1):
        at = (
            lanes_ptr
            + ((row - begin).to(tl.int64) * segments + segment) * NUMBERS * THREADS
            + tl.arange(0, THREADS)
        )
        segment_lanes = ()
        for i in tl.static_range(NUMBERS):
            segment_lanes = segment_lanes + (tl.load(at + i * THREADS),)
        lanes = (m, w, w_all, c, left, n, s, f, banned_in_q)
        m, w, w_all, c, left, n, s, f, banned_in_q = merge(lanes, segment_lanes, offset, inv_t)
    _store_row(
        kl_ptr, state_ptr, row, N, (m, w, w_all, c, left, n, s, f, banned_in_q), offset, inv_t
    )


def kl_fwd(x, y, mask, inv_t, softcap=None):
    """Return KL(P || Q) per row, (N,) fp32 in nats with N = B T, and the `KLState` (9, N) fp32; 0 in masked rows.

    Args:
        x, y: (B, T, V) bf16, fp16 or fp32, the logits of P and of Q.
        mask: (N,) bool, True for the rows that count, or None for all.
        inv_t: 1 / temperature, a float or (N,) fp32.
        softcap: logits x become softcap * tanh(x / softcap); None leaves them as they are.
    """
    n, vocab = x.shape[0] * x.shape[1], x.shape[2]
    kl = torch.empty(n, device=x.device, dtype=torch.float32)
    new = kl.new_empty if mask is None else kl.new_zeros  # masked rows stay zero
    state = new(len(KLState._fields), n)
    if n == 0:
        return kl, state
    vec = 16 // x.element_size()
    layout = launch_options(x, REGISTERS if softcap is None else CAPPED_REGISTERS)
    tiles = SEGMENT if vocab > SHORT else SEGMENT // 2
    segments = cdiv(vocab, tiles * K * vec * THREADS)
    unsplit_rows = choose_unsplit_rows(n, segments, slots(x.device, layout))
    x, y, inv_t, numbers = launch_arguments(x, y, inv_t, softcap)
    rows = (x, y, mask, inv_t, kl, state)
    merging = {"THREADS": THREADS} | layout
    del merging["LANES"], merging["VEC"]
    options = merging | {"K": K, "VEC": vec, "SEGMENT": tiles}
    if unsplit_rows:
        launch(kl_fwd_kernel, (unsplit_rows,), (*rows, None), (0, *numbers), options)
    if unsplit_rows < n:
        shape = (n - unsplit_rows, segments, NUMBERS.value, THREADS)
        rows += (kl.new_empty(shape),)
        launch(kl_fwd_kernel, shape[:2], rows, (unsplit_rows, *numbers), options)
        launch(kl_merge_kernel, shape[:1], rows, (unsplit_rows, segments, *numbers), merging)
    return kl, state
