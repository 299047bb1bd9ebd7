"""Losses of pairs and of single responses: their definitions, micro-batches and ranks."""

import math
from functools import partial

import pytest
import torch

import fused_rl
from tests.one_process import GROUP, together
from tests.papers import F64

N = 7
DESIRABLE = torch.tensor([True, False, True, True, False, False, True])


def scores_of(seed, n=N):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("desirable", [DESIRABLE, ~DESIRABLE | DESIRABLE, DESIRABLE & ~DESIRABLE])
def test_metrics_of_the_unpaired_loss_add_up_to_their_definitions(desirable):
    """Of micro-batches of different sizes and kinds; the loss itself is drawn in test_hostile.py."""
    scores, baseline = scores_of(0), torch.tensor(0.4, dtype=F64)
    options = {"desirable_weight": 1.25, "undesirable_weight": 0.5, "baseline": baseline}
    loss, metrics = fused_rl.unpaired_preference_loss(scores, desirable, **options)
    parts = [
        fused_rl.unpaired_preference_loss(part, kind, num_sequences=N, **options)[1]
        for part, kind in zip(scores.split([1, 4, 2]), desirable.split([1, 4, 2]), strict=True)
    ]
    good, bad = scores[desirable], scores[~desirable]
    want = {
        "loss": loss,
        "accuracy": torch.cat([good > baseline, bad < baseline]).double().mean(),
        "desirable": desirable.double().mean(),
        "desirable_rewards": good.sum() / N,
        "undesirable_rewards": bad.sum() / N,
    }
    summed = {name: sum(part[name] for part in parts) for name in metrics}
    for found in (metrics, summed):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-15)


def test_a_score_on_the_baseline_is_half_right_and_its_baseline_has_no_gradient():
    baseline = torch.tensor(0.5, requires_grad=True)
    loss, metrics = fused_rl.unpaired_preference_loss(
        torch.full((2,), 0.5, requires_grad=True), torch.tensor([True, False]), baseline=baseline
    )
    assert loss == metrics["accuracy"] == 0.5
    assert torch.autograd.grad(loss, baseline, allow_unused=True) == (None,)


def log_odds(scores):
    return (scores.exp() / (1 - scores.exp())).log()


# (chosen, rejected, margin) -> (N,)
DEFINITIONS = {
    "sigmoid": lambda good, bad, m: -torch.sigmoid(good - bad - m).log(),
    "hinge": lambda good, bad, m: (1 - (good - bad - m)).clamp(min=0),
    "squared": lambda good, bad, m: (good - bad - m).square(),
    "orpo": lambda good, bad, m: -torch.sigmoid(log_odds(good) - log_odds(bad) - m).log(),
    "apo-zero": lambda good, bad, m: 1 - torch.sigmoid(good) + torch.sigmoid(bad),
    "apo-down": lambda good, bad, m: torch.sigmoid(good) + 1 - torch.sigmoid(good - bad),
}


@pytest.mark.parametrize("loss_type", DEFINITIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_a_loss_of_pairs_is_its_definition(loss_type, label_smoothing):
    """A wrong label exchanges the two, and turns the sign of the margin."""
    scores = [(-scores_of(seed).abs()).requires_grad_() for seed in (7, 8)]
    margin = None if "apo" in loss_type else 0.3
    options = {"loss_type": loss_type, "margin": margin, "centering": 0.01}
    if loss_type == "squared":
        label_smoothing = 0.0
    loss, _ = fused_rl.preference_loss(*scores, label_smoothing=label_smoothing, **options)
    definition = DEFINITIONS[loss_type]
    right, wrong = definition(*scores, margin or 0), definition(*scores[::-1], -(margin or 0))
    want = (1 - label_smoothing) * right + label_smoothing * wrong + 0.01 * sum(scores).square()
    for score in scores:
        assert_same(loss, want.mean(), score)


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "orpo", "apo-zero", "apo-down"])
def test_a_pair_with_an_infinite_lead_is_right_and_done(loss_type):
    """Without smoothing and centering, whose terms are infinite there."""
    scores = torch.tensor([-0.5, -torch.inf], requires_grad=True)
    loss, metrics = fused_rl.preference_loss(scores[:1], scores[1:], loss_type=loss_type)
    far = fused_rl.preference_loss(scores[:1], torch.tensor([-1e4]), loss_type=loss_type)[0]
    torch.testing.assert_close(loss, far, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(x, scores)[0] for x in (loss, far)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=0)
    assert metrics["accuracy"] == 1


def test_odds_keep_their_digits_next_to_certainty_and_have_a_gradient_at_it():
    tiny = torch.tensor([-1e-12, 0.0], requires_grad=True)
    loss, _ = fused_rl.preference_loss(torch.full((2,), -40.0), tiny, loss_type="orpo")
    assert loss.item() == pytest.approx((40 + math.log(1e12) + 40 + 87.34) / 2, rel=1e-4)
    assert torch.autograd.grad(loss, tiny)[0].isfinite().all()


def test_the_baseline_is_that_of_all_ranks():
    """Ranks of different sizes and scores, with a negative mean, and one without any."""

    def of_ranks(*scores):
        ranks = [partial(fused_rl.kl_baseline, each, process_group=GROUP) for each in scores]
        return [baseline.item() for baseline in together(ranks)]

    scores = scores_of(3) + 1
    whole = pytest.approx(scores.mean().item(), rel=1e-12)
    assert scores.mean() > 0
    assert of_ranks(scores[:5], scores[5:]) == [whole, whole]
    assert of_ranks(scores, scores[:0]) == [whole, whole]
    assert of_ranks(-scores.abs(), -scores[:1].abs()) == [0.0, 0.0]


def assert_same(loss, want, leaf, rtol=1e-11):
    """The same values and gradients."""
    torch.testing.assert_close(loss, want, rtol=rtol, atol=0)
    grads = [torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (loss, want)]
    torch.testing.assert_close(*grads, rtol=rtol, atol=1e-15)
