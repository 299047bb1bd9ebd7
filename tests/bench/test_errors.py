"""Errors against fp64: the truths are right."""

import torch

import fused_rl.reference
from bench import numerics


def test_exact_numerics_agree_with_autograd_and_keep_what_it_loses():
    x, targets = numerics.logits("normal", 0, torch.float32, "cpu")
    up = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    logprobs, h, gradient = numerics.exact(x, targets, *up)
    leaf = x.double().requires_grad_()
    expected = fused_rl.reference.token_logprobs(leaf, targets)
    (given,) = torch.autograd.grad(expected[:2], leaf, up)
    torch.testing.assert_close(logprobs, expected.logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(h, expected.entropy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, given, rtol=1e-9, atol=1e-14)
    # One token 60 above the other: 1 - p = e^-60 of which plain fp64 keeps nothing.
    certain = torch.tensor([[60.0, 0.0]])
    _, h, gradient = numerics.exact(certain, torch.tensor([0]), torch.ones(1), None)
    rest = torch.exp(torch.tensor(-60.0, dtype=torch.float64))
    torch.testing.assert_close(h[0], rest * 61, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient[0], torch.stack([rest, -rest]), rtol=1e-12, atol=0)
