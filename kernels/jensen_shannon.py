"""The Jensen-Shannon divergence of rows of logits x, y, over the state that the forward of `kl.py` leaves.

With p, q the probabilities, delta = log(p / q), a = log(p / mean(p, q)), b = log(q / mean(p, q)) and g the upstream
gradient of the divergence [sum(p a) + sum(q b)] / 2:

    dx = g p (a - sum(p a)) / (2 T)    dy = g q (b - sum(q b)) / (2 T)

Bytes: the terms need both normalisers first, so after KL's sweep over both rows comes a second one, two more reads
forward; `kl_bwd_kernel` forms the gradient.
"""

import torch
import triton
import triton.language as tl

from fused_rl.kernels.online import log1p, valid
from fused_rl.kernels.pair import (
    LOG2E,
    RUNTIME,
    about_the_maxima,
    is_masked,
    launch_arguments,
    load,
    load_state,
    p_q_delta,
    row_offset,
    warps,
)
from fused_rl.kernels.states import JensenShannonSums

# The row of each number in `sums`, (3, N) fp32.
AT_DIVERGENCE = tl.constexpr(JensenShannonSums._fields.index("divergence"))
AT_P_A = tl.constexpr(JensenShannonSums._fields.index("p_a"))
AT_Q_B = tl.constexpr(JensenShannonSums._fields.index("q_b"))


@triton.jit
def js_logs(delta, expm1):
    """a = log(p / mean(p, q)), b = log(q / mean(p, q)) and |r| = |p - q| / (p + q)."""
    ratio = tl.exp2(-tl.abs(delta) * LOG2E)  # of the smaller to the larger
    r = tl.where(tl.abs(delta) < 1, tl.abs(expm1) / (2 + expm1), (1 - ratio) / (1 + ratio))
    larger = log1p(r)
    smaller = larger - tl.abs(delta)
    return tl.where(delta > 0, larger, smaller), tl.where(delta > 0, smaller, larger), r


@triton.jit
def _js_step(js, p_sum, q_sum, x, y, state, inv_t, EXACT: tl.constexpr):
    m, w_all, offset, c, n, s, k = state
    p, q, u, delta, expm1 = p_q_delta(x, y, m, w_all, offset, c, n, s, k, inv_t, EXACT)
    a, b, r = js_logs(delta, expm1)
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
    state_ptr,  # (9, N) fp32, see KLState
    sums_ptr,  # (3, N) fp32, see JensenShannonSums
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
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    sums_ptr += row
    if is_masked(mask_ptr, row):
        tl.store(sums_ptr + AT_DIVERGENCE * N, 0.0)
        return
    if inv_t_ptr is not None:
        inv_t = valid(tl.load(inv_t_ptr + row))
    x_ptr += row_offset(row, T, stride_xb, stride_xt, x_shift)
    y_ptr += row_offset(row, T, stride_yb, stride_yt, y_shift)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty != tl.bfloat16
    cols = tl.arange(0, BLOCK)
    state = about_the_maxima(load_state(state_ptr, row, N, True), inv_t)
    js = tl.zeros((BLOCK,), tl.float32)
    p_sum = tl.zeros((BLOCK,), tl.float32)
    q_sum = tl.zeros((BLOCK,), tl.float32)
    full = V // BLOCK * BLOCK
    for start in tl.range(0, full, BLOCK, num_stages=1):
        x, y = load(x_ptr, y_ptr, start + cols, None)
        js, p_sum, q_sum = _js_step(js, p_sum, q_sum, x, y, state, inv_t, EXACT)
    if full < V:
        x, y = load(x_ptr, y_ptr, full + cols, V)
        js, p_sum, q_sum = _js_step(js, p_sum, q_sum, x, y, state, inv_t, EXACT)
    divergence = tl.sum(js, 0)
    tl.store(sums_ptr + AT_DIVERGENCE * N, tl.where(divergence < 0, 0.0, divergence))  # NaN is not < 0
    tl.store(sums_ptr + AT_P_A * N, tl.sum(p_sum, 0))
    tl.store(sums_ptr + AT_Q_B * N, tl.sum(q_sum, 0))


def js_fwd(x, y, mask, inv_t, state):
    """(B, T, V) twice, (N,) bool | None, float | (N,) fp32, state (9, N) of `kl_fwd` -> sums (3, N) fp32."""
    n = x.shape[0] * x.shape[1]
    sums = torch.empty(len(JensenShannonSums._fields), n, device=x.device, dtype=torch.float32)
    x, y, inv_t, numbers = launch_arguments(x, y, inv_t)
    if n:
        with torch.cuda.device_of(x):
            js_kernel[(n,)](x, y, mask, inv_t, state, sums, *numbers, BLOCK=1024, num_warps=warps())
    return sums
