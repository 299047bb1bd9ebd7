"""Advantages of responses: by group and by batch, on one rank and on several."""

from functools import partial

import pytest
import torch

import fused_rl
from fused_rl import masked_var, response_advantages, whiten
from tests.one_process import GROUP, together


def test_a_small_deviation_of_a_group_is_still_one():
    """Whereas 0.1 has no exact mean in fp32."""
    groups = torch.tensor([0.1] * 6 + [1.0, 1.0 + 1e-6, 1.0, 1.0, 1.0, 1.0])
    advantages = fused_rl.group_advantages(groups, 6, eps=0.0)
    assert (advantages[:6] == 0).all()
    assert advantages[7] > 1.5


REWARDS = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0, 3.0, 1, 1, 1, 1, 1, 1, 1])


def test_each_name_is_its_definition():
    groups = REWARDS.view(2, 8).double()
    others = (groups.sum(1, keepdim=True) - groups) / 7
    whole = REWARDS.double()
    want = {
        "group-std": (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4),
        "group-mean": groups - groups.mean(1, keepdim=True),
        "leave-one-out": groups - others,
        "batch-std": (whole - whole.mean()) / whole.std(),
        "group-mean-batch-std": (groups - groups.mean(1, keepdim=True)) / (whole.std() + 1e-4),
    }
    lengths = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3])
    weights = lengths.view(2, 8) / lengths.view(2, 8).sum(1, keepdim=True)
    want["maxrl"] = (groups - groups.mean(1, keepdim=True)) / groups.mean(1, keepdim=True)
    want["opo"] = groups - (weights.double() * groups).sum(1, keepdim=True)
    want["pass-at-k"] = torch.zeros_like(groups)  # the first group's best two are equal
    want["pass-at-k"][1, 0] = 2 / (groups[1].std() + 1e-4)
    assert {*want, "gdpo", "gae"} == set(fused_rl.ADVANTAGES)
    for advantage, values in want.items():
        got = response_advantages(REWARDS, advantage, group_size=8, lengths=lengths)
        assert got.dtype == torch.float32
        assert got.shape == (16,)
        torch.testing.assert_close(
            got.double(), values.view(-1), rtol=1e-6, atol=1e-6, msg=advantage
        )


def test_gdpo_compares_each_reward_alone():
    """One reward of 0.3 on average and one of hundreds: each is divided by its own deviation before it is weighed."""
    rewards = torch.stack([REWARDS / 3, 100 * REWARDS.flip(0)])
    by_reward = torch.stack(
        [response_advantages(each, "group-std", group_size=8) for each in rewards]
    )
    summed = by_reward[0] + 0.5 * by_reward[1]
    got = response_advantages(rewards, "gdpo", group_size=8, weights=torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(got, (summed - summed.mean()) / summed.std())
    with pytest.raises(
        ValueError, match=r"^weights must have the shape of the first dimension of rewards, \(2,\)"
    ):
        response_advantages(rewards, "gdpo", group_size=8, weights=torch.ones(3))


def test_maxrl_needs_a_positive_mean_opo_lengths_and_groups_more_than_one_response():
    assert (response_advantages(-REWARDS, "maxrl", group_size=8) == 0).all()
    with pytest.raises(ValueError, match="^lengths must be a dense tensor"):
        response_advantages(REWARDS, "opo", group_size=8)
    for advantage in ("maxrl", "pass-at-k"):
        with pytest.raises(ValueError, match="^group_size=1 has no other response"):
            response_advantages(REWARDS, advantage, group_size=1)


@pytest.mark.parametrize("advantage", fused_rl.ADVANTAGES[:-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_advantages_of_exactly_0(advantage, dtype):
    """0.1 has no exact mean: a rounded one differs from it in the last bit, which a deviation of 0 would blow up."""
    rewards = torch.full((6,), 0.1, dtype=dtype)
    if advantage == "gdpo":
        assert (
            response_advantages(rewards[None], advantage, group_size=6, weights=rewards[:1]) == 0
        ).all()
        return
    assert (
        response_advantages(rewards, advantage, group_size=6, lengths=torch.arange(6)) == 0
    ).all()
    lone = torch.tensor([2.0])
    assert advantage != "batch-std" or response_advantages(lone, advantage, group_size=1) == 0


def test_a_standard_deviation_below_the_floor_counts_as_the_floor():
    """One right answer of eight: a deviation of 0.35 would make 2.47 of a lead of 0.875."""
    rewards = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0])
    for advantage in ("group-std", "batch-std", "group-mean-batch-std", "pass-at-k"):
        got = response_advantages(rewards, advantage, group_size=8, std_floor=0.5)
        want = torch.tensor([2.0, 0] if advantage == "pass-at-k" else [1.75, -0.25])
        torch.testing.assert_close(got[:2], want, rtol=3e-4, atol=0)
        below = response_advantages(rewards, advantage, group_size=8, std_floor=0.3)
        assert torch.equal(below, response_advantages(rewards, advantage, group_size=8))
    for advantage in ("group-mean", "leave-one-out", "maxrl", "opo"):
        with pytest.raises(ValueError, match="std_floor=0.5 has no meaning with advantage="):
            response_advantages(rewards, advantage, group_size=8, std_floor=0.5)


def test_the_batch_is_that_of_all_ranks():
    """Rewards that are equal on a rank but not on all; equal on all; none on the last rank; groups of either rank."""

    def of_ranks(advantage, group_size, *rewards):
        options = {"group_size": group_size, "process_group": GROUP}
        ranks = [partial(response_advantages, each, advantage, **options) for each in rewards]
        return torch.cat(together(ranks))

    unequal = torch.tensor([1.0, 1, 0, 0])
    want = (unequal - unequal.mean()) / unequal.std()
    torch.testing.assert_close(of_ranks("batch-std", 2, *unequal.split(2)), want)
    equal = torch.full((2,), 0.1)
    assert (of_ranks("batch-std", 2, equal, equal) == 0).all()
    whole = response_advantages(REWARDS, "batch-std", group_size=8)
    torch.testing.assert_close(of_ranks("batch-std", 8, REWARDS, REWARDS[:0]), whole)
    whole = response_advantages(REWARDS, "group-mean-batch-std", group_size=8)
    torch.testing.assert_close(of_ranks("group-mean-batch-std", 8, *REWARDS.split(8)), whole)


def example(*shape, keep=0.6, seed=0, dtype=torch.float32):
    """Values with NaN and inf wherever the mask is False."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 3 + 5
    mask = torch.rand(shape, generator=generator) < keep
    rubbish = torch.where(torch.rand(shape, generator=generator) < 0.5, torch.nan, -torch.inf)
    return torch.where(mask, values, rubbish).to(dtype), mask


def test_variance_does_not_cancel():
    """A large mean: E[x^2] - E[x]^2 in fp32 would be off by more than the variance."""
    values = 1e4 + torch.randn(1000, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1000, dtype=torch.bool)
    want = values.double().var().item()
    assert masked_var(values, mask).item() == pytest.approx(want, rel=1e-4)
    assert whiten(values, mask).double().var().item() == pytest.approx(1, rel=1e-4)


def test_whiten_over_a_process_group():
    """As over the union of all ranks' elements, also where the last rank keeps nothing."""
    values, mask = example(2, 40, seed=5)
    for kept in (mask, mask & torch.tensor([[True], [False]])):
        for shift_mean in (True, False):
            whitened = partial(whiten, shift_mean=shift_mean)
            ranks = [
                partial(whitened, *rows, process_group=GROUP)
                for rows in zip(values, kept, strict=True)
            ]
            found = torch.stack(together(ranks))
            torch.testing.assert_close(found, whitened(values, kept), rtol=0, atol=1e-6)
