"""KL divergence: per-token estimates from log-probabilities, and the exact KL of two logits tensors."""

import math
import os

import torch
from torch import Tensor

from fused_rl.logprobs import _check_row_temperature, _described, _positive

__all__ = ["kl_estimate", "token_kl"]

KL_ESTIMATORS = ("k1", "k2", "k3", "k4", "rk3", "k1+", "k3+")
_LINEAR_BEYOND = 20.0  # nats; beyond it an exponential continues as its tangent: value and slope stay finite


def tangent_exp(x: torch.Tensor) -> torch.Tensor:
    """exp, continued by its tangent beyond `_LINEAR_BEYOND`: C1, never inf, and its gradient never becomes 0."""
    far = x > _LINEAR_BEYOND
    # where() on the input too: exp's backward multiplies by the value, and 0 * inf would be nan
    return torch.where(far, math.exp(_LINEAR_BEYOND) * (1 + x - _LINEAR_BEYOND), torch.where(far, 0, x).exp())


def tangent_expm1(x: torch.Tensor) -> torch.Tensor:
    """`tangent_exp` less 1, to the last bits also where x is near 0; in the dtype of x, not meant for gradients."""
    return torch.where(x > _LINEAR_BEYOND, tangent_exp(x) - 1, x.clamp(max=_LINEAR_BEYOND).expm1())


def _k3(d: torch.Tensor) -> torch.Tensor:
    """expm1(-d) + d without cancellation near 0, continued by its tangent where exp(-d) would overflow."""
    x = -d
    near, far = x.abs() < 0.1, x > _LINEAR_BEYOND
    # where() on the inputs: a branch that is not taken must not turn the gradient into nan
    small, middle = torch.where(near, x, 0), torch.where(near | far, 1, x)
    series = torch.ones_like(x)  # x^2/2 (1 + x/3 (1 + x/4 (...))): the first term left out is below 1e-16 relative
    for n in range(11, 2, -1):
        series = 1 + small / n * series
    slope = math.expm1(_LINEAR_BEYOND)
    tangent = slope - _LINEAR_BEYOND + slope * (x - _LINEAR_BEYOND)
    return torch.where(near, small.square() / 2 * series, torch.where(far, tangent, torch.expm1(middle) - middle))


def kl_estimate(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    kl_estimator: str = "k3",
    *,
    old_logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) in nats, from the log-probabilities of sampled tokens.

    With d = logprobs - ref_logprobs and r = exp(logprobs - old_logprobs), r = 1 in value where there is no
    `old_logprobs` (gradients are those with respect to `logprobs`):

    | name | value | gradient | as a loss |
    |---|---|---|---|
    | k1 | d | 1 | expected gradient zero: holds nothing back; the unbiased choice inside a reward |
    | k2 | d^2 / 2 | d | biased value, the KL's gradient on-policy |
    | k3 | expm1(-d) + d | -expm1(-d) | unbiased value on-policy, the gradient of KL(reference, policy) |
    | k4 | r d | r (1 + d) | unbiased value and gradient, on- and off-policy; a token can be negative |
    | rk3 | r (expm1(-d) + d) | r k3 - r expm1(-d) | unbiased value and gradient, every token >= 0: the one to use |
    | k1+ | k1 | d | straight-through: k1's value, k2's gradient |
    | k3+ | k3 | d | straight-through: k3's value, k2's gradient |

    Overflow: beyond 20 nats exp(-d) and r continue as their tangents (linear, C1). Values and gradients stay finite,
    and the gradient never switches off, as it would under a clamp, when the policy has all but dropped a token.

    Args:
        logprobs: (...) of the policy, floating point.
        ref_logprobs: same shape, of the reference; a constant.
        kl_estimator: one of the names above.
        old_logprobs: same shape, of the policy that sampled the tokens; a constant, used by k4 and rk3 only. None
            means that `logprobs` is that policy (on-policy).

    Returns:
        Same shape, fp32 (fp64 for fp64 `logprobs`), unreduced, differentiable in `logprobs`.

    Raises:
        ValueError: an unknown estimator, or shapes that differ.

    Source: Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html (k1, k2, k3); k3 weighted by
    the ratio: DeepSeek-V3.2, arXiv:2512.02556.
    """
    if kl_estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator must be one of {KL_ESTIMATORS}, got {kl_estimator!r}")
    for name, other in (("ref_logprobs", ref_logprobs), ("old_logprobs", old_logprobs)):
        if other is not None and other.shape != logprobs.shape:
            raise ValueError(
                f"{name} must have the shape of logprobs {tuple(logprobs.shape)}, got {tuple(other.shape)}"
            )
    if logprobs.dtype != torch.float64:
        logprobs = logprobs.float()
    d = logprobs - ref_logprobs.detach()
    if kl_estimator == "k1":
        return d
    if kl_estimator == "k2":
        return d.square() / 2
    if kl_estimator == "k3":
        return _k3(d)
    if kl_estimator in ("k1+", "k3+"):
        k2 = d.square() / 2
        return k2 + ((d if kl_estimator == "k1+" else _k3(d)) - k2).detach()
    old = logprobs.detach() if old_logprobs is None else old_logprobs.detach()
    return tangent_exp(logprobs - old) * (d if kl_estimator == "k4" else _k3(d))


DIRECTIONS = ("reverse", "forward", "jensen-shannon")


def token_kl(logits, ref_logits, *, direction="reverse", temperature=1.0, mask=None):
    """Exact divergence between policy and reference, row by row over the whole vocabulary, in nats.

    With pi = softmax(logits / temperature) and ref = softmax(ref_logits / temperature): "reverse" is KL(pi || ref),
    "forward" KL(ref || pi), "jensen-shannon" the mean of KL(pi || mean) and KL(ref || mean), at most log 2. No value is
    negative; equal logits give exactly 0, and so do logits that differ by a constant when that difference is exact.
    Close distributions keep their relative precision, about 1e-6 down to 1e-12 nats.

    A column where both logits are -inf adds nothing. Where the second distribution of a KL is -inf and the first is
    not, that KL is inf, however small the probability; such a row gets a gradient of exactly 0, as no step along it
    would make the KL finite. A row that is -inf throughout is no distribution: KL(it || other) is 0, KL(other || it)
    inf, without gradient. NaN or +inf in an unmasked row makes it NaN. Logits of -1e20 and below count as -inf.

    Args:
        logits: (..., V), bf16, fp16 or fp32, of the policy. Any strides; copied only when a stride of the last
            dimension is not 1, when more than three dimensions do not merge, or, on a GPU, where rows do not begin at
            16 bytes although V is a multiple of 16.
        ref_logits: like logits, same shape and device; detach it (or compute it under no_grad) to save its gradient.
        direction: "reverse", "forward" or "jensen-shannon".
        temperature: a number > 0, or a tensor broadcastable to (...), one > 0 per row (not differentiated). It divides
            both logits.
        mask: (...) bool, True where a row counts. Any other row is not read, returns 0 and gets a gradient of 0.

    Returns:
        (...) fp32, differentiable once with respect to logits, and to ref_logits where it requires grad.

    Raises:
        ValueError: a direction, shape, dtype or device that does not fit; a temperature that is not positive.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
    row_temperature = temperature if isinstance(temperature, Tensor) else None
    temperature = 1.0 if row_temperature is not None else temperature
    check_logits_pair(logits, ref_logits, temperature, row_temperature, mask)
    rows = logits.shape[:-1]
    if torch.compiler.is_compiling() and row_temperature is None:  # as a tensor: a number would compile once per value
        row_temperature, temperature = torch.ones((), dtype=torch.float32, device=logits.device) * temperature, 1.0
    if row_temperature is not None:
        row_temperature = row_temperature.to(logits.device, torch.float32).expand(rows)
    first, second = (ref_logits, logits) if direction == "forward" else (logits, ref_logits)
    op = torch.ops.fused_rl.token_kl.default
    return op(first, second, mask, float(temperature), row_temperature, direction == "jensen-shannon")[0]


def check_logits_pair(logits, ref_logits, temperature, row_temperature, mask):
    for name, x in (("logits", logits), ("ref_logits", ref_logits)):
        if not isinstance(x, Tensor) or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"{name} must be a bf16, fp16 or fp32 tensor, got {_described(x)}; convert it first")
    if logits.dim() < 1 or logits.shape[-1] == 0 or logits.shape != ref_logits.shape:
        raise ValueError(
            f"logits and ref_logits must be (..., V) of one shape with V >= 1, got {tuple(logits.shape)} and "
            f"{tuple(ref_logits.shape)}"
        )
    if logits.dtype != ref_logits.dtype or logits.device != ref_logits.device:
        raise ValueError(
            f"logits and ref_logits must share dtype and device, got {logits.dtype} on {logits.device} and "
            f"{ref_logits.dtype} on {ref_logits.device}; convert one of them"
        )
    rows = tuple(logits.shape[:-1])
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != rows):
        raise ValueError(f"mask must be a bool tensor {rows}, True where a row counts, got {_described(mask)}")
    if row_temperature is None:
        _positive("temperature", temperature, "it divides both logits")
        return
    _check_row_temperature(row_temperature, rows)
    readable = row_temperature.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and not bool((row_temperature > 0).all()):
        raise ValueError(f"every temperature must be > 0, the smallest is {row_temperature.min().item()}")


def kl_backend(device: torch.device):
    """The module whose `kl_fwd`, `js_fwd` and `kl_bwd` serve tensors of this device."""
    if device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        from fused_rl.kernels import kl

        return kl
    from fused_rl import cpu_kl

    return cpu_kl


def as_rows(x, y, mask, temperature, row_temperature):
    """What a backend takes: x and y as (B, T, V), mask as (N,), 1 / temperature as a number or (N,) fp32."""
    x, y = (z if z.stride(-1) == 1 or z.shape[-1] == 1 else z.contiguous() for z in (x, y))
    if x.dim() != 3:
        shape = (-1, x.shape[-2] if x.dim() > 1 else 1, x.shape[-1])
        x, y = (x[None], y[None]) if x.dim() == 2 else (x.reshape(shape), y.reshape(shape))
    mask = None if mask is None else mask.reshape(-1).contiguous()
    return x, y, mask, 1 / temperature if row_temperature is None else 1 / row_temperature.reshape(-1)


@torch.library.custom_op("fused_rl::token_kl", mutates_args=())
def _token_kl(
    x: Tensor,  # (..., V)
    y: Tensor,  # (..., V)
    mask: Tensor | None,  # (...) bool
    temperature: float,
    row_temperature: Tensor | None,  # (...) fp32; replaces temperature
    js: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # divergence of x's distribution from y's (...), state (9, N), sums (3, N), fp32
    rows = as_rows(x, y, mask, temperature, row_temperature)
    backend = kl_backend(x.device)
    divergence, state = backend.kl_fwd(*rows)
    sums = backend.js_fwd(*rows, state) if js else state.new_empty(3, 0)
    divergence = sums[0].clone() if js else divergence
    return divergence.view(x.shape[:-1]), state, sums


@_token_kl.register_fake
def _token_kl_fake(x, y, mask, temperature, row_temperature, js):
    divergence = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    n = divergence.numel()
    return divergence, divergence.new_empty(9, n), divergence.new_empty(3, n if js else 0)


@torch.library.custom_op("fused_rl::token_kl_backward", mutates_args=())
def _token_kl_backward(
    g: Tensor,  # (...) fp32
    x: Tensor,  # (..., V)
    y: Tensor,  # (..., V)
    mask: Tensor | None,  # (...) bool
    divergence: Tensor,  # (...) fp32
    state: Tensor,  # (9, N) fp32
    sums: Tensor,  # (3, N) fp32, or (3, 0) for KL
    temperature: float,
    row_temperature: Tensor | None,
    js: bool,
    wants_dx: bool,
    wants_dy: bool,
) -> tuple[Tensor, Tensor]:  # (..., V) like x and y; (0,) where not wanted
    arguments = as_rows(x, y, mask, temperature, row_temperature)
    g, divergence = g.reshape(-1).contiguous(), divergence.reshape(-1)
    gradients = kl_backend(x.device).kl_bwd(g, *arguments, divergence, state, sums if js else None, wants_dx, wants_dy)
    return tuple(x.new_empty(0) if d is None else d.view(x.shape) for d in gradients)


@_token_kl_backward.register_fake
def _token_kl_backward_fake(g, x, y, *arguments):
    wants_dx, wants_dy = arguments[-2:]
    shapes = (x.shape if wants_dx else (0,), x.shape if wants_dy else (0,))
    return tuple(torch.empty(shape, dtype=x.dtype, device=x.device) for shape in shapes)


def _token_kl_context(ctx, inputs, output):
    x, y, mask, ctx.temperature, row_temperature, ctx.js = inputs
    divergence, state, sums = output
    ctx.save_for_backward(x, y, mask, row_temperature, divergence, state, sums)
    ctx.mark_non_differentiable(state, sums)
    ctx.set_materialize_grads(False)


def _token_kl_gradient(ctx, g, *_):
    if g is None:
        return (None,) * 6
    x, y, mask, row_temperature, divergence, state, sums = ctx.saved_tensors
    wants = ctx.needs_input_grad[:2]
    gradients = torch.ops.fused_rl.token_kl_backward(
        g, x, y, mask, divergence, state, sums, ctx.temperature, row_temperature, ctx.js, *wants
    )
    return *(d if wanted else None for d, wanted in zip(gradients, wants, strict=True)), None, None, None, None


_token_kl.register_autograd(_token_kl_gradient, setup_context=_token_kl_context)


def _no_second_derivative(ctx, *_):
    raise RuntimeError("token_kl is differentiable once; for second derivatives use fused_rl.reference.token_kl")


_token_kl_backward.register_autograd(_no_second_derivative)
