"""TRL's functions of logits, ours in their place, and the hard cases where TRL's lose their digits."""

import pytest
import torch

from fused_rl.integrations import trl as integration
from tests.integrations.trl_heads import assert_near_the_host, backward_of, error
from tests.lazy import Lazy, needs_trl

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

trl_utils = Lazy("trl.trainer.utils")
pytestmark = [pytest.mark.usefixtures("cpu"), needs_trl]


def make_logits(dtype, banned=False):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 7, 131, generator=generator) * torch.linspace(0.3, 4, 7)[:, None] + 20
    logits[..., [3, 77]] += -torch.inf if banned else 0.0
    return logits.to(dtype)


def from_logits(module, logits, index, temperature, row_mask, several):
    """log-probabilities, and entropies unless TRL's mask cannot fit them; the gradient of both."""
    logits = logits.detach().clone().requires_grad_()
    taken = logits[:, :-1]  # as trainers do: rows that do not merge
    found = [module.selective_log_softmax(taken, index, temperature, row_mask)]
    if not several or row_mask is None:
        found += module.selective_log_softmax_and_entropy(taken, index, True, temperature, row_mask)
        if temperature == 1 and row_mask is None:
            found.append(module.entropy_from_logits(taken))
    backward_of(found)
    return [*found, logits.grad]


def logits_on_both(dtype, temperature, masked, several):
    """Ours, theirs, exact: outputs and gradient; and the mask."""
    logits = make_logits(dtype)
    generator = torch.Generator().manual_seed(4)
    index = torch.randint(4, 77, (3, 6, 5) if several else (3, 6), generator=generator)
    if several:
        index[..., 1] = index[..., 0]  # an id twice
    row_mask = (
        None if masked is None else (torch.rand(index.shape, generator=generator) < 0.6).to(masked)
    )
    exact = from_logits(trl_utils, logits.double(), index, temperature, row_mask, several)
    theirs = from_logits(trl_utils, logits, index, temperature, row_mask, several)
    ours = from_logits(integration, logits, index, temperature, row_mask, several)
    return ours, theirs, exact, row_mask


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
@pytest.mark.parametrize(
    ("temperature", "masked"), [(1.0, None), (0.7, torch.bool), (1.0, torch.int64)]
)
@pytest.mark.parametrize("several", [False, True])
def test_logits(dtype, temperature, masked, several):
    """At most TRL's error, and fp32 where it returns 16 bits; from fp64 logits fp64."""
    ours, theirs, exact, row_mask = logits_on_both(dtype, temperature, masked, several)
    for i, (one, other, truth) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert one.dtype == (dtype if i == len(ours) - 1 else FP64 if dtype == FP64 else FP32)
        allowed = (
            1e-12 if dtype == FP64 else error(other, truth) + 2**-22 * truth.abs().max().item()
        )
        assert error(one, truth) <= allowed
        if dtype == FP32:
            assert_near_the_host("", one, other, truth)
    if row_mask is not None:
        assert (ours[0][row_mask == 0] == 0).all()
    if row_mask is not None and not several:
        assert (ours[-1][:, :-1][row_mask == 0] == 0).all()


@pytest.mark.parametrize("shape", [(1, 6), (3, 1)])
@pytest.mark.parametrize("several", [False, True])
def test_a_mask_is_broadcast_and_hides_targets_that_are_none(shape, several):
    logits = make_logits(FP32)[:, :-1]
    index = torch.full((3, 6, 2) if several else (3, 6), 5)
    row_mask = (torch.arange(6) % 2 if shape == (1, 6) else torch.arange(3) % 2).view(shape)
    row_mask = row_mask[..., None] if several else row_mask
    arguments = 0.7, row_mask
    expected = trl_utils.selective_log_softmax(logits, index, *arguments)
    masked = index.masked_fill((row_mask == 0).broadcast_to(index.shape), -100)
    logits = logits.masked_fill((row_mask == 0).reshape(*shape, 1), torch.nan)
    found = integration.selective_log_softmax(logits, masked, *arguments)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_entropy_without_gradient():
    logits = make_logits(FP32).requires_grad_()
    index = torch.zeros(3, 7, dtype=torch.long)
    logprobs, entropy = integration.selective_log_softmax_and_entropy(
        logits, index, entropy_requires_grad=False
    )
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    torch.testing.assert_close(
        entropy, trl_utils.entropy_from_logits(logits).detach(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("function", ["selective_log_softmax", "selective_log_softmax_and_entropy"])
def test_a_temperature_that_is_not_positive_is_refused_as_trl_does(function):
    with pytest.raises(ValueError, match="temperature must be positive"):
        getattr(integration, function)(
            torch.zeros(2, 9), torch.zeros(2, dtype=torch.long), temperature=0.0
        )


# Where TRL's lose their digits: bench/repro/integrations/trl.py.
