"""The Jensen-Shannon divergence of rows of logits x, y, from the state that the forward pass of `kl.py` keeps.

Let p, q be the probabilities, s and r = 1 - s their shares in the mixture m = s p + r q (arXiv:2306.13649, eq. 1, where
r is beta), delta = log(p / q), a = log(p / m) and b = log(q / m). The divergence is s sum(p a) + r sum(q b), and with
its upstream gradient g

    dx = g s p (a - sum(p a)) / T    dy = g r q (b - sum(q b)) / T

The two terms of a column cancel where p and q are close. With t = m / p - 1 and t' = m / q - 1, for which
s p t + r q t' = 0, they are s p [t - log1p(t)] + r q [t' - log1p(t')], and neither is negative. If both shares are one
half, their sum divided by the larger of p and q is a polynomial in |delta|, which takes half the instructions.

Bytes: the terms need both normalisers first, so a second sweep over both rows follows that of KL, with one more read of
each. `kl_bwd_kernel` forms the gradients.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, launch
from .online import valid
from .pair import (
    LN2,
    LOG2E,
    RUNTIME,
    SHARES,
    THREADS,
    about_the_maxima,
    as_logits,
    excess,
    is_masked,
    launch_arguments,
    load,
    load_state,
    load_together,
    p_q_delta,
    row_offset,
    warps,
)
from .states import JensenShannonSums, bounded

# The row of each number in `sums`, (3, N) fp32.
AT_DIVERGENCE = tl.constexpr(JensenShannonSums._fields.index("divergence"))
AT_P_A = tl.constexpr(JensenShannonSums._fields.index("p_a"))
AT_Q_B = tl.constexpr(JensenShannonSums._fields.index("q_b"))

SEGMENT = 32  # tiles of 16 bytes per thread; V alone decides how a row is cut


@triton.jit
def _larger(distance):
    """Return log(larger / mean) of two numbers whose logarithms are `distance` apart.

    It is -log((1 + exp(-distance)) / 2).
    """
    near = tl.fma(distance, -2.16920087e-04, -1.92123653e-04)  # minimax on [0, 1], 8e-8 relative
    near = tl.fma(distance, near, 5.32027427e-03)
    near = tl.fma(distance, near, -2.83246651e-05)
    near = tl.fma(distance, near, -1.24997403e-01)
    near = tl.fma(distance, near, 4.99999961e-01) * distance
    ratio = tl.exp2(distance * -LOG2E)
    # log1p(ratio) / -ratio, minimax below exp(-1), because a log takes about 20 instructions
    far = tl.fma(ratio, 6.26193626e-02, -1.57825792e-01)
    far = tl.fma(ratio, far, 2.40578864e-01)
    far = tl.fma(ratio, far, -3.32213895e-01)
    far = tl.fma(ratio, far, 4.99937021e-01)
    far = tl.fma(ratio, tl.fma(ratio, far, -9.99998794e-01), LN2)
    return tl.where(distance < 1, near, far)


@triton.jit
def _near(distance):
    """Return [p log(p / mean) + q log(q / mean)] / max(p, q) where distance = |log p - log q| <= 1.

    A polynomial, because the two terms would cancel.
    """
    near = tl.fma(distance, -1.06589424e-04, 7.91226737e-04)  # minimax, 5e-8 relative
    near = tl.fma(distance, near, -5.16750586e-03)
    near = tl.fma(distance, near, 3.12400975e-02)
    near = tl.fma(distance, near, -1.24999109e-01)
    return distance * distance * tl.fma(distance, near, 2.49999987e-01)


@triton.jit
def _cubic(z):
    """Return log1p(t) / 2 - z for t = 2 z / (1 - z) and |z| < 0.4626, within 4e-8 of t - log1p(t).

    The series is z^3 / 3 + z^5 / 5 + ...
    """
    w = z * z
    series = tl.fma(w, 0.1485572, 0.0991994976)
    series = tl.fma(w, series, 0.143808395)
    series = tl.fma(w, series, 0.199974044)
    return z * w * tl.fma(w, series, 0.333333445)


@triton.jit
def _sides(delta, p_share, q_share):
    """Return log(larger / m) for the larger of p and q, and what it is made of.

    These are the share of the larger and that of the other, other / larger - 1, t = m / larger - 1, and t / (2 + t).
    """
    distance = tl.abs(delta)
    share = tl.where(delta > 0, p_share, q_share)
    other = tl.where(delta > 0, q_share, p_share)
    ratio = tl.exp2(distance * -LOG2E)
    less = tl.where(distance < 1, excess(distance) - distance, ratio - 1)
    t = other * less
    z = t / (2 + t)
    # -log1p(t) by its series; where t is near -1, share + other * ratio has the digits that 1 + t has lost
    far = -tl.log(tl.fma(other, ratio, share))
    larger = tl.where(t > -0.63, -2 * (z + _cubic(z)), far)
    return larger, share, other, less, t, z


@triton.jit
def _near_of(share, other, less, t, z):
    """Return the two terms of a column divided by the larger of p and q, for |log p - log q| <= 1."""
    z_other = -share * less / tl.fma(2 - share, less, 2.0)
    cubic = tl.fma(share, _cubic(z), other * (1 + less) * _cubic(z_other))
    return tl.fma(t * share, z - z_other, -2 * cubic)


@triton.jit
def js_logs(delta, p_share, q_share):
    """Return a = log(p / m) and b = log(q / m); shares of None are halves."""
    distance = tl.abs(delta)
    if p_share is None:
        larger = _larger(distance)
    else:
        larger, _, _, _, _, _ = _sides(delta, p_share, q_share)
    smaller = larger - distance
    return tl.where(delta > 0, larger, smaller), tl.where(delta > 0, smaller, larger)


@triton.jit
def _step(js, p_sum, q_sum, x, y, state, inv_t, p_share, q_share, EXACT: tl.constexpr):
    """Return twice the divergence, sum(p a) and sum(q b), (threads,) each, after one more window (threads, columns).

    The sums have one dimension because some compilers would change the layout of two-dimensional ones in every loop.
    """
    m, w_all, offset, c, n, s, k = state
    p, q, u, delta, expm1 = p_q_delta(x, y, m, w_all, offset, c, n, s, k, inv_t, EXACT)
    distance = tl.abs(delta)
    a, b = js_logs(delta, p_share, q_share)
    a, b = p * a, q * b
    if p_share is None:
        near, far = _near(distance), a + b
    else:
        _, share, other, less, t, z = _sides(delta, p_share, q_share)
        near = 2 * _near_of(share, other, less, t, z)
        far = 2 * tl.fma(p_share, a, q_share * b)
    twice = tl.where(distance < 1, tl.where(delta > 0, p, q) * near, far)
    return js + tl.sum(twice, 1), p_sum + tl.sum(a, 1), q_sum + tl.sum(b, 1)


@triton.jit(do_not_specialize=[*RUNTIME, *SHARES])
def js_kernel(
    x_ptr,  # (B, T, V)
    y_ptr,  # (B, T, V)
    mask_ptr,  # (N,) bool or None
    inv_t_ptr,  # (N,) fp32 or None
    state_ptr,  # (9, N) fp32, see KLState
    sums_ptr,  # (segments, 3, N) fp32, see JensenShannonSums
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
    p_share,  # this and the next are the shares in the mixture, or None for halves
    q_share,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,  # elements in 16 bytes
    SEGMENT: tl.constexpr,
):
    row, segment = tl.program_id(0), tl.program_id(1)
    sums_ptr += segment.to(tl.int64) * 3 * N + row
    alive = is_masked(mask_ptr, row) == 0
    if inv_t_ptr is not None:
        inv_t = valid(tl.load(inv_t_ptr + row, mask=alive, other=1.0))
    EXACT: tl.constexpr = True if softcap is not None else x_ptr.dtype.element_ty != tl.bfloat16
    TILE: tl.constexpr = THREADS * VEC
    x_at = row_offset(row, T, stride_xb, stride_xt, x_shift)
    y_at = row_offset(row, T, stride_yb, stride_yt, y_shift)
    state = about_the_maxima(load_state(state_ptr, row, N, alive), inv_t)
    js = tl.zeros((THREADS,), tl.float32)
    p_sum, q_sum = js, js
    # this program's segment of the row, of which nothing is read if the row is masked
    begin = segment * SEGMENT * TILE
    stop = tl.where(alive, tl.minimum(V, begin + SEGMENT * TILE), begin)
    first_masked = begin + (stop - begin) // TILE * TILE
    # whole tiles: if rows begin at 16-byte boundaries, a thread reads 16 bytes of neighbouring columns; otherwise
    # neighbouring threads read neighbouring columns
    if wide:
        x_wide, y_wide = x_ptr + x_at // VEC * VEC, y_ptr + y_at // VEC * VEC
        for at in tl.range(begin, first_masked, TILE, num_stages=1):
            x = as_logits(load_together(x_wide + at, THREADS, VEC), None, softcap)
            y = as_logits(load_together(y_wide + at, THREADS, VEC), None, softcap)
            js, p_sum, q_sum = _step(js, p_sum, q_sum, x, y, state, inv_t, p_share, q_share, EXACT)
    apart = tl.arange(0, THREADS)[:, None] + tl.arange(0, VEC)[None, :] * THREADS
    x_apart, y_apart = x_ptr + x_at + apart, y_ptr + y_at + apart
    if wide == 0:
        for at in tl.range(begin, first_masked, TILE, num_stages=1):
            x, y = load(x_apart, y_apart, at, None, softcap)
            js, p_sum, q_sum = _step(js, p_sum, q_sum, x, y, state, inv_t, p_share, q_share, EXACT)
    # the end of the segment, less than a tile
    if first_masked < stop:
        x, y = load(x_ptr + x_at, y_ptr + y_at, first_masked + apart, stop, softcap)
        js, p_sum, q_sum = _step(js, p_sum, q_sum, x, y, state, inv_t, p_share, q_share, EXACT)
    tl.store(sums_ptr + AT_DIVERGENCE * N, 0.5 * tl.sum(js, 0))
    tl.store(sums_ptr + AT_P_A * N, tl.sum(p_sum, 0))
    tl.store(sums_ptr + AT_Q_B * N, tl.sum(q_sum, 0))


def js_fwd(x, y, mask, inv_t, state, softcap=None, shares=None):
    """Return the `JensenShannonSums` (3, N) fp32 in nats, N = B T, clamped to their range.

    Args:
        x, y: (B, T, V) logits, as `mask`, `inv_t` and `softcap` the arguments of `kl_fwd`.
        state: (9, N) fp32, the `KLState` that `kl_fwd` returned for them.
        shares: the `Shares` of the mixture, or None for halves.
    """
    n, vocab, vec = x.shape[0] * x.shape[1], x.shape[2], 16 // x.element_size()
    segments = cdiv(vocab, SEGMENT * THREADS * vec)
    by_segment = torch.empty(
        segments, len(JensenShannonSums._fields), n, device=x.device, dtype=torch.float32
    )
    x, y, inv_t, numbers = launch_arguments(x, y, inv_t, softcap)
    if n:
        options = {"THREADS": THREADS, "VEC": vec, "SEGMENT": SEGMENT, "num_warps": warps()}
        numbers = *numbers, *(shares or (None, None))
        launch(js_kernel, (n, segments), (x, y, mask, inv_t, state, by_segment), numbers, options)
    sums = by_segment[0]
    # always in this order, so that a row has the same bits in any batch
    for segment_sums in by_segment[1:]:
        sums = sums + segment_sums
    return bounded(sums, shares)
