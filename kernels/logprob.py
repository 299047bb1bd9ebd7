"""Log-probability, entropy and log-sum-exp of rows of logits: one read forward, one read and one write backward.

Forward (2 bytes per bf16 logit): a program per row streams tiles of K * LANES columns through the lanes of `online.py`
and reduces them once at the end. `logprob_gradient.py` has the backward pass.

A row's result has the same bits in any batch, at any stride and alignment, whether or not it is split over programs:
- which columns meet in a lane, and in which order, follows from the column's number alone (`lanes.py` has the windows);
- SEGMENT tiles make a segment, and V alone decides how many segments a row has; these are merged lane by lane and in
  order, whether one program holds them all or each program holds one;
- the sum over the lanes has the same bits in any order (`online.exact_sum`).
"""

import torch
import triton
import triton.language as tl

from .lanes import (
    as_fp32,
    by_column,
    cap,
    load_columns,
    load_lanes,
    load_raw,
    load_window,
    locate,
    row_scale,
)
from .launch import (
    SEGMENT,
    SHORT,
    K,
    aligned,
    cdiv,
    choose_unsplit_rows,
    contiguous,
    launch,
    launch_options,
    program_segments,
    slots,
    streaming,
    temperature_scales,
)
from .logprob_gradient import logprob_bwd
from .online import (
    FAR,
    LN2,
    NAN,
    exact_sum,
    fold,
    in_range,
    log1p,
    merge,
    reduce_lanes,
    start,
    step,
)
from .states import RowStatistics

__all__ = ["logprob_bwd", "logprob_fwd"]

# windows per tile at the end of a row; elsewhere a tile has K of them
TAIL = tl.constexpr(4)
HALF = tl.constexpr(2)
# the arguments of both kernels that are not compiled for their values
RUNTIME = ("unsplit_rows", "segments", "shift", "vocab", "x_stride")
RUNTIME += ("inv_t", "scale", "scale_low", "softcap")


@triton.jit
def load_tile(window_ptr, tile, stop, K: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """Return the windows of a tile in the bits that memory has; nothing is read from tile `stop` on."""
    raw = ()
    for k in tl.static_range(K):
        raw = raw + (
            load_raw(window_ptr + (tile * K + k) * LANES, (stop - tile) * LANES, LANES, VEC),
        )
    return raw


@triton.jit
def load_end(
    window_ptr,
    i,
    head,
    carry,
    vocab,
    softcap,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Return TAIL windows of columns of a row, and the last window read, which is i + TAIL.

    `carry` is window i. The first INSIDE of the windows after it lie in the row and are not masked.
    """
    lane = tl.arange(0, LANES)
    xs = ()
    for k in tl.static_range(TAIL):
        if k < INSIDE:
            x = cap(load_lanes(window_ptr + (i + k + 1) * LANES, None, LANES, VEC), softcap)
        else:
            x = load_window(window_ptr, i + k + 1, head, vocab, softcap, LANES, VEC)
        xs = xs + (tl.where(lane < head, x, carry),)
        carry = x
    return xs, carry


@triton.jit
def segment_state(
    window_ptr,
    head,
    carry,
    segment,
    whole_tiles,
    vocab,
    scale,
    softcap,
    K: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    SEGMENT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Return the lane states over one segment, folded to one lane per thread, and the last window that was read.

    The row begins `head` elements after `window_ptr`, and `carry` is the window in which the segment begins. The first
    `whole_tiles` tiles of the row, and the window after them, lie in the row whatever `head` is.
    """
    lane = tl.arange(0, LANES)
    m, rest, t = start(LANES)
    first = segment * SEGMENT
    first_masked = tl.minimum(tl.maximum(whole_tiles, first), first + SEGMENT)
    # whole tiles: where the row begins at a window, each window is loaded for itself
    if head == 0:
        if AHEAD:
            # the loads of the next tile are under way while this one is computed
            raw = load_tile(window_ptr, first, first_masked, K, LANES, VEC)
            for i in tl.range(first, first_masked, num_stages=1):
                after = load_tile(window_ptr, i + 1, first_masked, K, LANES, VEC)
                xs = ()
                for k in tl.static_range(K):
                    xs = xs + (cap(as_fp32(raw[k]), softcap),)
                m, rest, t = step(m, rest, t, xs, scale, K)
                raw = after
        else:
            for i in tl.range(first, first_masked, num_stages=1):
                xs = ()
                for k in tl.static_range(K):
                    xs = xs + (
                        cap(
                            load_lanes(window_ptr + (i * K + k) * LANES, None, LANES, VEC), softcap
                        ),
                    )
                m, rest, t = step(m, rest, t, xs, scale, K)
        # the masked end below uses each window one step after it is loaded, so it needs the one where it begins
        if (first <= whole_tiles) & (whole_tiles < first + SEGMENT):
            carry = load_window(window_ptr, first_masked * K, 0, vocab, softcap, LANES, VEC)
    # where it does not, a lane below `head` takes its element from the next window
    else:
        for i in tl.range(first, first_masked, num_stages=1):
            xs = ()
            for k in tl.static_range(K):
                x = cap(load_lanes(window_ptr + (i * K + k + 1) * LANES, None, LANES, VEC), softcap)
                xs = xs + (tl.where(lane < head, x, carry),)
                carry = x
            m, rest, t = step(m, rest, t, xs, scale, K)
    # the end of the row in groups of TAIL windows, which are masked only from the first half that may end beyond it
    last = (first + SEGMENT) * K
    inside = tl.minimum(tl.maximum(vocab - LANES, 0) // LANES, last)
    begin = first_masked * K
    masked = begin + tl.maximum(inside - begin, 0) // TAIL * TAIL
    for i in tl.range(begin, masked, TAIL, num_stages=1):
        xs, carry = load_end(window_ptr, i, head, carry, vocab, softcap, LANES, VEC, TAIL)
        m, rest, t = step(m, rest, t, xs, scale, TAIL)
    for i in tl.range(masked, tl.minimum(last, tl.cdiv(vocab, LANES)), TAIL, num_stages=1):
        if i + HALF <= inside:
            xs, carry = load_end(window_ptr, i, head, carry, vocab, softcap, LANES, VEC, HALF)
        else:
            xs, carry = load_end(window_ptr, i, head, carry, vocab, softcap, LANES, VEC, 0)
        m, rest, t = step(m, rest, t, xs, scale, TAIL)
    if head > 0:
        m, rest, t = (
            by_column(m, head, LANES),
            by_column(rest, head, LANES),
            by_column(t, head, LANES),
        )
    return fold(m, rest, t, scale, VEC), carry


@triton.jit
def wide_row(x_ptr, vocab, scale, scale_low, softcap, LANES: tl.constexpr):
    """Return what `reduce_lanes` returns, but from two more reads of the row, which is right for logits of any size."""
    lane = tl.arange(0, LANES)
    lane_m = tl.full((LANES,), float("-inf"), tl.float32)
    for begin in tl.range(0, vocab, LANES, num_stages=1):
        lane_m = tl.maximum(lane_m, load_columns(x_ptr, begin + lane, vocab, softcap))
    m = tl.max(lane_m, 0)

    # the sums relative to the maximum; a logit of +inf or NaN makes them NaN
    about = tl.where(m == float("-inf"), 0.0, m)
    off = scale_low / scale
    ties = tl.zeros((LANES,), tl.int32)
    rest = tl.zeros((LANES,), tl.float32)
    t = tl.zeros((LANES,), tl.float32)
    for begin in tl.range(0, vocab, LANES, num_stages=1):
        x = load_columns(x_ptr, begin + lane, vocab, softcap)
        d = tl.maximum((x - about) * scale, FAR, propagate_nan=NAN)
        d = tl.fma(d, off, d)
        p = tl.exp2(d)
        ties += (x == m).to(tl.int32)
        rest += tl.where(x == m, p - 1.0, p)  # p - 1 is 0, or NaN where the maximum is inf
        t = tl.fma(p, -d, t)
    # one element at the maximum is held out of `rest`; any others add 1 each
    more = tl.maximum(tl.sum(ties, 0) - 1, 0).to(tl.float32)
    return m, exact_sum(rest) + more, -LN2 * exact_sum(t)


@triton.jit
def store_row(
    outputs,
    row,
    x_ptr,
    target_ptr,
    state,
    vocab,
    inv_t,
    scale,
    scale_low,
    softcap,
    LANES: tl.constexpr,
):
    """Reduce the lanes of the row that begins at `x_ptr` and store logprob, entropy, lse, m and rest."""
    logprob_ptr, entropy_ptr, lse_ptr, m_ptr, rest_ptr = outputs
    lane_m, lane_rest, lane_t = state
    m, rest, t = reduce_lanes(lane_m, lane_rest, lane_t, scale, scale_low)
    if in_range(m, rest, t, scale) == 0:
        m, rest, t = wide_row(x_ptr, vocab, scale, scale_low, softcap, LANES)
    banned = (m == float("-inf")) & (rest == rest)  # every logit of the row is -inf
    target = tl.load(target_ptr + row)
    # a target outside the vocabulary gets NaN
    in_vocab = (target >= 0) & (target < vocab)
    x = cap(tl.load(x_ptr + target, mask=in_vocab, other=0.0).to(tl.float32), softcap)
    log1 = log1p(rest)
    logprob = (tl.minimum(x, m, propagate_nan=NAN) - m) * inv_t - log1
    logprob = tl.where(banned, float("-inf"), logprob)
    tl.store(logprob_ptr + row, tl.where(in_vocab, logprob, float("nan")))
    tl.store(entropy_ptr + row, tl.where(banned, 0.0, log1 - t / (1.0 + rest)))
    tl.store(lse_ptr + row, tl.where(banned, float("-inf"), tl.fma(m, inv_t, log1)))
    tl.store(m_ptr + row, tl.where(banned, float("-inf"), m))
    tl.store(rest_ptr + row, tl.where(banned, 0.0, rest))


@triton.jit
def store_zeros(outputs, row):
    """Store 0 in the five outputs of a masked row."""
    for i in tl.static_range(5):
        tl.store(outputs[i] + row, 0.0)


@triton.jit(do_not_specialize=RUNTIME)
def logprob_fwd_kernel(
    x_ptr,  # (N, V) bf16, fp16 or fp32
    target_ptr,  # (N,) int64
    mask_ptr,  # (N,) bool, or None
    inv_t_ptr,  # (N,) fp32, or None: inv_t and scale hold for all rows
    logprob_ptr,  # (N,) fp32, as the next four
    entropy_ptr,
    lse_ptr,
    m_ptr,
    rest_ptr,
    lanes_ptr,  # (N - unsplit_rows, segments, 3, THREADS) fp32: a program that has one segment leaves its lanes here
    unsplit_rows,  # the number of rows that have one program each; the rows after them have one program per segment
    segments,
    shift,  # x begins this many elements after x_ptr, which is aligned to 16 bytes
    vocab,
    x_stride: tl.int64,
    inv_t,
    scale,
    scale_low,
    softcap,
    K: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,  # elements in 16 bytes
    SEGMENT: tl.constexpr,
    AHEAD: tl.constexpr,  # `launch.VARIANTS` describes it
):
    THREADS: tl.constexpr = LANES // VEC
    row, first, last, has_whole_row = program_segments(unsplit_rows, segments)
    outputs = (logprob_ptr, entropy_ptr, lse_ptr, m_ptr, rest_ptr)
    if mask_ptr is not None:  # noqa: SIM102 (the load must not be traced where the pointer is None)
        if tl.load(mask_ptr + row) == 0:
            if has_whole_row:
                store_zeros(outputs, row)
            return
    inv_t, scale, scale_low = row_scale(inv_t_ptr, row, inv_t, scale, scale_low)
    row_ptr, window_ptr, head = locate(x_ptr, shift, row, x_stride, VEC)
    # a load of 16 bytes that begins in the first `streamed` columns ends in the row; the last columns come at the end
    streamed = tl.maximum(vocab - 2 * VEC, 0)
    whole_tiles = tl.maximum(streamed - LANES, 0) // (K * LANES)
    # the first window of this program, whose lanes below `head` lie before its columns and begin empty; where head
    # is 0, it is needed only by a program that begins beyond the whole tiles
    column = first * SEGMENT * K * LANES + tl.arange(0, LANES) - head
    fresh = (column >= first * SEGMENT * K * LANES) & (column < streamed)
    fresh = fresh & ((head > 0) | (first * SEGMENT > whole_tiles))
    carry = cap(tl.load(row_ptr + column, mask=fresh, other=0.0).to(tl.float32), softcap)
    carry = tl.where(fresh, carry, float("-inf"))
    m, rest, t = start(THREADS)
    for segment in tl.range(first, last, num_stages=1):
        segment_lanes, carry = segment_state(
            window_ptr,
            head,
            carry,
            segment,
            whole_tiles,
            streamed,
            scale,
            softcap,
            K,
            LANES,
            VEC,
            SEGMENT,
            AHEAD,
        )
        segment_m, segment_rest, segment_t = segment_lanes
        # a program with one segment leaves its lanes to `logprob_merge_kernel`
        if has_whole_row == 0:
            at = (
                lanes_ptr
                + (tl.program_id(0) - unsplit_rows).to(tl.int64) * (3 * THREADS)
                + tl.arange(0, THREADS)
            )
            tl.store(at, segment_m)
            tl.store(at + THREADS, segment_rest)
            tl.store(at + 2 * THREADS, segment_t)
        m, rest, t = merge(m, rest, t, segment_m, segment_rest, segment_t, scale)
    # the last columns, which were not streamed
    if has_whole_row:
        x = load_columns(row_ptr, streamed + tl.arange(0, THREADS), vocab, softcap)
        state = step(m, rest, t, (x,), scale, 1)
        store_row(
            outputs, row, row_ptr, target_ptr, state, vocab, inv_t, scale, scale_low, softcap, LANES
        )


@triton.jit(do_not_specialize=RUNTIME)
def logprob_merge_kernel(
    x_ptr,  # (N, V) bf16, fp16 or fp32
    target_ptr,  # (N,) int64
    mask_ptr,  # (N,) bool, or None
    inv_t_ptr,  # (N,) fp32, or None
    logprob_ptr,  # (N,) fp32, as the next four
    entropy_ptr,
    lse_ptr,
    m_ptr,
    rest_ptr,
    lanes_ptr,  # (N - unsplit_rows, segments, 3, THREADS) fp32
    unsplit_rows,
    segments,
    shift,
    vocab,
    x_stride: tl.int64,
    inv_t,
    scale,
    scale_low,
    softcap,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
):
    THREADS: tl.constexpr = LANES // VEC
    nth = tl.program_id(0).to(tl.int64)
    row = unsplit_rows + nth
    outputs = (logprob_ptr, entropy_ptr, lse_ptr, m_ptr, rest_ptr)
    if mask_ptr is not None:  # noqa: SIM102
        if tl.load(mask_ptr + row) == 0:
            store_zeros(outputs, row)
            return
    inv_t, scale, scale_low = row_scale(inv_t_ptr, row, inv_t, scale, scale_low)
    m, rest, t = start(THREADS)
    for segment in tl.range(0, segments, num_stages=1):
        at = lanes_ptr + (nth * segments + segment) * 3 * THREADS + tl.arange(0, THREADS)
        segment_m, segment_rest, segment_t = (
            tl.load(at),
            tl.load(at + THREADS),
            tl.load(at + 2 * THREADS),
        )
        m, rest, t = merge(m, rest, t, segment_m, segment_rest, segment_t, scale)
    # the last columns, which the programs of the segments have not read
    row_ptr, _window_ptr, _head = locate(x_ptr, shift, row, x_stride, VEC)
    streamed = tl.maximum(vocab - 2 * VEC, 0)
    x = load_columns(row_ptr, streamed + tl.arange(0, THREADS), vocab, softcap)
    state = step(m, rest, t, (x,), scale, 1)
    store_row(
        outputs, row, row_ptr, target_ptr, state, vocab, inv_t, scale, scale_low, softcap, LANES
    )


def logprob_fwd(logits, targets, mask, inv_temperature, softcap):
    """Return the `RowStatistics` of the rows of logits, each (N,) fp32, with zeros in masked rows.

    Args:
        logits: (N, V) bf16, fp16 or fp32.
        targets: (N,) int64; the log-probability of a target outside the vocabulary is NaN.
        mask: (N,) bool, True for the rows that count, or None for all.
        inv_temperature: 1 / temperature, a float or (N,) fp32.
        softcap: logits x become softcap * tanh(x / softcap); None leaves them as they are.
    """
    n, vocab = logits.shape
    # separate tensors, not rows of one: each is aligned to 16 bytes, and an operator may not return views of one tensor
    logprobs = torch.empty(n, dtype=torch.float32, device=logits.device)
    outputs = RowStatistics(logprobs, *map(torch.empty_like, [logprobs] * 4))
    if n == 0:
        return outputs
    options = launch_options(logits)
    softcap = None if softcap is None else float(softcap)
    inv_t_ptr, *scales = temperature_scales(inv_temperature)
    tiles = SEGMENT if vocab > SHORT else 1
    segments = cdiv(vocab, tiles * K * options["LANES"])
    unsplit_rows = choose_unsplit_rows(n, segments, slots(logits.device, options))
    lanes = outputs.rest  # for nothing: every row has one program
    if unsplit_rows < n:
        shape = (n - unsplit_rows, segments, 3, options["LANES"] // options["VEC"])
        lanes = outputs.rest.new_empty(shape)
    x, shift = aligned(logits)
    pointers = (x, *contiguous(targets, mask), inv_t_ptr, *outputs, lanes)
    numbers = (unsplit_rows, segments, shift, vocab, logits.stride(0), *scales, softcap)
    grid = (unsplit_rows + (n - unsplit_rows) * segments,)
    of_rows = options | streaming() | {"K": K, "SEGMENT": tiles}
    launch(logprob_fwd_kernel, grid, pointers, numbers, of_rows)
    if unsplit_rows < n:
        launch(logprob_merge_kernel, (n - unsplit_rows,), pointers, numbers, options)
    return outputs
