"""Log-probability, entropy and log-sum-exp of each row of logits: one read forward, one read and one write backward.

For one row, x = logits / temperature, m = max x, p = softmax(x), H the entropy, dlp, dH, dlse the upstream gradients:

    dx_j = [ dlp (1{j = target} - p_j) - dH p_j (log p_j + H) + dlse p_j ] / temperature

Both backends (`fused_rl.kernels.logprob` for GPU tensors, `fused_rl.cpu.logprob` for CPU tensors) have the same two
functions, `logprob_fwd` and `logprob_bwd`; what they exchange is O(N): the `RowStatistics` m and rest. Of K targets per
row the gradients add up, sum_k dlp_k (1{j = target_k} - p_j): `targets_fwd` and `targets_bwd` in `targets.py` beside.
The registered operators `fused_rl::token_logprobs` and `fused_rl::token_logprobs_backward` stand between them and the
public function, so that `torch.compile` sees two opaque calls with known shapes.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn.functional import pad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fused_rl import reference
from fused_rl.backend import row_functions
from fused_rl.checks import (
    LOGITS_DTYPES,
    check_logits,
    check_mask,
    check_positive,
    check_target_values,
    check_targets,
    check_temperature,
    check_temperature_values,
    no_second_derivative,
    split_temperature,
    values_are_checked,
)
from fused_rl.kernels.states import RowStatistics
from fused_rl.outputs import TokenLogprobs
from fused_rl.support import kept_logprobs
from fused_rl.token_support import TokenSupport, check_kept_values, check_support

__all__ = ["TokenLogprobs", "token_logprobs"]


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
    are legal anywhere; a target there has log-probability -inf. A row that is -inf throughout returns (-inf, 0, -inf)
    and gets a gradient of 0. NaN or +inf in an unmasked row makes its outputs NaN. Every finite logit counts as what it
    is, however large; an output beyond fp32 is infinite.

    Args:
        logits: (..., V), bf16, fp16 or fp32. Rows may have any strides; only a last dimension whose stride is not 1
            is copied. fp64 logits are taken too, through `fused_rl.reference`: outputs and gradient are fp64, several
            times the logits' memory is held, and `inplace` has no effect.
        targets: (...), integers in [0, V) wherever the mask is True; or (..., K), K of them per row: with as many
            dimensions as the logits. K may be 0, and thousands; ids may come in any order, and more than once.
        temperature: a number from 1e-6 to 1e6, or a tensor of such, broadcastable to the rows' shape, one per row
            (not differentiated).
        mask: bool, of the rows' shape, True where a row counts. Any other row is not read forward, returns 0 and
            gets a gradient of exactly 0, whatever its logits and target are.
        softcap: a number > 0, or None.
        shift: logits (B, T, V) at t score targets (B, T) at t + 1, or (B, T, K). Outputs, mask and per-row temperature
            are (B, T - 1); the gradient is written once to all T positions, zeros at the last.
        inplace: the gradient takes the storage of the logits, which must not be a leaf. Once it is computed, a second
            backward, and the backward of anything else that saved the logits, raise through autograd's version
            counter; reading the logits yields the gradient. No effect without a gradient. Not under torch.compile.
        support: the ids that a truncated sampler kept in each row of the targets, its target among them; all three
            outputs are then over these alone, K reads per row. Tokens outside the set get no gradient, as the sampler
            could not draw them. A row with an empty range keeps the whole vocabulary, with the bits that it has
            without `support`. For `shift` it has the rows of all T targets.

    Returns:
        `TokenLogprobs(logprobs, entropy, lse)`, each fp32 (of fp64 logits fp64): logprobs of the shape of the targets,
        the others one per row; (B, T - 1) for `shift`; each differentiable once with respect to the logits. Several
        targets take one read forward, one read and one write backward, as one does; upstream gradients of an id that
        comes more than once add up, with the same bits each time. entropy >= 0 and logprobs <= 0 exactly.
        Between forward and backward, O(rows) are kept beyond the logits; none of it is an output, so these may be
        modified in place.

    Raises:
        RuntimeError: a second derivative, torch.func transforms and forward-mode differentiation.
        ValueError: a shape, dtype or device that does not fit; a temperature out of range, or a softcap that is not
            positive and finite; a target outside the vocabulary, or outside its kept set, in an unmasked row, or an id
            of the set outside the vocabulary. What needs the values of a tensor (targets, sets, per-row temperature)
            is checked on CPU tensors. For GPU tensors a bad target's log-probability and the outputs of a bad id or
            temperature are NaN, and FUSED_RL_CHECKED=1 in the environment turns on the same checks, at the price of a
            synchronisation per call.
    """
    check_row_arguments(logits, targets, temperature, mask, softcap, shift, (*LOGITS_DTYPES, torch.float64))
    kept = _kept(support, logits, targets, shift)
    if logits.dtype == torch.float64:
        return _in_fp64(logits, targets, temperature, mask, softcap, shift, support)
    if inplace:
        _check_inplace(logits)
    rows = _rows_shape(logits, shift)
    temperature, row_temperature = split_temperature(temperature, rows, logits.device)
    if shift:  # position t takes the target of t + 1; the last has none: masked, so that its gradient is zeros
        last = (0, targets.shape[1] - rows[1])
        mask = torch.ones(rows, dtype=torch.bool, device=logits.device) if mask is None else mask
        of_targets = last if targets.dim() == 2 else (0, 0, *last)
        targets, mask = pad(targets[:, 1:], of_targets), pad(mask, last, value=False)
        row_temperature = None if row_temperature is None else pad(row_temperature, last, value=1.0)
    op = _chosen(logits, inplace) if support is None else kept_logprobs(inplace)
    logprobs, entropy, lse, *_ = op(logits, targets.long(), mask, temperature, row_temperature, softcap, *kept)
    if shift:
        return TokenLogprobs(logprobs[:, :-1], entropy[:, :-1], lse[:, :-1])
    return TokenLogprobs(logprobs, entropy, lse)


def _kept(support, logits, targets, shift):
    """`KeptSets` of the rows of the logits, or nothing."""
    if support is None:
        return ()
    check_support(support, several=targets.dim() == logits.dim())
    return support.of_rows(targets.shape, targets.device, shift)


def _in_fp64(logits, targets, temperature, mask, softcap, shift, support) -> TokenLogprobs:
    """The reference, whose arguments are checked as those of the operators."""
    if values_are_checked(logits.device):
        several = targets.dim() == logits.dim()
        check_target_values(targets[:, 1:] if shift else targets, mask, logits.shape[-1], several)
    number, per_row = split_temperature(temperature, _rows_shape(logits, shift), logits.device)
    if per_row is not None and values_are_checked(logits.device):
        check_temperature_values(per_row, mask)
    temperature = number if per_row is None else per_row
    options = {"mask": mask, "softcap": softcap, "shift": shift}
    if support is not None:
        kept = support.of_rows(targets.shape, targets.device)
        kept = kept._replace(begin=kept.begin[:, 1:], end=kept.end[:, 1:]) if shift else kept
        if values_are_checked(logits.device):
            check_kept_values(kept, targets[:, 1:] if shift else targets, mask, logits.shape[-1])
        options["support"] = support
    return reference.token_logprobs(logits, targets, temperature=temperature, **options)


def check_row_arguments(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    softcap: float | None,
    shift: bool = False,
    dtypes: tuple[torch.dtype, ...] = LOGITS_DTYPES,
) -> None:
    """What can be told of `token_logprobs`'s arguments without reading a tensor."""
    check_logits("logits", logits, dtypes)
    if shift and logits.dim() != 3:
        raise ValueError(f"shift=True takes logits (B, T, V), got {tuple(logits.shape)}; add the batch dimension")
    hint = "; shift=True takes the targets of all T positions and drops the first itself" if shift else ""
    check_targets(targets, f"the rows of logits {tuple(logits.shape)}", logits.shape[:-1], hint)
    rows = _rows_shape(logits, shift)
    if mask is not None:
        hint = "; shift=True takes mask[:, 1:] of a mask over all T tokens" if shift else ""
        check_mask(mask, "the outputs", rows, hint)
    check_temperature(temperature, rows)
    if softcap is not None:
        check_positive("softcap", softcap, "pass None for no capping")
    for name, x in (("targets", targets), ("mask", mask), ("temperature", temperature)):
        if isinstance(x, Tensor) and x.device != logits.device and x.dim():
            raise ValueError(f"{name} is on {x.device}, the logits are on {logits.device}; move it there")
    if not torch.compiler.is_compiling():
        _check_transforms(logits)


def _rows_shape(logits, shift):
    return (logits.shape[0], max(logits.shape[1] - 1, 0)) if shift else tuple(logits.shape[:-1])


def _check_inplace(logits):
    if torch.compiler.is_compiling():
        raise ValueError("inplace=True is not supported under torch.compile, which plans memory itself; leave it out")
    if not (logits.requires_grad and torch.is_grad_enabled()):
        return
    if logits.is_leaf:
        raise ValueError(
            "inplace=True would overwrite a leaf by its gradient; leave it out, or pass logits computed from the leaf"
        )
    leading = zip(logits.shape[:-1], logits.stride()[:-1], strict=True)
    overlapping = [n > 1 and stride < logits.shape[-1] for n, stride in leading]
    if logits.stride(-1) != 1 or any(overlapping):
        raise ValueError(
            f"inplace=True needs rows that are contiguous and do not overlap, got strides {logits.stride()} for "
            f"{tuple(logits.shape)}; leave it out, or pass logits.contiguous()"
        )


def _check_transforms(logits):
    if torch._C._are_functorch_transforms_active() or unpack_dual(logits).tangent is not None:
        raise RuntimeError(
            "token_logprobs supports neither torch.func transforms (grad, vmap, jvp, ...) nor forward-mode "
            "differentiation; use torch.autograd, or fused_rl.reference.token_logprobs"
        )


def _one_stride(x):
    """Whether all dimensions but the last merge into one without a copy."""
    if x.dim() < 3:
        return True
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    leading = [(n, stride) for n, stride in pairs if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(leading))


def _per_row(x, rows):
    """(*rows) or (*rows, K) -> (N,) or (N, K)."""
    return x if x is None or len(rows) == 1 else x.reshape(rows.numel(), *x.shape[len(rows) :])


def _inverse(temperature, row_temperature):
    return 1.0 / temperature if row_temperature is None else row_temperature.reshape(-1).reciprocal()


def _select(tensors, dim, i):
    return [None if x is None else x.select(dim, i) for x in tensors]


def _shortest(shape):
    """The leading dimension to walk when rows do not merge: such as the batch of logits[:, :-1]."""
    return min((n, dim) for dim, n in enumerate(shape[:-1]) if n > 1)[1]


def _forward(logits, targets, mask, temperature, row_temperature, softcap):
    if not _one_stride(logits):
        dim = _shortest(logits.shape)
        slabs = (_select((logits, targets, mask, row_temperature), dim, i) for i in range(logits.shape[dim]))
        parts = [_forward(x, y, k, temperature, rows, softcap) for x, y, k, rows in slabs]
        return tuple(torch.stack(part, dim) for part in zip(*parts, strict=True))
    rows = logits.shape[:-1]
    targets = _per_row(targets, rows)
    forward, _ = row_functions(logits.device, targets)
    inv_t = _inverse(temperature, row_temperature)
    outputs = forward(logits.reshape(-1, logits.shape[-1]), targets, _per_row(mask, rows), inv_t, softcap)
    if len(rows) == 1:
        return tuple(outputs)
    return tuple(o.resize_(rows + o.shape[1:]) for o in outputs)  # no views, which could not be modified in place


def _backward(dlogits, logits, per_row, temperature, row_temperature, softcap):
    """Fills dlogits; per_row holds dlogprobs, dentropy, dlse, targets, mask, entropy, m, rest, of the leading shape."""
    if not (_one_stride(logits) and _one_stride(dlogits)):
        dim = _shortest(logits.shape)
        for i in range(logits.shape[dim]):
            out, x, rows, *slab = _select((dlogits, logits, row_temperature, *per_row), dim, i)
            _backward(out, x, slab, temperature, rows, softcap)
        return
    vocab, rows = logits.shape[-1], logits.shape[:-1]
    dlogprobs, dentropy, dlse, targets, mask, entropy, m, rest = (_per_row(x, rows) for x in per_row)
    _, backward = row_functions(logits.device, targets)
    backward(
        dlogprobs, dentropy, dlse, logits.reshape(-1, vocab), targets, mask, entropy, m, rest,
        _inverse(temperature, row_temperature), softcap, out=dlogits.view(-1, vocab),
    )  # fmt: skip


def unit_stride(logits: Tensor) -> Tensor:
    """A copy only where the last dimension has another stride."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def _chosen(logits, inplace):
    """The operator, or where nobody looks at operators a plain function: a small input on a CPU takes half as long."""
    if inplace:
        return _InplaceGradient.apply
    traced = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    if traced or logits.device.type != "cpu" or type(logits) not in (Tensor, torch.nn.Parameter):
        return torch.ops.fused_rl.token_logprobs.default
    return _PlainGradient.apply if logits.requires_grad and torch.is_grad_enabled() else _outputs


def _outputs(logits, targets, mask, temperature, row_temperature, softcap):
    if values_are_checked(logits.device):
        check_target_values(targets, mask, logits.shape[-1], several=targets.dim() == logits.dim())
        check_temperature_values(row_temperature, mask)
    if logits.numel() == 0:
        return _token_logprobs_fake(logits, targets, mask, temperature, row_temperature, softcap)
    return _forward(unit_stride(logits), targets, mask, temperature, row_temperature, softcap)


@torch.library.custom_op("fused_rl::token_logprobs", mutates_args=())
def _token_logprobs(
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...) or (..., K) int64
    mask: Tensor | None,  # (...) bool
    temperature: float,
    row_temperature: Tensor | None,  # (...) fp32; replaces temperature
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # logprobs as the targets; entropy, lse, m, rest (...); fp32
    return _outputs(logits, targets, mask, temperature, row_temperature, softcap)


@_token_logprobs.register_fake
def _token_logprobs_fake(logits, targets, mask, temperature, row_temperature, softcap):
    logprobs = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    per_row = [logprobs.new_empty(logits.shape[:-1]) for _ in RowStatistics._fields[1:]]
    return logprobs, *per_row


def _gradient_of_logits(dlogprobs, dentropy, dlse, logits, targets, *rest):
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    *kept, temperature, row_temperature, softcap = rest
    if logits.numel():
        per_row = (dlogprobs, dentropy, dlse, targets, *kept)
        _backward(dlogits, unit_stride(logits), per_row, temperature, row_temperature, softcap)
    return dlogits


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
) -> Tensor:  # (..., V), contiguous, in the dtype of the logits
    per_row = (targets, mask, entropy, m, rest)
    return _gradient_of_logits(dlogprobs, dentropy, dlse, logits, *per_row, temperature, row_temperature, softcap)


@_token_logprobs_backward.register_fake
def _token_logprobs_backward_fake(dlogprobs, dentropy, dlse, logits, *_):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(ctx, inputs, output):
    _keep(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[3:])


def _keep(ctx, inputs, output):
    logits, targets, mask, ctx.temperature, row_temperature, ctx.softcap = inputs
    _, entropy, _, m, rest = output  # `RowStatistics`, as operators return them: a plain tuple
    kept = entropy.clone()  # the caller may modify the output
    ctx.save_for_backward(logits, targets, mask, kept, m, rest, row_temperature)
    ctx.set_materialize_grads(False)


def _gradient(ctx, dlogprobs, dentropy, dlse, *_):
    if dlogprobs is None and dentropy is None and dlse is None:
        return (None,) * 6
    dlogits = _gradient_by(torch.ops.fused_rl.token_logprobs_backward, ctx, dlogprobs, dentropy, dlse)
    return dlogits, None, None, None, None, None


def _gradient_by(function, ctx, *upstream):
    *saved, row_temperature = ctx.saved_tensors
    return function(*upstream, *saved, ctx.temperature, row_temperature, ctx.softcap)


_token_logprobs.register_autograd(_gradient, setup_context=_setup_context)


_token_logprobs_backward.register_autograd(no_second_derivative("token_logprobs"))


class _PlainGradient(torch.autograd.Function):
    """The same, outside the operators: no dispatch of theirs."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _outputs(*inputs)
        _keep(ctx, inputs, output)
        return output[:3]

    @staticmethod
    def backward(ctx, *upstream):
        if torch.is_grad_enabled():  # create_graph=True: the operator's gradient says that it has none
            return _gradient(ctx, *upstream)
        if all(d is None for d in upstream):
            return (None,) * 6
        return _gradient_by(_gradient_of_logits, ctx, *upstream), None, None, None, None, None


class _InplaceGradient(torch.autograd.Function):
    """The same, outside the operators: they may not return what they were given, and this gradient is the logits."""

    @staticmethod
    def forward(ctx, logits, targets, mask, temperature, row_temperature, softcap):
        inputs = (logits, targets, mask, temperature, row_temperature, softcap)
        output = _outputs(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, dlogprobs, dentropy, dlse, *_):
        if dlogprobs is None and dentropy is None and dlse is None:
            return (None,) * 6
        if torch.is_grad_enabled():  # create_graph=True: else a second derivative would go missing
            raise RuntimeError("inplace=True leaves no logits to differentiate a second time; leave out create_graph")
        logits, targets, mask, entropy, m, rest, row_temperature = ctx.saved_tensors
        per_row = (dlogprobs, dentropy, dlse, targets, mask, entropy, m, rest)
        dlogits = logits.detach()
        if logits.numel():
            _backward(dlogits, dlogits, per_row, ctx.temperature, row_temperature, ctx.softcap)
        torch.autograd.graph.increment_version(logits)  # a kernel's store is invisible to the version counter
        return dlogits, None, None, None, None, None
