"""The CPU path of row statistics over kept sets, with the functions of `fused_rl.kernels.support`.

Sets are ragged: what is kept of some rows stands in one vector, in which a row's bits depend on nothing but the row.
Sums are in fp64, a maximum left out of them as in `fused_rl.cpu.logprob`.
"""

import mmap
import sys
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
    if bool((starts == starts[0]).all()):  # one stretch of the ids
        at = slice(int(begin[0]), int(begin[0]) + len(row))
        return _Entries(at, row, support.ids[at].long(), offsets, rows)
    at = starts.index_select(0, row).add_(torch.arange(len(row)))
    return _Entries(at, row, support.ids.index_select(0, at).long(), offsets, rows)


def _chunks(support, mask):
    """The rows that have a set, some at a time: about CHUNK ids, or a single row of more."""
    some = support.end > support.begin if mask is None else (support.end > support.begin) & mask
    rows = some.nonzero()[:, 0]
    lengths = support.end[rows] - support.begin[rows]
    if int(lengths.sum()) <= CHUNK:
        return [_entries(support, rows)] if len(rows) else []
    full = (lengths.cumsum(0) - 1) // CHUNK
    sizes = torch.unique_consecutive(full, return_counts=True)[1]
    return (_entries(support, part) for part in rows.split(sizes.tolist()))


def _known(entries, first, vocab):
    """Columns of the entries, and which of them stand among the `vocab` columns; all if None."""
    if first is None:
        return entries.ids, None
    columns = entries.ids - first
    known = (columns >= 0) & (columns < vocab)
    return torch.where(known, columns, 0), None if known.all() else known


def _inverse(inv_temperature, rows):
    """1 / temperature of these rows, fp64: a number, or (R,)."""
    return (
        inv_temperature[rows].double() if isinstance(inv_temperature, Tensor) else inv_temperature
    )


def _each(values, row):
    """A value per row as one per entry."""
    return values.index_select(0, row) if isinstance(values, Tensor) else values


def _sum(values, offsets):
    return torch.segment_reduce(values, "sum", offsets=offsets, axis=0, unsafe=True)


def whole_fwd(logits, targets, whole, inv_temperature, softcap):
    """`logprob_fwd` of the rows `whole` (N,) bool; 0 in all others."""
    return logprob.logprob_fwd(
        logits, torch.where(whole, targets, 0), whole, inv_temperature, softcap
    )


def whole_bwd(
    dlogprobs,
    dentropy,
    dlse,
    logits,
    targets,
    whole,
    entropy,
    m,
    rest,
    inv_temperature,
    softcap,
    out,
):
    """`logprob_bwd` of the rows `whole` (N,) bool; zeros in all others. `out` may be the logits."""
    vocab = logits.shape[1]
    if whole.all():
        return logprob.logprob_bwd(
            dlogprobs,
            dentropy,
            dlse,
            logits,
            targets,
            None,
            entropy,
            m,
            rest,
            inv_temperature,
            softcap,
            out,
        )
    rows = whole.nonzero()[:, 0]
    if len(rows) == 0:
        return out.zero_()

    # those rows by themselves, copied out a few at a time
    per_row = (dlogprobs, dentropy, dlse, targets, entropy, m, rest)
    for part in rows.split(max(1, CHUNK // vocab)):
        dlp, dh, dl, chosen, h, top, others = (None if r is None else r[part] for r in per_row)
        inv_t = inv_temperature[part] if isinstance(inv_temperature, Tensor) else inv_temperature
        found = logprob.logprob_bwd(
            dlp, dh, dl, logits[part], chosen, None, h, top, others, inv_t, softcap
        )
        out[part] = found.to(out.dtype)
    return out.index_fill_(0, (~whole).nonzero()[:, 0], 0)


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
        into = RowStatistics(*(torch.zeros(len(targets)) for _ in RowStatistics._fields))
    with torch.no_grad():
        for entries in _chunks(support, mask):
            if logits is not None:
                columns, known = _known(entries, first, logits.shape[1])
                raw = _gathered(logits.detach(), entries.rows.index_select(0, entries.row), columns)
                x[entries.at] = raw
            else:
                raw, known = x[entries.at], None
            value = logprob.capped(raw, softcap)
            value = value if known is None else torch.where(known, value, -torch.inf)
            found = _statistics(value, entries, targets, _inverse(inv_temperature, entries.rows))
            for whole, part in zip(into, found, strict=True):
                whole[entries.rows] = part.float()
    return into


def _gathered(logits, rows, columns):
    """logits[rows, columns] as fp32, from rows that may lie apart."""
    return _flat(logits).index_select(0, (rows * logits.stride(0)).add_(columns)).float()


def _flat(matrix):
    """All that its rows span, (n,): what lies between them too."""
    n, stride = matrix.shape[0], matrix.stride(0)
    return matrix.as_strided(((n - 1) * stride + matrix.shape[1],), (1,))


def _statistics(x, entries, targets, inv_t):
    """`RowStatistics` (R,) fp64 of capped logits (E,) fp32."""
    _, row, ids, offsets, rows = entries
    m = torch.segment_reduce(x, "max", offsets=offsets, axis=0, unsafe=True).double()
    about = torch.where(m == -torch.inf, 0.0, m)
    s = x.double()
    s = s.sub_(about.index_select(0, row)).mul_(_each(inv_t, row)).clamp_(min=_FLAT)
    p, top = s.exp(), s == 0
    ties = _sum(top.double(), offsets)
    rest = _sum(p.masked_fill(top, 0), offsets) + (ties - 1).clamp_(min=0)
    t = _sum(p.mul_(s), offsets)

    # the target's own; a set holds it once, or on a shard not at all
    own = (ids == targets[rows].index_select(0, row)).nonzero()[:, 0]
    chosen = torch.full_like(m, -torch.inf)
    chosen[row[own]] = x[own].double()
    log1p = rest.log1p()
    logprobs = ((chosen - about) * inv_t).clamp_(max=0) - log1p
    return logprobs, log1p - t / (1 + rest), m * inv_t + log1p, m, rest


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
    none = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for entries in _chunks(support, mask):
            rows = entries.rows
            grads = [none if d is None else d[rows].double() for d in upstream]
            state = [r[rows].double() for r in (entropy, m, rest)]
            dx = _gradients(
                x[entries.at],
                entries,
                targets,
                grads,
                state,
                _inverse(inv_temperature, rows),
                softcap,
            )
            if out.dim() == 1:
                out[entries.at] = dx.float()
                continue
            columns, known = _known(entries, first, out.shape[1])
            at = (_each(rows, entries.row) * out.stride(0)).add_(columns)
            if known is not None:
                at, dx = at[known], dx[known]
            _flat(out.detach()).index_copy_(0, at, dx.to(out.dtype))
    return out


def _gradients(raw, entries, targets, grads, state, inv_t, softcap):
    """(E,) fp64, the gradients of the uncapped logits (E,) fp32 of rows with this upstream and state, (R,) fp64."""
    _, row, ids, _, rows = entries
    (dlp, dh, dlse), (entropy, m, rest) = grads, state
    live, log1p = m != -torch.inf, rest.log1p()
    mean = log1p - entropy  # of s, so that log p + H = s - mean
    value = logprob.capped(raw, softcap).double()

    # p (a - dh (s - mean)) for every id, then the target's with 1 - p right also where p is next to 1
    about = torch.where(live, m, 0.0)
    s = (value - _each(about, row)).mul_(_each(inv_t, row)).clamp_(_FLAT, 0)
    logp = s - _each(log1p, row)
    dlp, dh, of_lse = (d.expand_as(m) for d in (dlp, dh, dlse + dh * mean))
    dp = s.mul_(_each(-dh, row)).add_(_each(of_lse, row))
    p = logp.exp()
    own = (ids == _each(targets[rows], row)).nonzero()[:, 0]
    of_own = p[own] * dp[own] - dlp[row[own]] * logp[own].expm1()
    dx = p.mul_(dp.sub_(_each(dlp, row)))
    dx[own] = of_own
    dx.mul_(_each(inv_t, row))
    if softcap is not None:
        dx.mul_(1 - (value / softcap).square())
    return dx if live.all() else torch.where(live[row], dx, 0)


def kept_dot(x, hidden, weight, bias, support):
    """Fills x (M,) fp32 with the logits of the kept ids, from hidden states (N, H) and the head (V, H), (V,) | None."""
    width = hidden.shape[1]
    step = max(1, CHUNK // max(1, width))
    for entries in _chunks(support, None):
        rows = _each(entries.rows, entries.row)
        total = torch.empty(len(entries.row))
        low = hidden.dtype != torch.float32
        w, h = torch.empty(2, min(step, len(rows)), width, dtype=hidden.dtype)
        for i in range(0, len(rows), step):
            c = slice(i, min(i + step, len(rows)))
            a = w[: c.stop - i]
            b = h[: c.stop - i]
            torch.index_select(weight, 0, entries.ids[c], out=a)
            torch.index_select(hidden, 0, rows[c], out=b)
            torch.sum(a.float().mul_(b) if low else a.mul_(b), -1, out=total[c])
        x[entries.at] = total if bias is None else total + bias[entries.ids].float()


def kept_hidden(dx, weight, support):
    """Gradient of the hidden states, (N, H) in the head's dtype, from that of the kept logits (M,) fp32."""
    dhidden = weight.new_zeros(support.begin.numel(), weight.shape[1])
    for entries in _chunks(support, None):
        dhidden[entries.rows] = _weighted(weight, entries.ids, entries.offsets[:-1], dx[entries.at])
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
        dweight = zeros_for_rows(vocab, hidden.shape[1], hidden.dtype, touched=len(ids))
    if wants[1] and dbias is None:
        dbias = hidden.new_zeros(vocab)
    if len(ids):
        offsets = torch.nn.functional.pad(ends, (1, 0))
        if wants[0]:
            dweight.index_add_(0, ids, _weighted(hidden, rows, offsets[:-1], dx))
        if wants[1]:
            dbias.index_add_(0, ids, _sum(dx, offsets).to(hidden.dtype))
    return dweight, dbias


def zeros_for_rows(n: int, width: int, dtype: torch.dtype, touched: int) -> Tensor:
    """Return zeros (n, width); if only a few rows will be `touched`, the others are unwritten pages without memory."""
    size = n * width * dtype.itemsize
    page = mmap.PAGESIZE
    pages = touched * (width * dtype.itemsize / page + 2)
    if sys.platform != "linux" or size < (1 << 25) or pages * page * 4 > size:
        return in_huge_pages(torch.empty(n, width, dtype=dtype)).zero_()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page is zeroed whole for one row in it
    return torch.frombuffer(memory, dtype=dtype).view(n, width)
