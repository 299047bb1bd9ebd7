"""KL divergence: per-token estimates from log-probabilities, and the exact KL of two logits tensors."""

import torch

__all__ = ["kl_estimate"]

KL_ESTIMATORS = ("k1", "k2", "k3", "k4", "rk3", "k1+", "k3+")
_LINEAR_BEYOND = (
    20.0  # |log-ratio| in nats from which exponentials continue as their tangent: value and slope stay finite
)


def _exp(x: torch.Tensor) -> torch.Tensor:
    """exp, continued by its tangent beyond `_LINEAR_BEYOND`: C1, never inf, and its gradient never becomes 0."""
    edge = x.clamp(max=_LINEAR_BEYOND)
    return edge.exp() * (1 + (x - edge))


def _k3(d: torch.Tensor) -> torch.Tensor:
    """expm1(-d) + d without cancellation near 0, linear where exp(-d) would overflow."""
    x = -d
    edge = x.clamp(max=_LINEAR_BEYOND)
    exact = torch.expm1(edge) - edge + torch.expm1(edge) * (x - edge)
    small = torch.where(d.abs() < 0.1, x, 0)  # where() on the input: the unused branch must not make nan gradients
    # x^2/2! + x^3/3! + ... + x^7/7!: the next term is below 2e-12 relative at |x| = 0.1
    taylor = (
        small
        * small
        * (1 / 2 + small * (1 / 6 + small * (1 / 24 + small * (1 / 120 + small * (1 / 720 + small / 5040)))))
    )
    return torch.where(d.abs() < 0.1, taylor, exact)


def kl_estimate(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    kl_estimator: str = "k3",
    *,
    old_logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) in nats, from the log-probabilities of sampled tokens."""
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
    return _exp(logprobs - old) * (d if kl_estimator == "k4" else _k3(d))
