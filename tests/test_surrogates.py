"""Surrogates of one's own: in both passes, and refused where they are none."""

import pytest
import torch

import fused_rl
from fused_rl import surrogates
from tests.papers import F64, B, T, batch, head

pytestmark = pytest.mark.usefixtures("cpu", "seeded")


def test_a_surrogate_of_ones_own_and_per_token_advantages():
    mask, ids, _, _, drift = batch("partial")
    logprobs = (torch.randn(B, T, dtype=F64) - 3).requires_grad_()
    advantages = drift[1]
    loss, _ = fused_rl.policy_loss(
        logprobs,
        logprobs.detach(),
        advantages,
        mask,
        surrogate=lambda log_ratio, advantages, *_: log_ratio * advantages,
    )
    (grad,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(grad, torch.where(mask, advantages, 0) / mask.sum(), rtol=1e-12, atol=1e-13)


def needs_lengths(log_ratio, advantages, logprobs, sequences, options):
    means = sequences.mean(log_ratio)
    return -sequences.expand(means) * advantages


@pytest.mark.parametrize(
    ("surrogate", "message"),
    [
        ("geo-mean", "surrogate='geo-mean' needs more than one token at a time"),
        (
            surrogates.needs_sequences(lambda *arguments: needs_lengths(*arguments)),
            "needs more than one token",
        ),
    ],
    ids=["built-in", "declared"],
)
def test_a_surrogate_that_needs_sequences_is_refused_at_once_where_there_are_none(surrogate, message):
    mask, _, advantages, _, drift = batch("partial")
    with pytest.raises(ValueError, match=message):
        fused_rl.policy_token_loss(drift[0], advantages, mask, surrogate=surrogate)
    fused_rl.policy_loss(drift[1], drift[0], advantages, mask, surrogate=surrogate)


def test_an_undeclared_surrogate_that_reaches_for_sequences_hears_what_to_do():
    hidden, weight, targets = head()
    mask, _, advantages, _, drift = batch("partial")
    token_loss, per_token = fused_rl.policy_token_loss(drift[0], advantages, mask, surrogate=needs_lengths)
    with pytest.raises(
        ValueError,
        match="uses sequences.mean, but .* single tokens: use linear_token_logprobs and pol",
    ):
        fused_rl.linear_token_loss(hidden, weight, targets, token_loss, *per_token, mask=mask)


def test_a_surrogate_of_ones_own_in_one_pass():
    hidden, weight, targets = head()
    mask, _, advantages, _, drift = batch("partial")

    def tanh_surrogate(log_ratio, advantages, logprobs, sequences, options):
        return -torch.tanh(log_ratio.exp() - 1) * advantages

    token_loss, per_token = fused_rl.policy_token_loss(drift[0], advantages, mask, surrogate=tanh_surrogate)
    one_pass = fused_rl.linear_token_loss(hidden, weight, targets, token_loss, *per_token, mask=mask)
    logprobs = fused_rl.linear_token_logprobs(hidden, weight, targets, mask=mask).logprobs
    want, _ = fused_rl.policy_loss(logprobs, drift[0], advantages, mask, surrogate=tanh_surrogate)
    torch.testing.assert_close(one_pass.loss, want)


BAD_SURROGATES = {
    "a sum": lambda r, a, lp, s, o: -(r.exp() * a).sum(),
    "a mean of sequences": lambda r, a, lp, s, o: -(r.exp() * a).mean(1),
    "a column": lambda r, a, lp, s, o: -(r.exp() * a).sum(1, keepdim=True),
    "another dtype": lambda r, a, lp, s, o: -(r.exp() * a).bfloat16(),
    "nothing": lambda r, a, lp, s, o: None,
    "another signature": lambda r, a: -(r.exp() * a),
}


@pytest.mark.parametrize("surrogate", BAD_SURROGATES.values(), ids=BAD_SURROGATES)
def test_a_surrogate_that_is_none_is_refused_in_one_line(surrogate):
    """Each would broadcast into a loss of B T times the size, or end somewhere inside."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    logprobs = torch.zeros(2, 3, requires_grad=True)
    options = {"preset": "grpo", "surrogate": surrogate}
    with pytest.raises(ValueError, match=r"^the surrogate [^\n]*\(2, 3\)[^\n]*$"):
        fused_rl.policy_loss(logprobs, None, torch.ones(2), mask, **options)
