"""Estimates of KL(policy || reference) per token, from the log-probabilities of the tokens that were sampled."""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from fused_rl.base.checks import check_choice, check_floating, check_like

KLEstimator = Literal["k1", "k2", "k3", "k4", "rk3", "k1+", "k3+"]
KL_ESTIMATORS = get_args(KLEstimator)
# nats; beyond it an exponential continues as its tangent: value and slope stay finite
_LINEAR_BEYOND = 20.0
_SERIES_BELOW = 0.1  # nats; below it exp(x) - 1 - x would cancel


def tangent_exp(x: Tensor) -> Tensor:
    """exp, continued by its tangent beyond `_LINEAR_BEYOND`: C1, never inf, and its gradient never becomes 0."""
    tangent = math.exp(_LINEAR_BEYOND) * (1 + x - _LINEAR_BEYOND)
    # clamp() on the input: exp's backward multiplies by the value, and 0 * inf would be nan
    return torch.where(x > _LINEAR_BEYOND, tangent, x.clamp(max=_LINEAR_BEYOND).exp())


def tangent_expm1(x: Tensor) -> Tensor:
    """`tangent_exp` less 1, to the last bits also where x is near 0; in the dtype of x, not meant for gradients."""
    tangent = math.exp(_LINEAR_BEYOND) * (1 + x - _LINEAR_BEYOND) - 1
    return torch.where(x > _LINEAR_BEYOND, tangent, x.clamp(max=_LINEAR_BEYOND).expm1())


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid, whose gradient keeps its digits also where it is near 1."""
    # torch's gradient is value * (1 - value): for x = 17 a multiple of 6e-8 instead of 4e-8. Its smaller half is exact.
    is_positive = x > 0
    smaller = torch.sigmoid(torch.where(is_positive, -x, x))
    return torch.where(is_positive, 1 - smaller, smaller)


def k3(d: Tensor) -> Tensor:
    """expm1(-d) + d without cancellation near 0, continued by its tangent where exp(-d) would overflow."""
    x = -d
    # clamp() on the inputs: a branch that is not taken must not turn the gradient into nan
    small = x.clamp(-_SERIES_BELOW, _SERIES_BELOW)
    middle = x.clamp(max=_LINEAR_BEYOND)
    # x^2/2 (1 + x/3 (1 + x/4 (...))): the first term left out is below 1e-16 relative
    series = 1 + small / 11
    if small.requires_grad:
        quotients = [small / n for n in range(10, 2, -1)]
    else:  # in one kernel; the gradient would be summed in another order
        divisors = torch.arange(10, 2, -1, dtype=x.dtype, device=x.device)
        quotients = (small[..., None] / divisors).unbind(-1)
    for quotient in quotients:
        series = 1 + quotient * series
    slope = math.expm1(_LINEAR_BEYOND)
    tangent = slope - _LINEAR_BEYOND + slope * (x - _LINEAR_BEYOND)
    beyond = torch.where(x > _LINEAR_BEYOND, tangent, torch.expm1(middle) - middle)
    return torch.where(x.abs() < _SERIES_BELOW, small.square() / 2 * series, beyond)


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
    return Estimates(logprobs, ref_logprobs, kl_estimator, old_logprobs).chosen


class Estimates:
    """`kl_estimate` of tensors that were checked before, and all that estimates are made of, each computed once."""

    def __init__(
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        kl_estimator: KLEstimator,
        old_logprobs: Tensor | None = None,
    ):
        self.logprobs = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
        self.old_logprobs = self.logprobs if old_logprobs is None else old_logprobs
        self.kl_estimator = kl_estimator
        self.k1 = self.logprobs - ref_logprobs.detach()
        self._computed: dict[str, Tensor] = {}

    def _once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        # functools.cached_property has a lock, which torch.compile cannot trace
        if name not in self._computed:
            self._computed[name] = compute()
        return self._computed[name]

    @property
    def k2(self) -> Tensor:
        return self._once("k2", lambda: self.k1.square() / 2)

    @property
    def k3(self) -> Tensor:
        # as a part of another estimate it has no gradient
        d = self.k1 if self.kl_estimator == "k3" else self.k1.detach()
        return self._once("k3", lambda: k3(d))

    @property
    def ratio(self) -> Tensor:
        """That of the policy to the one that sampled; a constant."""
        return self._once("ratio", self._ratio)

    def _ratio(self):
        return tangent_exp((self.logprobs - self.old_logprobs).detach())

    @property
    def chosen(self) -> Tensor:
        """That of `kl_estimator`, with its gradient."""
        return self._once("chosen", self._chosen)

    def _chosen(self):
        name = self.kl_estimator
        if name in ("k1", "k2", "k3"):
            return getattr(self, name)
        value = self.k1 if name in ("k1+", "k4") else self.k3
        if name in ("k1+", "k3+"):
            return (
                self.k2 + (value - self.k2).detach()
            )  # the value of one, the gradient of the other
        # d, or 1 + d: what the product rule leaves, in one term
        slope = self.k1 * self.k1.detach() if name == "rk3" else self.k2 + self.k1
        return self.ratio * (value.detach() + (slope - slope.detach()))
