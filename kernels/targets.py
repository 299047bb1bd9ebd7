"""Log-probabilities of K targets of each row: the row kernels of `logprob.py`, and K elements more.

Forward: the row's statistics, then a read of K logits (a sector of 32 bytes each). Backward, with D_c the sum of the
upstream gradients of all targets that are column c, and S that of all targets:

    dx_j = [ (D_j - p_j S) - dH p_j (log p_j + H) + dlse p_j ] / temperature

which off the targets is the row kernel's gradient for dlse - S. So: the gradients of the K targets' logits, while the
logits still stand; the row kernel for dlse - S; and the K stored over it, each rounded once. Targets are sorted in each
row, so that equal ones are neighbours: their sum has one order, and one of them stores it.
"""

import torch
import triton
import triton.language as tl

from fused_rl.kernels.lanes import cap, row_scale
from fused_rl.kernels.launch import aligned, temperature_scales
from fused_rl.kernels.logprob import logprob_bwd, logprob_fwd
from fused_rl.kernels.logprob_gradient import target_gradient, upstream
from fused_rl.kernels.online import NAN, log1p

BLOCK = 128  # targets


@triton.jit(do_not_specialize=["shift", "vocab", "count", "x_stride", "inv_t", "softcap"])
def targets_fwd_kernel(
    x_ptr,  # (N, V) bf16, fp16 or fp32
    target_ptr,  # (N, K) int64
    mask_ptr,  # (N,) bool, or None
    m_ptr,  # (N,) fp32, as the next
    rest_ptr,
    inv_t_ptr,  # (N,) fp32, or None: inv_t holds for all rows
    logprob_ptr,  # (N, K) fp32
    shift,  # x begins so many elements after x_ptr
    vocab,
    count,  # K
    x_stride: tl.int64,
    inv_t,
    softcap,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = row * count + k, k < count
    if mask_ptr is not None:  # noqa: SIM102 (the load must not be traced where the pointer is None)
        if tl.load(mask_ptr + row) == 0:
            tl.store(logprob_ptr + at, tl.zeros((BLOCK,), tl.float32), mask=inside)
            return
    inv_t, _scale, _low = row_scale(inv_t_ptr, row, inv_t, 0.0, 0.0)
    m, rest = tl.load(m_ptr + row), tl.load(rest_ptr + row)
    banned = (m == float("-inf")) & (rest == rest)  # nothing but -inf
    target = tl.load(target_ptr + at, mask=inside, other=-1)
    known = (target >= 0) & (target < vocab)
    x = tl.load(x_ptr + shift + row * x_stride + target, mask=known, other=0.0).to(tl.float32)
    logprob = (tl.minimum(cap(x, softcap), m, propagate_nan=NAN) - m) * inv_t - log1p(rest)
    logprob = tl.where(banned, float("-inf"), logprob)
    tl.store(logprob_ptr + at, tl.where(known, logprob, float("nan")), mask=inside)


@triton.jit
def load_targets(x_row, id_ptr, order_ptr, dlogprob_ptr, first, k, inside, vocab):
    """Load a row's targets in order of their ids: id, upstream gradient and logit, 0 where there is none."""
    target = tl.load(id_ptr + first + k, mask=inside, other=-1)
    order = tl.load(order_ptr + first + k, mask=inside, other=0)
    d = tl.load(dlogprob_ptr + first + order, mask=inside, other=0.0).to(tl.float64)
    known = (target >= 0) & (target < vocab)
    x = tl.load(x_row + target, mask=known, other=0.0).to(tl.float32)
    return target, d, x, known


@triton.jit
def first_of_its_id(id_ptr, first, k, target, known):
    """Return True if a target is the first of its equals, which stores for all of them."""
    before = tl.load(id_ptr + first + k - 1, mask=known & (k > 0), other=-1)
    return known & (before != target)


@triton.jit(do_not_specialize=["shift", "vocab", "count", "x_stride", "inv_t", "softcap"])
def targets_bwd_kernel(
    dlogprob_ptr,  # (N, K) fp32
    dentropy_ptr,  # (N,) fp32 or None, as the next
    dlse_ptr,
    x_ptr,  # (N, V) bf16, fp16 or fp32
    id_ptr,  # (N, K) int64, the targets of each row in ascending order
    order_ptr,  # (N, K) int64, where they stood
    mask_ptr,  # (N,) bool, or None
    entropy_ptr,  # (N,) fp32, as the next two
    m_ptr,
    rest_ptr,
    inv_t_ptr,  # (N,) fp32, or None: inv_t holds for all rows
    dtarget_ptr,  # (N, K) fp32, at the first of equal ids: the gradient of that logit
    dtotal_ptr,  # (N,) fp32: dlse - S
    shift,  # x begins so many elements after x_ptr
    vocab,
    count,  # K
    x_stride: tl.int64,
    inv_t,
    softcap,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    m = tl.load(m_ptr + row)
    alive = m != float("-inf")
    if mask_ptr is not None:
        alive = alive & (tl.load(mask_ptr + row) != 0)
    if alive == 0:
        tl.store(dtotal_ptr + row, 0.0)
        return
    inv_t, _scale, _low = row_scale(inv_t_ptr, row, inv_t, 0.0, 0.0)
    rest, entropy = tl.load(rest_ptr + row), tl.load(entropy_ptr + row)
    dentropy, dlse = upstream(dentropy_ptr, row, True), upstream(dlse_ptr, row, True)
    x_row, first = x_ptr + shift + row * x_stride, row * count

    # S, and the part of it that belongs to tokens below a maximum with most of the mass, beside which S less its own
    # share would have lost them; of two at the maximum (rest >= 1) neither has most, and each is the other's other.
    # Sums of thousands of terms are held in fp64
    top = tl.where(rest < 1.0, m, float("inf"))
    total, below = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for begin in tl.range(0, count, BLOCK, num_stages=1):
        k = begin + tl.arange(0, BLOCK)
        _id, d, x, _known = load_targets(
            x_row, id_ptr, order_ptr, dlogprob_ptr, first, k, k < count, vocab
        )
        total += d
        below += tl.where(cap(x, softcap) < top, d, 0.0)
    total, below = tl.sum(total, 0), tl.sum(below, 0)
    tl.store(dtotal_ptr + row, (dlse - total).to(tl.float32))

    for begin in tl.range(0, count, BLOCK, num_stages=1):
        k = begin + tl.arange(0, BLOCK)
        target, own, x, known = load_targets(
            x_row, id_ptr, order_ptr, dlogprob_ptr, first, k, k < count, vocab
        )
        head = first_of_its_id(id_ptr, first, k, target, known)
        # equal ids follow; the walk ends with the longest run
        same, ahead = head, k + 1
        while tl.max(same.to(tl.int32), 0) > 0:
            same = same & (ahead < count)
            same = same & (tl.load(id_ptr + first + ahead, mask=same, other=-1) == target)
            order = tl.load(order_ptr + first + ahead, mask=same, other=0)
            own += tl.load(dlogprob_ptr + first + order, mask=same, other=0.0).to(tl.float64)
            ahead += 1
        others = tl.where(cap(x, softcap) < top, total - own, below)
        dothers = (dlse - others).to(tl.float32)
        g = target_gradient(
            x, m, rest, entropy, own.to(tl.float32), dentropy, dothers, inv_t, softcap
        )
        tl.store(dtarget_ptr + first + k, g, mask=head)


@triton.jit(do_not_specialize=["shift", "vocab", "count", "dx_stride"])
def targets_store_kernel(
    dtarget_ptr,  # (N, K) fp32
    id_ptr,  # (N, K) int64, ascending
    mask_ptr,  # (N,) bool, or None
    m_ptr,  # (N,) fp32
    dx_ptr,  # (N, V) bf16, fp16 or fp32
    shift,  # dx begins so many elements after dx_ptr
    vocab,
    count,  # K
    dx_stride: tl.int64,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    alive = tl.load(m_ptr + row) != float("-inf")
    if mask_ptr is not None:
        alive = alive & (tl.load(mask_ptr + row) != 0)
    first = row * count
    target = tl.load(id_ptr + first + k, mask=(k < count) & alive, other=-1)
    head = first_of_its_id(id_ptr, first, k, target, (target >= 0) & (target < vocab))
    g = tl.load(dtarget_ptr + first + k, mask=head, other=0.0)
    tl.store(dx_ptr + shift + row * dx_stride + target, g.to(dx_ptr.dtype.element_ty), mask=head)


def _contiguous(*tensors):
    return [None if x is None else x.contiguous() for x in tensors]


def targets_fwd(logits, targets, mask, inv_temperature, softcap):
    """`logprob_fwd` for targets (N, K): the statistics' logprobs are (N, K)."""
    n, count = targets.shape
    statistics = logprob_fwd(logits, targets.new_zeros(n), mask, inv_temperature, softcap)
    logprobs = torch.empty(n, count, dtype=torch.float32, device=logits.device)
    if n and count:
        inv_t_ptr, inv_t, *_ = temperature_scales(inv_temperature)
        targets, mask = _contiguous(targets, mask)
        x, shift = aligned(logits)
        per_row = (mask, statistics.m, statistics.rest, inv_t_ptr)
        softcap = None if softcap is None else float(softcap)
        scalars = (shift, logits.shape[1], count, logits.stride(0), inv_t, softcap)
        grid = (n, triton.cdiv(count, BLOCK))
        with torch.cuda.device_of(logits):
            targets_fwd_kernel[grid](
                x, targets, *per_row, logprobs, *scalars, BLOCK=BLOCK, num_warps=1
            )
    return statistics._replace(logprobs=logprobs)


def targets_bwd(
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
    """`logprob_bwd` for dlogprobs and targets (N, K); ids outside the vocabulary get no gradient of their own."""
    n, count = targets.shape
    out = torch.empty_like(logits) if out is None else out
    rows = (logits, targets.new_zeros(n), mask, entropy, m, rest, inv_temperature, softcap)
    if dlogprobs is None or targets.numel() == 0:
        return logprob_bwd(None, dentropy, dlse, *rows, out=out)
    ids, order = targets.sort(stable=True)
    upstream = _contiguous(dlogprobs, dentropy, dlse)
    dtargets, dtotal = torch.empty_like(upstream[0]), torch.empty_like(m)
    inv_t_ptr, inv_t, *_ = temperature_scales(inv_temperature)
    mask, entropy, m, rest = _contiguous(mask, entropy, m, rest)
    vocab, softcap = logits.shape[1], None if softcap is None else float(softcap)
    (x, x_shift), (dx, dx_shift) = aligned(logits), aligned(out)
    scalars = (x_shift, vocab, count, logits.stride(0), inv_t, softcap)
    per_row = (mask, entropy, m, rest, inv_t_ptr)
    options = {"BLOCK": BLOCK, "num_warps": 1}
    with torch.cuda.device_of(logits):
        targets_bwd_kernel[(n,)](
            *upstream, x, ids, order, *per_row, dtargets, dtotal, *scalars, **options
        )
        logprob_bwd(None, dentropy, dtotal, *rows, out=out)
        grid = (n, triton.cdiv(count, BLOCK))
        targets_store_kernel[grid](
            dtargets, ids, mask, m, dx, dx_shift, vocab, count, out.stride(0), **options
        )
    return out
