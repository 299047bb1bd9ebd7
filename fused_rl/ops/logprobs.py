"""Log-probability, entropy and log-sum-exp of each row of logits: one read forward, one read and one write backward.

For one row, x = logits / temperature, m = max x, p = softmax(x), H the entropy, dlp, dH, dlse the upstream gradients:

    dx_j = [ dlp (1{j = target} - p_j) - dH p_j (log p_j + H) + dlse p_j ] / temperature

`token_logprobs` checks its arguments and takes one of the routes of `fused_rl.ops.routes` to the row functions of
`fused_rl.ops.rows`; in place it is not that of operators, which may not return what they were given. The backward pass
needs O(rows) of their results: the `RowStatistics` m and rest, and the logits of a support.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_rl import reference
from fused_rl.base.checks import (
    FLOATING,
    LOGITS_DTYPES,
    check_device,
    check_flag,
    check_logits,
    check_rows,
    check_softcap,
    check_target_values,
    check_targets,
    check_temperature_values,
    check_transforms,
    split_temperature,
    values_are_checked,
)
from fused_rl.base.graphs import skips_dispatcher
from fused_rl.base.outputs import TokenLogprobs
from fused_rl.cpu.compiled import in_huge_pages
from fused_rl.kernels.states import RowSupport
from fused_rl.ops.routes import Op
from fused_rl.ops.rows import (
    inverse,
    next_targets,
    of_slab,
    row_bwd,
    row_fwd,
    slabs,
    without_last,
)
from fused_rl.ops.token_support import TokenSupport, check_support, check_support_values


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    softcap: float | None = None,
    shift: bool = False,
    inplace: bool = False,
    support: TokenSupport | None = None,
) -> TokenLogprobs:
    """Log-probability of each target, entropy and log-sum-exp of each row of logits, in nats.

    A row scores x = cap(logits) / temperature with cap(z) = softcap * tanh(z / softcap). -inf logits (banned tokens)
    are allowed anywhere, and a target there has log-probability -inf. A row that is -inf throughout returns (-inf, 0,
    -inf) and gets a gradient of 0. NaN or +inf in an unmasked row makes its outputs NaN. Every finite logit counts,
    however large; an output beyond fp32 is infinite.

    Args:
        logits: (..., V), bf16, fp16 or fp32. Rows may have any strides; logits are copied only if the stride of the
            last dimension is not 1. fp64 logits are computed by `fused_rl.reference`: outputs and gradient are then
            fp64, several times the memory of the logits is used, and `inplace` has no effect.
        targets: (...), integers in [0, V) wherever the mask is True; or (..., K), K targets per row, with as many
            dimensions as the logits. K may be 0 or thousands, and ids may come in any order and more than once.
        temperature: a number from 1e-6 to 1e6, or a tensor of such numbers, one per row, which broadcasts to the rows'
            shape (not differentiated).
        mask: bool, of the rows' shape, True where a row counts. The forward pass does not read any other row; it
            returns 0 and gets a gradient of exactly 0, whatever its logits and target are.
        softcap: a number > 0, or None.
        shift: logits (B, T, V) at t score targets (B, T) at t + 1, or (B, T, K). Outputs, mask and per-row temperature
            are (B, T - 1); the gradient is written once to all T positions, zeros at the last.
        inplace: the gradient takes the storage of the logits, which must be neither a leaf nor a view of one. Once it
            is computed, the logits hold the gradient, and autograd's version counter raises at a second backward pass
            and at that of anything else that saved the logits. It has no effect without a gradient, and is refused
            under torch.compile.
        support: the ids that a truncated sampler kept in each row of the targets, including the target. All three
            outputs are then over these ids alone, which takes K reads per row. Tokens outside the set get no gradient,
            because the sampler could not choose them. A row with an empty range keeps the whole vocabulary, with the
            same bits as without `support`. With `shift` it has the rows of all T targets.

    Returns:
        `TokenLogprobs(logprobs, entropy, lse)`, each fp32 (fp64 for fp64 logits): logprobs have the shape of the
        targets, and the others have one value per row, (B, T - 1) with `shift`. Each is differentiable once with
        respect to the logits. Like a single target, several targets take one read in the forward pass, and one read and
        one write in the backward pass. The upstream gradients of an id that comes more than once add up, with the same
        bits each time. entropy >= 0 and logprobs <= 0 hold exactly. Between forward and backward, O(rows) values are
        kept beside the logits. The outputs are not among them, so they may be modified in place.

    Raises:
        RuntimeError: a second derivative, torch.func transforms and forward-mode differentiation.
        ValueError: a shape, dtype or device that does not fit; a temperature out of range, or a softcap that is not
            positive and finite; a target outside the vocabulary, or outside its kept set, in an unmasked row, or an id
            of the set outside the vocabulary. Checks that need the values of a tensor (targets, sets, temperatures per
            row) are made on CPU tensors. For GPU tensors, the log-probability of a bad target and the outputs of a bad
            id or temperature are NaN; FUSED_RL_CHECKED=1 in the environment turns on the same checks, at the price of a
            synchronisation per call.
    """
    if not isinstance(inplace, bool):
        check_flag("inplace", inplace)
    options = temperature, mask, softcap, shift
    temperature, row_temperature = check_row_arguments(logits, targets, *options, FLOATING)
    ids = begin = end = None
    if support is not None:
        check_support(support, several=targets.dim() == logits.dim())
        ids, begin, end = support.of_rows(targets.shape, targets.device, shift)
    if logits.dtype == torch.float64:
        return _in_fp64(
            logits, targets, temperature, row_temperature, mask, softcap, shift, support
        )
    if inplace:
        _check_inplace(logits)

    # shift: position t takes the target of t + 1; the last has none: masked, so that its gradient is zeros
    if shift:
        mask, row_temperature = without_last(logits, mask, row_temperature)
        targets = next_targets(targets)

    tensors = logits, targets.long(), mask, row_temperature, ids, begin, end
    inputs = *tensors, temperature, softcap, inplace
    if not (inplace or skips_dispatcher(logits)):
        outputs = torch.ops.fused_rl.token_logprobs.default(*inputs)
    elif logits.requires_grad and torch.is_grad_enabled():
        outputs = _OP.unregistered(logits, inputs)
    else:
        outputs = _statistics(*inputs)
    statistics = TokenLogprobs(*outputs[:3])
    return TokenLogprobs(*(output[:, :-1] for output in statistics)) if shift else statistics


def check_row_arguments(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    softcap: float | None,
    shift: bool = False,
    dtypes: tuple[torch.dtype, ...] = LOGITS_DTYPES,
) -> tuple[float, Tensor | None]:
    """Check `token_logprobs`'s arguments without reading a tensor; `split_temperature` of theirs."""
    check_logits("logits", logits, dtypes)
    rows = check_rows(logits, mask, shift)
    check_targets(targets, "logits", logits, shift)
    if softcap is not None:
        check_softcap(softcap)
    if targets.device != logits.device:
        check_device("targets", targets, logits.device, "logits")
    check_transforms("token_logprobs", logits)
    return split_temperature(temperature, rows, logits.device)


def shares_leaf(logits: Tensor) -> bool:
    """Return True for a leaf of autograd and for a view of one, which torch lets nothing write to either."""
    return logits.is_leaf or (logits._base is not None and logits._base.is_leaf)


def _check_inplace(logits):
    if torch.compiler.is_compiling():
        raise ValueError(
            "inplace=True is not supported under torch.compile, which plans memory itself; leave it out"
        )
    if not (logits.requires_grad and torch.is_grad_enabled()):
        return
    if shares_leaf(logits):
        raise ValueError(
            "inplace=True would overwrite a leaf by its gradient, which views of it share; leave it out, or pass "
            "logits computed from the leaf"
        )
    leading = zip(logits.shape[:-1], logits.stride()[:-1], strict=True)
    overlapping = [n > 1 and stride < logits.shape[-1] for n, stride in leading]
    if logits.stride(-1) != 1 or any(overlapping):
        raise ValueError(
            f"inplace=True needs rows that are contiguous and do not overlap, got strides {logits.stride()} for "
            f"{tuple(logits.shape)}; leave it out, or pass logits.contiguous()"
        )


def _in_fp64(
    logits, targets, temperature, row_temperature, mask, softcap, shift, support
) -> TokenLogprobs:
    """The reference, whose arguments are checked as those of the operators."""
    scored = targets[:, 1:] if shift else targets
    row_support = None if support is None else support.of_rows(targets.shape, targets.device)
    if shift and row_support is not None:
        row_support = row_support.at((slice(None), slice(1, None)))
    if values_are_checked(logits.device):
        _check_values(logits, scored, mask, row_temperature, row_support)
    temperature = temperature if row_temperature is None else row_temperature
    options = {"mask": mask, "softcap": softcap, "shift": shift, "support": support}
    return reference.token_logprobs(logits, targets, temperature=temperature, **options)


def _check_values(logits, targets, mask, row_temperature, support):
    check_target_values(targets, mask, logits.shape[-1], several=targets.dim() == logits.dim())
    if row_temperature is not None:
        check_temperature_values(row_temperature, mask)
    if support is not None:
        check_support_values(support, targets, mask, logits.shape[-1])


def _statistics(
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...) or (..., K) int64
    mask: Tensor | None,  # (...) bool
    row_temperature: Tensor | None,  # (...) fp32; replaces temperature
    ids: Tensor | None,  # (M,) integers, a `RowSupport` with the next two
    begin: Tensor | None,  # (...) int64
    end: Tensor | None,
    temperature: float,
    softcap: float | None,
    inplace: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """fp32, new tensors: logprobs as the targets; entropy, lse, m, rest (...); x (M,), the logits of a support."""
    support: Any = None if ids is None else RowSupport(ids, begin, end)  # type: ignore[arg-type]
    if values_are_checked(logits.device):
        _check_values(logits, targets, mask, row_temperature, support)
    if logits.numel() == 0:
        return _empty_statistics(logits, targets, mask, row_temperature, ids)
    x: Any = None
    outputs: Sequence[Tensor] = []

    # a slab at a time; as a rule it is all rows
    if ids is not None:
        x = torch.zeros(ids.shape, dtype=torch.float32, device=logits.device)
    for at, rows in slabs(logits):
        per_row = of_slab(at, rows, logits.dim() - 1, targets, mask, row_temperature, begin, end)
        slab_targets, slab_mask, temperatures, begins, ends = per_row
        sets = None if ids is None else RowSupport(ids, begins, ends)
        inv_t = 1.0 / temperature if temperatures is None else inverse(temperature, temperatures)
        statistics = row_fwd(rows, slab_targets, slab_mask, inv_t, softcap, sets, x)
        if at == ():
            outputs = statistics
            if logits.dim() != 2:  # no views, which could not be modified in place
                outputs = []
                for output in statistics:
                    outputs.append(output.resize_(logits.shape[:-1] + output.shape[1:]))
            break
        outputs = outputs or _empty_statistics(logits, targets)[:-1]
        for output, slab_output in zip(outputs, statistics, strict=True):
            output[at].copy_(slab_output.view(output[at].shape))
    logprobs, entropy, lse, m, rest = outputs
    return logprobs, entropy, lse, m, rest, x


def _empty_statistics(logits, targets, mask=None, row_temperature=None, ids=None, *_):
    logprobs = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    entropy, lse, m, rest = (logprobs.new_empty(logits.shape[:-1]) for _ in range(4))
    return logprobs, entropy, lse, m, rest, logprobs.new_empty(0 if ids is None else ids.shape)


def _gradient(
    dlogprobs: Tensor | None,  # as the targets, fp32
    dentropy: Tensor | None,  # (...) fp32, as the next
    dlse: Tensor | None,
    entropy: Tensor,  # (...) fp32
    logits: Tensor,  # this and the next six as in `_statistics`
    targets: Tensor,
    mask: Tensor | None,
    row_temperature: Tensor | None,
    ids: Tensor | None,
    begin: Tensor | None,
    end: Tensor | None,
    m: Tensor,  # (...) fp32, as rest
    rest: Tensor,
    x: Tensor | None,  # (M,) fp32
    temperature: float,
    softcap: float | None,
    inplace: bool,
) -> Tensor:
    """(..., V), contiguous, in the dtype of the logits, or in their place."""
    if inplace:
        dlogits = logits.detach()
        # a kernel's store is invisible to the version counter
        torch.autograd.graph.increment_version(logits)
    else:
        dlogits = in_huge_pages(torch.empty_like(logits, memory_format=torch.contiguous_format))
    if logits.numel() == 0:
        return dlogits
    row_inputs = dlogprobs, dentropy, dlse, targets, mask, entropy, m, rest
    for at, rows, out in slabs(logits, dlogits):
        slab_inputs = of_slab(at, rows, logits.dim() - 1, *row_inputs, row_temperature, begin, end)
        *upstream, slab_targets, slab_mask, of_entropy, ms, rests, temperatures, begins, ends = (
            slab_inputs
        )
        sets = None if ids is None else RowSupport(ids, begins, ends)
        state = of_entropy, ms, rests
        inv_t = inverse(temperature, temperatures)
        row_bwd(upstream, rows, slab_targets, slab_mask, state, inv_t, softcap, out, sets, x)
    return dlogits


def _empty_gradient(dlogprobs, dentropy, dlse, entropy, logits, *_):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


_OP = Op(
    ("fused_rl::token_logprobs", "fused_rl::token_logprobs_backward"),
    (_statistics, _gradient),
    (_empty_statistics, _empty_gradient),
    tensors=7,
    leaves=1,
    outputs=3,
    kept=1,
)
