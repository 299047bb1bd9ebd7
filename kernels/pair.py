"""What the kernels of KL and of Jensen-Shannon share: two rows of logits x and y, read together, as p and q.

`fused_rl.kernels.kl` has the formulas. `state` is what its forward leaves per row, a tensor (9, N) fp32; `KLState`
names its rows on the host, `AT_M` to `AT_K` in a kernel.
"""

import torch
import triton
import triton.language as tl

from fused_rl.kernels.states import KLState

LOG2E = tl.constexpr(1.4426950408889634)
BANNED = tl.constexpr(-1e20)  # stands for -inf, and for whatever is below: differences stay finite
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
RUNTIME = ("N", "T", "V", "stride_xb", "stride_xt", "stride_yb", "stride_yt", "inv_t")


@triton.jit
def load(x_ptr, y_ptr, cols, V, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(x_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(x_ptr + cols).to(tl.float32)
        y = tl.load(y_ptr + cols).to(tl.float32)
    return tl.maximum(x, BANNED, propagate_nan=ALL_NAN), tl.maximum(y, BANNED, propagate_nan=ALL_NAN)


@triton.jit
def difference(x, y, offset, EXACT: tl.constexpr):
    """x - y - offset, with what x - y rounds off (Knuth's TwoSum) but for bf16, where that is next to nothing."""
    d = x - y
    if not EXACT:
        return d - offset
    back = d - x
    return (d - offset) + ((x - (d - back)) - (y + back))


@triton.jit
def excess(u):  # exp(-u) - 1 + u for |u| <= 1 by a polynomial (Chebyshev fit, 1.2e-7 relative): exp would cancel
    p = tl.fma(u, 2.5358644e-05, -2.0329202e-04)
    p = tl.fma(u, p, 1.3885394e-03)
    p = tl.fma(u, p, -8.3308844e-03)
    p = tl.fma(u, p, 4.1666735e-02)
    p = tl.fma(u, p, -1.6666697e-01)
    return u * u * tl.fma(u, p, 0.5)


@triton.jit
def is_masked(mask_ptr, row):
    return False if mask_ptr is None else tl.load(mask_ptr + row) == 0


@triton.jit
def row_offset(row, T, stride_b, stride_t, ALIGNED: tl.constexpr):
    row = row.to(tl.int64)
    offset = (row // T) * stride_b + (row % T) * stride_t
    return tl.multiple_of(offset, 16) if ALIGNED else offset


@triton.jit
def p_q_delta(x, y, m, w_all, offset, c, n, s, k, inv_t, EXACT: tl.constexpr):
    """p, q, u, delta = u + k = log(p / q) of a tile, and expm1(-delta) where |delta| < 1."""
    p = tl.exp2((x - m) * (inv_t * LOG2E)) * tl.where(w_all == 0, 0.0, 1 / w_all)
    q = tl.exp2((y - n) * (inv_t * LOG2E)) * tl.where(s == 0, 0.0, 1 / s)
    u = tl.fma(difference(x, y, offset, EXACT), inv_t, -c)
    delta = u + k
    return p, q, u, delta, excess(delta) - delta


@triton.jit
def load_state(state_ptr, row, N):
    """Of `KLState` what the gradients take."""
    state_ptr += row
    m = tl.load(state_ptr + AT_M * N)
    w_all = tl.load(state_ptr + AT_W_ALL * N)
    offset = tl.load(state_ptr + AT_OFFSET * N)
    c = tl.load(state_ptr + AT_C * N)
    n = tl.load(state_ptr + AT_N * N)
    s = tl.load(state_ptr + AT_S * N)
    k = tl.load(state_ptr + AT_K * N)
    return m, w_all, offset, c, n, s, k


@triton.jit
def about_the_maxima(state, inv_t):
    """The state about the rows' maxima where KL is large: u and k would cancel where the two distributions meet."""
    m, w_all, offset, c, n, s, k = state
    far = k > 8
    apart = m - n
    c = tl.where(far, difference(m, n, apart, True) * inv_t, c)
    k = tl.where(far, tl.log(s / w_all), k)
    return m, w_all, tl.where(far, apart, offset), c, n, s, k


def warps():
    return THREADS // (64 if torch.version.hip else 32)


def launch_arguments(x, y, inv_t):
    """x, y; inv_t_ptr or None; sizes, strides, inv_t and ALIGNED as every kernel here takes them."""
    b, t, vocab = x.shape
    aligned = vocab % 16 == 0
    if aligned:
        x, y = from_16_bytes(x), from_16_bytes(y)
    per_row = isinstance(inv_t, torch.Tensor)
    strides = [*x.stride()[:2], *y.stride()[:2]]
    inv_t_ptr, inv_t = (inv_t, 1.0) if per_row else (None, inv_t)
    return x, y, inv_t_ptr, (b * t, t, vocab, *strides, inv_t, aligned)


def from_16_bytes(x):
    """x, or a copy whose rows all begin at 16 bytes: wide loads, and columns in one order, hence one set of bits."""
    begins = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:2])
    return x if begins else x.clone(memory_format=torch.contiguous_format)
