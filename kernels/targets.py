"""Log-probabilities of K targets per row, from the row kernels of `logprob.py` and K more elements per row.

The forward pass computes the row's statistics and then reads K logits (a sector of 32 bytes each). For the backward
pass, let D_c be the sum of the upstream gradients of all targets that are column c, and S the sum over all targets:

    dx_j = [ (D_j - p_j S) - dH p_j (log p_j + H) + dlse p_j ] / temperature

Off the targets this is the row kernel's gradient with dlse - S in place of dlse. So the backward pass takes three
steps: it computes the gradients of the K targets' logits before these may be overwritten, runs the row kernel with
dlse - S, and stores the K gradients over its result, each rounded once. The targets of a row are sorted, so that equal
ones are neighbours: their gradients are added in one order, and the first of them stores the sum.
"""

import torch
import triton
import triton.language as tl

from .lanes import cap, row_scale
from .launch import aligned, cdiv, contiguous, launch, temperature_scales
from .logprob import logprob_bwd, logprob_fwd
from .logprob_gradient import target_gradient, upstream
from .online import NAN, log1p

BLOCK = 128  # targets per program
OPTIONS = {"BLOCK": BLOCK, "num_warps": 1}


@triton.jit(do_not_specialize=["shift", "vocab", "count", "x_stride", "inv_t", "softcap"])
def targets_fwd_kernel(
    x_ptr,  # (N, V) bf16, fp16 or fp32
    target_ptr,  # (N, K) int64
    mask_ptr,  # (N,) bool, or None
    m_ptr,  # (N,) fp32, as the next
    rest_ptr,
    inv_t_ptr,  # (N,) fp32, or None: inv_t holds for all rows
    logprob_ptr,  # (N, K) fp32
    shift,  # x begins this many elements after x_ptr
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
    banned = (m == float("-inf")) & (rest == rest)  # every logit of the row is -inf
    target = tl.load(target_ptr + at, mask=inside, other=-1)
    in_vocab = (target >= 0) & (target < vocab)
    x = tl.load(x_ptr + shift + row * x_stride + target, mask=in_vocab, other=0.0).to(tl.float32)
    logprob = (tl.minimum(cap(x, softcap), m, propagate_nan=NAN) - m) * inv_t - log1p(rest)
    logprob = tl.where(banned, float("-inf"), logprob)
    tl.store(logprob_ptr + at, tl.where(in_vocab, logprob, float("nan")), mask=inside)


@triton.jit
def load_targets(x_row, id_ptr, order_ptr, dlogprob_ptr, first, k, inside, vocab):
    """Load a row's targets in ascending order of ids: id, upstream gradient, logit, and if it is in the vocabulary."""
    target = tl.load(id_ptr + first + k, mask=inside, other=-1)
    order = tl.load(order_ptr + first + k, mask=inside, other=0)
    d = tl.load(dlogprob_ptr + first + order, mask=inside, other=0.0).to(tl.float64)
    in_vocab = (target >= 0) & (target < vocab)
    x = tl.load(x_row + target, mask=in_vocab, other=0.0).to(tl.float32)
    return target, d, x, in_vocab


@triton.jit
def first_of_its_id(id_ptr, first, k, target, in_vocab):
    """Return True for the first of equal targets, which stores the gradient of all of them."""
    before = tl.load(id_ptr + first + k - 1, mask=in_vocab & (k > 0), other=-1)
    return in_vocab & (before != target)


@triton.jit(do_not_specialize=["shift", "vocab", "count", "x_stride", "inv_t", "softcap"])
def targets_bwd_kernel(
    dlogprob_ptr,  # (N, K) fp32
    dentropy_ptr,  # (N,) fp32 or None, as the next
    dlse_ptr,
    x_ptr,  # (N, V) bf16, fp16 or fp32
    id_ptr,  # (N, K) int64, the targets of each row in ascending order
    order_ptr,  # (N, K) int64, their positions before they were sorted
    mask_ptr,  # (N,) bool, or None
    entropy_ptr,  # (N,) fp32, as the next two
    m_ptr,
    rest_ptr,
    inv_t_ptr,  # (N,) fp32, or None: inv_t holds for all rows
    dtarget_ptr,  # (N, K) fp32, the gradient of a target's logit at the first of equal ids
    dtotal_ptr,  # (N,) fp32, dlse - S
    shift,  # x begins this many elements after x_ptr
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

    # A target's gradient needs the sum over all the other targets. Where the maximum has most of the mass (rest < 1),
    # S - D of the maximum would lose the small terms, so the targets below it are summed on their own, in `below`. Of
    # two equal maxima (rest >= 1) neither has most of the mass, so S - D serves. The sums may have thousands of terms
    # and are fp64.
    top = tl.where(rest < 1.0, m, float("inf"))
    total, below = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for begin in tl.range(0, count, BLOCK, num_stages=1):
        k = begin + tl.arange(0, BLOCK)
        _id, d, x, _in_vocab = load_targets(
            x_row, id_ptr, order_ptr, dlogprob_ptr, first, k, k < count, vocab
        )
        total += d
        below += tl.where(cap(x, softcap) < top, d, 0.0)
    total, below = tl.sum(total, 0), tl.sum(below, 0)
    tl.store(dtotal_ptr + row, (dlse - total).to(tl.float32))

    for begin in tl.range(0, count, BLOCK, num_stages=1):
        k = begin + tl.arange(0, BLOCK)
        target, d_of_id, x, in_vocab = load_targets(
            x_row, id_ptr, order_ptr, dlogprob_ptr, first, k, k < count, vocab
        )
        head = first_of_its_id(id_ptr, first, k, target, in_vocab)
        # equal ids follow one another: add up each run from its first, until the longest run ends
        same, ahead = head, k + 1
        while tl.max(same.to(tl.int32), 0) > 0:
            same = same & (ahead < count)
            same = same & (tl.load(id_ptr + first + ahead, mask=same, other=-1) == target)
            order = tl.load(order_ptr + first + ahead, mask=same, other=0)
            d_of_id += tl.load(dlogprob_ptr + first + order, mask=same, other=0.0).to(tl.float64)
            ahead += 1
        d_other_ids = tl.where(cap(x, softcap) < top, total - d_of_id, below)
        dlse_left = (dlse - d_other_ids).to(tl.float32)
        g = target_gradient(
            x, m, rest, entropy, d_of_id.to(tl.float32), dentropy, dlse_left, inv_t, softcap
        )
        tl.store(dtarget_ptr + first + k, g, mask=head)


@triton.jit(do_not_specialize=["shift", "vocab", "count", "dx_stride"])
def targets_store_kernel(
    dtarget_ptr,  # (N, K) fp32
    id_ptr,  # (N, K) int64, ascending
    mask_ptr,  # (N,) bool, or None
    m_ptr,  # (N,) fp32
    dx_ptr,  # (N, V) bf16, fp16 or fp32
    shift,  # dx begins this many elements after dx_ptr
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


def targets_fwd(logits, targets, mask, inv_temperature, softcap):
    """Return what `logprob_fwd` returns, for targets (N, K) and with log-probabilities (N, K) fp32 in nats."""
    n, count = targets.shape
    statistics = logprob_fwd(logits, targets.new_zeros(n), mask, inv_temperature, softcap)
    logprobs = torch.empty(n, count, dtype=torch.float32, device=logits.device)
    if n and count:
        inv_t_ptr, inv_t, *_ = temperature_scales(inv_temperature)
        x, shift = aligned(logits)
        per_row = (statistics.m, statistics.rest, inv_t_ptr)
        pointers = (x, *contiguous(targets, mask), *per_row, logprobs)
        softcap = None if softcap is None else float(softcap)
        numbers = (shift, logits.shape[1], count, logits.stride(0), inv_t, softcap)
        launch(targets_fwd_kernel, (n, cdiv(count, BLOCK)), pointers, numbers, OPTIONS)
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
    """Return what `logprob_bwd` returns, for dlogprobs and targets (N, K); ids outside the vocabulary add nothing."""
    n, count = targets.shape
    out = torch.empty_like(logits) if out is None else out
    rows = (logits, targets.new_zeros(n), mask, entropy, m, rest, inv_temperature, softcap)
    if dlogprobs is None or targets.numel() == 0:
        return logprob_bwd(None, dentropy, dlse, *rows, out=out)
    ids, order = targets.sort(stable=True)
    upstream = contiguous(dlogprobs, dentropy, dlse)
    dtargets, dtotal = torch.empty_like(upstream[0]), torch.empty_like(m)
    inv_t_ptr, inv_t, *_ = temperature_scales(inv_temperature)
    mask, entropy, m, rest = contiguous(mask, entropy, m, rest)
    vocab, softcap = logits.shape[1], None if softcap is None else float(softcap)
    (x, x_shift), (dx, dx_shift) = aligned(logits), aligned(out)
    per_row = (mask, entropy, m, rest, inv_t_ptr)
    pointers = (*upstream, x, ids, order, *per_row, dtargets, dtotal)
    numbers = (x_shift, vocab, count, logits.stride(0), inv_t, softcap)
    launch(targets_bwd_kernel, (n,), pointers, numbers, OPTIONS)
    logprob_bwd(None, dentropy, dtotal, *rows, out=out)
    pointers, numbers = (dtargets, ids, mask, m, dx), (dx_shift, vocab, count, out.stride(0))
    launch(targets_store_kernel, (n, cdiv(count, BLOCK)), pointers, numbers, OPTIONS)
    return out
