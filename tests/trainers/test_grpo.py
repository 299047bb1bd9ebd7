"""GRPO's parts one by one: rewards, advantages, options that need others, which groups are trained on."""

import itertools
import math
import time
from types import SimpleNamespace

import pytest
import torch

import fused_rl
from fused_rl.trainers import grpo
from fused_rl.trainers.base import ranks
from fused_rl.trainers.data import encode
from fused_rl.trainers.policy import groups, policy, setup
from fused_rl.trainers.rollouts.types import Prompt, Response
from tests.distributed import run_distributed
from tests.trainers import tiny
from tests.trainers.steps import EOS, GROUP, LENGTH, TEMPERATURE, Plain, config_of

REWARDS = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0])


# Rewards and advantages.


@pytest.mark.parametrize("advantage", groups.ADVANTAGES)
def test_advantages_are_those_of_the_op_and_groups_that_do_not_count_reach_none(advantage):
    """The second half does not count; scorer b applies to some alone."""
    scores = {"a": REWARDS.flip(0), "b": torch.where(REWARDS == 1, torch.nan, 2.0)}
    scores = {name: torch.cat([each, REWARDS]) for name, each in scores.items()}
    rollout = SimpleNamespace(scores=scores, lengths=torch.arange(16))
    scorers = [SimpleNamespace(name="a", weight=0.5), SimpleNamespace(name="b", weight=2.0)]
    config = config_of(group_size=8, advantage=advantage)
    rewards = torch.cat([REWARDS, torch.full((8,), 9.0)])
    found = groups.advantages_of(config, rewards, torch.arange(16) < 8, rollout, scorers)
    assert (found[8:] == 0).all()
    options = {"lengths": torch.arange(8)}
    compared = REWARDS
    if advantage == "gdpo":
        compared = torch.stack([scores[name][:8].nan_to_num() for name in "ab"])
        options = {"weights": torch.tensor([0.5, 2.0])}
    expected = fused_rl.response_advantages(compared, advantage, group_size=8, **options)
    torch.testing.assert_close(found[:8], expected)


# Of whole groups; and more than there are groups: of responses.
@pytest.mark.parametrize("minibatches", [2, 4])
def test_minibatches_are_drawn_anew_in_every_epoch(minibatches):
    torch.manual_seed(1)
    config = config_of(minibatches=minibatches, epochs=6)
    together = GROUP if groups.keeps_groups(config, 1) else 1
    updates = policy.plan(config, 2 * GROUP, together)
    orders = torch.cat(updates).view(6, 2 * GROUP)
    assert len(updates) == 6 * minibatches and len(orders.unique(dim=0)) > 1
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(2 * GROUP))
        if minibatches == 2:
            assert ((order // GROUP).view(2, GROUP).diff() == 0).all()


# Which groups are trained on.


class Echo(tiny.Sampler):
    """Responds to each prompt with tokens that number the prompt and the copy."""

    def sample(self, prompts, sampling):
        seen, responses = {}, []
        for prompt in map(tuple, prompts):
            seen[prompt] = seen.get(prompt, 0) + 1
            responses.append(Response([prompt[-1], 100 + seen[prompt], EOS], "stop"))
        return responses


class Judge:
    """Scores that differ within a group where the prompt's number is odd; all 1 where it is divisible by 4."""

    name, weight, solved_at = "judge", 1.0, 1.0
    broken = ()

    def __call__(self, samples):
        self.broken = ["a time-out in each rollout"]
        scores = []
        for sample in samples:
            number, copy = sample.response.ids[0], sample.response.ids[1] - 100
            scores.append(float(copy % 2) if number % 2 else float(number % 4 == 0))
        return scores


def prompts_of(*numbers: int) -> list[Prompt]:
    return [Prompt([1, 50, number], {}) for number in numbers]


def drawn_by(config, numbers, rank=0, world=1):
    """What `draw` makes of the first prompts_per_step of the numbers, the rest waiting; and its refills."""
    tokenizer = encode.load_tokenizer(config.model)
    sampling = policy.Sampling(TEMPERATURE, LENGTH, (EOS,))
    # All that a rollout asks a model.
    text = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=200))
    module = Plain(SimpleNamespace(base=SimpleNamespace(config=text)))
    device = torch.device("cpu")
    made = policy.Policy(config, module, None, Echo(), sampling, [Judge()], tokenizer, device)
    waiting, refills = list(numbers[config.prompts_per_step :]), []

    def more(count):
        refills.append(count)
        taken = [waiting.pop(0) for _ in range(math.ceil(count / world) * world)]
        return prompts_of(*taken[rank::world])

    first = prompts_of(*numbers[: config.prompts_per_step][rank::world])
    drawn = groups.collect(made.config, made, first, more, 1)
    of_groups = [sample.prompt_ids[-1] for sample in drawn.rollout.samples[:: config.group_size]]
    return drawn, of_groups, refills


# What is done with them; the groups trained on, and how many are asked for again: of four two are missing; of 16 and 15
# one is there; of 18 none; of 17 one.
@pytest.mark.parametrize(
    ("zero_variance", "trained", "asked"),
    [
        ("keep", [11, 12, 14, 13], []),
        ("drop", [11, 13], []),
        ("refill", [11, 13, 15, 17], [2, 1, 1]),
    ],
)
def test_groups_of_equal_rewards_are_kept_dropped_or_refilled(
    zero_variance, trained, asked, folder, monkeypatch
):
    monkeypatch.setattr(time, "monotonic", itertools.count().__next__)  # a second at each look
    config = config_of(folder, zero_variance=zero_variance, prompts_per_step=4, minibatches=2)
    numbers = [11, 12, 14, 13, 16, 15, 18, 17, 19, 21]
    drawn, of_groups, refills = drawn_by(config, numbers)
    assert (of_groups, refills) == (trained, asked) and drawn.included.all()
    # The metrics are of all that were sampled.
    sampled = 4 + sum(asked)
    expected = {"groups/sampled": sampled, "groups/trained": len(trained)}
    expected |= {"frac_reward_zero_std": 0.5, "episode": sampled * GROUP}
    expected |= {"verifier/judge/timeouts": 1 + len(asked), "time/score": 1 + len(asked)}
    assert {key: drawn.metrics[key] for key in expected} == expected


def test_refilling_is_bounded_and_goes_on_with_what_there_is(folder, monkeypatch):
    monkeypatch.setattr(groups, "MAX_REFILLS", 2)
    config = config_of(folder, zero_variance="refill", prompts_per_step=4, minibatches=2)
    drawn, of_groups, refills = drawn_by(config, [11, *range(12, 34, 2), 13])
    found = refills, drawn.metrics["groups/sampled"], drawn.metrics["groups/trained"]
    assert found == ([3, 3], 10, 1)
    assert of_groups == [11, 12]  # minibatches are of whole groups here, so a second one fills up
    assert drawn.included.tolist() == [True] * GROUP + [False] * GROUP


# Rank 0 takes the first, third, … of these. Four groups are wanted:
REFILLED = [
    [11, 12, 13, 14, 16, 15, 20],  # two are there, and one of two more: 3, and a fourth fills
    [11, 12, 13, 15, 17, 19, 20],  # three are there, and both of two more: one too many
]


def draw_here(rank, world, folder):
    groups.MAX_REFILLS = 1  # of this process
    config = config_of(folder, zero_variance="refill", prompts_per_step=4)
    found = []
    for numbers in REFILLED:
        drawn, of_groups, refills = drawn_by(config, numbers, rank, world)
        counts = drawn.included.view(-1, GROUP).tolist()
        found.append((of_groups, counts, refills, tiny.untimed([drawn.metrics])[0]))
    return found


def test_ranks_agree_on_refills_and_share_what_they_find(folder):
    few, many = zip(*run_distributed(draw_here, 2, folder), strict=True)
    of_groups, counts, refills, metrics = zip(*few, strict=True)
    assert of_groups == ([11, 15], [13, 16]) and refills == ([2], [2])
    assert counts == ([[True] * GROUP] * 2, [[True] * GROUP, [False] * GROUP])
    assert metrics[0] == metrics[1] and metrics[0]["groups/trained"] == 3
    of_groups, counts, refills, metrics = zip(*many, strict=True)
    assert len({*sum(of_groups, [])} & {11, 13, 15, 17, 19}) == 4 and refills == ([1], [1])
    assert counts == ([[True] * GROUP] * 2,) * 2
    assert metrics[0] == metrics[1] and metrics[0]["groups/trained"] == 4


def test_a_minibatch_is_of_whole_groups_where_those_of_a_rank_divide():
    for minibatches, worlds in {1: (1, 2, 4), 2: (1, 2), 4: (1,)}.items():
        config = config_of(prompts_per_step=4, minibatches=minibatches)
        whole = tuple(world for world in (1, 2, 4) if groups.keeps_groups(config, world))
        assert whole == worlds


def test_the_ranks_have_each_prompt_of_a_step_once(monkeypatch):
    given, shares = SimpleNamespace(prompts="abcdef"), []
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        shares.append(setup.Inputs.prompts_of_rank(given, [5, 1, 4, 2]))
    assert sorted(sum(shares, [])) == [*"bcef"] and len(shares[0]) == 2


def test_a_mean_per_response_is_over_those_that_are_included():
    included = torch.tensor([True, True, False])
    columns = {"kl": torch.tensor([[1.0], [2.0], [30.0]])}
    assert grpo._per_response(columns, included) == {"kl": 1.5}
    assert grpo._per_response(columns, included & False) == {}
