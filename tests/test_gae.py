"""GAE against the loop from the last token to the first, in fp64."""

import contextlib

import torch

import fused_rl
from fused_rl import reference
from tests.marks import on_backends
from tests.paths import DEVICE
from tests.tools import interpreter


def batch(b, t, keep=0.7, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, b, t, generator=generator)
    mask = torch.rand(b, t, generator=generator) < keep
    # what no one may read
    rewards = rewards.masked_fill(~mask, torch.nan)
    values = values.masked_fill(~mask, torch.inf)
    return rewards.to(device), values.to(device), mask.to(device)


def assert_equals_loop(rewards, values, mask, gamma, gae_lambda):
    with interpreter.check_memory() if DEVICE == "cpu" else contextlib.nullcontext():
        got = fused_rl.gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    want = reference.gae(
        rewards.double(), values.double(), mask, gamma=gamma, gae_lambda=gae_lambda
    )
    for ours, best in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        assert (ours[~mask] == 0).all()
        torch.testing.assert_close(ours, best.float(), rtol=1e-6, atol=1e-6)


def test_known_values():
    """Masked positions are as if not there."""
    mask = torch.tensor([[False, True, True, False, True, False, True, False]])
    rewards, values = torch.full((2, *mask.shape), torch.nan)
    rewards[mask], values[mask] = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4]])
    advantages, returns = reference.gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
    want = torch.tensor([0.799675, 0.7365, 0.67, 0.6])
    torch.testing.assert_close(advantages[mask], want, rtol=0, atol=1e-6)
    torch.testing.assert_close(returns[mask], want + values[mask], rtol=0, atol=1e-6)


# undiscounted, usual, strong decay (short blocks in the kernel), one-step, myopic, a decay that fp32 cannot hold
DECAYS = [(0.99, 0.95), (1, 1), (1, 0), (0.3, 0.4), (0.99999, 0.99999), (0, 1)]


@on_backends("length, decay", [1, 2, 3, 127, 1025], DECAYS, most=5)
def test_equals_the_loop(backend, length, decay):
    gamma, gae_lambda = decay
    if length > 200 and gamma * gae_lambda < 0.1:
        length = 200  # blocks of 8: many steps for the interpreter
    assert_equals_loop(*batch(3, length, device=backend), gamma, gae_lambda)


@on_backends("gamma", [1.0, 0.999], most=0)
def test_longest(backend, gamma):
    """131072 tokens, all rewards and values of one sign: returns of 10^5, where an fp32 loop is off by 1e-3."""
    rewards, values, mask = batch(1, 131072, keep=0.9, device=backend)
    rewards, values = rewards.abs(), values.abs()
    # the loop in fp64, without its bookkeeping of masks
    advantage, value, want = 0.0, 0.0, []
    for r, v in zip(rewards[mask].tolist()[::-1], values[mask].tolist()[::-1], strict=True):
        advantage = r + gamma * value - v + gamma * advantage
        value = v
        want.append(advantage)
    advantages, _ = fused_rl.gae(rewards, values, mask, gamma=gamma, gae_lambda=1.0)
    torch.testing.assert_close(
        advantages[mask].cpu(), torch.tensor(want[::-1]), rtol=1e-6, atol=1e-6
    )


def test_strides_and_detachment(backend):
    rewards, values, mask = batch(4, 50, device=backend)
    plain = fused_rl.gae(rewards, values, mask, gamma=0.9, gae_lambda=0.9)
    wide = torch.stack([rewards, rewards], 2)[:, :, 0]  # stride 2 along T
    rows = torch.cat([values, values], 1)[:, :50].requires_grad_()
    for ours, best in zip(
        fused_rl.gae(wide, rows, mask, gamma=0.9, gae_lambda=0.9), plain, strict=True
    ):
        assert torch.equal(ours, best)
        assert not ours.requires_grad


def test_operator_registration():
    torch.library.opcheck(torch.ops.fused_rl.gae.default, (*batch(2, 9, device=DEVICE), 0.9, 0.8))
