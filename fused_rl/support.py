"""Row statistics over kept sets and their gradient, as operators of logits: what `token_logprobs(support=)` calls.

Rows with a set cost K reads forward, and V writes backward: zeros and K values. Rows that keep the whole vocabulary go
the way of `fused_rl.logprobs`, with its bits. What the backward pass needs of the logits, x (M,) fp32, is kept from the
forward pass, so that a gradient in place can be written over them.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from fused_rl.backend import backend_of
from fused_rl.checks import check_target_values, check_temperature_values, no_second_derivative, values_are_checked
from fused_rl.kernels.states import KeptSets, RowStatistics
from fused_rl.token_support import check_kept_values

__all__ = ["kept_logprobs"]


def kept_logprobs(inplace: bool) -> Callable:
    """(logits, targets, mask, temperature, row_temperature, softcap, *KeptSets) -> logprobs, entropy, lse, *more."""
    return _InplaceGradient.apply if inplace else torch.ops.fused_rl.kept_logprobs.default


def _merges(x):
    """Whether all dimensions but the last are one without a copy."""
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    leading = [(n, stride) for n, stride in pairs if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(leading))


def _slabs(*matrices) -> Iterator[tuple]:
    """Indices under which the rows of every one of these (..., V) merge: all at once, or a batch at a time."""
    if all(map(_merges, matrices)):
        yield ()
        return
    shape = matrices[0].shape[:-1]
    dim = min((n, dim) for dim, n in enumerate(shape) if n > 1)[1]
    for i in range(shape[dim]):
        index = (*[slice(None)] * dim, i)
        for rest in _slabs(*(x[index] for x in matrices)):
            yield _joined(index, rest)


def _joined(index, rest):
    """The index that takes `index` first and then `rest`."""
    rest, joined = list(rest), []
    for part in index:
        joined.append(part if isinstance(part, int) else (rest.pop(0) if rest else slice(None)))
    return (*joined, *rest)


def _flat(x, index):
    """Rows of what is per row; None is None."""
    return None if x is None else x[index].reshape(-1)


def _inverse(temperature, row_temperature, index):
    return 1.0 / temperature if row_temperature is None else row_temperature[index].reshape(-1).reciprocal()


def _ranges(kept, index):
    """The sets of these rows, and which rows keep the whole vocabulary and count."""
    ids, begin, end = kept
    return KeptSets(ids, begin[index].reshape(-1), end[index].reshape(-1))


def whole_rows(kept: KeptSets, mask: Tensor | None) -> Tensor:
    """(N,) bool: rows that keep the whole vocabulary and count."""
    whole = kept.begin == kept.end
    return whole if mask is None else whole & mask


def _unit_stride(logits):
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


@torch.library.custom_op("fused_rl::kept_logprobs", mutates_args=())
def _kept_logprobs(
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...) int64
    mask: Tensor | None,  # (...) bool
    temperature: float,
    row_temperature: Tensor | None,  # (...) fp32; replaces temperature
    softcap: float | None,
    ids: Tensor,  # (M,) integers
    begin: Tensor,  # (...) int64, as end
    end: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # logprobs, entropy, lse, m, rest (...), x (M,), fp32
    kept = KeptSets(ids, begin, end)
    if values_are_checked(logits.device):
        check_target_values(targets, mask, logits.shape[-1])
        check_temperature_values(row_temperature, mask)
        check_kept_values(kept, targets, mask, logits.shape[-1])
    x = torch.zeros(ids.shape, dtype=torch.float32, device=logits.device)
    new = [torch.zeros(targets.shape, dtype=torch.float32, device=logits.device) for _ in RowStatistics._fields]
    if targets.numel() == 0:
        return *new, x

    # whole rows first; those with a set are written over what is left of them
    backend, logits = backend_of(logits.device).support, _unit_stride(logits)
    for at in _slabs(logits):
        rows, chosen, counts, sets = logits[at].flatten(0, -2), _flat(targets, at), _flat(mask, at), _ranges(kept, at)
        inv_t, whole = _inverse(temperature, row_temperature, at), whole_rows(sets, counts)
        found = backend.whole_fwd(rows, chosen, whole, inv_t, softcap)
        found = backend.kept_fwd(x, sets, chosen, counts, inv_t, softcap, logits=rows, into=found)
        if at == ():
            return *(o.resize_(targets.shape) for o in found), x  # no views, which could not be modified in place
        for all_rows, part in zip(new, found, strict=True):
            all_rows[at].copy_(part.view(targets[at].shape))
    return *new, x


@_kept_logprobs.register_fake
def _kept_logprobs_fake(logits, targets, mask, temperature, row_temperature, softcap, ids, begin, end):
    new = [torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in RowStatistics._fields]
    return *new, torch.empty(ids.shape, dtype=torch.float32, device=logits.device)


@torch.library.custom_op("fused_rl::kept_logprobs_backward", mutates_args=())
def _kept_logprobs_backward(
    dlogprobs: Tensor | None,  # (...) fp32, as the next two
    dentropy: Tensor | None,
    dlse: Tensor | None,
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...) int64
    mask: Tensor | None,  # (...) bool
    entropy: Tensor,  # (...) fp32, as m and rest
    m: Tensor,
    rest: Tensor,
    x: Tensor,  # (M,) fp32
    temperature: float,
    row_temperature: Tensor | None,  # (...) fp32
    softcap: float | None,
    ids: Tensor,  # (M,) integers
    begin: Tensor,  # (...) int64, as end
    end: Tensor,
) -> Tensor:  # (..., V), contiguous, in the dtype of the logits
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    upstream, per_row = (dlogprobs, dentropy, dlse), (targets, mask, entropy, m, rest)
    _fill(dlogits, upstream, _unit_stride(logits), per_row, x, temperature, row_temperature, softcap, (ids, begin, end))
    return dlogits


@_kept_logprobs_backward.register_fake
def _kept_logprobs_backward_fake(dlogprobs, dentropy, dlse, logits, *_):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _fill(dlogits, upstream, logits, per_row, x, temperature, row_temperature, softcap, kept):
    """The gradient into dlogits, which may be the logits."""
    if logits.numel() == 0:
        return
    backend = backend_of(logits.device).support
    for at in _slabs(logits, dlogits):
        rows, out = logits[at].flatten(0, -2), dlogits[at].flatten(0, -2)
        grads = [_flat(d, at) for d in upstream]
        targets, mask, *state = (_flat(r, at) for r in per_row)
        sets, inv_t = _ranges(kept, at), _inverse(temperature, row_temperature, at)
        whole = whole_rows(sets, mask)
        backend.whole_bwd(*grads, rows, targets, whole, *state, inv_t, softcap, out=out)
        backend.kept_bwd(*grads, x, sets, targets, mask, *state, inv_t, softcap, out=out)


def _setup_context(ctx, inputs, output):
    logits, targets, mask, ctx.temperature, row_temperature, ctx.softcap, *kept = inputs
    _, entropy, _, m, rest, x = output
    own = entropy.clone()  # the caller may modify the output
    ctx.save_for_backward(logits, targets, mask, own, m, rest, x, row_temperature, *kept)
    ctx.mark_non_differentiable(m, rest, x)
    ctx.set_materialize_grads(False)


def _gradient(ctx, dlogprobs, dentropy, dlse, *_):
    if dlogprobs is None and dentropy is None and dlse is None:
        return (None,) * 9
    *saved, row_temperature, ids, begin, end = ctx.saved_tensors
    dlogits = torch.ops.fused_rl.kept_logprobs_backward(
        dlogprobs, dentropy, dlse, *saved, ctx.temperature, row_temperature, ctx.softcap, ids, begin, end
    )
    return dlogits, *(None,) * 8


_kept_logprobs.register_autograd(_gradient, setup_context=_setup_context)


_kept_logprobs_backward.register_autograd(no_second_derivative("token_logprobs"))


class _InplaceGradient(torch.autograd.Function):
    """The same, outside the operators: they may not return what they were given, and this gradient is the logits."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _kept_logprobs(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, dlogprobs, dentropy, dlse, *_):
        if dlogprobs is None and dentropy is None and dlse is None:
            return (None,) * 9
        if torch.is_grad_enabled():  # create_graph=True: else a second derivative would go missing
            raise RuntimeError("inplace=True leaves no logits to differentiate a second time; leave out create_graph")
        logits, targets, mask, entropy, m, rest, x, row_temperature, *kept = ctx.saved_tensors
        dlogits, upstream = logits.detach(), (dlogprobs, dentropy, dlse)
        per_row = (targets, mask, entropy, m, rest)
        _fill(dlogits, upstream, dlogits, per_row, x, ctx.temperature, row_temperature, ctx.softcap, kept)
        torch.autograd.graph.increment_version(logits)  # a kernel's store is invisible to the version counter
        return dlogits, *(None,) * 8
