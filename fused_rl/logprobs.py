"""Log-probability, entropy and log-sum-exp of each row of logits: one read forward, one read and one write backward.

For one row, x = logits / temperature, m = max x, p = softmax(x), H the entropy, dlp, dH, dlse the upstream gradients:

    dx_j = [ dlp (1{j = target} - p_j) - dH p_j (log p_j + H) + dlse p_j ] / temperature

Both backends (`fused_rl.kernels.logprob` for GPU tensors, `fused_rl.cpu` for CPU tensors) have the same two functions,
`logprob_fwd` and `logprob_bwd`; what they exchange is O(N): the raw maximum m and rest = sum(exp(x - m)) - 1.
The registered operators `fused_rl::token_logprobs` and `fused_rl::token_logprobs_backward` stand between them and the
public function, so that `torch.compile` sees two opaque calls with known shapes.
"""

import math
import os
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn.functional import pad

__all__ = ["TokenLogprobs", "token_logprobs"]


class TokenLogprobs(NamedTuple):
    """Per-row outputs of `token_logprobs`, each fp32, in nats, of the shape of the targets, 0 where masked."""

    logprobs: Tensor
    entropy: Tensor
    lse: Tensor


def row_backend(device: torch.device):
    """The module whose `logprob_fwd` and `logprob_bwd` serve tensors of this device."""
    if device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        from fused_rl.kernels import logprob

        return logprob
    from fused_rl import cpu

    return cpu


def token_logprobs(logits, targets, *, temperature=1.0, mask=None, softcap=None, shift=False, inplace=False):
    """Log-probability of each target, entropy and log-sum-exp of each row of logits, in nats.

    A row scores x = cap(logits) / temperature with cap(z) = softcap * tanh(z / softcap). -inf logits (banned tokens)
    are legal anywhere; a target there has log-probability -inf. A row that is -inf throughout returns (-inf, 0, -inf)
    and gets a gradient of 0. NaN or +inf in an unmasked row makes its outputs NaN.

    Args:
        logits: (..., V), bf16, fp16 or fp32. Rows may have any strides; only a last dimension whose stride is not 1
            is copied.
        targets: (...), integers in [0, V) wherever the mask is True.
        temperature: a number > 0, or a tensor broadcastable to the outputs' shape, one > 0 per row (not
            differentiated).
        mask: bool, of the outputs' shape, True where a row counts. Any other row is not read forward, returns 0 and
            gets a gradient of exactly 0, whatever its logits and target are.
        softcap: a number > 0, or None.
        shift: logits (B, T, V) at t score targets (B, T) at t + 1. Outputs, mask and per-row temperature are
            (B, T - 1); the gradient is written once to all T positions, zeros at the last.
        inplace: the gradient takes the storage of the logits, which must not be a leaf. Once it is computed, a second
            backward, and the backward of anything else that saved the logits, raise through autograd's version
            counter; reading the logits yields the gradient. No effect without a gradient. Not under torch.compile.

    Returns:
        `TokenLogprobs(logprobs, entropy, lse)`, each fp32 of the shape of the targets, (B, T - 1) for `shift`, each
        differentiable once with respect to the logits. entropy >= 0 and logprobs <= 0 exactly. Between forward and
        backward, O(rows) are kept beyond the logits.

    Raises:
        RuntimeError: a second derivative, torch.func transforms and forward-mode differentiation.
        ValueError: a shape, dtype or device that does not fit; a temperature or softcap that is not positive and
            finite; a target outside the vocabulary in an unmasked row. What needs the values of a tensor (targets,
            per-row temperature) is checked on CPU tensors. For GPU tensors a bad target's log-probability is NaN, and
            FUSED_RL_CHECKED=1 in the environment turns on the same checks, at the price of a synchronisation per call.
    """
    row_temperature = temperature if isinstance(temperature, Tensor) else None
    temperature = 1.0 if row_temperature is not None else temperature
    _check_arguments(logits, targets, temperature, row_temperature, mask, softcap, shift, inplace)
    if torch.compiler.is_compiling() and row_temperature is None:  # as a tensor: a number would compile once per value
        row_temperature, temperature = torch.ones((), dtype=torch.float32, device=logits.device) * temperature, 1.0
    rows = targets.shape if not shift else (targets.shape[0], max(targets.shape[1] - 1, 0))
    if row_temperature is not None:
        row_temperature = row_temperature.to(logits.device, torch.float32).expand(rows)
    if shift:  # position t takes the target of t + 1; the last has none: masked, so that its gradient is zeros
        last = (0, targets.shape[1] - rows[1])
        mask = torch.ones(rows, dtype=torch.bool, device=logits.device) if mask is None else mask
        targets, mask = pad(targets[:, 1:], last), pad(mask, last, value=False)
        row_temperature = None if row_temperature is None else pad(row_temperature, last, value=1.0)
    op = _InplaceGradient.apply if inplace else torch.ops.fused_rl.token_logprobs.default
    outputs = op(logits, targets.long(), mask, float(temperature), row_temperature, softcap)[:3]
    return TokenLogprobs(*(o[:, :-1] for o in outputs)) if shift else TokenLogprobs(*outputs)


def _positive(name, value, remedy):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}; {remedy}")


def _check_arguments(logits, targets, temperature, row_temperature, mask, softcap, shift, inplace):
    if not isinstance(logits, Tensor) or logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"logits must be a bf16, fp16 or fp32 tensor, got {_described(logits)}; convert it first")
    if logits.dim() < 1 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be (..., V) with V >= 1, got {tuple(logits.shape)}")
    if shift and logits.dim() != 3:
        raise ValueError(f"shift=True takes logits (B, T, V), got {tuple(logits.shape)}; add the batch dimension")
    if not isinstance(targets, Tensor) or targets.dtype not in _INTEGERS:
        raise ValueError(f"targets must be an integer tensor (int64 or int32), got {_described(targets)}")
    rows = logits.shape[:-1]
    if targets.shape != rows:
        hint = "; shift=True takes the targets of all T positions and drops the first itself" if shift else ""
        raise ValueError(
            f"targets must be {tuple(rows)} for logits {tuple(logits.shape)}, got {tuple(targets.shape)}{hint}"
        )
    outputs = (rows[0], max(rows[1] - 1, 0)) if shift else tuple(rows)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be a bool tensor, True where a row counts, got {_described(mask)}; use mask.bool()"
            )
        if tuple(mask.shape) != outputs:
            hint = "; shift=True takes mask[:, 1:] of a mask over all T tokens" if shift else ""
            raise ValueError(f"mask must have the shape of the outputs, {outputs}, got {tuple(mask.shape)}{hint}")
    if row_temperature is None:
        _positive("temperature", temperature, "a small one, such as 0.01, comes close to the greedy choice")
    else:
        _check_row_temperature(row_temperature, outputs)
    if softcap is not None:
        _positive("softcap", softcap, "pass None for no capping")
    for name, x in (("targets", targets), ("mask", mask), ("temperature", row_temperature)):
        if x is not None and x.device != logits.device and x.dim():
            raise ValueError(f"{name} is on {x.device}, the logits are on {logits.device}; move it there")
    if inplace:
        _check_inplace(logits)
    if not torch.compiler.is_compiling():
        _check_transforms(logits)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _described(x):
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else f"{type(x).__name__} {x!r}"


def _check_row_temperature(temperature, outputs):
    fits = temperature.dim() <= len(outputs) and all(
        a in (1, b) for a, b in zip(reversed(temperature.shape), reversed(outputs), strict=False)
    )
    if not fits or temperature.dtype.is_complex or temperature.dtype == torch.bool:
        raise ValueError(
            f"temperature must be a number or broadcastable to the outputs' shape {outputs}, one per row, got "
            f"{_described(temperature)}"
        )
    if temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError("the gradient of temperature is not supported; pass temperature.detach()")


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
    if logits.stride(-1) != 1 or any(n > 1 and stride < logits.shape[-1] for n, stride in leading):
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


def _check_values(targets, mask, row_temperature, vocab):
    """What only the values tell; the operator calls it, where reading them costs nothing or was asked for."""
    bad = (targets < 0) | (targets >= vocab)
    bad = bad if mask is None else bad & mask
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"the target of logits[{', '.join(map(str, at))}] is {targets[at].item()}, outside the vocabulary of "
            f"{vocab} (0 to {vocab - 1}); {int(bad.sum())} of {bad.numel()} targets are. Give positions to ignore "
            f"False in mask"
        )
    if row_temperature is not None:
        bad = ~((row_temperature > 0) & (row_temperature < math.inf))
        bad = bad if mask is None else bad & mask
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"temperature must be finite and > 0 in every row, got {row_temperature[at].item()} for "
                f"logits[{', '.join(map(str, at))}]"
            )


def _one_stride(x):
    """Whether all dimensions but the last merge into one without a copy."""
    leading = [(n, stride) for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(leading))


def _rows(x):
    return x if x is None or x.dim() == 1 else x.reshape(-1)


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
    outputs = row_backend(logits.device).logprob_fwd(
        logits.reshape(-1, logits.shape[-1]),
        _rows(targets),
        _rows(mask),
        _inverse(temperature, row_temperature),
        softcap,
    )
    return tuple(o.view(targets.shape) for o in outputs)


def _backward(dlogits, logits, per_row, temperature, row_temperature, softcap):
    """Fills dlogits; per_row holds dlogprobs, dentropy, dlse, targets, mask, entropy, m, rest, of the leading shape."""
    if not (_one_stride(logits) and _one_stride(dlogits)):
        dim = _shortest(logits.shape)
        for i in range(logits.shape[dim]):
            out, x, rows, *slab = _select((dlogits, logits, row_temperature, *per_row), dim, i)
            _backward(out, x, slab, temperature, rows, softcap)
        return
    vocab = logits.shape[-1]
    dlogprobs, dentropy, dlse, targets, mask, entropy, m, rest = map(_rows, per_row)
    row_backend(logits.device).logprob_bwd(
        dlogprobs, dentropy, dlse, logits.reshape(-1, vocab), targets, mask, entropy, m, rest,
        _inverse(temperature, row_temperature), softcap, out=dlogits.view(-1, vocab),
    )  # fmt: skip


def _unit_stride(logits):
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


@torch.library.custom_op("fused_rl::token_logprobs", mutates_args=())
def _token_logprobs(
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...) int64
    mask: Tensor | None,  # (...) bool
    temperature: float,
    row_temperature: Tensor | None,  # (...) fp32; replaces temperature
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # logprobs, entropy, lse, m, rest, each (...) fp32
    if logits.device.type == "cpu" or os.environ.get("FUSED_RL_CHECKED") == "1":
        _check_values(targets, mask, row_temperature, logits.shape[-1])
    if targets.numel() == 0:
        return _token_logprobs_fake(logits, targets, mask, temperature, row_temperature, softcap)
    return _forward(_unit_stride(logits), targets, mask, temperature, row_temperature, softcap)


@_token_logprobs.register_fake
def _token_logprobs_fake(logits, targets, mask, temperature, row_temperature, softcap):
    return tuple(torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(5))


@torch.library.custom_op("fused_rl::token_logprobs_backward", mutates_args=())
def _token_logprobs_backward(
    dlogprobs: Tensor | None,  # (...) fp32, as the next two
    dentropy: Tensor | None,
    dlse: Tensor | None,
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...) int64
    mask: Tensor | None,  # (...) bool
    entropy: Tensor,  # (...) fp32, as m and rest
    m: Tensor,
    rest: Tensor,
    temperature: float,
    row_temperature: Tensor | None,  # (...) fp32
    softcap: float | None,
) -> Tensor:  # (..., V), contiguous, in the dtype of the logits
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    per_row = (dlogprobs, dentropy, dlse, targets, mask, entropy, m, rest)
    if targets.numel():
        _backward(dlogits, _unit_stride(logits), per_row, temperature, row_temperature, softcap)
    return dlogits


@_token_logprobs_backward.register_fake
def _token_logprobs_backward_fake(dlogprobs, dentropy, dlse, logits, *_):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(ctx, inputs, output):
    logits, targets, mask, ctx.temperature, row_temperature, ctx.softcap = inputs
    _, entropy, _, m, rest = output
    ctx.save_for_backward(logits, targets, mask, entropy, m, rest, row_temperature)
    ctx.mark_non_differentiable(m, rest)
    ctx.set_materialize_grads(False)


def _gradient(ctx, dlogprobs, dentropy, dlse, *_):
    if dlogprobs is None and dentropy is None and dlse is None:
        return (None,) * 6
    *saved, row_temperature = ctx.saved_tensors
    dlogits = torch.ops.fused_rl.token_logprobs_backward(
        dlogprobs, dentropy, dlse, *saved, ctx.temperature, row_temperature, ctx.softcap
    )
    return dlogits, None, None, None, None, None


_token_logprobs.register_autograd(_gradient, setup_context=_setup_context)


def _no_second_derivative(ctx, *_):
    raise RuntimeError(
        "token_logprobs is differentiable once: its gradient has no gradient. For second derivatives use "
        "fused_rl.reference.token_logprobs"
    )


_token_logprobs_backward.register_autograd(_no_second_derivative)


class _InplaceGradient(torch.autograd.Function):
    """The same, outside the operators: they may not return what they were given, and this gradient is the logits."""

    @staticmethod
    def forward(ctx, logits, targets, mask, temperature, row_temperature, softcap):
        inputs = (logits, targets, mask, temperature, row_temperature, softcap)
        output = _token_logprobs(*inputs)
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
        if targets.numel():
            _backward(dlogits, dlogits, per_row, ctx.temperature, row_temperature, ctx.softcap)
        torch.autograd.graph.increment_version(logits)  # a kernel's store is invisible to the version counter
        return dlogits, None, None, None, None, None
