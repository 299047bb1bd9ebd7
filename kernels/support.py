"""Row statistics over kept sets of ids, from logits or from hidden states, with reads of the K kept ids per row alone.

Forward: one program per row goes over its ids twice. The first pass finds the maximum and gathers the logits into x
(M,) fp32; the second adds up the sums about the maximum, which is held out of them as in `online.py`. Backward: the
gradient 2^d_j (a + b d_j) of `logprob_gradient.py` for the kept ids alone; the zeros around them, and the rows that
keep the whole vocabulary, are left to `logprob_bwd`. From hidden states, x_j = h . W[id_j]. With dx the gradients of x,
dh = sum_j dx_j W[id_j], and dW[id] is the sum of dx_j h over all entries of an id. The entries come sorted by id, so
that no two programs add to the same row of dW and the order of the sum is fixed.
"""

import torch
import triton
import triton.language as tl

from . import logprob
from .lanes import cap, row_scale
from .launch import cdiv, contiguous, launch, temperature_scales
from .logprob_gradient import gradient, target_gradient, upstream
from .online import FAR, LN2, NAN, exact_sum, log1p
from .states import RowStatistics, RowSupport

LANES = 128  # ids at a time, in one warp because most sets are shorter
# A tile of the head is IDS rows x WIDTH columns of the hidden size; PROGRAMS programs share the products of a long set.
IDS, WIDTH, PROGRAMS = 16, 256, 4
OPTIONS = {"IDS": IDS, "WIDTH": WIDTH, "num_warps": 4}
FAR_ID = 2**62  # above every id


@triton.jit
def load_ids(ids_ptr, at, end, first, vocab):
    """Return ids, which of them are in the set, and which are also in the columns first .. first + vocab."""
    inside = at < end
    ids = tl.load(ids_ptr + at, mask=inside, other=-1).to(tl.int64)
    in_columns = inside & (ids >= first) & (ids < first + vocab)
    return ids, inside, in_columns


@triton.jit
def kept_values(x, inside, in_columns, softcap, SHARD: tl.constexpr):
    """Return the capped logits of a set; an id in the columns of other ranks adds nothing, one in nobody's is NaN."""
    if SHARD:
        return tl.where(in_columns, cap(x, softcap), float("-inf"))
    else:  # noqa: RET505
        return tl.where(in_columns, cap(x, softcap), tl.where(inside, float("nan"), float("-inf")))


@triton.jit(
    do_not_specialize=["first", "vocab", "x_stride", "inv_t", "scale", "scale_low", "softcap"]
)
def kept_fwd_kernel(
    x_ptr,  # (M,) fp32
    logits_ptr,  # (N, V) bf16, fp16 or fp32, or None where x has the logits already
    ids_ptr,  # (M,) integers
    begin_ptr,  # (N,) int64
    end_ptr,  # (N,) int64
    target_ptr,  # (N,) int64
    mask_ptr,  # (N,) bool, or None
    inv_t_ptr,  # (N,) fp32, or None: inv_t and scale hold for all rows
    logprob_ptr,  # (N,) fp32, as the next four; rows that keep the whole vocabulary or are masked are left as they are
    entropy_ptr,
    lse_ptr,
    m_ptr,
    rest_ptr,
    first,  # the logits are columns first .. first + vocab
    vocab,
    x_stride: tl.int64,
    inv_t,
    scale,
    scale_low,
    softcap,
    SHARD: tl.constexpr,  # the other columns of the vocabulary are on other ranks
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(begin_ptr + row), tl.load(end_ptr + row)
    if begin >= end:
        return
    if mask_ptr is not None:  # noqa: SIM102 (the load must not be traced where the pointer is None)
        if tl.load(mask_ptr + row) == 0:
            return
    inv_t, scale, scale_low = row_scale(inv_t_ptr, row, inv_t, scale, scale_low)
    target, lane = tl.load(target_ptr + row), tl.arange(0, LANES)

    # the maximum, and the target's logit
    lane_m = tl.full((LANES,), float("-inf"), tl.float32)
    chosen = tl.full((LANES,), float("-inf"), tl.float32)
    held = tl.zeros((LANES,), tl.int32)
    for at in tl.range(begin, end, LANES, num_stages=1):
        ids, inside, in_columns = load_ids(ids_ptr, at + lane, end, first, vocab)
        if logits_ptr is None:
            x = tl.load(x_ptr + at + lane, mask=inside, other=0.0)
        else:
            x = tl.load(logits_ptr + row * x_stride + (ids - first), mask=in_columns, other=0.0).to(
                tl.float32
            )
            tl.store(x_ptr + at + lane, x, mask=inside)
        x = kept_values(x, inside, in_columns, softcap, SHARD)
        lane_m = tl.maximum(lane_m, x)
        chosen = tl.maximum(chosen, tl.where(ids == target, x, float("-inf")))
        held += (inside & (ids == target)).to(tl.int32)
    m, target_x = tl.max(lane_m, 0), tl.max(chosen, 0)
    tl.debug_barrier()  # other threads read x than those that stored it

    # the sums relative to the maximum; a logit of +inf or NaN makes them NaN
    about = tl.where(m == float("-inf"), 0.0, m)
    off = scale_low / scale
    ties, rest, t = (
        tl.zeros((LANES,), tl.int32),
        tl.zeros((LANES,), tl.float32),
        tl.zeros((LANES,), tl.float32),
    )
    for at in tl.range(begin, end, LANES, num_stages=1):
        _, inside, in_columns = load_ids(ids_ptr, at + lane, end, first, vocab)
        x = tl.load(x_ptr + at + lane, mask=inside, other=0.0)
        x = kept_values(x, inside, in_columns, softcap, SHARD)
        d = tl.maximum((x - about) * scale, FAR, propagate_nan=NAN)
        # what rounding took off d is added back, because the errors of a few terms do not average out
        low = tl.where(d > FAR, tl.fma(d, off, tl.fma(x - about, scale, -d)), 0.0)
        p = tl.exp2(d)
        p = tl.fma(p, low * LN2, p)
        ties += (x == m).to(tl.int32)
        rest += tl.where(x == m, p - 1.0, p)  # p - 1 is 0, or NaN where the maximum is inf
        t = tl.fma(p, -d - low, t)
    # one id at the maximum is held out of `rest`; any others add 1 each
    more = tl.maximum(tl.sum(ties, 0) - 1, 0).to(tl.float32)
    rest, t = exact_sum(rest) + more, -LN2 * exact_sum(t)

    banned = (m == float("-inf")) & (rest == rest)  # every logit of the set is -inf
    log1 = log1p(rest)
    logprob = tl.where(banned, float("-inf"), (target_x - m) * inv_t - log1)
    # a target outside its set is an error, unless another rank may have it
    if not SHARD:
        logprob = tl.where(tl.max(held, 0) > 0, logprob, float("nan"))
    tl.store(logprob_ptr + row, logprob)
    tl.store(entropy_ptr + row, tl.where(banned, 0.0, log1 - t / (1.0 + rest)))
    tl.store(lse_ptr + row, tl.where(banned, float("-inf"), tl.fma(m, inv_t, log1)))
    tl.store(m_ptr + row, tl.where(banned, float("-inf"), m))
    tl.store(rest_ptr + row, tl.where(banned, 0.0, rest))


@triton.jit(do_not_specialize=["first", "vocab", "dx_stride", "inv_t", "scale", "softcap"])
def kept_bwd_kernel(
    x_ptr,  # (M,) fp32
    dlogprob_ptr,  # (N,) fp32 or None, as the next two
    dentropy_ptr,
    dlse_ptr,
    ids_ptr,  # (M,) integers
    begin_ptr,  # (N,) int64
    end_ptr,  # (N,) int64
    target_ptr,  # (N,) int64
    mask_ptr,  # (N,) bool, or None
    entropy_ptr,  # (N,) fp32, as the next two
    m_ptr,
    rest_ptr,
    inv_t_ptr,  # (N,) fp32, or None
    dx_ptr,  # (N, V), already 0 in the rows that have a set, or (M,) fp32
    first,
    vocab,
    dx_stride: tl.int64,
    inv_t,
    scale,
    softcap,
    SPREAD: tl.constexpr,  # dx is (N, V)
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(begin_ptr + row), tl.load(end_ptr + row)
    if begin >= end:
        return
    if mask_ptr is not None:  # noqa: SIM102
        if tl.load(mask_ptr + row) == 0:
            return
    inv_t, scale, _ = row_scale(inv_t_ptr, row, inv_t, scale, 0.0)
    m, target = tl.load(m_ptr + row), tl.load(target_ptr + row)
    alive = m != float("-inf")

    # the row's constants, as in `logprob_bwd_kernel`; all are 0 where every logit of the set is -inf
    m, scale = tl.where(alive, m, 0.0), tl.where(alive, scale, 0.0)
    rest, entropy = tl.load(rest_ptr + row), tl.load(entropy_ptr + row)
    dlogprob, dlse = upstream(dlogprob_ptr, row, alive), upstream(dlse_ptr, row, alive)
    dentropy = upstream(dentropy_ptr, row, alive)
    norm = tl.where(alive, inv_t / (1.0 + rest), 0.0)
    a = norm * (dlse - dlogprob - dentropy * (entropy - log1p(rest)))
    b = None if dentropy_ptr is None else norm * dentropy * -LN2

    for at in tl.range(begin, end, LANES, num_stages=1):
        i = at + tl.arange(0, LANES)
        ids, inside, in_columns = load_ids(ids_ptr, i, end, first, vocab)
        x = tl.load(x_ptr + i, mask=in_columns & alive, other=0.0)
        g = gradient(x, m, scale, a, b, softcap)
        target_g = target_gradient(x, m, rest, entropy, dlogprob, dentropy, dlse, inv_t, softcap)
        g = tl.where(in_columns & alive, tl.where(ids == target, target_g, g), 0.0)
        if SPREAD:
            tl.store(
                dx_ptr + row * dx_stride + (ids - first),
                g.to(dx_ptr.dtype.element_ty),
                mask=in_columns,
            )
        else:
            tl.store(dx_ptr + i, g, mask=inside)


def full_rows_fwd(logits, targets, keeps_all, inv_temperature, softcap):
    """Return the statistics of `logprob_fwd` for the rows in `keeps_all` (N,) bool, and 0 for all others."""
    return logprob.logprob_fwd(logits, targets, keeps_all, inv_temperature, softcap)


def full_rows_bwd(
    dlogprobs,
    dentropy,
    dlse,
    logits,
    targets,
    keeps_all,
    entropy,
    m,
    rest,
    inv_temperature,
    softcap,
    out,
):
    """Return the gradient of `logprob_bwd` for the rows in `keeps_all` (N,) bool, and zeros for all others.

    `out` may be the logits, which are then overwritten.
    """
    upstream, state = (dlogprobs, dentropy, dlse), (entropy, m, rest)
    return logprob.logprob_bwd(
        *upstream, logits, targets, keeps_all, *state, inv_temperature, softcap, out
    )


def kept_fwd(
    x,
    support: RowSupport,
    targets,
    mask,
    inv_temperature,
    softcap,
    logits=None,
    first=None,
    into=None,
):
    """Return the `RowStatistics` (N,) fp32 over kept sets, written into `into` where that is given.

    Rows that are masked or keep the whole vocabulary stay as they are in `into`, or are 0.

    Args:
        x: (M,) fp32, the kept logits; they are gathered from `logits` (N, V) where these are given.
        support: the `RowSupport` of the rows.
        targets: (N,) int64; the log-probability of a target outside its set is NaN, or -inf with `first`.
        mask, inv_temperature, softcap: as for `logprob_fwd`.
        first: `logits` are the columns from `first` on and other ranks have the others, whose ids add nothing. With
            None they are all the columns, and an id outside them makes its row NaN.
    """
    n, softcap = len(targets), None if softcap is None else float(softcap)
    if into is None:
        into = RowStatistics(*(x.new_zeros(n) for _ in RowStatistics._fields))
    if n == 0:
        return into
    stride, vocab = (0, FAR_ID) if logits is None else (logits.stride(0), logits.shape[1])
    inv_t_ptr, *scales = temperature_scales(inv_temperature)
    pointers = (x, logits, *contiguous(*support, targets, mask, inv_t_ptr), *into)
    numbers = (first or 0, vocab, stride, *scales, softcap)
    options = {"SHARD": first is not None, "LANES": LANES, "num_warps": 1}
    launch(kept_fwd_kernel, (n,), pointers, numbers, options)
    return into


def kept_bwd(
    dlogprobs,
    dentropy,
    dlse,
    x,
    support,
    targets,
    mask,
    entropy,
    m,
    rest,
    inv_temperature,
    softcap,
    out,
    first=None,
):
    """Write the gradients of the kept logits into `out` and return it.

    `out` is (M,) fp32, or (N, V) and already 0 in the rows that have a set. The upstream gradients are (N,) fp32 or
    None, `x` is what `kept_fwd` left there, and `entropy`, `m` and `rest` are its results.
    """
    n, softcap = len(targets), None if softcap is None else float(softcap)
    if n == 0:
        return out
    spread = out.dim() == 2
    stride, vocab = (out.stride(0), out.shape[1]) if spread else (0, FAR_ID)
    inv_t_ptr, inv_t, scale, _ = temperature_scales(inv_temperature)
    per_row = (dlogprobs, dentropy, dlse, *support, targets, mask, entropy, m, rest, inv_t_ptr)
    numbers = (first or 0, vocab, stride, inv_t, scale, softcap)
    options = {"SPREAD": spread, "LANES": LANES, "num_warps": 1}
    launch(kept_bwd_kernel, (n,), (x, *contiguous(*per_row), out), numbers, options)
    return out


@triton.jit
def kept_dot_kernel(
    hidden_ptr,  # (N, H) bf16, fp16 or fp32
    weight_ptr,  # (V, H)
    bias_ptr,  # (V,) or None
    ids_ptr,  # (M,) integers
    begin_ptr,  # (N,) int64
    end_ptr,  # (N,) int64
    x_ptr,  # (M,) fp32
    vocab,
    width,
    hidden_stride: tl.int64,
    weight_stride: tl.int64,
    IDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, program, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    begin, end = tl.load(begin_ptr + row), tl.load(end_ptr + row)
    column = tl.arange(0, WIDTH)
    for at in tl.range(begin + program * IDS, end, programs * IDS, num_stages=1):
        i = at + tl.arange(0, IDS)
        ids = tl.load(ids_ptr + i, mask=i < end, other=-1).to(tl.int64)
        in_vocab = (ids >= 0) & (ids < vocab)
        total = tl.zeros((IDS, WIDTH), tl.float32)
        for begin_column in tl.range(0, width, WIDTH, num_stages=1):
            inside = begin_column + column < width
            h = tl.load(
                hidden_ptr + row * hidden_stride + begin_column + column, mask=inside, other=0.0
            )
            w_ptr = weight_ptr + ids[:, None] * weight_stride + (begin_column + column)[None, :]
            w = tl.load(w_ptr, mask=in_vocab[:, None] & inside[None, :], other=0.0)
            total = tl.fma(
                w.to(tl.float32), tl.broadcast_to(h.to(tl.float32)[None, :], (IDS, WIDTH)), total
            )
        x = tl.sum(total, 1)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + ids, mask=in_vocab, other=0.0).to(tl.float32)
        tl.store(x_ptr + i, tl.where(in_vocab, x, float("nan")), mask=i < end)


@triton.jit
def kept_hidden_kernel(
    dx_ptr,  # (M,) fp32
    weight_ptr,  # (V, H) bf16, fp16 or fp32
    ids_ptr,  # (M,) integers
    begin_ptr,  # (N,) int64
    end_ptr,  # (N,) int64
    dhidden_ptr,  # (N, H)
    vocab,
    width,
    weight_stride: tl.int64,
    IDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    begin, end = tl.load(begin_ptr + row), tl.load(end_ptr + row)
    inside = column < width
    total = tl.zeros((WIDTH,), tl.float32)
    for at in tl.range(begin, end, IDS, num_stages=1):
        i = at + tl.arange(0, IDS)
        ids = tl.load(ids_ptr + i, mask=i < end, other=-1).to(tl.int64)
        in_vocab = (ids >= 0) & (ids < vocab)
        dx = tl.load(dx_ptr + i, mask=i < end, other=0.0)
        w_ptr = weight_ptr + ids[:, None] * weight_stride + column[None, :]
        w = tl.load(w_ptr, mask=in_vocab[:, None] & inside[None, :], other=0.0)
        total += tl.sum(w.to(tl.float32) * dx[:, None], 0)
    tl.store(
        dhidden_ptr + row * width + column, total.to(dhidden_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def kept_head_kernel(
    dx_ptr,  # (M,) fp32, sorted by id, as is the next
    row_ptr,  # (M,) int64, the row of each entry
    id_ptr,  # (U,) int64, the different ids
    end_ptr,  # (U,) int64, where the entries of each id end
    hidden_ptr,  # (N, H) bf16, fp16 or fp32
    dweight_ptr,  # (V, H) or None
    dbias_ptr,  # (V,) or None
    vocab,
    width,
    hidden_stride: tl.int64,
    dweight_stride: tl.int64,  # of a row, and of a column: a given gradient has the strides of the head
    dweight_column: tl.int64,
    ADD: tl.constexpr,  # add to what dweight and dbias hold, instead of overwriting it
    IDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    nth = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    begin = tl.load(end_ptr + nth - 1, mask=nth > 0, other=0)
    end, token = tl.load(end_ptr + nth), tl.load(id_ptr + nth)
    if (token < 0) | (token >= vocab):
        return
    inside = column < width
    # the gradient of one row of the head: the hidden states of all entries of its id, weighted by their gradients
    total, of_bias = tl.zeros((WIDTH,), tl.float32), tl.zeros((IDS,), tl.float32)
    for at in tl.range(begin, end, IDS, num_stages=1):
        i = at + tl.arange(0, IDS)
        row = tl.load(row_ptr + i, mask=i < end, other=0)
        dx = tl.load(dx_ptr + i, mask=i < end, other=0.0)
        h_ptr = hidden_ptr + row[:, None] * hidden_stride + column[None, :]
        h = tl.load(h_ptr, mask=(i < end)[:, None] & inside[None, :], other=0.0)
        total += tl.sum(h.to(tl.float32) * dx[:, None], 0)
        of_bias += dx
    if dweight_ptr is not None:
        dw_ptr = dweight_ptr + token * dweight_stride + column * dweight_column
        if ADD:
            total += tl.load(dw_ptr, mask=inside, other=0.0).to(tl.float32)
        tl.store(dw_ptr, total.to(dweight_ptr.dtype.element_ty), mask=inside)
    # every program of an id has the whole sum of the bias, and the first one stores it
    if dbias_ptr is not None:  # noqa: SIM102
        if tl.program_id(1) == 0:
            bias = tl.sum(of_bias, 0)
            if ADD:
                bias += tl.load(dbias_ptr + token).to(tl.float32)
            tl.store(dbias_ptr + token, bias.to(dbias_ptr.dtype.element_ty))


def _unit(x):
    """Return x with a stride of 1 in its last dimension, copied if it has another."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def kept_dot(x, hidden, weight, bias, support):
    """Fill x (M,) fp32 with the logits of the kept ids.

    Args:
        hidden: (N, H) hidden states.
        weight, bias: (V, H), and (V,) or None, the LM head.
        support: the `RowSupport` of the rows; an id outside the vocabulary becomes NaN.
    """
    hidden, weight = _unit(hidden), _unit(weight)
    if len(hidden):
        pointers = (hidden, weight, bias, *contiguous(*support), x)
        numbers = (*weight.shape, hidden.stride(0), weight.stride(0))
        launch(kept_dot_kernel, (len(hidden), PROGRAMS), pointers, numbers, OPTIONS)


def kept_hidden(dx, weight, support):
    """Return the gradient of the hidden states, (N, H) in the head's dtype, from that of the kept logits, (M,) fp32."""
    weight, n = _unit(weight), support.begin.numel()
    dhidden = torch.empty(n, weight.shape[1], dtype=weight.dtype, device=weight.device)
    if n:
        pointers = (dx, weight, *contiguous(*support), dhidden)
        grid, numbers = (n, cdiv(weight.shape[1], WIDTH)), (*weight.shape, weight.stride(0))
        launch(kept_hidden_kernel, grid, pointers, numbers, OPTIONS)
    return dhidden


def kept_head(dx, rows, ids, ends, hidden, vocab, dweight, dbias, wants):
    """Return the gradients of the LM head, (V, H) and (V,), each None where it is neither wanted nor given.

    Args:
        dx, rows: (M,) fp32 and int64, the gradients of the kept logits and the rows of `hidden` (N, H) that they
            belong to, sorted by id.
        ids, ends: (U,) int64, the different ids in order, and where the entries of each one end.
        vocab: V, the rows of the head.
        dweight, dbias: gradients to add to in place, or None to begin from zeros.
        wants: whether the gradient of the weight and that of the bias are wanted.
    """
    hidden, add = _unit(hidden), dweight is not None or dbias is not None
    if wants[0] and dweight is None:
        dweight = hidden.new_zeros(vocab, hidden.shape[1])
    if wants[1] and dbias is None:
        dbias = hidden.new_zeros(vocab)
    if len(ids):
        width = hidden.shape[1]
        pointers = (dx, rows, ids, ends, hidden, dweight, dbias)
        strides = (0, 1) if dweight is None else dweight.stride()
        numbers = (vocab, width, hidden.stride(0), *strides)
        grid = (len(ids), cdiv(width, WIDTH))
        launch(kept_head_kernel, grid, pointers, numbers, {"ADD": add} | OPTIONS)
    return dweight, dbias
