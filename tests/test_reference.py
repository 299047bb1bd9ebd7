"""The oracle itself: its gradients by finite differences, its values by another library's definitions."""

import torch

from fused_rl import reference


def test_token_logprobs_values_are_those_of_a_categorical():
    torch.manual_seed(0)
    logits = 5 * torch.randn(4, 50, dtype=torch.float64)
    targets = torch.randint(50, (4,))
    categorical = torch.distributions.Categorical(logits=logits / 0.7)
    outputs = reference.token_logprobs(logits, targets, temperature=0.7)
    torch.testing.assert_close(outputs.logprobs, categorical.log_prob(targets))
    torch.testing.assert_close(outputs.entropy, categorical.entropy())
    torch.testing.assert_close(outputs.lse, torch.logsumexp(logits / 0.7, -1))


def test_token_logprobs_keeps_its_digits_next_to_certainty():
    # one token ahead of 10^5 equal ones by 30: rest = 1e5 exp(-30), and H = log1p(rest) + 30 rest / (1 + rest)
    logits = torch.zeros(1, 100_001, dtype=torch.float64)
    logits[0, 5] = 30
    rest = 1e5 * torch.tensor(-30.0, dtype=torch.float64).exp()
    outputs = reference.token_logprobs(logits, torch.tensor([5]))
    torch.testing.assert_close(outputs.logprobs[0], -rest.log1p(), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        outputs.entropy[0], rest.log1p() + 30 * rest / (1 + rest), rtol=1e-12, atol=0
    )


def test_token_logprobs_of_banned_and_masked_rows():
    logits = torch.full((3, 4), -torch.inf, dtype=torch.float64)
    logits[1, 2] = 7
    logits[2] = torch.nan
    logits.requires_grad_()
    mask = torch.tensor([True, True, False])
    outputs = reference.token_logprobs(logits, torch.tensor([0, 2, -100]), mask=mask)
    assert outputs.logprobs.tolist() == [-torch.inf, 0, 0]
    assert outputs.entropy.tolist() == [0, 0, 0]
    assert outputs.lse.tolist() == [-torch.inf, 7, 0]
    sum(outputs).sum().backward()
    assert logits.grad.tolist() == [[0] * 4, [0, 0, 1, 0], [0] * 4]
