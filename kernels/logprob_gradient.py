"""The gradient of the outputs of `logprob.py`, 4 bytes per bf16 logit: one read and one write.

With p_j = softmax(x)_j and x = logits / temperature, and with the upstream gradients dlp of the log-probability, dH of
the entropy and dlse of the log-sum-exp,

    dx_j = [ dlp (1{j = target} - p_j) - dH p_j (log p_j + H) + dlse p_j ] / temperature

Off the target this is 2^d_j (a + b d_j), where d_j is the distance to the maximum in log2 units, as in the forward
pass, and a, b are constants of the row. The target's own element is computed apart and stored last.
"""

import torch
import triton
import triton.language as tl

from .lanes import cap, load_lanes, row_scale, uncap
from .launch import (
    SEGMENT,
    SHORT,
    K,
    aligned,
    cdiv,
    contiguous,
    launch,
    launch_options,
    programs_per_row,
    slots,
    temperature_scales,
)
from .online import FAR, LN2, NAN, log1p

# Registers per thread, as in `launch.REGISTERS`. The limit is above what the kernel needs, so that its loads stay
# together.
REGISTERS = (128, 128)


@triton.jit
def gradient(x, m, scale, a, b, softcap):
    """Return 2^d (a + b d) with d = (cap(x) - m) * scale, times the derivative of the soft cap; b None stands for 0."""
    y = cap(x, softcap)
    d = (y - m) * scale
    if b is None:
        g = tl.exp2(d) * a
    else:
        d = tl.maximum(d, FAR, propagate_nan=NAN)  # because 0 * -inf would be NaN
        g = tl.exp2(d) * tl.fma(b, d, a)
    return g if softcap is None else g * uncap(y, softcap)


@triton.jit
def upstream(ptr, row, alive):
    """Return the upstream gradient of a row, 0 where there is none or the row is not alive."""
    return 0.0 if ptr is None else tl.load(ptr + row, mask=alive, other=0.0)


@triton.jit
def target_gradient(x, m, rest, entropy, dlogprob, dentropy, dlse, inv_t, softcap):
    """Return the gradient of the target's logit x.

    Where x is the maximum, 1 - p is formed as rest / (1 + rest), because the subtraction would cancel.
    """
    y = tl.minimum(cap(x, softcap), m, propagate_nan=NAN)
    p_m = 1.0 / (1.0 + rest)
    s = tl.maximum((y - m) * inv_t, FAR, propagate_nan=NAN)
    p = tl.where(y == m, p_m, tl.exp2(s * 1.4426950408889634) * p_m)
    one_minus_p = tl.where(y == m, rest * p_m, 1.0 - p)
    g = inv_t * (dlogprob * one_minus_p + p * (dlse - dentropy * (s - log1p(rest) + entropy)))
    return g if softcap is None else g * uncap(y, softcap)


@triton.jit
def owns(
    target,
    lead,
    tiled,
    inner,
    first,
    last,
    program,
    programs,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return True if this program writes the target's column: in whole tiles, in windows after them, or in the rest."""
    column = target - lead
    if (column < 0) | (column >= tiled):
        beyond = tl.where(column < 0, target, target - inner)
        beyond = tl.where((column >= tiled) & (column < inner), column - tiled, beyond)
        return beyond // LANES % programs == program
    return (column >= first * TILE) & (column < last * TILE)


@triton.jit(
    do_not_specialize=[
        "x_shift",
        "dx_shift",
        "vocab",
        "x_stride",
        "dx_stride",
        "inv_t",
        "scale",
        "softcap",
    ],
)
def logprob_bwd_kernel(
    x_ptr,  # (N, V) bf16, fp16 or fp32
    dlogprob_ptr,  # (N,) fp32 or None, as the next two
    dentropy_ptr,
    dlse_ptr,
    target_ptr,  # (N,) int64
    mask_ptr,  # (N,) bool, or None
    entropy_ptr,  # (N,) fp32, as the next two
    m_ptr,
    rest_ptr,
    inv_t_ptr,  # (N,) fp32, or None: inv_t and scale hold for all rows
    dx_ptr,  # (N, V), may be x
    x_shift,  # x begins this many elements after x_ptr, which is aligned to 16 bytes; dx_shift is the same for dx
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
    program, programs = tl.program_id(1), tl.num_programs(1)
    x_offset, dx_offset = x_shift + row * x_stride, dx_shift + row * dx_stride
    x_row, dx_row = x_ptr + x_offset, dx_ptr + dx_offset
    inv_t, scale, _ = row_scale(inv_t_ptr, row, inv_t, scale, 0.0)
    m = tl.load(m_ptr + row)
    alive = m != float("-inf")
    if mask_ptr is not None:
        alive = alive & (tl.load(mask_ptr + row) != 0)

    # a row that is masked or all -inf is not alive: nothing else is read of it, so its constants and gradient are 0
    m, scale = tl.where(alive, m, 0.0), tl.where(alive, scale, 0.0)
    rest = tl.load(rest_ptr + row, mask=alive, other=0.0)
    entropy = tl.load(entropy_ptr + row, mask=alive, other=0.0)
    dlogprob, dlse = upstream(dlogprob_ptr, row, alive), upstream(dlse_ptr, row, alive)
    dentropy = upstream(dentropy_ptr, row, alive)
    norm = tl.where(alive, inv_t / (1.0 + rest), 0.0)
    a = norm * (dlse - dlogprob - dentropy * (entropy - log1p(rest)))
    b = None if dentropy_ptr is None else norm * dentropy * -LN2

    # first the whole tiles between two 16-byte boundaries, if x and dx have these at the same columns; then the whole
    # windows of less than a tile, and the columns before and after them
    lead = tl.minimum((VEC - x_offset % VEC) % VEC, vocab).to(tl.int32)
    windows = tl.where(x_offset % VEC == dx_offset % VEC, (vocab - lead) // LANES, 0)
    tiles = windows // (TILE // LANES)
    first, last = program * tiles // programs, (program + 1) * tiles // programs
    inner = windows * LANES
    around = vocab - inner

    target = tl.load(target_ptr + row)
    owner = alive & (target >= 0) & (target < vocab)
    owner = owner & owns(
        target, lead, tiles * TILE, inner, first, last, program, programs, TILE, LANES
    )
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
    for i in tl.range(tiles * (TILE // LANES) + program, windows, programs, num_stages=1):
        x = load_lanes(x_window + i * LANES, read, LANES, VEC)
        g = gradient(x, m, scale, a, b, softcap)
        tl.store(dx_window + (i * LANES + tl.arange(0, LANES)), g.to(dx_ptr.dtype.element_ty))
    for begin in tl.range(program * LANES, around, programs * LANES, num_stages=1):
        column = begin + tl.arange(0, LANES)
        inside = column < around
        wanted = column < tl.where(alive, around, 0)
        column += tl.where(column < lead, 0, inner)
        x = tl.load(x_row + column, mask=wanted, other=0.0).to(tl.float32)
        g = gradient(x, m, scale, a, b, softcap)
        tl.store(dx_row + column, g.to(dx_ptr.dtype.element_ty), mask=inside)
    if dlogprob_ptr is not None:
        tl.debug_barrier()
        g = target_gradient(x_target, m, rest, entropy, dlogprob, dentropy, dlse, inv_t, softcap)
        tl.store(dx_row + target, g.to(dx_ptr.dtype.element_ty), mask=owner)


def logprob_bwd(
    dlogprobs,
    dentropy,
    dlse,
    logits,
    targets,
    mask,
    entropy,
    m,
    rest,
    inv_temperature,
    softcap,
    out=None,
):
    """Return the gradient of the logits, (N, V), in `out` or else in a new tensor of the logits' dtype.

    Args:
        dlogprobs, dentropy, dlse: (N,) fp32, the upstream gradients, each None where there is none.
        logits: (N, V), as `targets` (N,), `mask`, `inv_temperature` and `softcap` the arguments of `logprob_fwd`.
        entropy, m, rest: (N,) fp32, results of `logprob_fwd`.
        out: (N, V) of any floating dtype, or the logits themselves, which are then overwritten.
    """
    n, vocab = logits.shape
    out = torch.empty_like(logits) if out is None else out
    if n == 0:
        return out
    options = launch_options(logits, REGISTERS)
    softcap = None if softcap is None else float(softcap)
    inv_t_ptr, inv_t, scale, _ = temperature_scales(inv_temperature)
    per_row = (dlogprobs, dentropy, dlse, targets, mask, entropy, m, rest, inv_t_ptr)
    x, x_shift = aligned(logits)
    dx, dx_shift = aligned(out)
    most = cdiv(vocab, (SEGMENT if vocab > SHORT else 1) * K * options["LANES"])
    grid = (n, programs_per_row(n, most, slots(logits.device, options)))
    pointers = (x, *contiguous(*per_row), dx)
    strides = (logits.stride(0), out.stride(0))
    numbers = (x_shift, dx_shift, vocab, *strides, inv_t, scale, softcap)
    launch(logprob_bwd_kernel, grid, pointers, numbers, options)
    return out
