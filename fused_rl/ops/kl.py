"""The exact divergence between two logits tensors, row by row, and its gradient.

`fused_rl.ops.routes` has its two routes to the launchers below, `fused_rl.kernels.kl` the formulas, and
`fused_rl.kernels.states` what a row leaves for the gradient.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from fused_rl.base.backend import backend_of
from fused_rl.base.checks import (
    check_choice,
    check_device,
    check_logits,
    check_range,
    check_rows,
    check_shape,
    check_softcap,
    check_temperature_values,
    check_transforms,
    split_temperature,
)
from fused_rl.base.graphs import skips_dispatcher
from fused_rl.kernels.states import JensenShannonSums, KLState, shares_of
from fused_rl.ops.routes import Op
from fused_rl.ops.rows import inverse, unit_stride, without_last

Direction = Literal["reverse", "forward", "jensen-shannon"]
DIRECTIONS = get_args(Direction)


def token_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    direction: Direction = "reverse",
    jsd_beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    softcap: float | None = None,
    shift: bool = False,
) -> Tensor:
    """Exact divergence between policy and reference, row by row over the whole vocabulary, in nats.

    With pi = softmax(cap(logits) / temperature), cap(z) = softcap * tanh(z / softcap) where there is a softcap, and ref
    the same of ref_logits: "reverse" is KL(pi || ref), "forward" KL(ref || pi), "jensen-shannon" beta KL(ref || m) + (1
        - beta) KL(pi || m) with the mixture m = beta ref + (1 - beta) pi (arXiv:2306.13649, eq. 1), at most log 2 for
        the default beta of 1/2. No value is negative; equal logits give exactly 0, and so do logits that differ by a
        constant when that difference is exact. Close distributions keep their relative precision, about 1e-6 down to
        1e-12 nats. A divergence that is small beside the distance D = |max logits - max ref_logits| / temperature is
        accurate to 1e-7 D. It is NaN where D is above 1e7 and the divergence is below D / 100, because nothing is known
        of it there. (Jensen-Shannon is NaN where its KL(pi || ref) is.)

    A column where both logits are -inf adds nothing. Where the second distribution of a KL is -inf and the first is
    not, that KL is inf, however small the probability. Such a row gets a gradient of exactly 0, because no step along
    it would make the KL finite. A row that is -inf throughout is not a distribution: KL(it || other) is 0 and KL(other
    || it) is inf, without a gradient. NaN or +inf in an unmasked row makes it NaN, and so does a logit above 1e19,
    because differences of such logits cannot be told from a ban. Logits of -1e20 and below count as -inf, and every
    other logit counts as it is, so a mask of -1e9 in one of the rows costs no precision.

    Args:
        logits: (..., V), bf16, fp16 or fp32, of the policy. Rows may have any strides; logits are copied only if the
            stride of the last dimension is not 1, if more than three dimensions do not merge, or, on a GPU, if rows do
            not begin at 16 bytes although V is a multiple of 16.
        ref_logits: like logits, with the same shape and device; detach it (or compute it under no_grad) to save the
            cost of its gradient.
        direction: "reverse", "forward" or "jensen-shannon".
        jsd_beta: above 0 and below 1, the weight of the reference in the mixture of "jensen-shannon".
        temperature: a number from 1e-6 to 1e6, or a tensor of such numbers, one per row, which broadcasts to (...) (not
            differentiated). It divides both logits.
        mask: (...) bool, True where a row counts. Any other row is not read, returns 0 and gets a gradient of 0.
        softcap: a number > 0 for both logits, or None. A logit of -inf then becomes -softcap, so nothing is banned, and
            the divergence is that of the capped logits in fp32, which are known to an ulp of the softcap each.
        shift: logits (B, T, V) of whole sequences, of which the last position predicts no token: outputs, mask and
            per-row temperature are (B, T - 1), and the gradient is written once to all T positions, with zeros at the
            last.

    Returns:
        (...) fp32, or (B, T - 1) for `shift`; differentiable once with respect to logits, and to ref_logits where it
        requires grad.

    Raises:
        ValueError: a direction, shape, dtype or device that does not fit; a temperature out of range (on a GPU,
            temperatures per row are not checked, and the row of a wrong one is NaN).
    """
    beta = check_direction(direction, jsd_beta)
    options = per_row_options(logits, ref_logits, temperature, mask, softcap, shift)
    # as `in_order`, written out because each call of Python's counts here
    pair = (ref_logits, logits) if direction == "forward" else (logits, ref_logits)
    inputs = *pair, *options, beta, softcap
    if not skips_dispatcher(logits, ref_logits):
        divergence, *_ = torch.ops.fused_rl.token_kl.default(*inputs)
    elif torch.is_grad_enabled() and (logits.requires_grad or ref_logits.requires_grad):
        (divergence,) = _OP.unregistered(*pair, inputs)
    else:
        divergence, *_ = _forward(*inputs)
    return divergence[:, :-1] if shift else divergence


def check_direction(direction: str, jsd_beta: float) -> float | None:
    """Check both; return the weight of the reference in the mixture, or None for a KL."""
    check_choice("direction", direction, DIRECTIONS)
    if direction == "jensen-shannon":
        check_range("jsd_beta", jsd_beta, "a number above 0, below 1")
        return float(jsd_beta)
    # torch.compile would make a symbol of the default, and compile twice
    if not torch.compiler.is_compiling() and jsd_beta != 0.5:
        raise ValueError(
            f"jsd_beta={jsd_beta} has no meaning with direction={direction!r}; leave it out, or pass "
            "direction='jensen-shannon'"
        )
    return None


def in_order(policy: Tensor, reference: Tensor, direction: str) -> tuple[Tensor, Tensor]:
    """Return the two as x and y of KL(x || y): forward is reverse with them exchanged."""
    return (reference, policy) if direction == "forward" else (policy, reference)


def per_row_options(
    logits: Tensor,
    ref_logits: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    softcap: float | None,
    shift: bool,
) -> tuple[Tensor | None, Tensor | None, float]:
    """Check `token_kl`'s arguments; return mask, temperatures per row and temperature, with `shift` of T positions."""
    check_logits("logits", logits)
    check_logits("ref_logits", ref_logits)
    check_shape("ref_logits", ref_logits, "logits", logits.shape)
    check_device("ref_logits", ref_logits, logits.device, "logits")
    if logits.dtype != ref_logits.dtype:
        raise ValueError(
            f"ref_logits must be {logits.dtype} as the logits, got {ref_logits.dtype}; convert it"
        )
    rows = check_rows(logits, mask, shift)
    check_softcap(softcap)
    check_transforms("token_kl", logits, ref_logits)
    temperature, row_temperature = split_temperature(temperature, rows, logits.device)
    if logits.device.type == "cpu" and not torch.compiler.is_compiling():
        check_temperature_values(row_temperature, None)
    if shift:
        mask, row_temperature = without_last(logits, mask, row_temperature)
    return mask, row_temperature, temperature


def as_rows(x, y, mask, row_temperature, temperature):
    """Return a backend's arguments: x and y as (B, T, V), mask as (N,), 1 / temperature as a number or (N,) fp32."""
    mask = None if mask is None else mask.reshape(-1).contiguous()
    inv_t = 1.0 / temperature if row_temperature is None else inverse(temperature, row_temperature)
    return _three_dimensions(x), _three_dimensions(y), mask, inv_t


def _three_dimensions(x):
    x = unit_stride(x)
    if x.dim() == 2:  # as a rule
        return x.unsqueeze(0)
    return x[(None,) * (3 - x.dim())].flatten(0, -3)


def divergence_fwd(x, y, mask, inv_temperature, jsd_beta, softcap):
    """Of (B, T, V): divergence (N,), state (9, N) and for Jensen-Shannon sums (3, N), else None."""
    backend = backend_of(x.device)
    divergence, state = backend.kl.kl_fwd(x, y, mask, inv_temperature, softcap)
    if jsd_beta is None:
        return divergence, state, None
    # a second pass, which needs the state of the first
    options = state, softcap, shares_of(jsd_beta)
    sums = backend.jensen_shannon.js_fwd(x, y, mask, inv_temperature, *options)
    # no view, which could not be modified in place
    return JensenShannonSums(*sums).divergence.clone(), state, sums


def _forward(
    x: Tensor,  # (..., V)
    y: Tensor,  # (..., V)
    mask: Tensor | None,  # (...) bool
    row_temperature: Tensor | None,  # (...) fp32; replaces temperature
    temperature: float,
    jsd_beta: float | None,  # None: KL
    softcap: float | None,
) -> tuple[
    Tensor, Tensor, Tensor
]:  # divergence of x's distribution from y's (...), state (9, N), sums (3, N), fp32
    rows = as_rows(x, y, mask, row_temperature, temperature)
    divergence, state, sums = divergence_fwd(*rows, jsd_beta, softcap)
    if x.dim() != 2:  # no view, which could not be modified in place
        divergence = divergence.resize_(x.shape[:-1])
    # the operator has no None: `Op`
    return divergence, state, sums  # type: ignore[return-value]


def _empty_forward(x, y, mask, row_temperature, temperature, jsd_beta, softcap):
    divergence = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    n = divergence.numel()
    sums = divergence.new_empty(0 if jsd_beta is None else (len(JensenShannonSums._fields), n))
    return divergence, divergence.new_empty(len(KLState._fields), n), sums


def _backward(
    g: Tensor,  # (...) fp32
    divergence: Tensor,  # (...) fp32
    x: Tensor,  # (..., V)
    y: Tensor,  # (..., V)
    mask: Tensor | None,  # (...) bool
    row_temperature: Tensor | None,
    state: Tensor,  # (9, N) fp32
    sums: Tensor | None,  # (3, N) fp32; not read for KL
    temperature: float,
    jsd_beta: float | None,
    softcap: float | None,
    wants_dx: bool,
    wants_dy: bool,
) -> tuple[Tensor, Tensor]:  # (..., V) like x and y; (0,) where not wanted
    arguments = as_rows(x, y, mask, row_temperature, temperature)
    g = g.reshape(-1).contiguous()
    divergence = divergence.reshape(-1)
    kept, shares = (None, None) if jsd_beta is None else (sums, shares_of(jsd_beta))
    dx, dy = backend_of(x.device).kl.kl_bwd(
        g, *arguments, divergence, state, kept, wants_dx, wants_dy, softcap, shares
    )
    gradients = [None if d is None else d.view(x.shape) for d in (dx, dy)]
    return tuple(gradients)  # type: ignore[return-value]


def _empty_backward(g, divergence, x, y, *arguments):
    shapes = (x.shape if wanted else (0,) for wanted in arguments[-2:])
    return tuple(torch.empty(shape, dtype=x.dtype, device=x.device) for shape in shapes)


_OP = Op(
    ("fused_rl::token_kl", "fused_rl::token_kl_backward"),
    (_forward, _backward),
    (_empty_forward, _empty_backward),
    tensors=4,
    leaves=2,
    outputs=1,
    kept=0,
)
