"""`integrations.open_instruct` against the host's formulas in fp64, transcribed from `open_instruct/model_utils.py`."""

import pytest
import torch

from fused_rl.integrations.open_instruct import estimate_kl, log_softmax_and_gather

pytestmark = pytest.mark.usefixtures("cpu")


def transcribed_kl(d, r):
    return torch.stack([d, d**2 / 2, torch.expm1(-d) + d, r * d])


def differentiated(function, *inputs):
    """Values and gradients in fp64, for an upstream gradient that follows from the shape."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    values = function(*inputs)
    upstream = torch.linspace(-1, 1, values.numel()).reshape(values.shape).to(values.dtype)
    wanted = [x for x in inputs if x.requires_grad]
    gradients = torch.autograd.grad(values, wanted, upstream)
    return [x.detach().double() for x in (values, *gradients)]


def test_log_softmax_and_gather():
    """The host's own rounds to bf16."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(3, 5, 1009, generator=generator) + 100).bfloat16()
    index = torch.randint(1009, (3, 5), generator=generator)
    exact = logits.double().log_softmax(-1).gather(-1, index[..., None])[..., 0]
    found = log_softmax_and_gather(logits, index)
    torch.testing.assert_close(found, exact.float(), atol=4e-6, rtol=1e-6)


def test_estimates_of_the_kl():
    """Within 20 nats the host's four, and their gradients by both arguments; 0 is k1, as the host counts."""
    generator = torch.Generator().manual_seed(1)
    d = torch.cat(
        [20 * (2 * torch.rand(1, 99, generator=generator) - 1), torch.zeros(1, 1)], -1
    ).double()
    r = torch.rand(d.shape, generator=generator).double() + 0.5
    for got, want in zip(
        differentiated(estimate_kl, d, r), differentiated(transcribed_kl, d, r), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-13, rtol=1e-13)
    assert estimate_kl(d, r).shape == (4, *d.shape)
