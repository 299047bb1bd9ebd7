"""KL estimators: exact expectations by enumeration, precision near 0, and a gradient that never switches off."""

import pytest
import torch

import fused_rl
from fused_rl.objectives.estimators import KL_ESTIMATORS

F64 = torch.float64
# Five-token categoricals: the policy's logits, the reference's, and those of the policy that sampled.
THETA = torch.tensor([0.5, -0.3, 0.8, -1.0, 0.2], dtype=F64)
REF = torch.tensor([0.1, 0.4, -0.2, 0.3, -0.6], dtype=F64).log_softmax(0)
BEHAVIOUR = torch.tensor([0.3, -0.1, 0.5, -0.6, 0.0], dtype=F64).log_softmax(0)
KL_GRADIENT = torch.tensor([-0.016429, -0.138725, 0.193046, -0.104465, 0.066574], dtype=F64)
REVERSED_GRADIENT = torch.tensor([0.057778, -0.161311, 0.204647, -0.194707, 0.093593], dtype=F64)


def expectation(kl_estimator, on_policy):
    """E over the behaviour policy, and the expected gradient on the policy's logits, as a loss would see them."""
    theta = THETA.clone().requires_grad_()
    logprobs = theta.log_softmax(0)
    old = logprobs.detach() if on_policy else BEHAVIOUR
    expected = (
        old.exp() * fused_rl.kl_estimate(logprobs, REF, kl_estimator, old_logprobs=old)
    ).sum()
    return expected.detach(), torch.autograd.grad(expected, theta)[0]


@pytest.mark.parametrize(
    ("kl_estimator", "on_policy", "off_policy", "gradient", "off_policy_cosine"),
    [
        ("k1", 0.306993, 0.146296, torch.zeros(5, dtype=F64), -0.953),
        ("k2", 0.283445, 0.320773, KL_GRADIENT, 0.983),
        ("k3", 0.306993, 0.387491, REVERSED_GRADIENT, 0.896),
        ("k4", 0.306993, 0.306993, KL_GRADIENT, 1.0),
        ("rk3", 0.306993, 0.306993, KL_GRADIENT, 1.0),
        ("k1+", 0.306993, 0.146296, KL_GRADIENT, 0.983),
        ("k3+", 0.306993, 0.387491, KL_GRADIENT, 0.983),
    ],
)
def test_expectations_by_enumeration(
    kl_estimator, on_policy, off_policy, gradient, off_policy_cosine
):
    value, grad = expectation(kl_estimator, on_policy=True)
    torch.testing.assert_close(value.item(), on_policy, rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, gradient, rtol=0, atol=1e-6)
    value, grad = expectation(kl_estimator, on_policy=False)
    torch.testing.assert_close(value.item(), off_policy, rtol=0, atol=1e-6)
    cosine = torch.nn.functional.cosine_similarity(grad, KL_GRADIENT, dim=0).item()
    torch.testing.assert_close(cosine, off_policy_cosine, rtol=0, atol=5e-4)
    if kl_estimator in ("k4", "rk3"):  # not the direction alone
        torch.testing.assert_close(grad, KL_GRADIENT, rtol=0, atol=1e-6)


def test_the_constants_above_are_the_exact_kl():
    theta = THETA.clone().requires_grad_()
    logp = theta.log_softmax(0)
    for kl, value, gradient in (
        ((logp.exp() * (logp - REF)).sum(), 0.306993, KL_GRADIENT),
        ((REF.exp() * (REF - logp)).sum(), 0.361676, REVERSED_GRADIENT),
    ):
        torch.testing.assert_close(kl.item(), value, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            torch.autograd.grad(kl, theta, retain_graph=True)[0], gradient, rtol=0, atol=1e-6
        )


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
