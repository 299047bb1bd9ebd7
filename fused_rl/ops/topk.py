"""The divergence of two distributions of which only K log-probabilities each are known: distillation from a server.

All tokens other than the K are one further outcome, the tail, with probability 1 - sum_k p_k. Each of the K + 1
outcomes adds a term that is not negative, so that nothing cancels:

    KL(P || Q) = sum_i p_i log(p_i / q_i) = sum_i [ p_i (e^-d_i - 1 + d_i) ],  d_i = log(p_i / q_i)

as the probabilities of both sides sum to 1. Merging outcomes never raises a divergence: this is at most the exact one.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fused_rl.base.checks import (
    INTEGERS,
    MASKED,
    check_choice,
    check_device,
    check_floating,
    check_mask,
    check_shape,
    check_transforms,
    described,
    once_differentiable,
    values_are_checked,
)
from fused_rl.objectives.estimators import k3
from fused_rl.ops.kl import DIRECTIONS, Direction

# Of a log-probability, from the logits that others subtract: half an ulp of a log-sum-exp up to 32.
_ULPS = 16


def topk_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    direction: Direction = "reverse",
    mask: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Divergence between policy and reference over K tokens and the tail of all others, per row, in nats.

    The outcomes are the K tokens, with the given probabilities, and "any other token", with the remaining probability.
    "reverse" is KL(pi || ref), "forward" is KL(ref || pi), and "jensen-shannon" is the mean of KL(pi || mean) and
    KL(ref || mean). The value is never negative and, up to rounding, never above `token_kl` of the whole vocabulary. It
    grows with the number of tokens, and equals `token_kl` if the K tokens are all. Without the tail, a sum over K
    tokens is not a divergence: it becomes negative, and "reverse" is minimised by taking mass away from the K tokens.

        logprobs = fused_rl.token_logprobs(logits, teacher_ids).logprobs  # ids (B, T, K): normalised over all tokens
        loss = fused_rl.masked_mean(fused_rl.topk_kl(logprobs, teacher_logprobs, direction="forward", mask=mask), mask)

    The log-probabilities are taken as accurate to their last bits, as `token_logprobs` returns them: the tail of one
    token at -1e-9 is 1e-9. A tail that is smaller than their rounding is unknown. Two unknown tails add nothing. If
    only the tail of the second distribution of a KL is unknown, it counts as large as the rounding, so value and
    gradient are finite, and the value is a lower bound. A token whose probability is 0 (-inf) on both sides adds
    nothing. If it is 0 only in the second distribution of a KL, that KL is inf, with a gradient of exactly 0.

    Args:
        logprobs: (..., K) floating point, of K different tokens under the policy, each normalised over the whole
            vocabulary.
        ref_logprobs: same shape, of the same tokens under the reference; detach it to save the cost of its gradient.
        direction: "reverse", "forward" or "jensen-shannon", as in `token_kl`.
        mask: (...) bool, True where a row counts. Any other row returns 0 and gets a gradient of 0.
        ids: (..., K) integers, the tokens. They are only used for a check, because a token that comes twice would count
            twice.

    Returns:
        (...) in the inputs' dtype, at least fp32; differentiable in both.

    Raises:
        ValueError: an unknown direction; shapes that differ. On CPU, or with FUSED_RL_CHECKED=1 in the environment, in
            rows that count: NaN, a log-probability above 0, or K of them whose probabilities sum above 1, each beyond
                rounding; an id that comes twice, unless both sides have -inf there. On a GPU, and under torch.compile,
                a row of bad numbers is NaN, and `ids` are not checked.
    """
    check_choice("direction", direction, DIRECTIONS)
    check_floating("logprobs", logprobs)
    check_floating("ref_logprobs", ref_logprobs)
    check_shape(
        "ref_logprobs",
        ref_logprobs,
        "logprobs",
        logprobs.shape,
        "; pass those of the same K tokens",
    )
    check_device("ref_logprobs", ref_logprobs, logprobs.device, "logprobs")
    check_transforms("topk_kl", logprobs, ref_logprobs)
    if mask is None:
        mask = torch.ones(logprobs.shape[:-1], dtype=torch.bool, device=logprobs.device)
    check_mask(mask, "the rows", logprobs.shape[:-1], logprobs.device)
    common = torch.promote_types(logprobs.dtype, ref_logprobs.dtype)
    dtype = torch.promote_types(common, torch.float32)
    if ids is not None:
        _check_ids_fit(ids, logprobs)
    checked = values_are_checked(logprobs.device) and not torch.compiler.is_compiling()
    sides = []
    rounding = []  # of each side's own dtype: casting adds no digits
    legal = mask
    for name, side in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        rounding.append(torch.finfo(side.dtype).eps)
        # what is masked counts as K tokens of probability 0
        side = torch.where(mask[..., None], side, -torch.inf)
        if checked:
            _check_values(name, side)
        legal = legal & _is_legal(side)
        sides.append(side.to(dtype))
    if checked and ids is not None:
        _check_distinct(ids, torch.maximum(*sides) > -torch.inf)

    # rows that are not legal go in as masked ones, so that no NaN meets their gradient, and come out as NaN
    sides = [torch.where(legal[..., None], side, -torch.inf) for side in sides]
    empty = [side[..., :0].clone() for side in sides]
    value = _TopkKL.apply(*sides, direction, rounding, *empty)
    elsewhere = torch.zeros_like(value).masked_fill(mask, torch.nan)
    return torch.where(legal, value, elsewhere)


@torch.no_grad()
def _sums(x):
    """Return the probability mass of log-probabilities (..., K), and how far rounding may take it above 1; fp64."""
    wide = x.double()
    p = wide.exp()
    spread = torch.where(p > 0, p * (1 + wide.abs()), 0)
    ulps = _ULPS * torch.finfo(x.dtype).eps
    return p.sum(-1), ulps * (1 + spread.sum(-1))


def _is_legal(x):
    total, slack = _sums(x)
    each_legal = (x <= slack[..., None]).all(-1)
    return (total - 1 <= slack) & each_legal  # not so with NaN


def _check_values(name, x):
    """Raises where a row is no K log-probabilities of different tokens: by how much, and which row."""
    bad = ~_is_legal(x)
    if not bad.any():
        return
    at = tuple(bad.nonzero()[0].tolist())
    total, slack = (number.item() for number in _sums(x[at]))
    raise ValueError(
        f"{name}[{', '.join(map(str, at))}] has the maximum {x[at].max().item():g}, and the sum of its probabilities "
        f"is {total:.9g}, {total - 1:.3g} above 1 where rounding explains {slack:.2g}; expected log-probabilities (no "
        f"logits) of {x.shape[-1]} different tokens, normalised over the whole vocabulary. {int(bad.sum())} of "
        f"{bad.numel()} rows are like this. {MASKED}"
    )


def _check_ids_fit(ids, logprobs):
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS:
        raise ValueError(f"ids must be an integer tensor (int64 or int32), got {described(ids)}")
    check_shape("ids", ids, "logprobs", logprobs.shape)
    check_device("ids", ids, logprobs.device, "logprobs")


def _check_distinct(ids, possible):
    """Raises where a row has an id twice among those (..., K) that are possible."""
    # what adds nothing gets an id of its own, below all others: padding may be -1, -2, ...
    least = torch.iinfo(torch.int64).min
    below = least + torch.arange(ids.shape[-1], device=ids.device)
    ranked = torch.where(possible, ids.long(), below).sort(-1).values
    again = ranked[..., 1:] == ranked[..., :-1]
    if not again.any():
        return
    at = tuple(again.nonzero()[0].tolist())
    row = ", ".join(map(str, at[:-1]))
    raise ValueError(
        f"ids[{row}] has {ranked[at].item()} twice, whose probability would count twice; expected {ids.shape[-1]} "
        f"different tokens. {int(again.any(-1).sum())} of {again[..., 0].numel()} rows are like this. {MASKED}"
    )


class _Tail(NamedTuple):
    """What K probabilities leave of 1, (...) each."""

    mass: Tensor  # fp64, 1 - sum_k p_k; of rounding it may be negative
    unknown: Tensor  # bool, True where the mass is no more than rounding
    floor: Tensor  # fp64, how large it may be then


def _tail(x, p, eps):
    """Return log-probabilities (..., K), accurate to 4 eps of themselves, and probabilities."""
    if x.shape[-1] == 0:
        one = torch.ones(x.shape[:-1], dtype=torch.float64, device=x.device)
        return _Tail(one, one < 0, one)
    # the largest one's complement keeps its digits down to the smallest numbers; the others are taken off it
    top, at = x.max(-1, keepdim=True)
    below_top = p.scatter(-1, at, 0).sum(-1, dtype=torch.float64)
    mass = -top.double().expm1()[..., 0] - below_top

    # what rounding may do to it: of p by that of x and of exp, of the largest's complement by that of x alone
    of_top = torch.where(top > -torch.inf, top.exp() * top.abs(), 0)
    of_each = torch.where(p > 0, p * (1 - x), 0)
    spread = of_each.scatter(-1, at, of_top)
    rounding = 4 * eps * spread.sum(-1, dtype=torch.float64)
    # where the others leave less than nothing, the largest was rounded to the digits of 1, as by a difference of logits
    floor = torch.where(mass > -rounding, rounding, _ULPS * eps)
    return _Tail(mass, mass <= rounding, floor)


def _log_ratio(x, y):
    return torch.where(x == y, 0, x - y)  # -inf - -inf


def _term(p, q, d):
    """p (e^-d - 1 + d), which is q - p + p d, with d = log(p / q): >= 0, and q where p is 0."""
    some = p > 0
    near = some & (d.abs() < 1)
    far = q - p + p * torch.where(some, d, 0)
    of_near = p * k3(torch.where(near, d, 0))
    return torch.where(near, of_near, far)


def _log_share(d):
    """log(p / mean(p, q)) of d = log(p / q), to the last bits near 0."""
    near = d.clamp(min=-1)
    far = d.clamp(max=-1)
    of_near = -(torch.expm1(-near) / 2).log1p()
    of_far = math.log(2) + far - far.exp().log1p()
    return torch.where(d > -1, of_near, of_far)


def _kl(p, q, d, tail, ref_tail):
    """KL(P || Q) of probabilities (..., K) and their log-ratios; its gradients by log p and log q."""
    a = tail.mass.clamp(min=0)
    b = torch.where(ref_tail.unknown, ref_tail.floor, ref_tail.mass)
    # two tails within rounding are alike: they add nothing
    nothing = ref_tail.unknown & (a <= torch.maximum(tail.floor, b))
    a = torch.where(nothing, b, a)
    # where a is 0, its slope is infinite, but the tail has no probability to move
    d_tail = torch.where(a > 0, a.log() - b.log(), 0)
    value = _term(p, q, d).sum(-1, dtype=torch.float64) + _term(a, b, d_tail)
    # mass that a token gains is lost by the tail
    moved = torch.where(p > 0, d - d_tail[..., None].to(d), 0)
    tail_ratio = (a / b)[..., None].to(q)
    return value, p * moved, q * tail_ratio - p


def _jensen_shannon(p, q, d, tail, ref_tail):
    """Return the mean of both KLs from the mean of the two distributions, as `_kl` does."""
    a = tail.mass.clamp(min=0)
    b = ref_tail.mass.clamp(min=0)
    nothing = tail.unknown & ref_tail.unknown
    d_tail = _log_ratio(a.log(), b.log())
    d_tail = torch.where(nothing, 0, d_tail)
    mean = (p + q) / 2
    tail_mean = (a + b) / 2
    values = []
    slopes = []
    # the KL of each side from the mean
    sides = (p, d, a, d_tail), (q, -d, b, -d_tail)
    for side, ratio, side_tail, tail_ratio in sides:
        share = _log_share(ratio)
        tail_share = _log_share(tail_ratio)
        tokens = _term(side, mean, share).sum(-1, dtype=torch.float64)
        of_tail = _term(side_tail, tail_mean, tail_share)
        values.append(tokens + torch.where(nothing, 0, of_tail))
        # a tail of 0 has no mass to move
        tail_share = torch.where(side_tail > 0, tail_share, 0)[..., None].to(share)
        moved = torch.where(side > 0, share - tail_share, 0)
        slopes.append(side / 2 * moved)
    return (values[0] + values[1]) / 2, *slopes


class _TopkKL(torch.autograd.Function):
    """The divergence and its gradients in closed form: autograd's own would keep a dozen (..., K) tensors."""

    @staticmethod
    def forward(ctx, logprobs, ref_logprobs, direction, rounding, *of_inputs):
        # forward is reverse with the two exchanged
        swapped = direction == "forward"
        x, y = (ref_logprobs, logprobs) if swapped else (logprobs, ref_logprobs)
        eps_x, eps_y = rounding[::-1] if swapped else rounding
        p = x.exp()
        q = y.exp()
        tails = _tail(x, p, eps_x), _tail(y, q, eps_y)
        formula = _jensen_shannon if direction == "jensen-shannon" else _kl
        value, dx, dy = formula(p, q, _log_ratio(x, y), *tails)
        if formula is _kl:
            lone = (y == -torch.inf) & (x > -torch.inf)
            infinite = lone.any(-1)
            value = torch.where(infinite, torch.inf, value)
            dx = torch.where(infinite[..., None], 0, dx)
            dy = torch.where(infinite[..., None], 0, dy)
        gradients = (dy, dx) if swapped else (dx, dy)
        ctx.save_for_backward(*gradients, *of_inputs)
        return value.to(x.dtype)

    @staticmethod
    @once_differentiable("topk_kl")
    def backward(ctx, g):
        gradients = [g[..., None] * d for d in ctx.saved_tensors[:2]]
        needs = ctx.needs_input_grad[:2]
        wanted = [d if needed else None for d, needed in zip(gradients, needs, strict=True)]
        return *wanted, *(None,) * 4
