"""Log-probability, entropy and log-sum-exp of rows of logits: one read forward, one read and one write backward.

Forward (2 bytes per bf16 logit): a program per row streams tiles of K * LANES columns through the lanes of `online.py`
and reduces them once at the end. Backward (4 bytes): with p_j = softmax(x)_j and x = logits / temperature,

    dx_j = [ dlp (1{j = target} - p_j) - dH p_j (log p_j + H) + dlse p_j ] / temperature  =  2^d_j (a + b d_j)

off the target, where d_j is the forward's distance to the maximum in log2 units and a, b are constants of the row.

A row's result has the same bits in any batch, at any stride and alignment, and split over programs or not:
- which columns meet in a lane, and in which order, follows from the column's number alone. What is loaded is windows of
  LANES elements, aligned to 16 bytes wherever the row begins. A row that begins `head` elements into its first window
  has its lanes rotated by `head`, and the lanes below `head`, which wrap around, take their elements one window later;
- SEGMENT tiles make a segment: V alone says how many; they merge lane by lane, in order, in one program or in many;
- the reduction of the lanes is free of order.
"""

import struct

import torch
import triton
import triton.language as tl

from fused_rl.kernels.online import (
    FAR,
    LN2,
    NAN,
    exact_sum,
    in_range,
    log1p,
    merge,
    reduce_lanes,
    start,
    step,
    tanh,
    valid,
    widen,
)
from fused_rl.kernels.states import RowStatistics

THREADS = 128  # per program
K = 8  # windows per tile: one rescaling per K elements of a lane
TAIL = tl.constexpr(4)  # the same in the masked end of a row
SEGMENT = 4  # tiles


@triton.jit
def load_lanes(ptr, stop, LANES: tl.constexpr, VEC: tl.constexpr):
    """(LANES,) fp32 from `ptr` on, aligned to 16 bytes; 16 bytes that begin at or after `stop` are not read."""
    if ptr.dtype.element_ty == tl.bfloat16:
        at = tl.arange(0, LANES // 2)
        mask = None if stop is None else 2 * (at // (VEC // 2) * (VEC // 2)) < stop
        return widen(tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at, mask=mask))
    else:  # noqa: RET505
        at = tl.arange(0, LANES)
        mask = None if stop is None else at // VEC * VEC < stop
        return tl.load(ptr + at, mask=mask).to(tl.float32)


@triton.jit
def cap(x, softcap):
    return x if softcap is None else softcap * tanh(x * (1.0 / softcap))


@triton.jit
def load_window(window_ptr, index, head, vocab, softcap, LANES: tl.constexpr, VEC: tl.constexpr):
    """Window `index` of a row, -inf from column vocab on; the row goes on for another VEC columns at least."""
    lane = tl.arange(0, LANES)
    column = index * LANES + lane - head
    x = load_lanes(window_ptr + index * LANES, head + vocab - index * LANES, LANES, VEC)
    return tl.where(column < vocab, cap(x, softcap), float("-inf"))


@triton.jit
def uncap(y, softcap):
    """The derivative of `cap` where it is y."""
    u = y * (1.0 / softcap)
    return tl.fma(-u, u, 1.0)


@triton.jit
def segment_state(
    window_ptr,
    head,
    carry,
    segment,
    inside,
    vocab,
    scale,
    softcap,
    K: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Lane states over one segment, and the last window read; the row begins `head` elements after `window_ptr`.

    The first `inside` tiles lie in the row together with the window after them, wherever it begins.
    """
    lane = tl.arange(0, LANES)
    m, rest, t = start(LANES)
    first = segment * SEGMENT
    whole = tl.minimum(tl.maximum(inside, first), first + SEGMENT)
    # whole tiles: where the row begins at a window, each window is loaded for itself
    if head == 0:
        for i in tl.range(first, whole, num_stages=1):
            xs = ()
            for k in tl.static_range(K):
                xs = xs + (cap(load_lanes(window_ptr + (i * K + k) * LANES, None, LANES, VEC), softcap),)
            m, rest, t = step(m, rest, t, xs, scale, K)
        if (first <= inside) & (inside < first + SEGMENT):
            carry = load_window(window_ptr, whole * K, 0, vocab, softcap, LANES, VEC)
    # and where it does not, a lane below `head` takes its element from the next window
    else:
        for i in tl.range(first, whole, num_stages=1):
            xs = ()
            for k in tl.static_range(K):
                x = cap(load_lanes(window_ptr + (i * K + k + 1) * LANES, None, LANES, VEC), softcap)
                xs = xs + (tl.where(lane < head, x, carry),)
                carry = x
            m, rest, t = step(m, rest, t, xs, scale, K)
    # the row's end, masked
    stop = tl.minimum((first + SEGMENT) * K, tl.cdiv(vocab, LANES))
    for i in tl.range(whole * K, stop, TAIL, num_stages=1):
        xs = ()
        for k in tl.static_range(TAIL):
            x = load_window(window_ptr, i + k + 1, head, vocab, softcap, LANES, VEC)
            xs = xs + (tl.where(lane < head, x, carry),)
            carry = x
        m, rest, t = step(m, rest, t, xs, scale, TAIL)
    return (m, rest, t), carry


@triton.jit
def locate(x_ptr, shift, row, x_stride, VEC: tl.constexpr):
    """Where a row begins, the 16-byte boundary before it, and the elements between the two."""
    offset = shift + row * x_stride
    return x_ptr + offset, x_ptr + offset // VEC * VEC, (offset % VEC).to(tl.int32)


@triton.jit
def last_columns(row_ptr, head, streamed, vocab, softcap, LANES: tl.constexpr):
    """The columns from `streamed` on, each in its lane; -inf in the others."""
    column = streamed + ((tl.arange(0, LANES) - head - streamed) & (LANES - 1))
    x = tl.load(row_ptr + column, mask=column < vocab, other=0.0).to(tl.float32)
    return tl.where(column < vocab, cap(x, softcap), float("-inf"))


@triton.jit
def row_scale(inv_t_ptr, row, inv_t, scale, scale_low):
    """1 / temperature of a row, and log2(e) / temperature in two parts; the caller's where all rows share them."""
    if inv_t_ptr is not None:
        inv_t = valid(tl.load(inv_t_ptr + row))
        scale = tl.fma(inv_t, 1.4426950216293335, 0.0)
        scale_low = tl.fma(inv_t, 1.4426950216293335, -scale) + inv_t * 1.925963033500011e-08
    return inv_t, scale, scale_low


@triton.jit
def load_columns(x_ptr, column, vocab, softcap):
    x = tl.load(x_ptr + column, mask=column < vocab, other=0.0).to(tl.float32)
    return tl.where(column < vocab, cap(x, softcap), float("-inf"))


@triton.jit
def wide_row(x_ptr, vocab, scale, scale_low, softcap, LANES: tl.constexpr):
    """As `reduce_lanes`, from two more reads of the row: right for all logits, at the price of those reads."""
    lane = tl.arange(0, LANES)
    lane_m = tl.full((LANES,), float("-inf"), tl.float32)
    for begin in tl.range(0, vocab, LANES, num_stages=1):
        lane_m = tl.maximum(lane_m, load_columns(x_ptr, begin + lane, vocab, softcap))
    m = tl.max(lane_m, 0)

    # about the maximum; +inf and NaN become NaN in the sums
    about = tl.where(m == float("-inf"), 0.0, m)
    off = scale_low / scale
    ties, rest, t = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    for begin in tl.range(0, vocab, LANES, num_stages=1):
        x = load_columns(x_ptr, begin + lane, vocab, softcap)
        d = tl.maximum((x - about) * scale, FAR, propagate_nan=NAN)
        d = tl.fma(d, off, d)
        p = tl.exp2(d)
        ties += (x == m).to(tl.int32)
        rest += tl.where(x == m, p - 1.0, p)  # NaN from inf - inf
        t = tl.fma(p, -d, t)
    more = tl.maximum(tl.sum(ties, 0) - 1, 0).to(tl.float32)
    return m, exact_sum(rest) + more, -LN2 * exact_sum(t)


@triton.jit
def store_row(outputs, row, x_ptr, target_ptr, state, vocab, inv_t, scale, scale_low, softcap, LANES: tl.constexpr):
    """Reduce the lanes of the row that begins at `x_ptr` and store logprob, entropy, lse, m and rest."""
    logprob_ptr, entropy_ptr, lse_ptr, m_ptr, rest_ptr = outputs
    lane_m, lane_rest, lane_t = state
    m, rest, t = reduce_lanes(lane_m, lane_rest, lane_t, scale, scale_low)
    if in_range(m, rest, t, scale) == 0:
        m, rest, t = wide_row(x_ptr, vocab, scale, scale_low, softcap, LANES)
    banned = (m == float("-inf")) & (rest == rest)  # nothing but -inf
    target = tl.load(target_ptr + row)
    known = (target >= 0) & (target < vocab)
    x = cap(tl.load(x_ptr + target, mask=known, other=0.0).to(tl.float32), softcap)
    log1 = log1p(rest)
    logprob = (tl.minimum(x, m, propagate_nan=NAN) - m) * inv_t - log1
    logprob = tl.where(banned, float("-inf"), logprob)
    tl.store(logprob_ptr + row, tl.where(known, logprob, float("nan")))
    tl.store(entropy_ptr + row, tl.where(banned, 0.0, log1 - t / (1.0 + rest)))
    tl.store(lse_ptr + row, tl.where(banned, float("-inf"), tl.fma(m, inv_t, log1)))
    tl.store(m_ptr + row, tl.where(banned, float("-inf"), m))
    tl.store(rest_ptr + row, tl.where(banned, 0.0, rest))


@triton.jit
def store_zeros(outputs, row):
    for i in tl.static_range(5):
        tl.store(outputs[i] + row, 0.0)


@triton.jit(do_not_specialize=["shift", "vocab", "x_stride", "inv_t", "scale", "scale_low", "softcap"])
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
    lanes_ptr,  # (N, segments, 3, LANES) fp32: a program per segment leaves its lanes there; None: a program per row
    shift,  # x begins so many elements after x_ptr, which is aligned to 16 bytes
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
):
    row = tl.program_id(0).to(tl.int64)
    outputs = (logprob_ptr, entropy_ptr, lse_ptr, m_ptr, rest_ptr)
    if mask_ptr is not None:  # noqa: SIM102 (the load must not be traced where the pointer is None)
        if tl.load(mask_ptr + row) == 0:
            if lanes_ptr is None:
                store_zeros(outputs, row)
            return
    inv_t, scale, scale_low = row_scale(inv_t_ptr, row, inv_t, scale, scale_low)
    row_ptr, window_ptr, head = locate(x_ptr, shift, row, x_stride, VEC)
    streamed = tl.maximum(vocab - 2 * VEC, 0)  # columns; a whole load that begins in them ends in the row
    inside = tl.maximum(streamed - LANES, 0) // (K * LANES)
    begin, lane = tl.program_id(1) * SEGMENT, tl.arange(0, LANES)
    column = begin * K * LANES + lane - head
    fresh = (lane >= head) & (column < streamed) & ((head > 0) | (begin > inside))
    carry = cap(tl.load(row_ptr + column, mask=fresh, other=0.0).to(tl.float32), softcap)
    carry = tl.where(fresh, carry, float("-inf"))
    if lanes_ptr is not None:
        segment = tl.program_id(1)
        state, carry = segment_state(
            window_ptr, head, carry, segment, inside, streamed, scale, softcap, K, LANES, VEC, SEGMENT
        )
        at = lanes_ptr + (row * tl.num_programs(1) + segment) * 3 * LANES + lane
        for i in tl.static_range(3):
            tl.store(at + i * LANES, state[i])
    else:
        m, rest, t = start(LANES)
        for segment in tl.range(0, tl.cdiv(streamed, SEGMENT * K * LANES), num_stages=1):
            part, carry = segment_state(
                window_ptr, head, carry, segment, inside, streamed, scale, softcap, K, LANES, VEC, SEGMENT
            )
            part_m, part_rest, part_t = part
            m, rest, t = merge(m, rest, t, part_m, part_rest, part_t, scale)
        x = last_columns(row_ptr, head, streamed, vocab, softcap, LANES)
        state = step(m, rest, t, (x,), scale, 1)
        store_row(outputs, row, row_ptr, target_ptr, state, vocab, inv_t, scale, scale_low, softcap, LANES)


@triton.jit(
    do_not_specialize=["segments", "shift", "vocab", "x_stride", "inv_t", "scale", "scale_low", "softcap"],
)
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
    lanes_ptr,  # (N, segments, 3, LANES) fp32
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
    row = tl.program_id(0).to(tl.int64)
    outputs = (logprob_ptr, entropy_ptr, lse_ptr, m_ptr, rest_ptr)
    if mask_ptr is not None:  # noqa: SIM102
        if tl.load(mask_ptr + row) == 0:
            store_zeros(outputs, row)
            return
    inv_t, scale, scale_low = row_scale(inv_t_ptr, row, inv_t, scale, scale_low)
    m, rest, t = start(LANES)
    for segment in tl.range(0, segments, num_stages=1):
        at = lanes_ptr + (row * segments + segment) * 3 * LANES + tl.arange(0, LANES)
        part_m, part_rest, part_t = tl.load(at), tl.load(at + LANES), tl.load(at + 2 * LANES)
        m, rest, t = merge(m, rest, t, part_m, part_rest, part_t, scale)
    row_ptr, window_ptr, head = locate(x_ptr, shift, row, x_stride, VEC)
    x = last_columns(row_ptr, head, tl.maximum(vocab - 2 * VEC, 0), vocab, softcap, LANES)
    state = step(m, rest, t, (x,), scale, 1)
    store_row(outputs, row, row_ptr, target_ptr, state, vocab, inv_t, scale, scale_low, softcap, LANES)


@triton.jit
def gradient(x, m, scale, a, b, softcap):
    """2^d (a + b d) with d = (x - m) * scale, through the soft cap."""
    y = cap(x, softcap)
    d = (y - m) * scale
    if b is None:
        g = tl.exp2(d) * a
    else:
        d = tl.maximum(d, FAR, propagate_nan=NAN)  # 0 * -inf
        g = tl.exp2(d) * tl.fma(b, d, a)
    return g if softcap is None else g * uncap(y, softcap)


@triton.jit
def upstream(ptr, row, alive):
    return 0.0 if ptr is None else tl.load(ptr + row, mask=alive, other=0.0)


@triton.jit
def target_gradient(x, m, rest, entropy, dlogprob, dentropy, dlse, inv_t, softcap):
    """The gradient of the target's logit x, with 1 - p = rest / (1 + rest) exactly where x is the maximum."""
    y = tl.minimum(cap(x, softcap), m, propagate_nan=NAN)
    p_m = 1.0 / (1.0 + rest)
    s = tl.maximum((y - m) * inv_t, FAR, propagate_nan=NAN)
    p = tl.where(y == m, p_m, tl.exp2(s * 1.4426950408889634) * p_m)
    one_minus_p = tl.where(y == m, rest * p_m, 1.0 - p)
    g = inv_t * (dlogprob * one_minus_p + p * (dlse - dentropy * (s - log1p(rest) + entropy)))
    return g if softcap is None else g * uncap(y, softcap)


@triton.jit
def owns(target, lead, tiles, first, last, part, parts, TILE: tl.constexpr, LANES: tl.constexpr):
    """Whether this program writes the target's column: in its whole tiles, or in its share of the columns around."""
    column = target - lead
    if (column < 0) | (column >= tiles * TILE):
        around = tl.where(column < 0, target, target - tiles * TILE)
        return around // LANES % parts == part
    return (column >= first * TILE) & (column < last * TILE)


@triton.jit(
    do_not_specialize=["x_shift", "dx_shift", "vocab", "x_stride", "dx_stride", "inv_t", "scale", "softcap"],
)
def logprob_bwd_kernel(
    dlogprob_ptr,  # (N,) fp32 or None, as the next two
    dentropy_ptr,
    dlse_ptr,
    x_ptr,  # (N, V) bf16, fp16 or fp32
    target_ptr,  # (N,) int64
    mask_ptr,  # (N,) bool, or None
    entropy_ptr,  # (N,) fp32, as the next two
    m_ptr,
    rest_ptr,
    inv_t_ptr,  # (N,) fp32, or None: inv_t and scale hold for all rows
    dx_ptr,  # (N, V), may be x
    x_shift,  # x begins so many elements after x_ptr, which is aligned to 16 bytes, and dx likewise
    dx_shift,
    vocab,
    x_stride: tl.int64,
    dx_stride: tl.int64,
    inv_t,
    scale,
    softcap,
    LANES: tl.constexpr,
    VEC: tl.constexpr,  # elements in 16 bytes
):
    TILE: tl.constexpr = 4 * LANES
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    x_offset, dx_offset = x_shift + row * x_stride, dx_shift + row * dx_stride
    x_row, dx_row = x_ptr + x_offset, dx_ptr + dx_offset
    inv_t, scale, _ = row_scale(inv_t_ptr, row, inv_t, scale, 0.0)
    m = tl.load(m_ptr + row)
    alive = m != float("-inf")
    if mask_ptr is not None:
        alive = alive & (tl.load(mask_ptr + row) != 0)

    # of a dead row nothing else is read, so that its constants are 0, and its gradient
    m, scale = tl.where(alive, m, 0.0), tl.where(alive, scale, 0.0)
    rest = tl.load(rest_ptr + row, mask=alive, other=0.0)
    entropy = tl.load(entropy_ptr + row, mask=alive, other=0.0)
    dlogprob, dlse = upstream(dlogprob_ptr, row, alive), upstream(dlse_ptr, row, alive)
    dentropy = upstream(dentropy_ptr, row, alive)
    norm = tl.where(alive, inv_t / (1.0 + rest), 0.0)
    a = norm * (dlse - dlogprob - dentropy * (entropy - log1p(rest)))
    b = None if dentropy_ptr is None else norm * dentropy * -LN2

    # whole tiles between two 16-byte boundaries, if x and dx have these at the same columns; then the columns around
    lead = tl.minimum((VEC - x_offset % VEC) % VEC, vocab).to(tl.int32)
    tiles = tl.where(x_offset % VEC == dx_offset % VEC, (vocab - lead) // TILE, 0)
    first, last = part * tiles // parts, (part + 1) * tiles // parts
    around = vocab - tiles * TILE

    target = tl.load(target_ptr + row)
    owner = alive & (target >= 0) & (target < vocab)
    owner = owner & owns(target, lead, tiles, first, last, part, parts, TILE, LANES)
    x_target = tl.load(x_row + target, mask=owner, other=0.0).to(tl.float32)
    if dlogprob_ptr is not None:
        tl.debug_barrier()  # dx may be x: every thread has the target's logit before one overwrites it

    x_window = x_ptr + (x_offset + (VEC - 1)) // VEC * VEC
    dx_window = dx_ptr + (dx_offset + (VEC - 1)) // VEC * VEC
    read = tl.where(alive, TILE, 0)
    for i in tl.range(first, last, num_stages=1):
        x = load_lanes(x_window + i * TILE, read, TILE, VEC)
        g = gradient(x, m, scale, a, b, softcap)
        tl.store(dx_window + (i * TILE + tl.arange(0, TILE)), g.to(dx_ptr.dtype.element_ty))
    for begin in tl.range(part * LANES, around, parts * LANES, num_stages=1):
        column = begin + tl.arange(0, LANES)
        inside = column < around
        wanted = column < tl.where(alive, around, 0)
        column += tl.where(column < lead, 0, tiles * TILE)
        x = tl.load(x_row + column, mask=wanted, other=0.0).to(tl.float32)
        g = gradient(x, m, scale, a, b, softcap)
        tl.store(dx_row + column, g.to(dx_ptr.dtype.element_ty), mask=inside)
    if dlogprob_ptr is not None:
        tl.debug_barrier()
        g = target_gradient(x_target, m, rest, entropy, dlogprob, dentropy, dlse, inv_t, softcap)
        tl.store(dx_row + target, g.to(dx_ptr.dtype.element_ty), mask=owner)


def launch_options(x):
    """Compile-time arguments and options of a launch over the rows of x."""
    vec = 16 // x.element_size()
    shape = {"LANES": THREADS * vec, "VEC": vec, "num_stages": 1}  # more stages would go through shared memory
    if torch.version.hip:
        return shape | {"num_warps": THREADS // 64}
    # left alone, ptxas hoists the masks and addresses of a row's ends: 240 registers. 168 do without a spill, and three
    # programs share a multiprocessor; but not on Blackwell, whose paired arithmetic needs registers in pairs
    return shape | {"num_warps": THREADS // 32, "maxnreg": 168 if capability(x.device) < (10, 0) else 232}


def capability(device):
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def aligned(x):
    """x from the 16-byte boundary before it on, and the elements between the two."""
    shift = x.data_ptr() % 16 // x.element_size()
    if shift == 0:
        return x, 0
    spans = [(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    size = shift + 1 + sum(spans)
    return x.as_strided((size,), (1,), x.storage_offset() - shift), shift


def temperature_scales(inv_temperature):
    """inv_t_ptr or None, inv_t, and log2(e) * inv_t as a sum of two fp32."""
    if isinstance(inv_temperature, torch.Tensor):
        return inv_temperature.contiguous(), 0.0, 0.0, 0.0
    exact = inv_temperature * 1.4426950408889634
    scale = struct.unpack("f", struct.pack("f", exact))[0]
    return None, float(inv_temperature), scale, exact - scale


def _programs_per_row(x, lanes):
    """More than one where there are fewer rows than multiprocessors: one per segment."""
    segments = triton.cdiv(x.shape[1], SEGMENT * K * lanes)
    return segments if x.shape[0] < multiprocessors(x.device) else 1


def multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def logprob_fwd(logits, targets, mask, inv_temperature, softcap):
    """(N, V), (N,) int64, (N,) bool | None, float | (N,) fp32 -> statistics, (N,) fp32 each."""
    n, vocab = logits.shape
    new = [torch.empty(n, dtype=torch.float32, device=logits.device) for _ in RowStatistics._fields]
    outputs = RowStatistics(*new)  # tensors of their own: each begins at 16 bytes, and an operator may return them
    if n == 0:
        return outputs
    launch, softcap = launch_options(logits), None if softcap is None else float(softcap)
    inv_t_ptr, *scales = temperature_scales(inv_temperature)
    targets, mask = targets.contiguous(), None if mask is None else mask.contiguous()
    parts, lanes = _programs_per_row(logits, launch["LANES"]), None
    if parts > 1:
        lanes = torch.empty(n, parts, 3, launch["LANES"], dtype=torch.float32, device=logits.device)
    x, shift = aligned(logits)
    rows = (x, targets, mask, inv_t_ptr, *outputs, lanes)
    scalars = (shift, vocab, logits.stride(0), *scales, softcap)
    with torch.cuda.device_of(logits):
        logprob_fwd_kernel[(n, parts)](*rows, *scalars, K=K, SEGMENT=SEGMENT, **launch)
        if parts > 1:
            logprob_merge_kernel[(n,)](*rows, parts, *scalars, **launch)
    return outputs


def logprob_bwd(dlogprobs, dentropy, dlse, logits, targets, mask, entropy, m, rest, inv_temperature, softcap, out=None):
    """Gradient of the logits, (N, V) in their dtype; upstream gradients (N,) fp32 or None; `out` may be the logits."""
    n, vocab = logits.shape
    out = torch.empty_like(logits) if out is None else out
    if n == 0:
        return out
    launch, softcap = launch_options(logits), None if softcap is None else float(softcap)
    inv_t_ptr, inv_t, scale, _ = temperature_scales(inv_temperature)
    upstream = [None if d is None else d.contiguous() for d in (dlogprobs, dentropy, dlse)]
    per_row = [None if r is None else r.contiguous() for r in (targets, mask, entropy, m, rest, inv_t_ptr)]
    (x, x_shift), (dx, dx_shift) = aligned(logits), aligned(out)
    strides = (logits.stride(0), out.stride(0))
    grid = (n, _programs_per_row(logits, launch["LANES"]))
    with torch.cuda.device_of(logits):
        logprob_bwd_kernel[grid](
            *upstream, x, *per_row, dx, x_shift, dx_shift, vocab, *strides, inv_t, scale, softcap, **launch
        )
    return out
