"""Rows of logits of any shape and strides as a backend takes them: matrices (N, V), and numbers (N,) per row."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fused_rl.base.backend import backend_of
from fused_rl.kernels.states import RowStatistics, RowSupport


def unit_stride(logits: Tensor) -> Tensor:
    """A copy only where the last dimension has another stride."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def slabs(*matrices: Tensor) -> Iterable[tuple]:
    """Return tuples (at, *matrices (N, V)): all rows, at = (), if they merge without a copy, else a part at a time."""
    # plain loops: at a small input each call of Python's counts
    merged = []
    for x in matrices:
        if x.dim() == 2:  # no view, which would take as long as a small kernel
            merged.append(unit_stride(x))
        elif x.is_contiguous():
            merged.append(x.view(-1, x.shape[-1]))
    return [((), *merged)] if len(merged) == len(matrices) else _walk(*map(unit_stride, matrices))


def _walk(*matrices):
    pending = [()]
    while pending:
        at = pending.pop()
        views = [x[at] for x in matrices] if at else matrices
        # as a rule all of them merge; else the shortest leading dimension is walked
        if all(map(_merges, views)):
            yield at, *(x.view(-1, x.shape[-1]) for x in views)
            continue
        leading = views[0].shape[:-1]
        n, dim = min((n, dim) for dim, n in enumerate(leading) if n > 1)
        before = (*at, *[slice(None)] * dim)[:dim]
        after = at[dim + 1 :]
        pending += [(*before, slice(i, i + 1), *after) for i in range(n)]


def _merges(x):
    """Return True if all dimensions but the last can be viewed as one, without a copy."""
    if x.dim() < 3:
        return True
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    leading = [(n, stride) for n, stride in pairs if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(leading))


def of_slab(at: tuple, slab: Tensor, leading: int, *values: Tensor | None) -> list[Any]:
    """Flatten values (...) or (..., K), with this many leading dimensions, to one per row: (n,) or (n, K)."""
    if at == () and leading == 1:
        return list(values)
    n = len(slab)
    in_slab = [None if v is None else v[at] for v in values] if at else values
    return [None if v is None else v.reshape(n, *v.shape[leading:]) for v in in_slab]


def inverse(temperature: float, row_temperature: Tensor | None) -> float | Tensor:
    """1 / temperature: a number, or (N,) of one per row (...)."""
    if row_temperature is None:
        return 1.0 / temperature
    return row_temperature.reshape(-1).reciprocal()


def in_columns(
    upstream: Sequence[Tensor | None], targets: Tensor, first: int, count: int
) -> tuple[Sequence[Tensor | None], Tensor]:
    """Upstream gradients of (logprobs, entropy, lse) and targets as the columns first .. first + count see them.

    Where the target stands elsewhere, dlp (1{j = target} - p_j) is -dlp p_j: a gradient -dlp of lse. Of K targets per
    row, those that stand elsewhere become -1, which is in no vocabulary.
    """
    dlogprobs, dentropy, dlse = upstream
    here = (targets >= first) & (targets < first + count)
    several = targets.dim() == 2
    local = torch.where(here, targets - first, -1 if several else 0)
    if dlogprobs is None:
        return upstream, local
    if several:
        elsewhere = torch.where(here, 0, dlogprobs).double().sum(1)
        dlse = (-elsewhere if dlse is None else dlse - elsewhere).float()
    elif dlse is None:
        dlse = torch.where(here, 0, -dlogprobs)
    else:
        dlse = torch.where(here, dlse, dlse - dlogprobs)
    dlogprobs = torch.where(here, dlogprobs, 0)
    return (dlogprobs, dentropy, dlse), local


def without_last(
    logits: Tensor, mask: Tensor | None, row_temperature: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """For `shift`, mask and temperatures (B, T - 1) as (B, T): the last position is masked, its gradient zeros."""
    batch, length = logits.shape[:2]
    scored = max(length - 1, 0)
    last = (0, length - scored)
    if mask is None:
        mask = torch.ones(batch, scored, dtype=torch.bool, device=logits.device)
    # any temperature but 0 will do there
    if row_temperature is not None:
        row_temperature = pad(row_temperature, last, value=1.0)
    return pad(mask, last, value=False), row_temperature


def next_targets(targets: Tensor) -> Tensor:
    """For `shift`, (B, T) or (B, T, K) as position t sees them: the target of t + 1, and at the last any."""
    last = (0, min(targets.shape[1], 1))
    if targets.dim() == 3:
        last = 0, 0, *last
    return pad(targets[:, 1:], last)


def row_fwd(
    logits: Tensor,  # (N, V)
    targets: Tensor,  # (N,) or (N, K) int64
    mask: Tensor | None,  # (N,) bool
    inv_temperature: float | Tensor,  # or (N,) fp32
    softcap: float | None,
    support: RowSupport | None = None,
    x: Tensor | None = None,  # (M,) fp32, filled with the logits of the support
    # the logits are the columns from this one on, and other ranks have the others
    first: int | None = None,
) -> RowStatistics:
    backend = backend_of(logits.device)
    local = targets
    if first is not None:
        here = (targets >= first) & (targets < first + logits.shape[1])
        local = torch.where(here, targets - first, 0)
    options = inv_temperature, softcap
    if support is None:
        forward = backend.logprob.logprob_fwd if targets.dim() == 1 else backend.targets.targets_fwd
        return forward(logits, local, mask, *options)
    # rows that keep the whole vocabulary first; those with a set are written over what is left of them
    statistics = backend.support.full_rows_fwd(logits, local, support.keeps_all(mask), *options)
    return backend.support.kept_fwd(
        x, support, targets, mask, *options, logits=logits, first=first, into=statistics
    )


def row_bwd(
    # of logprobs (N,) or (N, K), entropy (N,), lse (N,), fp32 or None
    upstream: Sequence[Tensor | None],
    logits: Tensor,  # (N, V)
    targets: Tensor,  # (N,) or (N, K) int64
    mask: Tensor | None,  # (N,) bool
    state: Sequence[Tensor],  # entropy, m, rest (N,) fp32
    inv_temperature: float | Tensor,
    softcap: float | None,
    out: Tensor | None = None,  # (N, V), may be the logits
    support: RowSupport | None = None,
    x: Tensor | None = None,
    first: int | None = None,
) -> Tensor:
    """The gradient of the logits; what is not said here is as in `row_fwd`."""
    backend = backend_of(logits.device)
    local_upstream, local = upstream, targets
    if first is not None:
        local_upstream, local = in_columns(upstream, targets, first, logits.shape[1])
    options = *state, inv_temperature, softcap
    if support is None:
        backward = backend.logprob.logprob_bwd
        if targets.dim() == 2:
            backward = backend.targets.targets_bwd
        return backward(*local_upstream, logits, local, mask, *options, out=out)
    out = torch.empty_like(logits) if out is None else out
    # rows with a set become zeros, into which the gradients of their kept logits are written
    keeps_all = support.keeps_all(mask)
    backend.support.full_rows_bwd(*local_upstream, logits, local, keeps_all, *options, out=out)
    return backend.support.kept_bwd(
        *upstream, x, support, targets, mask, *options, out=out, first=first
    )
