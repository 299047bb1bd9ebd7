"""Log-probability, entropy and log-sum-exp of each row of logits: one read forward, one read and one write backward.

For one row, x = logits / temperature, m = max x, p = softmax(x), H the entropy, dlp, dH, dlse the upstream gradients:

    dx_j = [ dlp (1{j = target} - p_j) - dH p_j (log p_j + H) + dlse p_j ] / temperature

`token_logprobs` checks its arguments and reaches the row functions of `fused_rl.ops.rows` in one of three ways. The
backward pass needs O(rows) of their results: the `RowStatistics` m and rest, and the logits of a support.

- `torch.ops.fused_rl.token_logprobs` and `token_logprobs_backward`: registered, so that `torch.compile` sees two opaque
  calls with known shapes;
- `_Unregistered`, where nobody looks at operators: their dispatch takes as long as a kernel over a hundred rows;
- `_Unregistered` in place: a registered operator may not return what it was given, and this gradient is the logits.
"""

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
    no_second_derivative,
    split_temperature,
    values_are_checked,
)
from fused_rl.base.graphs import skips_dispatcher
from fused_rl.base.outputs import TokenLogprobs, unless_modified
from fused_rl.cpu.compiled import in_huge_pages
from fused_rl.kernels.states import RowStatistics, RowSupport
from fused_rl.ops.rows import (
    inverse,
    next_targets,
    of_slab,
    row_bwd,
    row_fwd,
    slabs,
    unit_stride,
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
    row_support = None, None, None
    if support is not None:
        check_support(support, several=targets.dim() == logits.dim())
        row_support = support.of_rows(targets.shape, targets.device, shift)
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

    inputs = logits, targets.long(), mask, temperature, row_temperature, softcap, *row_support
    if not (inplace or skips_dispatcher(logits)):
        outputs = torch.ops.fused_rl.token_logprobs.default(*inputs)
    elif logits.requires_grad and torch.is_grad_enabled():
        outputs = _Unregistered.apply(logits, inplace, inputs)
    else:
        outputs = _statistics(*inputs)
    logprobs, entropy, lse, *_ = outputs
    if shift:
        return TokenLogprobs(logprobs[:, :-1], entropy[:, :-1], lse[:, :-1])
    return TokenLogprobs(logprobs, entropy, lse)


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
    _check_values(logits, scored, mask, row_temperature, row_support)
    temperature = temperature if row_temperature is None else row_temperature
    options = {"mask": mask, "softcap": softcap, "shift": shift, "support": support}
    return reference.token_logprobs(logits, targets, temperature=temperature, **options)


def _check_values(logits, targets, mask, row_temperature, support):
    """Check the tensors' values, where that costs nothing."""
    if not values_are_checked(logits.device):
        return
    check_target_values(targets, mask, logits.shape[-1], several=targets.dim() == logits.dim())
    if row_temperature is not None:
        check_temperature_values(row_temperature, mask)
    if support is not None:
        check_support_values(support, targets, mask, logits.shape[-1])


@torch.library.custom_op("fused_rl::token_logprobs", mutates_args=())
def _token_logprobs(
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...) or (..., K) int64
    mask: Tensor | None,  # (...) bool
    temperature: float,
    row_temperature: Tensor | None,  # (...) fp32; replaces temperature
    softcap: float | None,
    ids: Tensor | None = None,  # (M,) integers, a `RowSupport` with the next two
    begin: Tensor | None = None,  # (...) int64
    end: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """fp32: logprobs as the targets; entropy, lse, m, rest (...); x (M,), the logits of the support."""
    logprobs, entropy, lse, m, rest, x = _statistics(
        logits, targets, mask, temperature, row_temperature, softcap, ids, begin, end
    )
    return logprobs, entropy, lse, m, rest, logprobs.new_empty(0) if x is None else x


@_token_logprobs.register_fake
def _empty_statistics(logits, targets, mask, temperature, row_temperature, softcap, ids=None, *_):
    logprobs = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    others = [logprobs.new_empty(logits.shape[:-1]) for _ in RowStatistics._fields[1:]]
    return logprobs, *others, logprobs.new_empty(0 if ids is None else ids.shape)


def _statistics(*inputs):
    """Return the operator's results for its arguments, as new tensors; without support no x."""
    logits, targets, mask, temperature, row_temperature, softcap, *support = inputs
    ids, begin, end = support
    _check_values(
        logits, targets, mask, row_temperature, None if ids is None else RowSupport(*support)
    )
    if logits.numel() == 0:
        return _empty_statistics(*inputs)
    x = None if ids is None else torch.zeros(ids.shape, dtype=torch.float32, device=logits.device)
    outputs: Any = None

    # all rows at once where they are a matrix: a small input would wait for slabs as long as for its arithmetic
    if ids is None and (logits.dim() == 2 or logits.is_contiguous()):
        return *_matrix_statistics(
            logits, targets, mask, temperature, row_temperature, softcap
        ), None

    # else a slab at a time; as a rule it is all of them
    for at, rows in slabs(logits):
        per_row = of_slab(at, rows, logits.dim() - 1, targets, mask, row_temperature, begin, end)
        slab_targets, slab_mask, temperatures, *ranges = per_row
        sets = None if ids is None else RowSupport(ids, *ranges)
        statistics = row_fwd(
            rows, slab_targets, slab_mask, inverse(temperature, temperatures), softcap, sets, x
        )
        if at == ():  # no views, which could not be modified in place
            return *(o.resize_(logits.shape[:-1] + o.shape[1:]) for o in statistics), x
        outputs = outputs or _empty_statistics(*inputs)[:-1]
        for whole, slab_output in zip(outputs, statistics, strict=True):
            whole[at].copy_(slab_output.view(whole[at].shape))
    return *outputs, x


def _matrix_statistics(logits, targets, mask, temperature, row_temperature, softcap):
    rows = unit_stride(logits) if logits.dim() == 2 else logits.view(-1, logits.shape[-1])
    leading = logits.dim() - 1
    if leading != 1:
        targets = targets.reshape(len(rows), *targets.shape[leading:])
        mask = None if mask is None else mask.reshape(-1)
    outputs = row_fwd(rows, targets, mask, inverse(temperature, row_temperature), softcap)
    if leading != 1:
        # no views, which could not be modified in place
        outputs = [output.resize_(logits.shape[:-1] + output.shape[1:]) for output in outputs]
    return outputs


@torch.library.custom_op("fused_rl::token_logprobs_backward", mutates_args=())
def _token_logprobs_backward(
    dlogprobs: Tensor | None,  # as the targets, fp32
    dentropy: Tensor | None,  # (...) fp32, as the next
    dlse: Tensor | None,
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...) or (..., K) int64
    mask: Tensor | None,  # (...) bool
    entropy: Tensor,  # (...) fp32, as m and rest
    m: Tensor,
    rest: Tensor,
    temperature: float,
    row_temperature: Tensor | None,  # (...) fp32
    softcap: float | None,
    x: Tensor | None = None,  # (M,) fp32
    ids: Tensor | None = None,  # (M,) integers
    begin: Tensor | None = None,  # (...) int64
    end: Tensor | None = None,
) -> Tensor:  # (..., V), contiguous, in the dtype of the logits
    upstream = (dlogprobs, dentropy, dlse)
    state = (entropy, m, rest)
    dlogits = _empty_gradient(logits)
    options = temperature, row_temperature, softcap, x, ids, begin, end
    return _gradient_into(dlogits, *upstream, logits, targets, mask, *state, *options)


@_token_logprobs_backward.register_fake
def _token_logprobs_backward_fake(dlogprobs, dentropy, dlse, logits, *_):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _empty_gradient(logits):
    return in_huge_pages(torch.empty_like(logits, memory_format=torch.contiguous_format))


def _gradient_into(dlogits, *arguments):
    """The gradient, of the arguments of the operator, into dlogits (..., V), which may be the logits."""
    *given, temperature, row_temperature, softcap, x, ids, begin, end = arguments
    logits = given.pop(3)
    if logits.numel() == 0:
        return dlogits
    # all rows at once where they are a matrix, as in the forward pass
    if ids is None and (logits.dim() == 2 or logits.is_contiguous()):
        rows, out = unit_stride(logits), dlogits
        if logits.dim() != 2:
            rows, out = (x.view(-1, x.shape[-1]) for x in (logits, dlogits))
            given = of_slab((), rows, logits.dim() - 1, *given)
        inv_t = inverse(temperature, row_temperature)
        row_bwd(given[:3], rows, given[3], given[4], given[5:], inv_t, softcap, out)
        return dlogits
    for at, rows, out in slabs(logits, dlogits):
        parts = of_slab(at, rows, logits.dim() - 1, *given, row_temperature, begin, end)
        *upstream, targets, mask, entropy, m, rest, temperatures, begins, ends = parts
        sets = None if ids is None else RowSupport(ids, begins, ends)
        inv_t = inverse(temperature, temperatures)
        row_bwd(upstream, rows, targets, mask, (entropy, m, rest), inv_t, softcap, out, sets, x)
    return dlogits


def _setup_context(ctx, inputs, output, kept_entropy):
    logits, targets, mask, ctx.temperature, row_temperature, ctx.softcap, *support = inputs
    *_, m, rest, x = output
    ctx.save_for_backward(
        logits, targets, mask, kept_entropy, m, rest, row_temperature, x, *support
    )
    ctx.set_materialize_grads(False)


def _saved(ctx):
    """The arguments of the backward operator after the upstream gradients."""
    *state, row_temperature, x, ids, begin, end = ctx.saved_tensors
    return *state, ctx.temperature, row_temperature, ctx.softcap, x, ids, begin, end


def _registered_context(ctx, inputs, output):
    _setup_context(ctx, inputs, output, output[1].clone())  # the caller may modify the output
    ctx.mark_non_differentiable(*output[3:])


def _registered_gradient(ctx, *upstream):
    if all(d is None for d in upstream):
        return (None,) * 9
    return torch.ops.fused_rl.token_logprobs_backward(*upstream[:3], *_saved(ctx)), *(None,) * 8


_token_logprobs.register_autograd(_registered_gradient, setup_context=_registered_context)
_token_logprobs_backward.register_autograd(no_second_derivative("token_logprobs"))


class _Unregistered(torch.autograd.Function):
    """The same outside the operators: without their dispatch, or in place, which they may not be."""

    @staticmethod
    def forward(ctx, logits, inplace, inputs):
        ctx.inplace, output = inplace, _statistics(*inputs)
        _setup_context(ctx, inputs, output, None)
        ctx.entropy = output[1].detach(), output[1]._version
        return output[:3]

    @staticmethod
    def backward(ctx, *upstream):
        if all(d is None for d in upstream):
            return None, None, None
        logits, targets, mask, _, *state = _saved(ctx)
        entropy = unless_modified(*ctx.entropy)
        if entropy is None:
            _, _, *options, _, ids, begin, end = state
            entropy = _statistics(logits, targets, mask, *options, ids, begin, end)[1]
        saved = logits, targets, mask, entropy, *state
        if torch.is_grad_enabled():  # create_graph=True: else a second derivative would go missing
            if ctx.inplace:
                raise RuntimeError(
                    "inplace=True leaves no logits to differentiate again; leave out create_graph"
                )
            return torch.ops.fused_rl.token_logprobs_backward(*upstream, *saved), None, None
        dlogits = logits.detach() if ctx.inplace else _empty_gradient(logits)
        _gradient_into(dlogits, *upstream, *saved)
        if ctx.inplace:
            # a kernel's store is invisible to the version counter
            torch.autograd.graph.increment_version(logits)
        return dlogits, None, None
