"""Estimates of KL(policy || reference) per token, from the log-probabilities of the tokens that were sampled."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from fused_rl.base.checks import check_choice, check_floating, check_like

KLEstimator = Literal["k1", "k2", "k3", "k4", "rk3", "k1+", "k3+"]
KL_ESTIMATORS = get_args(KLEstimator)
_LINEAR_BEYOND = (
    20.0  # nats; beyond it an exponential continues as its tangent: value and slope stay finite
)


def tangent_exp(x: Tensor) -> Tensor:
    """exp, continued by its tangent beyond `_LINEAR_BEYOND`: C1, never inf, and its gradient never becomes 0."""
    far = x > _LINEAR_BEYOND
    tangent = math.exp(_LINEAR_BEYOND) * (1 + x - _LINEAR_BEYOND)
    # where() on the input too: exp's backward multiplies by the value, and 0 * inf would be nan
    near = torch.where(far, 0, x).exp()
    return torch.where(far, tangent, near)


def tangent_expm1(x: Tensor) -> Tensor:
    """`tangent_exp` less 1, to the last bits also where x is near 0; in the dtype of x, not meant for gradients."""
    return torch.where(x > _LINEAR_BEYOND, tangent_exp(x) - 1, x.clamp(max=_LINEAR_BEYOND).expm1())


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid, whose gradient keeps its digits also where it is near 1."""
    # torch's gradient is value * (1 - value): for x = 17 a multiple of 6e-8 instead of 4e-8. Its smaller half is exact.
    is_positive = x > 0
    smaller = torch.sigmoid(torch.where(is_positive, -x, x))
    return torch.where(is_positive, 1 - smaller, smaller)


def k3(d: Tensor) -> Tensor:
    """expm1(-d) + d without cancellation near 0, continued by its tangent where exp(-d) would overflow."""
    x = -d
    near, far = x.abs() < 0.1, x > _LINEAR_BEYOND
    # where() on the inputs: a branch that is not taken must not turn the gradient into nan
    small = torch.where(near, x, 0)
    middle = torch.where(near | far, 1, x)
    series = torch.ones_like(
        x
    )  # x^2/2 (1 + x/3 (1 + x/4 (...))): the first term left out is below 1e-16 relative
    for n in range(11, 2, -1):
        series = 1 + small / n * series
    slope = math.expm1(_LINEAR_BEYOND)
    tangent = slope - _LINEAR_BEYOND + slope * (x - _LINEAR_BEYOND)
    beyond = torch.where(far, tangent, torch.expm1(middle) - middle)
    return torch.where(near, small.square() / 2 * series, beyond)


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kl_estimator: KLEstimator = "rk3",
    *,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, from the log-probabilities of sampled tokens.

    With d = logprobs - ref_logprobs and r = exp(logprobs - old_logprobs), r = 1 in value where there is no
    `old_logprobs` (gradients are those with respect to `logprobs`):

    | name | value | gradient | as a loss |
    |---|---|---|---|
    | k1 | d | 1 | expected gradient zero: holds nothing back; the unbiased choice inside a reward |
    | k2 | d^2 / 2 | d | biased value, the KL's gradient on-policy |
    | k3 | expm1(-d) + d | -expm1(-d) | unbiased value on-policy, the gradient of KL(reference, policy) |
    | k4 | r d | r (1 + d) | unbiased value and gradient, on- and off-policy; a token can be negative |
    | rk3 | r (expm1(-d) + d) | r d | unbiased value and gradient, every token >= 0: the one to use |
    | k1+ | k1 | d | straight-through: k1's value, k2's gradient |
    | k3+ | k3 | d | straight-through: k3's value, k2's gradient |

    Overflow: beyond 20 nats, exp(-d) and r continue as their tangents (linear, C1), both in values and where the table
        has them in a gradient. The gradients of k4 and rk3 are those of the table, with r as a factor. Values and
        gradients stay finite. The gradient never becomes 0, as it would under a clamp, and never changes its sign, as
        that of the product r k3 would where its two halves, r k3 - r expm1(-d), no longer cancel.

    Args:
        logprobs: (...) of the policy, floating point.
        ref_logprobs: same shape, of the reference; a constant.
        kl_estimator: one of the names above; every loss here has the same default. Inside a reward, use k1.
        old_logprobs: same shape, of the policy that sampled the tokens; a constant, used by k4 and rk3 only. None
            means that `logprobs` is that policy (on-policy).

    Returns:
        Same shape, fp32 (fp64 for fp64 `logprobs`), unreduced, differentiable in `logprobs`.

    Raises:
        ValueError: an unknown estimator, or shapes that differ.

    Source: Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html (k1, k2, k3); k3 weighted by
    the ratio: DeepSeek-V3.2, arXiv:2512.02556.
    """
    check_choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    check_floating("logprobs", logprobs)
    sampled = logprobs if old_logprobs is None else old_logprobs
    for name, x in (("ref_logprobs", ref_logprobs), ("old_logprobs", sampled)):
        check_like(name, x, "logprobs", logprobs)
    return estimate(logprobs, ref_logprobs, kl_estimator, old_logprobs)


def estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kl_estimator: KLEstimator,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Return `kl_estimate` of tensors that were checked before."""
    if logprobs.dtype != torch.float64:
        logprobs = logprobs.float()
    d = logprobs - ref_logprobs.detach()
    k2 = d.square() / 2
    if kl_estimator == "k2":
        return k2
    value = d if kl_estimator in ("k1", "k1+", "k4") else k3(d)
    if kl_estimator in ("k1", "k3"):
        return value
    if kl_estimator in ("k1+", "k3+"):
        return k2 + (value - k2).detach()  # the value of one, the gradient of the other
    old_logprobs = logprobs if old_logprobs is None else old_logprobs
    ratio = tangent_exp((logprobs - old_logprobs).detach())
    slope = (
        k2 if kl_estimator == "rk3" else k2 + d
    )  # d, or 1 + d: what the product rule leaves, in one term
    return ratio * (value.detach() + (slope - slope.detach()))
