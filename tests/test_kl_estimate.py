"""KL estimators: exact expectations by enumeration, precision near 0, and a gradient that never switches off."""

import pytest
import torch

import fused_rl
from fused_rl.objectives.estimators import KL_ESTIMATORS

F64 = torch.float64


# gradient by logprobs at d = logprobs - ref and r = exp(logprobs - old), docs/losses.md
GRADIENTS = {
    "k1": lambda d, r: torch.ones_like(d),
    "k2": lambda d, r: d,
    "k3": lambda d, r: -torch.expm1(-d),
    "k4": lambda d, r: r * (1 + d),
    "rk3": lambda d, r: r * d,
    "k1+": lambda d, r: d,
    "k3+": lambda d, r: d,
}


@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
def test_values_and_gradients_are_the_table(kl_estimator):
    # both sides of the switch to the series at 0.1, and moderate log-ratios of both signs
    d = torch.tensor(
        [-15.0, -3.0, -0.5, -0.1001, -0.0999, -1e-3, 0.0, 1e-3, 0.0999, 0.1001, 0.5, 3.0, 15.0],
        dtype=F64,
    )
    torch.manual_seed(0)
    logprobs = -torch.rand_like(d).mul(4).requires_grad_()
    ref = (logprobs - d).detach()
    old = (logprobs - torch.randn_like(d)).detach()
    d, r = logprobs.detach() - ref, (logprobs.detach() - old).exp()
    kl = fused_rl.kl_estimate(logprobs, ref, kl_estimator, old_logprobs=old)
    k3 = torch.expm1(-d) + d
    values = {"k1": d, "k2": d**2 / 2, "k3": k3, "k4": r * d, "rk3": r * k3, "k1+": d, "k3+": k3}
    torch.testing.assert_close(kl.detach(), values[kl_estimator], rtol=1e-9, atol=1e-15)
    upstream = torch.randn_like(d)
    (grad,) = torch.autograd.grad(kl, logprobs, upstream)
    torch.testing.assert_close(
        grad, upstream * GRADIENTS[kl_estimator](d, r), rtol=1e-9, atol=1e-15
    )
