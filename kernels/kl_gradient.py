"""The gradients of KL and of Jensen-Shannon, from the state that their forward passes keep.

`kl.py` and `jensen_shannon.py` derive the formulas. Bytes: both rows are read once, and each gradient that is wanted is
written once.
"""

import torch
import triton
import triton.language as tl

from .jensen_shannon import AT_P_A, AT_Q_B, js_logs
from .lanes import uncap
from .launch import cdiv, launch, multiprocessors, programs_per_row
from .online import valid
from .pair import (
    AT_W_ALL,
    RUNTIME,
    SHARES,
    THREADS,
    about_the_maxima,
    as_logits,
    is_masked,
    launch_arguments,
    load_state,
    p_q_delta,
    row_offset,
    warps,
)

BLOCK = 1024  # columns that a program handles at once
RESIDENT = 16  # programs that fit on a multiprocessor at once, because each needs few registers


@triton.jit
def _gradients(
    x,
    y,
    state,
    g,
    a_mean,
    b_mean,
    inv_t,
    softcap,
    p_share,
    q_share,
    JS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Return the gradients of one tile of x and of y, for Jensen-Shannon where JS is set and for KL elsewhere."""
    m, w_all, offset, c, n, s, k = state
    p, q, u, delta, expm1 = p_q_delta(x, y, m, w_all, offset, c, n, s, k, inv_t, EXACT)
    if JS:
        a, b = js_logs(delta, p_share, q_share)
        of_p = 0.5 if p_share is None else p_share
        of_q = 0.5 if q_share is None else q_share
        dx, dy = of_p * g * p * (a - a_mean), of_q * g * q * (b - b_mean)
    else:
        # where KL is large, u and k cancel in delta and leave it few digits, so q - p is formed directly
        near = tl.where(k > 8, 0.0, 1.0)
        dx, dy = g * p * u, g * tl.where(tl.abs(delta) < near, p * expm1, q - p)
    if softcap is not None:
        dx, dy = dx * uncap(x, softcap), dy * uncap(y, softcap)
    return dx, dy


@triton.jit
def _store(dx_ptr, dy_ptr, dx, dy, cols, mask):
    """Store the gradients that are wanted, rounded to the dtype of their tensors."""
    if dx_ptr is not None:
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dy_ptr is not None:
        tl.store(dy_ptr + cols, dy.to(dy_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=[*RUNTIME, *SHARES])
def kl_bwd_kernel(
    g_ptr,  # (N,) fp32, the upstream gradient of the divergence
    x_ptr,  # (B, T, V)
    y_ptr,  # (B, T, V)
    mask_ptr,  # (N,) bool or None
    inv_t_ptr,  # (N,) fp32 or None
    divergence_ptr,  # (N,) fp32
    state_ptr,  # (9, N) fp32, see KLState
    sums_ptr,  # (3, N) fp32, see JensenShannonSums, or None for KL
    dx_ptr,  # (N, V) or None
    dy_ptr,  # (N, V) or None
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
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,  # elements in 16 bytes
):
    row = tl.program_id(0)
    program, programs = tl.program_id(1), tl.num_programs(1)
    alive = is_masked(mask_ptr, row) == 0
    if inv_t_ptr is not None:
        inv_t = valid(tl.load(inv_t_ptr + row, mask=alive, other=1.0))
    # nothing is read of a masked row, so its constants are 0, and its gradient is too
    g = tl.load(g_ptr + row, mask=alive, other=0.0) * inv_t
    none = tl.load(state_ptr + AT_W_ALL * N + row, mask=alive, other=0.0) == 0  # P bans all columns
    # a divergence that is infinite has the gradient 0, not NaN
    infinite = tl.load(divergence_ptr + row, mask=alive, other=0.0) == float("inf")
    g = tl.where(infinite | none, 0.0, g)
    a_mean, b_mean = 0.0, 0.0
    if sums_ptr is not None:
        a_mean = tl.load(sums_ptr + AT_P_A * N + row, mask=alive, other=0.0)
        b_mean = tl.load(sums_ptr + AT_Q_B * N + row, mask=alive, other=0.0)
    state = load_state(state_ptr, row, N, alive)
    JS: tl.constexpr = sums_ptr is not None
    EXACT: tl.constexpr = True if softcap is not None else x_ptr.dtype.element_ty != tl.bfloat16
    if JS:
        state = about_the_maxima(state, inv_t)

    # first the whole blocks between two 16-byte boundaries, if x, y and the gradients have these at the same columns;
    # then the columns before and after them
    x_at = row_offset(row, T, stride_xb, stride_xt, x_shift)
    y_at = row_offset(row, T, stride_yb, stride_yt, y_shift)
    out = row.to(tl.int64) * V
    alike = (x_at % VEC == y_at % VEC) & (x_at % VEC == out % VEC)
    lead = tl.minimum((VEC - x_at % VEC) % VEC, V).to(tl.int32)
    blocks = tl.where(alike, (V - lead) // BLOCK, 0)
    around = V - blocks * BLOCK
    begin = (out + (VEC - 1)) // VEC * VEC
    x_begin = (x_at + (VEC - 1)) // VEC * VEC
    y_begin = (y_at + (VEC - 1)) // VEC * VEC
    cols = tl.arange(0, BLOCK)
    read = tl.where(alive, BLOCK, 0)
    for i in tl.range(
        program * blocks // programs, (program + 1) * blocks // programs, num_stages=1
    ):
        inside = cols // VEC * VEC < read
        x = as_logits(
            tl.load(x_ptr + x_begin + i * BLOCK + cols, mask=inside, other=0.0), None, softcap
        )
        y = as_logits(
            tl.load(y_ptr + y_begin + i * BLOCK + cols, mask=inside, other=0.0), None, softcap
        )
        dx, dy = _gradients(
            x, y, state, g, a_mean, b_mean, inv_t, softcap, p_share, q_share, JS, EXACT
        )
        _store(dx_ptr, dy_ptr, dx, dy, begin + i * BLOCK + cols, None)
    for i in tl.range(program * THREADS, around, programs * THREADS, num_stages=1):
        column = i + tl.arange(0, THREADS)
        inside = column < around
        wanted = column < tl.where(alive, around, 0)
        column += tl.where(column < lead, 0, blocks * BLOCK)
        x = as_logits(tl.load(x_ptr + x_at + column, mask=wanted, other=0.0), None, softcap)
        y = as_logits(tl.load(y_ptr + y_at + column, mask=wanted, other=0.0), None, softcap)
        dx, dy = _gradients(
            x, y, state, g, a_mean, b_mean, inv_t, softcap, p_share, q_share, JS, EXACT
        )
        _store(dx_ptr, dy_ptr, dx, dy, out + column, inside)


def kl_bwd(
    g, x, y, mask, inv_t, divergence, state, sums, wants_dx, wants_dy, softcap=None, shares=None
):
    """Return the gradients (B, T, V) of x and of y in their dtypes, or None for one that is not wanted.

    Args:
        g: (N,) fp32 with N = B T, the upstream gradient of the divergence.
        x, y: (B, T, V) logits.
        mask: (N,) bool, or None; a masked row has zeros as its gradient.
        inv_t: 1 / temperature, a float or (N,) fp32.
        divergence, state: (N,) and (9, N) fp32, the results of the forward pass; `state` is that of `kl_fwd`.
        sums: (3, N) fp32, the result of `js_fwd` with the same `shares`, or None for KL.
        wants_dx, wants_dy: which of the two gradients to compute.
        shares: the `Shares` of Jensen-Shannon, or None for halves.
    """
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype) if wants_dx else None
    dy = torch.empty(y.shape, device=y.device, dtype=y.dtype) if wants_dy else None
    vec = 16 // x.element_size()
    x, y, inv_t, numbers = launch_arguments(x, y, inv_t, softcap)
    n, _, vocab, *_ = numbers
    if n:
        programs = programs_per_row(
            n, cdiv(vocab, 32 * BLOCK), RESIDENT * multiprocessors(x.device)
        )
        numbers = *numbers, *(shares or (None, None))
        pointers = (g, x, y, mask, inv_t, divergence, state, sums, dx, dy)
        options = {"BLOCK": BLOCK, "THREADS": THREADS, "VEC": vec, "num_warps": warps()}
        launch(kl_bwd_kernel, (n, programs), pointers, numbers, options)
    return dx, dy
