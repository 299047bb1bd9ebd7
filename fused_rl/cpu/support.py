"""The CPU path of row statistics over kept sets, with the functions of `fused_rl.kernels.support`.

Sets are ragged: what is kept of some rows stands in one vector, in which a row's bits depend on nothing but the row.
Sums are in fp64, a maximum left out of them as in `fused_rl.cpu.logprob`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fused_rl.cpu import logprob
from fused_rl.cpu.compiled import CHUNK, in_huge_pages
from fused_rl.kernels.states import RowStatistics, RowSupport

_FLAT = -1e4  # exp is 0 from here on; finite, so that 0 * s is 0 for banned tokens


class _Entries(NamedTuple):
    """Sets of some rows in one vector: (E,) each but the last two."""

    at: Tensor | slice  # positions among all ids
    row: Tensor  # which of `rows` an entry belongs to
    ids: Tensor  # int64
    offsets: Tensor  # (R + 1,)
    rows: Tensor  # (R,) rows of the caller


def _entries(support, rows):
    begin = support.begin[rows]
    lengths = support.end[rows] - begin
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    row = torch.repeat_interleave(lengths)
    starts = begin - offsets[:-1]
    # one stretch of the ids is a view: nothing is gathered
    if bool((starts == starts[0]).all()):
        first = int(begin[0])
        at = slice(first, first + len(row))
        ids = support.ids[at]
    else:
        at = starts.index_select(0, row).add_(torch.arange(len(row), device=row.device))
        ids = support.ids.index_select(0, at)
    return _Entries(at, row, ids.long(), offsets, rows)


def _chunks(support, mask):
    """The rows that have a set, some at a time: about CHUNK ids, or a single row of more."""
    has_set = support.end > support.begin
    if mask is not None:
        has_set = has_set & mask
    rows = has_set.nonzero()[:, 0]
    lengths = support.end[rows] - support.begin[rows]
    if int(lengths.sum()) <= CHUNK:
        return [_entries(support, rows)] if len(rows) else []

    # a row goes to the chunk that its last id falls into
    chunk_of_row = (lengths.cumsum(0) - 1) // CHUNK
    _, sizes = torch.unique_consecutive(chunk_of_row, return_counts=True)
    return (_entries(support, some_rows) for some_rows in rows.split(sizes.tolist()))


def _local(entries, first, vocab):
    """Columns of the entries, and which of them stand among the `vocab` columns; all if None."""
    if first is None:
        return entries.ids, None
    columns = entries.ids - first
    is_local = (columns >= 0) & (columns < vocab)
    # column 0 stands for what another rank has
    columns = torch.where(is_local, columns, 0)
    return columns, None if is_local.all() else is_local


def _inverse(inv_temperature, rows):
    """1 / temperature of these rows, fp64: a number, or (R,)."""
    if isinstance(inv_temperature, Tensor):
        return inv_temperature[rows].double()
    return inv_temperature


def _each(values, row):
    """A value per row as one per entry."""
    return values.index_select(0, row) if isinstance(values, Tensor) else values


def _sum(values, offsets):
    return torch.segment_reduce(values, "sum", offsets=offsets, axis=0, unsafe=True)


def full_rows_fwd(logits, targets, keeps_all, inv_temperature, softcap):
    """`logprob_fwd` of the rows `keeps_all` (N,) bool; 0 in all others."""
    # a target of the other rows may lie in another rank's columns
    targets = torch.where(keeps_all, targets, 0)
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
    """`logprob_bwd` of the rows `keeps_all` (N,) bool; zeros in all others. `out` may be the logits."""
    upstream = dlogprobs, dentropy, dlse
    state = entropy, m, rest
    options = inv_temperature, softcap
    if keeps_all.all():
        return logprob.logprob_bwd(*upstream, logits, targets, None, *state, *options, out)
    rows = keeps_all.nonzero()[:, 0]
    if len(rows) == 0:
        return out.zero_()

    # those rows by themselves, copied out a few at a time
    step = max(1, CHUNK // logits.shape[1])
    for some in rows.split(step):
        dlp, dh, dl = (None if d is None else d[some] for d in upstream)
        some_state = entropy[some], m[some], rest[some]
        if isinstance(inv_temperature, Tensor):
            options = inv_temperature[some], softcap
        dx = logprob.logprob_bwd(
            dlp, dh, dl, logits[some], targets[some], None, *some_state, *options
        )
        out[some] = dx.to(out.dtype)
    with_sets = (~keeps_all).nonzero()[:, 0]
    return out.index_fill_(0, with_sets, 0)


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
    """Statistics (N,) fp32 over kept sets, into `into` where given; other rows stay as they are there, or 0.

    Args:
        x: (M,) fp32, the kept logits; filled from `logits` (N, V) where these are given.
        first: the logits are the columns from `first` on, and other ranks have the others: an id of theirs adds
            nothing. None: they are all columns.
    """
    if into is None:
        into = RowStatistics(*(x.new_zeros(len(targets)) for _ in RowStatistics._fields))
    with torch.no_grad():
        for entries in _chunks(support, mask):
            # the kept logits, saved uncapped in x: the gradient reads them there
            if logits is None:
                raw = x[entries.at]
                is_local = None
            else:
                columns, is_local = _local(entries, first, logits.shape[1])
                rows = entries.rows.index_select(0, entries.row)
                raw = _gathered(logits.detach(), rows, columns)
                x[entries.at] = raw
            value = logprob.capped(raw, softcap)
            # what other ranks have adds nothing here
            if is_local is not None:
                value = torch.where(is_local, value, -torch.inf)
            inv_t = _inverse(inv_temperature, entries.rows)
            statistics = _statistics(value, entries, targets, inv_t)
            for output, of_rows in zip(into, statistics, strict=True):
                output[entries.rows] = of_rows.float()
    return into


def _gathered(logits, rows, columns):
    """logits[rows, columns] as fp32, from rows that may lie apart."""
    places = (rows * logits.stride(0)).add_(columns)
    return _flat(logits).index_select(0, places).float()


def _flat(matrix):
    """All that its rows span, (n,): what lies between them too."""
    n, width = matrix.shape
    span = (n - 1) * matrix.stride(0) + width
    return matrix.as_strided((span,), (1,))


def _statistics(x, entries, targets, inv_t):
    """`RowStatistics` (R,) fp64 of capped logits (E,) fp32."""
    _, row, ids, offsets, rows = entries
    m = torch.segment_reduce(x, "max", offsets=offsets, axis=0, unsafe=True).double()
    about = logprob.finite(m)
    s = x.double()
    s.sub_(about.index_select(0, row)).mul_(_each(inv_t, row))
    s.clamp_(min=_FLAT)
    p = s.exp()

    # one maximum is left out, and its ties are counted: next to its 1 small terms would drown
    is_top = s == 0
    ties = _sum(is_top.double(), offsets)
    below_top = p.masked_fill(is_top, 0)
    rest = _sum(below_top, offsets) + (ties - 1).clamp_(min=0)
    t = _sum(p.mul_(s), offsets)

    # the target's own; a set holds it once, or on a shard not at all
    is_target = ids == targets[rows].index_select(0, row)
    entry = is_target.nonzero()[:, 0]
    target_logits = torch.full_like(m, -torch.inf)
    target_logits[row[entry]] = x[entry].double()
    log1p = rest.log1p()
    logprobs = ((target_logits - about) * inv_t).clamp_(max=0) - log1p
    entropy = log1p - t / (1 + rest)
    lse = m * inv_t + log1p
    return logprobs, entropy, lse, m, rest


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
    """Gradients of the kept logits into `out`: (M,) fp32, or (N, V) that is 0 in rows with a set."""
    upstream = dlogprobs, dentropy, dlse
    none = m.new_zeros((), dtype=torch.float64)
    with torch.no_grad():
        for entries in _chunks(support, mask):
            rows = entries.rows
            grads = [none if d is None else d[rows].double() for d in upstream]
            state = [r[rows].double() for r in (entropy, m, rest)]
            inv_t = _inverse(inv_temperature, rows)
            dx = _gradients(x[entries.at], entries, targets, grads, state, inv_t, softcap)
            if out.dim() == 1:
                out[entries.at] = dx.float()
                continue
            # into whole rows of logits, those of this rank
            columns, is_local = _local(entries, first, out.shape[1])
            places = (_each(rows, entries.row) * out.stride(0)).add_(columns)
            if is_local is not None:
                places = places[is_local]
                dx = dx[is_local]
            _flat(out.detach()).index_copy_(0, places, dx.to(out.dtype))
    return out


def _gradients(raw, entries, targets, grads, state, inv_t, softcap):
    """(E,) fp64, the gradients of the uncapped logits (E,) fp32 of rows with this upstream and state, (R,) fp64."""
    _, row, ids, _, rows = entries
    dlp, dh, dlse = grads
    entropy, m, rest = state
    live = m != -torch.inf
    log1p = rest.log1p()
    mean = log1p - entropy  # of s, so that log p + H = s - mean
    value = logprob.capped(raw, softcap).double()
    each_inv_t = _each(inv_t, row)

    # p (a - dh (s - mean)) for every id, then the target's with 1 - p right also where p is next to 1
    about = logprob.finite(m)
    s = (value - _each(about, row)).mul_(each_inv_t)
    s.clamp_(_FLAT, 0)
    logp = s - _each(log1p, row)
    dlp = dlp.expand_as(m)
    dh = dh.expand_as(m)
    of_lse = (dlse + dh * mean).expand_as(m)
    dp = s.mul_(_each(-dh, row)).add_(_each(of_lse, row))
    p = logp.exp()
    is_target = ids == _each(targets[rows], row)
    entry = is_target.nonzero()[:, 0]
    p_minus_one = logp[entry].expm1()
    target_dx = p[entry] * dp[entry] - dlp[row[entry]] * p_minus_one
    dx = p.mul_(dp.sub_(_each(dlp, row)))
    dx[entry] = target_dx

    # from s to the logits
    dx.mul_(each_inv_t)
    if softcap is not None:
        dx.mul_(1 - (value / softcap).square())
    return dx if live.all() else torch.where(live[row], dx, 0)


def kept_dot(x, hidden, weight, bias, support):
    """Fills x (M,) fp32 with the logits of the kept ids, from hidden states (N, H) and the head (V, H), (V,) | None."""
    width = hidden.shape[1]
    low = hidden.dtype != torch.float32
    step = max(1, CHUNK // max(1, width))
    for entries in _chunks(support, None):
        rows = _each(entries.rows, entries.row)
        n = len(rows)
        total = x.new_empty(n)
        # both factors of a few dot products, copied out side by side
        weights, states = hidden.new_empty(2, min(step, n), width)
        for begin in range(0, n, step):
            c = slice(begin, min(begin + step, n))
            a = weights[: c.stop - begin]
            b = states[: c.stop - begin]
            torch.index_select(weight, 0, entries.ids[c], out=a)
            torch.index_select(hidden, 0, rows[c], out=b)
            # 16-bit factors have exact products in fp32
            terms = a.float().mul_(b) if low else a.mul_(b)
            torch.sum(terms, -1, out=total[c])
        x[entries.at] = total if bias is None else total + bias[entries.ids].float()


def kept_hidden(dx, weight, support):
    """Gradient of the hidden states, (N, H) in the head's dtype, from that of the kept logits (M,) fp32."""
    dhidden = weight.new_zeros(support.begin.numel(), weight.shape[1])
    for entries in _chunks(support, None):
        begins = entries.offsets[:-1]
        dhidden[entries.rows] = _weighted(weight, entries.ids, begins, dx[entries.at])
    return dhidden


def _weighted(rows, ids, begins, by):
    """Sum of by_j rows[ids_j] over each bag of entries, in their order; (bags, H) in the dtype of `rows`."""
    return torch.nn.functional.embedding_bag(
        ids, rows, begins, mode="sum", per_sample_weights=by.to(rows.dtype)
    )


def kept_head(dx, rows, ids, ends, hidden, vocab, dweight, dbias, wants):
    """Gradients (V, H) and (V,) of the head, None where not wanted: what there was or zeros, and sums for `ids` (U,).

    Args:
        dx, rows: (M,) gradients of the kept logits, and the rows of `hidden` (N, H) they belong to, sorted by id.
        ends: (U,) int64, where the entries of each id end.
        dweight, dbias: gradients to add to, or None.
    """
    if wants[0] and dweight is None:
        dweight = in_huge_pages(hidden.new_empty(vocab, hidden.shape[1])).zero_()
    if wants[1] and dbias is None:
        dbias = hidden.new_zeros(vocab)
    if len(ids):
        offsets = torch.nn.functional.pad(ends, (1, 0))
        # an id's entries are summed first, so that each row of the head is written once
        if wants[0]:
            sums = _weighted(hidden, rows, offsets[:-1], dx)
            dweight.index_add_(0, ids, sums)
        if wants[1]:
            sums = _sum(dx, offsets).to(hidden.dtype)
            dbias.index_add_(0, ids, sums)
    return dweight, dbias
