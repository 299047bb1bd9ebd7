"""Tokens that a policy gives no probability, and that count all the same."""

import pytest
import torch

from fused_rl import policy_loss, policy_token_loss

pytestmark = pytest.mark.usefixtures("cpu")
SHAPE = (3, 6)
# In both policies; in the one that sampled; in the reference; for the sampler.
IMPOSSIBLE = [(0, 1), (1, 0), (2, 5), (2, 2)]


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, ref, sampler, advantages = -3 * torch.rand(5, *SHAPE, generator=generator)
    mask = torch.rand(SHAPE, generator=generator) < 0.8
    for at in IMPOSSIBLE:
        mask[at] = True
    kept = mask.clone()
    places = (logprobs, old), (old,), (ref,), (sampler,)
    for at, tensors in zip(IMPOSSIBLE, places, strict=True):
        kept[at] = False
        for tensor in tensors:
            tensor[at] = -torch.inf
    measured = {"ref_logprobs": ref, "rollout_logprobs": sampler}
    measured["rollout_correction"] = "token-truncate"
    return logprobs, old, measured, advantages + 1.5, mask, kept


OPTIONS = {
    "ppo": {"preset": "ppo"},
    "grpo": {"preset": "grpo", "kl_coef": 0.1},
    "gspo": {"preset": "gspo", "kl_coef": 0.1, "kl_estimator": "k3"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_skipped_tokens_are_as_masked_ones(options):
    """Loss, metrics and gradient; what the caller counted stays, what is counted here follows the mask."""
    logprobs, old, measured, advantages, mask, kept = inputs()
    for denominators in ({}, {"num_tokens": 40, "num_sequences": 7}):

        def run(logprobs, mask, denominators=denominators, **more):
            logprobs = logprobs.clone().requires_grad_()
            arguments = measured | options | denominators | more
            loss, metrics = policy_loss(logprobs, old, advantages, mask, **arguments)
            return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics

        loss, gradient, metrics = run(logprobs, mask, skip_impossible=True)
        wanted_loss, wanted_gradient, wanted_metrics = run(logprobs, kept)
        assert loss.isfinite()
        assert torch.equal(loss, wanted_loss)
        assert torch.equal(gradient, wanted_gradient)
        assert (gradient[~kept] == 0).all()
        assert metrics == wanted_metrics
        assert all(value.isfinite() for value in metrics.values())
        assert not run(logprobs, mask)[0].isfinite()  # as the docstring says


def test_skipped_tokens_of_a_token_loss():
    """The policy's own -inf is known only inside; the caller's denominator is used."""
    logprobs, old, measured, advantages, mask, kept = inputs()
    given = measured | {"kl_coef": 0.1, "num_tokens": 15}
    found = []
    for counted in (mask, kept):
        options = given | {"skip_impossible": counted is mask}
        token_loss, per_token = policy_token_loss(old, advantages, counted, **options)
        leaf = logprobs.clone().requires_grad_()
        loss = token_loss(leaf[counted], None, *(x[counted] for x in per_token)).sum()
        found.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    torch.testing.assert_close(*found)
    assert found[0][0].isfinite()
