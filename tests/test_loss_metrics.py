"""Metrics of the losses: their definitions in fp64, and that those of micro-batches add up to the whole batch's."""

import pytest
import torch

import fused_rl

F64 = torch.float64
B, T = 6, 9
# Of different sizes: a mean of the halves' means would be wrong.
HALVES = (
    slice(0, 2),
    slice(2, B),
)


@pytest.fixture
def batch():
    """mask; advantages; logprobs, old_logprobs, ref_logprobs, entropy, fp32, apart and NaN where masked."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(B, T, generator=generator) < 0.6
    mask[:, 0] = True
    logprobs = torch.randn(B, T, generator=generator) - 3
    drift = 0.3 * torch.randn(2, B, T, generator=generator)
    entropy = torch.rand(B, T, generator=generator)
    advantages = torch.randn(B, generator=generator)
    tensors = [
        torch.where(mask, x, torch.nan)
        for x in (logprobs, logprobs + drift[0], logprobs + drift[1], entropy)
    ]
    return mask, advantages, *tensors


def summed(parts):
    """What a trainer does over micro-batches and ranks."""
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ratio_level", ["token", "sequence", "sequence-sum"])
def test_policy_metrics_are_their_definitions(batch, ratio_level):
    mask, advantages, logprobs, old, ref, entropy = batch
    options = {
        "ratio_level": ratio_level,
        "loss_agg": "seq-mean-token-mean",
        "clip_low": 0.1,
        "clip_high": 0.2,
        "delta": 1.3,
    }
    options |= {"kl_coef": 0.2, "kl_estimator": "k2", "entropy_coef": 0.1}
    whole, metrics = fused_rl.policy_loss(
        logprobs, old, advantages, mask, ref_logprobs=ref, entropy=entropy, **options
    )
    # the definitions, in fp64
    lp, old, ref, h = (torch.where(mask, x, 0).double() for x in (logprobs, old, ref, entropy))
    log_ratio, lengths = lp - old, mask.sum(1, keepdim=True)
    sums = (log_ratio * mask).sum(1, keepdim=True).expand(B, T)
    ratio = {"token": log_ratio, "sequence": sums / lengths, "sequence-sum": sums}[
        ratio_level
    ].exp()
    a, d = advantages.double()[:, None].expand(B, T), lp - ref
    surrogate = -torch.minimum(ratio.clamp(max=1.3) * a, ratio.clamp(0.9, 1.2) * a)
    losses = surrogate + 0.2 * d.square() / 2 - 0.1 * h
    sequence_means = [(x * mask).sum(1) / lengths[:, 0] for x in (losses, surrogate)]
    k3 = (-d).exp() - 1 + d
    token_means = {
        "approx_kl": log_ratio.square() / 2,
        "clipfrac": torch.where(a > 0, ratio > 1.2, (ratio < 0.9) | (ratio > 1.3)).double(),
        "ratio_minus_1": ratio - 1,
        "ratio_minus_1_square": (ratio - 1).square(),
        "entropy": h,
    }
    sequence_sums = {
        "kl": d.square() / 2,
        "kl1": d,
        "kl2": d.square() / 2,
        "kl3": k3,
        "kl4": log_ratio.exp() * d,
    }
    want = {"loss": sequence_means[0].mean(), "policy_loss": sequence_means[1].mean()}
    want |= {name: x[mask].mean() for name, x in token_means.items()}
    want |= {name: x[mask].sum() / B for name, x in sequence_sums.items()}
    assert set(want) == set(metrics)
    for name, value in want.items():
        close(metrics[name], value)
        assert not metrics[name].requires_grad
    close(metrics["loss"], whole)
    variance = metrics["ratio_minus_1_square"] - metrics["ratio_minus_1"] ** 2
    close(variance, ratio[mask].var(unbiased=False))


def test_clipfrac_is_what_the_surrogate_clips(batch):
    """What has no bounds has no metric."""
    mask, advantages, logprobs, old, *_ = batch
    a, log_ratio = advantages.double()[:, None], torch.where(mask, logprobs - old, 0).double()
    clamped = log_ratio.clamp(-0.1, 0.2)
    clipped = {
        "cispo": log_ratio.exp().clamp(0.9, 1.2) != log_ratio.exp(),
        "geo-mean": torch.minimum(log_ratio * a, clamped * a) != log_ratio * a,
    }
    for surrogate in (*clipped, "sapo", "vespo", "policy-gradient"):
        bounds = {"clip_low": 0.1, "clip_high": 0.2} if surrogate in clipped else {}
        given = {"surrogate": surrogate, **bounds}
        _, metrics = fused_rl.policy_loss(logprobs, old, advantages, mask, **given)
        assert (surrogate in clipped) == ("clipfrac" in metrics)
        if bounds:
            close(metrics["clipfrac"], clipped[surrogate][mask].double().mean())


def test_the_ratio_keeps_its_variance_next_to_1():
    """Log-ratios of 1e-6: of a variance of 1e-12, E[r^2] - E[r]^2 has no digit in fp32 and four in fp64."""
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.zeros(4, 250)
    old = 1e-6 * torch.randn(4, 250, generator=generator)
    mask = torch.ones(4, 250, dtype=torch.bool)
    _, metrics = fused_rl.policy_loss(logprobs, old, torch.ones(4), mask)
    variance = metrics["ratio_minus_1_square"] - metrics["ratio_minus_1"] ** 2
    want = (-old.double()).expm1().var(unbiased=False)
    torch.testing.assert_close(variance, want, rtol=1e-9, atol=0)


def test_value_metrics_add_up_to_their_definitions(batch):
    mask, _, *given, _ = batch
    given.append(mask)
    _, metrics = fused_rl.value_loss(*given, value_clip=0.2)
    parts = ([x[at] for x in given] for at in HALVES)
    total = summed([fused_rl.value_loss(*part, num_tokens=mask.sum())[1] for part in parts])
    v, o, r = (x[mask].double() for x in given[:3])
    clipped = (v.clamp(o - 0.2, o + 0.2) - r).square()
    plain, error = (v - r).square(), r - v
    want = {
        "value_loss": torch.maximum(plain, clipped) / 2,
        "value_clipfrac": (clipped > plain).double(),
        "return": r,
        "return_square": r**2,
        "value_error": error,
        "value_error_square": error**2,
    }
    assert set(want) == set(total) == set(metrics)
    for name, value in want.items():
        close(total[name], value.mean())
        close(metrics[name], value.mean())


def explained_variance(m):
    error = m["value_error_square"] - m["value_error"] ** 2
    return 1 - error / (m["return_square"] - m["return"] ** 2)


def test_explained_variance_of_returns_far_from_0():
    """Mean 1000, deviation 0.1: in fp32 the variance of the returns would be below the rounding of their squares."""
    generator = torch.Generator().manual_seed(1)
    returns = 1000 + 0.1 * torch.randn(8, 500, generator=generator)
    # An error of constant mean explains all the same.
    values = returns - 5 - 0.05 * torch.randn(8, 500, generator=generator)
    _, found = fused_rl.value_loss(values, values, returns, returns > 0)
    exact = 1 - (returns - values.double()).var() / returns.double().var()
    torch.testing.assert_close(explained_variance(found), exact, rtol=1e-5, atol=0)


def test_preference_metrics_add_up_to_their_definitions():
    generator = torch.Generator().manual_seed(2)
    chosen, rejected = torch.randn(2, B, generator=generator)
    options = {"margin": 0.1, "centering": 0.01}
    loss, metrics = fused_rl.preference_loss(chosen, rejected, **options)
    parts = [
        fused_rl.preference_loss(chosen[at], rejected[at], num_sequences=B, **options)[1]
        for at in HALVES
    ]
    want = {
        "loss": loss.detach(),
        "accuracy": (chosen > rejected).float().mean(),
        "reward_margin": (chosen - rejected).mean(),
        "chosen_rewards": chosen.mean(),
        "rejected_rewards": rejected.mean(),
        "mean_reward": torch.cat([chosen, rejected]).mean(),
    }
    both = torch.cat([chosen, rejected])
    extremes = {"min_reward": min, "max_reward": max}
    assert set(metrics) == set(want) | set(extremes)
    total = summed(parts)
    for name, value in want.items():
        close(total[name], value, 1e-6)
        close(metrics[name], value, 1e-6)
    for name, most in extremes.items():
        assert most(part[name] for part in parts) == most(both) == metrics[name]
