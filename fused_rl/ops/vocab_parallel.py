"""token_logprobs and token_kl when the vocabulary is split over the ranks of a tensor-parallel group.

Each rank runs the row kernels on its own columns, and the states merge as those of two blocks of a row would: one
all-reduce of maxima, one of packed sums, O(rows) numbers in fp64. The gradient of the local logits then needs no
communication: it is the same kernel, given the merged state. Outputs are the same on every rank, and every rank's
backward assumes the same upstream gradient, as a replicated loss gives it.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fused_rl.base.backend import backend_of
from fused_rl.base.checks import (
    check_process_group,
    check_range,
    once_differentiable,
    values_are_checked,
)
from fused_rl.base.graphs import breaks_graph
from fused_rl.base.outputs import TokenLogprobs
from fused_rl.cpu.kl import MOST, NONE, TOO_FAR
from fused_rl.kernels.states import (
    JensenShannonSums,
    KLState,
    RowStatistics,
    RowSupport,
    bounded,
    shares_of,
)
from fused_rl.ops.kl import Direction, as_rows, check_direction, in_order, per_row_options
from fused_rl.ops.logprobs import check_row_arguments
from fused_rl.ops.rows import inverse, next_targets, row_bwd, row_fwd, unit_stride, without_last
from fused_rl.ops.token_support import TokenSupport, check_support, check_support_values

_NEAR = 20.0  # nats by which fp64 moves sums of terms >= 0, and takes them off each other


@breaks_graph
def vocab_parallel_token_logprobs(
    local_logits: Tensor,
    targets: Tensor,
    vocab_start: int,
    process_group: dist.ProcessGroup | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    softcap: float | None = None,
    shift: bool = False,
    support: TokenSupport | None = None,
) -> TokenLogprobs:
    """`token_logprobs` of logits whose columns are split over the ranks of `process_group`, in nats.

    Args:
        local_logits: (..., V_rank) bf16, fp16 or fp32: columns vocab_start to vocab_start + V_rank of the logits. The
            shards may differ in size; together they cover each column once.
        targets: (...) or (..., K) integers in the whole vocabulary. They are the same on every rank, and so are the
            arguments that follow, except vocab_start.
        vocab_start: this rank's first column.
        process_group: the ranks of the split, all of which must call this; None is the default group.
        temperature, mask, softcap, shift: as in `token_logprobs`.
        support: as in `token_logprobs`, with ids in the whole vocabulary, and the same on every rank. It takes one more
            all-reduce, of how many ids of each row the ranks hold.

    Returns:
        `TokenLogprobs`, fp32, which has on every rank what `token_logprobs` of the whole logits returns. It is
        differentiable once with respect to local_logits, without communication, if the upstream gradients are the same
        on every rank.

    Raises:
        ValueError: as `token_logprobs`; a target or a kept id that is on no rank, or on several, is NaN on a GPU.
    """
    check_range(
        "vocab_start", vocab_start, "a finite number, 0 or more", ": this rank's first column"
    )
    check_process_group(process_group)
    options = temperature, mask, softcap, shift
    temperature, row_temperature = check_row_arguments(local_logits, targets, *options)
    row_support = None
    if support is not None:
        check_support(support, several=targets.dim() == local_logits.dim())
        row_support = support.of_rows(targets.shape, targets.device, shift)
    if shift:
        mask, row_temperature = without_last(local_logits, mask, row_temperature)
        targets = next_targets(targets)
    rows = local_logits.shape[:-1]
    mask = None if mask is None else mask.reshape(-1).contiguous()
    per_row = targets.shape[len(rows) :]
    targets = targets.long().reshape(rows.numel(), *per_row)

    # the sets, of which no rank sees whether the vocabulary has their ids
    sets = None
    if row_support is not None:
        begin = row_support.begin.reshape(-1)
        end = row_support.end.reshape(-1)
        sets = row_support._replace(begin=begin, end=end)
        if values_are_checked(targets.device):
            check_support_values(sets, targets, mask, None)
    inv_t = inverse(temperature, row_temperature)
    logits = unit_stride(local_logits).reshape(-1, local_logits.shape[-1])
    outputs = _VocabParallelLogprobs.apply(
        logits, targets, mask, inv_t, softcap, vocab_start, process_group, sets
    )
    outputs = (o.view(rows + o.shape[1:]) for o in outputs)
    return TokenLogprobs(*(o[:, :-1] if shift else o for o in outputs))


@breaks_graph
def vocab_parallel_token_kl(
    local_logits: Tensor,
    local_ref_logits: Tensor,
    process_group: dist.ProcessGroup | None = None,
    *,
    direction: Direction = "reverse",
    jsd_beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    softcap: float | None = None,
    shift: bool = False,
) -> Tensor:
    """`token_kl` of logits whose columns are split over the ranks of `process_group`, in nats.

    Args:
        local_logits: (..., V_rank) bf16, fp16 or fp32, this rank's columns; shards may differ in size.
        local_ref_logits: like local_logits, the same columns.
        process_group: the ranks of the split, all of which must call this; None is the default group.
        direction, jsd_beta, temperature, mask, softcap, shift: as in `token_kl`, the same on every rank.

    Returns:
        (...) fp32, the same on every rank. It is differentiable once with respect to local_logits, and to
        local_ref_logits if it requires grad, without communication, if the upstream gradient is the same on every rank.

    Raises:
        ValueError: as `token_kl`.
    """
    beta = check_direction(direction, jsd_beta)
    check_process_group(process_group)
    pair = in_order(local_logits, local_ref_logits, direction)
    options = per_row_options(local_logits, local_ref_logits, temperature, mask, softcap, shift)
    x, y, mask, inv_t = as_rows(*pair, *options)
    kl = _VocabParallelKL.apply(x, y, mask, inv_t, beta, softcap, process_group)
    kl = kl.view(local_logits.shape[:-1])
    return kl[:, :-1] if shift else kl


def _reduced(rows, op, group):
    """One all-reduce of several (N,) or (K, N) fp64."""
    matrices = [x if x.dim() == 2 else x[None] for x in rows]
    packed = torch.cat(matrices)
    dist.all_reduce(packed, op=op, group=group)
    reduced = packed.split([len(matrix) for matrix in matrices])
    return [total.view(x.shape) for total, x in zip(reduced, rows, strict=True)]


def merge_logprobs(local, owns_target, inv_t, group):
    """The backend's statistics for the local columns -> those of all columns, fp64, and how many own each target.

    Logprobs, `owns_target` and what is returned for them are (N,) or (N, K). The maximum stays out of the sum: a rank
    that holds it adds its rest, the others add 1 + rest.
    """
    logprobs, entropy, _, m, rest = (x.double() for x in local)
    # a NaN comes back with the sums; what a reduction makes of it as a maximum is up to the backend
    m_without_nan = m.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    (m_all,) = _reduced([m_without_nan], dist.ReduceOp.MAX, group)

    # the local sums, moved to the maximum of all columns
    empty = m == -torch.inf
    below = torch.where(empty, -torch.inf, (m - m_all) * inv_t)
    share = below.exp()
    holds_maximum = (m == m_all) & (m > -torch.inf)
    log1p = rest.log1p()
    local_mass = share * (1 + rest)
    mass = torch.where(holds_maximum, rest, local_mass)
    # sum of -e^s s over the local columns: both parts are >= 0
    local_spread = (entropy - log1p).clamp(min=0)
    spread = local_mass * (local_spread - torch.where(share > 0, below, 0))
    s_target = torch.where(empty, -torch.inf, logprobs.t() + log1p + below)  # (N,) or (K, N)
    target = torch.where(owns_target.t(), s_target, 0)

    # one of the ranks' maxima is the one that is left out, the others are ties
    rows = [mass, holds_maximum.double(), spread, target, owns_target.t().double()]
    rest, count, spread, target, owners = _reduced(rows, dist.ReduceOp.SUM, group)
    dead = (count == 0) & (rest == 0)  # not so with NaN
    rest = torch.where(dead, 0, rest + (count - 1))
    log1p = rest.log1p()
    entropy = torch.where(dead, 0, log1p + spread / (1 + rest))
    logprobs = (target - log1p).clamp(max=0)
    lse = m_all * inv_t + log1p
    return RowStatistics(logprobs.t(), entropy, lse, m_all, rest), owners.t()


def _check_held(support, columns, counts, group):
    """(N,) bool: rows that count of which an id is on no rank, or on several; on a CPU an error."""
    is_local = (support.ids >= columns.start) & (support.ids < columns.stop)
    # differences of running counts: the sets are ragged
    before = torch.nn.functional.pad(is_local.cumsum(0), (1, 0))
    local = before[support.end] - before[support.begin]
    (held,) = _reduced([local.double()], dist.ReduceOp.SUM, group)
    lengths = support.end - support.begin
    astray = counts & (held != lengths)
    if held.device.type == "cpu" and astray.any():  # on every rank alike
        row = int(astray.nonzero()[0])
        raise ValueError(
            f"of the {int(lengths[row])} kept ids of row {row} the ranks hold {int(held[row])}; check "
            f"vocab_start ({columns.start} here) and that every id is in the vocabulary"
        )
    return astray


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, mask, inv_t, softcap, vocab_start, group, support):
        columns = slice(vocab_start, vocab_start + logits.shape[1])
        owns_target = (targets >= columns.start) & (targets < columns.stop)
        counts = mask
        if counts is None:
            counts = torch.ones(len(targets), dtype=torch.bool, device=logits.device)
        x = None
        astray = False
        if support is not None:
            astray = _check_held(support, columns, counts, group)
            x = logits.new_zeros(len(support.ids), dtype=torch.float32)

        # this rank's statistics, then those of all columns
        statistics = row_fwd(logits, targets, mask, inv_t, softcap, support, x, first=vocab_start)
        merged, owners = merge_logprobs(statistics, owns_target, inv_t, group)
        of_targets = counts if targets.dim() == 1 else counts[:, None]
        strays = of_targets & (owners != 1)
        if logits.device.type == "cpu" and strays.any():  # on every rank alike
            at = tuple(strays.nonzero()[0].tolist())
            raise ValueError(
                f"target {int(targets[at])} of row {at[0]} is in the columns of {int(owners[at])} ranks, expected one; "
                f"check vocab_start ({vocab_start} here) and the targets"
            )
        logprobs = torch.where(strays | astray, torch.nan, merged.logprobs)
        logprobs = torch.where(of_targets, logprobs, 0).float().contiguous()
        entropy = torch.where(counts, merged.entropy, 0).float()
        lse = torch.where(counts, merged.lse, 0).float()

        # with the merged state the gradient of the local columns needs no other rank
        sets = (None, None, None) if support is None else support
        state = merged.entropy, merged.m, merged.rest
        ctx.save_for_backward(logits, targets, mask, x, *sets, *state)
        ctx.inv_t = inv_t
        ctx.softcap = softcap
        ctx.first = vocab_start
        ctx.set_materialize_grads(False)
        return logprobs, entropy, lse

    @staticmethod
    @once_differentiable("vocab_parallel_token_logprobs")
    def backward(ctx, *upstream):
        logits, targets, mask, x, ids, begin, end, *state = ctx.saved_tensors
        if all(d is None for d in upstream):
            return (None,) * 8
        support = None if ids is None else RowSupport(ids, begin, end)
        upstream = [None if d is None else d.contiguous() for d in upstream]
        state = [s.float() for s in state]
        where = {"support": support, "x": x, "first": ctx.first}
        dlogits = row_bwd(upstream, logits, targets, mask, state, ctx.inv_t, ctx.softcap, **where)
        return dlogits, *(None,) * 7


def merge_kl(kl, state, mask, inv_t, group):
    """The backend's KL and state for the local columns -> those for all columns, (N,) and (9, N) fp32.

    Every rank moves its sums to one c, the difference of the maxima: `fused_rl.kernels.kl` has the formulas. Unlike at
    the mean a = sum(p (d / T - c)) is not 0 there, and KL = a + log1p(F / W - a), which fp64 can afford to subtract.
    """
    # what stands in masked rows may be anything, and would go into the reductions
    if mask is not None:
        state = torch.where(mask, state, 0)
    state = state.double()
    m, w, w_all, offset, c, n, f, s, _ = KLState(*state)
    infinite = (kl == torch.inf).double()
    # a NaN comes back with the sums
    rows = [r.nan_to_num(0, 0, -torch.inf) for r in (m, n, infinite)]
    m_all, n_all, infinite = _reduced(rows, dist.ReduceOp.MAX, group)
    c_all = (m_all - n_all) * inv_t

    # the local sums, moved there by h; from q itself where x - y has no digits for it, as between a mask and a logit
    share = ((m - m_all) * inv_t).exp()
    q_share = ((n - n_all) * inv_t).exp()
    weight = w * share
    h = c_all - (offset * inv_t + c)
    s = s * q_share
    moved = f * q_share + weight * (torch.expm1(h) - h)
    from_q = s - weight * (1 + h)
    f = torch.where(h.abs() < _NEAR, moved, from_q)
    f = torch.where(w > 0, f, s)
    a = torch.where(w > 0, -weight * h, 0)
    rows = [weight, w_all * share, a, f, s]
    w, w_all, a, f, s = _reduced(rows, dist.ReduceOp.SUM, group)

    # the divergence of all columns
    some = w > 0
    a = torch.where(some, a / w, 0)
    r = torch.where(some, f / w, 1)
    near = a + torch.log1p(r - a)
    far = a + (s / w).log()
    value = torch.where(a.abs() < _NEAR, near, far).clamp(min=0)
    value = torch.where(some, value, 0)
    # what is left of so large a distance may be rounding alone
    distance = c_all.abs()
    unknown = some & (distance > TOO_FAR) & (value < 0.01 * distance)
    value = torch.where(unknown, torch.nan, value)

    # the state that a row of all columns would leave
    allowed = torch.where(infinite > 0, (w / w_all).log(), 0)
    k = torch.where(some, value + allowed, NONE)
    mean = c_all + a
    # fp32 as the kernels have it; c keeps what that rounds off
    offset = torch.where(some, mean / inv_t, 0).float().double()
    c = torch.where(some, mean, 0) - offset * inv_t
    merged = KLState(m_all, w, w_all, offset, c, n_all, f, s, k)
    nan = 0 * (s + w_all)  # 0, or NaN where a logit is NaN or inf
    nan = torch.where(torch.maximum(m_all, n_all) > MOST, torch.nan, nan)
    divergence = torch.where(infinite > 0, torch.inf, value) + nan
    return divergence.float(), torch.stack(merged).float()


class _VocabParallelKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, mask, inv_t, jsd_beta, softcap, group):
        backend = backend_of(x.device)
        local_kl, local_state = backend.kl.kl_fwd(x, y, mask, inv_t, softcap)
        divergence, state = merge_kl(local_kl, local_state, mask, inv_t, group)
        sums = None
        ctx.shares = None
        # Jensen-Shannon is a second pass, which needs the state of all columns
        if jsd_beta is not None:
            ctx.shares = shares_of(jsd_beta)
            sums = backend.jensen_shannon.js_fwd(x, y, mask, inv_t, state, softcap, ctx.shares)
            dist.all_reduce(sums, group=group)
            divergence = JensenShannonSums(*bounded(sums, ctx.shares)).divergence
        divergence = divergence if mask is None else torch.where(mask, divergence, 0)
        ctx.save_for_backward(x, y, mask, divergence, state, sums)
        ctx.inv_t = inv_t
        ctx.softcap = softcap
        return divergence.clone()

    @staticmethod
    @once_differentiable("vocab_parallel_token_kl")
    def backward(ctx, g):
        x, y, mask, divergence, state, sums = ctx.saved_tensors
        gradients = backend_of(x.device).kl.kl_bwd(
            g.contiguous(),
            x,
            y,
            mask,
            ctx.inv_t,
            divergence,
            state,
            sums,
            *ctx.needs_input_grad[:2],
            ctx.softcap,
            ctx.shares,
        )
        return *gradients, *(None,) * 5
