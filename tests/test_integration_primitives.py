"""What the integrations of hosts share, without a host."""

import pytest
import torch

from fused_rl import kl_estimate
from fused_rl.integrations import primitives


def gradient(d, estimator):
    d = d.clone().requires_grad_()
    reference = torch.zeros_like(d, requires_grad=True)  # which is a constant all the same
    value = primitives.capped_kl(d, reference, estimator)
    slope, none = torch.autograd.grad(value.sum(), [d, reference], allow_unused=True)
    assert none is None
    return value.detach(), slope


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_capped_kl_is_the_estimate_up_to_the_cap(estimator):
    lowest, highest = primitives.CAPPED_AT_10[estimator]
    d = torch.linspace(lowest, highest, 101, dtype=torch.float64)
    value, slope = gradient(d, estimator)
    leaf = d.clone().requires_grad_()
    exact = kl_estimate(leaf, torch.zeros_like(d), estimator)
    exact.sum().backward()
    torch.testing.assert_close(value, exact.detach())
    torch.testing.assert_close(slope, leaf.grad)
    torch.testing.assert_close(value[[0, -1]].abs(), torch.full((2,), 10.0, dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_beyond_the_cap_value_and_gradient_are_those_at_the_cap(estimator):
    at_cap = torch.tensor(primitives.CAPPED_AT_10[estimator], dtype=torch.float64)
    for factor in (1.5, 40.0, torch.inf):
        for beyond, cap in zip(
            gradient(at_cap * factor, estimator), gradient(at_cap, estimator), strict=True
        ):
            torch.testing.assert_close(beyond, cap)


def test_with_gradient_of_is_exact():
    value = torch.tensor([0.1, torch.inf])
    carrier = torch.tensor([1e20, -torch.inf], requires_grad=True)
    out = primitives.with_gradient_of(value, carrier)
    assert torch.equal(out, value)
    out.backward(torch.tensor([2.0, 3.0]))
    assert carrier.grad.tolist() == [2.0, 3.0]


def test_what_is_served():
    x = torch.zeros(2, 3)
    assert primitives.is_served(x, torch.nn.Parameter(x))
    assert not primitives.is_served(x, x.to("meta"))
    assert not primitives.is_served(torch.nested.as_nested_tensor([x, x[:1]], layout=torch.jagged))
    assert not primitives.is_served(torch.nested.nested_tensor([x, x[:1]]))


def test_the_gradient_takes_no_memory_that_a_leaf_shares():
    leaf, labels = torch.randn(3, 5, requires_grad=True), torch.tensor([0, 4, 2])
    before = leaf.detach().clone()
    for logits in (leaf, leaf[:], (leaf * 1)[:, :]):
        primitives.label_logprobs(logits, labels, inplace=True).sum().backward()
    assert torch.equal(leaf, before)
    logits = leaf * 1
    primitives.label_logprobs(logits, labels, inplace=True).sum().backward()
    assert not torch.equal(logits, before)
