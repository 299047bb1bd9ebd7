"""How kernels read a row of logits: windows of LANES elements, single columns, and the row's temperature.

Windows are aligned to 16 bytes wherever the row begins. A row that begins `head` elements into its first window has
its lanes rotated by `head`, and the lanes below `head`, which wrap around, take their elements one window later.
"""

import triton
import triton.language as tl

from .online import tanh, valid, widen


@triton.jit
def load_lanes(ptr, stop, LANES: tl.constexpr, VEC: tl.constexpr):
    """Return (LANES,) fp32 from `ptr` on, which is aligned to 16 bytes.

    Groups of 16 bytes that begin `stop` elements after `ptr` or later are not read.
    """
    return as_fp32(load_raw(ptr, stop, LANES, VEC))


@triton.jit
def load_raw(ptr, stop, LANES: tl.constexpr, VEC: tl.constexpr):
    """Load what `as_fp32` converts to lanes; two bf16 share a register, so loads ahead of time need half as many."""
    if ptr.dtype.element_ty == tl.bfloat16:
        at = tl.arange(0, LANES // 2)
        mask = None if stop is None else 2 * (at // (VEC // 2) * (VEC // 2)) < stop
        return tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at, mask=mask)
    else:  # noqa: RET505
        at = tl.arange(0, LANES)
        mask = None if stop is None else at // VEC * VEC < stop
        return tl.load(ptr + at, mask=mask)


@triton.jit
def as_fp32(raw):
    """Return the fp32 lanes of what `load_raw` loaded."""
    return widen(raw) if raw.dtype == tl.int32 else raw.to(tl.float32)


@triton.jit
def cap(x, softcap):
    """Return x after the soft cap, softcap * tanh(x / softcap), or x itself where softcap is None."""
    return x if softcap is None else softcap * tanh(x * (1.0 / softcap))


@triton.jit
def uncap(y, softcap):
    """Return the derivative of `cap` at the x for which its value is y."""
    u = y * (1.0 / softcap)
    return tl.fma(-u, u, 1.0)


@triton.jit
def load_window(window_ptr, index, head, vocab, softcap, LANES: tl.constexpr, VEC: tl.constexpr):
    """Return window `index` of a row in fp32, -inf from column `vocab` on.

    At least VEC more columns must follow in memory, because 16 bytes are read at once.
    """
    lane = tl.arange(0, LANES)
    column = index * LANES + lane - head
    x = load_lanes(window_ptr + index * LANES, head + vocab - index * LANES, LANES, VEC)
    return tl.where(column < vocab, cap(x, softcap), float("-inf"))


@triton.jit
def load_columns(x_ptr, column, vocab, softcap):
    """Return the capped logits of single columns in fp32, -inf from column `vocab` on."""
    x = tl.load(x_ptr + column, mask=column < vocab, other=0.0).to(tl.float32)
    return tl.where(column < vocab, cap(x, softcap), float("-inf"))


@triton.jit
def locate(x_ptr, shift, row, x_stride, VEC: tl.constexpr):
    """Return where a row begins, the 16-byte boundary at or before that, and the number of elements between the two."""
    offset = shift + row * x_stride
    return x_ptr + offset, x_ptr + offset // VEC * VEC, (offset % VEC).to(tl.int32)


@triton.jit
def by_column(x, head, LANES: tl.constexpr):
    """Return the (LANES,) of a row that begins `head` elements into its first window, rotated as if `head` were 0."""
    return tl.gather(x, (tl.arange(0, LANES) + head) & (LANES - 1), 0)


@triton.jit
def row_scale(inv_t_ptr, row, inv_t, scale, scale_low):
    """Return 1 / temperature of a row, and log2(e) / temperature as a sum of two fp32 numbers.

    These are the arguments themselves where all rows share a temperature and inv_t_ptr is None.
    """
    if inv_t_ptr is not None:
        # the two constants are log2(e) in fp32 and what that rounding took off
        inv_t = valid(tl.load(inv_t_ptr + row))
        scale = tl.fma(inv_t, 1.4426950216293335, 0.0)
        scale_low = tl.fma(inv_t, 1.4426950216293335, -scale) + inv_t * 1.925963033500011e-08
    return inv_t, scale, scale_low
