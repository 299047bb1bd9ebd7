"""`integrations.open_instruct` against the host's formulas in fp64, transcribed from `open_instruct/model_utils.py`."""

import pytest
import torch

from fused_rl.integrations.open_instruct import estimate_kl, log_softmax_and_gather

pytestmark = pytest.mark.usefixtures("cpu")


def transcribed_logprobs(logits, index):
    return logits.log_softmax(-1).gather(-1, index[..., None])[..., 0]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# With an offset bf16 loses what log_softmax does not keep in fp32.
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_log_softmax_and_gather(dtype, offset):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(3, 5, 1009, generator=generator) + offset).to(dtype)
    index = torch.randint(1009, (3, 5), generator=generator)
    exact = differentiated(transcribed_logprobs, logits.double(), index)
    ours = differentiated(log_softmax_and_gather, logits, index)
    theirs = differentiated(transcribed_logprobs, logits, index)
    for got, want, host in zip(ours, exact, theirs, strict=True):
        assert (got - want).abs().max() <= (host - want).abs().max()
    assert log_softmax_and_gather(logits, index).dtype == torch.float32
    # a value's error is that of fp32, whatever the logits' dtype
    torch.testing.assert_close(ours[0], exact[0], atol=4e-6, rtol=1e-6)


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
