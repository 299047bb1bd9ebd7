"""What the kernels of KL and Jensen-Shannon share: they read two rows of logits x and y together, as p and q.

`fused_rl.kernels.kl` has the formulas. `state` is what its forward pass keeps of each row, a tensor (9, N) fp32, whose
rows are named by `KLState` on the host and by `AT_M` to `AT_K` in a kernel.
"""

import torch
import triton
import triton.language as tl

from .lanes import cap
from .launch import aligned
from .online import widen
from .states import KLState

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
BANNED = tl.constexpr(-1e20)  # stands for -inf and all below it, so that differences stay finite
ALL_NAN = tl.constexpr(tl.PropagateNan.ALL)

# The row of each number in `state`: a kernel cannot read a NamedTuple.
AT_M = tl.constexpr(KLState._fields.index("m"))
AT_W = tl.constexpr(KLState._fields.index("w"))
AT_W_ALL = tl.constexpr(KLState._fields.index("w_all"))
AT_OFFSET = tl.constexpr(KLState._fields.index("offset"))
AT_C = tl.constexpr(KLState._fields.index("c"))
AT_N = tl.constexpr(KLState._fields.index("n"))
AT_F = tl.constexpr(KLState._fields.index("f"))
AT_S = tl.constexpr(KLState._fields.index("s"))
AT_K = tl.constexpr(KLState._fields.index("k"))

THREADS = 128  # per program

# A new length, batch, vocabulary or temperature must not compile anything.
RUNTIME = ("N", "T", "V", "x_shift", "y_shift", "stride_xb", "stride_xt", "stride_yb", "stride_yt")
RUNTIME += ("inv_t", "wide", "softcap")
SHARES = ("p_share", "q_share")  # the same for the arguments that only Jensen-Shannon has


@triton.jit
def banned_as_finite(x):
    """Return x in fp32 with BANNED in place of -inf."""
    return tl.maximum(x.to(tl.float32), BANNED, propagate_nan=ALL_NAN)


@triton.jit
def as_logits(x, mask, softcap):
    """Return x in fp32, with BANNED for -inf; or capped, in which case only what the mask leaves out is banned."""
    if softcap is None:
        return banned_as_finite(x)
    else:  # noqa: RET505
        x = cap(x.to(tl.float32), softcap)
        return x if mask is None else tl.where(mask, x, BANNED)


@triton.jit
def load(x_ptr, y_ptr, cols, stop, softcap):
    """Return columns of both rows in fp32, capped; those from `stop` on are banned, or none if `stop` is None."""
    mask = None if stop is None else cols < stop
    other = None if stop is None else float("-inf")
    x = tl.load(x_ptr + cols, mask=mask, other=other)
    y = tl.load(y_ptr + cols, mask=mask, other=other)
    return as_logits(x, mask, softcap), as_logits(y, mask, softcap)


@triton.jit
def load_together(ptr, THREADS: tl.constexpr, VEC: tl.constexpr):
    """Return (THREADS, VEC) fp32 in memory order from `ptr` on, a 16-byte boundary, with one load per thread."""
    thread = tl.arange(0, THREADS)[:, None]
    if ptr.dtype.element_ty == tl.bfloat16:
        words = thread * (VEC // 2) + tl.arange(0, VEC // 2)[None, :]
        return widen(tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + words))
    else:  # noqa: RET505
        return tl.load(ptr + (thread * VEC + tl.arange(0, VEC)[None, :])).to(tl.float32)


@triton.jit
def load_rotated(ptr, head, THREADS: tl.constexpr, VEC: tl.constexpr):
    """Return what `load_together` would `head` elements after `ptr`, a 16-byte boundary, for any head below VEC.

    A thread loads its 16 bytes and those of the next thread, which the cache has, and takes its elements out of both.
    The last of these loads ends VEC elements after the last element that is returned.
    """
    words = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    words += tl.arange(0, THREADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    ws = _columns(tl.load(words)) + _columns(tl.load(words + 4))
    # past two words, past one, and past half a word
    skipped = head * 4 // VEC
    ws = _from(_from(ws, skipped >= 2, 2), skipped % 2 == 1, 1)
    if VEC == 8:
        ws = _halves_later(ws, head % 2 * 16)
    words = tl.join(tl.join(ws[0], ws[2]), tl.join(ws[1], ws[3]))
    return _as_fp32(tl.reshape(words, (THREADS, 4)), ptr.dtype.element_ty)


@triton.jit
def _columns(words):
    """Return the four columns (THREADS,) of words (THREADS, 4) as a tuple."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _from(words, later, n: tl.constexpr):
    """Return the words of a tuple without the last n, or without the first n where `later` is set."""
    chosen = ()
    for i in tl.static_range(len(words) - n):
        chosen = chosen + (tl.where(later, words[i + n], words[i]),)
    return chosen


@triton.jit
def _halves_later(words, bits):
    """Return the words that begin `bits` bits later, 0 or 16, one fewer."""
    later_words = ()
    for i in tl.static_range(len(words) - 1):
        pair = (words[i + 1].to(tl.int64) << 32) | (words[i].to(tl.int64) & 0xFFFFFFFF)
        later_words = later_words + ((pair >> bits).to(tl.int32),)
    return later_words


@triton.jit
def _as_fp32(words, dtype: tl.constexpr):
    """Return the elements of words (THREADS, 4) in memory order: (THREADS, 4) of fp32, (THREADS, 8) of 16 bits."""
    if dtype == tl.float32:
        return words.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:  # noqa: RET505
        return widen(words)
    else:
        low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
        return tl.interleave(low, high).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def difference(x, y, offset, EXACT: tl.constexpr):
    """Return x - y - offset; if EXACT, it includes what the rounding of x - y takes off (Knuth's TwoSum).

    The kernels leave that out for bf16 logits, where it is almost always 0.
    """
    d = x - y
    if not EXACT:
        return d - offset
    back = d - x
    return (d - offset) + ((x - (d - back)) - (y + back))


@triton.jit
def excess(u):
    """Return exp(-u) - 1 + u for |u| <= 1, by a polynomial because exp would cancel.

    It is a Chebyshev fit with a relative error of 1.2e-7.
    """
    p = tl.fma(u, 2.5358644e-05, -2.0329202e-04)
    p = tl.fma(u, p, 1.3885394e-03)
    p = tl.fma(u, p, -8.3308844e-03)
    p = tl.fma(u, p, 4.1666735e-02)
    p = tl.fma(u, p, -1.6666697e-01)
    return u * u * tl.fma(u, p, 0.5)


@triton.jit
def is_masked(mask_ptr, row):
    """Return True if the row does not count."""
    return False if mask_ptr is None else tl.load(mask_ptr + row) == 0


@triton.jit
def row_offset(row, T, stride_b, stride_t, shift):
    """Return where row b T + t of a tensor (B, T, V) begins, in elements from the pointer."""
    row = row.to(tl.int64)
    return (row // T) * stride_b + (row % T) * stride_t + shift


@triton.jit
def p_q_delta(x, y, m, w_all, offset, c, n, s, k, inv_t, EXACT: tl.constexpr):
    """Return p, q, u and delta = u + k = log(p / q) of a tile, and expm1(-delta), which is right where |delta| < 1."""
    p = tl.exp2((x - m) * (inv_t * LOG2E)) * tl.where(w_all == 0, 0.0, 1 / w_all)
    q = tl.exp2((y - n) * (inv_t * LOG2E)) * tl.where(s == 0, 0.0, 1 / s)
    u = tl.fma(difference(x, y, offset, EXACT), inv_t, -c)
    delta = u + k
    return p, q, u, delta, excess(delta) - delta


@triton.jit
def load_state(state_ptr, row, N, alive):
    """Load the part of `KLState` that the gradients read, or zeros if the row is not alive."""
    state_ptr += row
    m = tl.load(state_ptr + AT_M * N, mask=alive, other=0.0)
    w_all = tl.load(state_ptr + AT_W_ALL * N, mask=alive, other=0.0)
    offset = tl.load(state_ptr + AT_OFFSET * N, mask=alive, other=0.0)
    c = tl.load(state_ptr + AT_C * N, mask=alive, other=0.0)
    n = tl.load(state_ptr + AT_N * N, mask=alive, other=0.0)
    s = tl.load(state_ptr + AT_S * N, mask=alive, other=0.0)
    k = tl.load(state_ptr + AT_K * N, mask=alive, other=0.0)
    return m, w_all, offset, c, n, s, k


@triton.jit
def about_the_maxima(state, inv_t):
    """Return the state relative to the rows' maxima where KL is large.

    Otherwise u and k would cancel in delta at the columns where both distributions have mass.
    """
    m, w_all, offset, c, n, s, k = state
    far = k > 8
    apart = m - n
    c = tl.where(far, difference(m, n, apart, True) * inv_t, c)
    k = tl.where(far, tl.log(s / w_all), k)
    return m, w_all, tl.where(far, apart, offset), c, n, s, k


def warps():
    """Return the warps of a program, which have 64 threads on AMD devices and 32 elsewhere."""
    return THREADS // (64 if torch.version.hip else 32)


def launch_arguments(x, y, inv_t, softcap):
    """Return x and y from a 16-byte boundary on, inv_t_ptr or None, and the numbers that every kernel here takes.

    These are in the kernels' order: the sizes; where x and y begin, in elements; the strides; inv_t; whether all rows
    begin at 16-byte boundaries; and the soft cap.
    """
    b, t, vocab = x.shape
    wide = vocab % 16 == 0
    if wide:
        x, y = from_16_bytes(x), from_16_bytes(y)
    strides = [*x.stride()[:2], *y.stride()[:2]]
    (x, x_shift), (y, y_shift) = aligned(x), aligned(y)
    softcap = None if softcap is None else float(softcap)
    per_row = isinstance(inv_t, torch.Tensor)
    inv_t_ptr, inv_t = (inv_t, 1.0) if per_row else (None, inv_t)
    return x, y, inv_t_ptr, (b * t, t, vocab, x_shift, y_shift, *strides, inv_t, int(wide), softcap)


def from_16_bytes(x):
    """Return x, or a copy of it if not all rows begin at 16-byte boundaries.

    Loads are then wide, and columns meet in one order whatever the strides, so the result has the same bits.
    """
    begins = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:2])
    return x if begins else x.clone(memory_format=torch.contiguous_format)
