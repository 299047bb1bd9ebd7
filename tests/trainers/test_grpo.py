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


def test_advantages_are_those_of_the_op_and_groups_that_do_not_count_reach_none():
    counts = torch.arange(16) < 8
    # B applies to some alone.
    scores = {"a": REWARDS.flip(0), "b": torch.where(REWARDS == 1, torch.nan, 2.0)}
    scores = {name: torch.cat([each, REWARDS]) for name, each in scores.items()}
    rollout = SimpleNamespace(scores=scores, lengths=torch.arange(16))
    scorers = [SimpleNamespace(name="a", weight=0.5), SimpleNamespace(name="b", weight=2.0)]
    for advantage in groups.ADVANTAGES:
        config = config_of(group_size=8, advantage=advantage)
        rewards = torch.cat([REWARDS, torch.full((8,), 9.0)])
        found = groups.advantages_of(config, rewards, counts, rollout, scorers)
        assert (found[8:] == 0).all(), advantage
        if advantage == "gdpo":
            normal = [(x - x.mean()) / (x.std() + 1e-4) for x in scores_of(scores)]
            summed = 0.5 * normal[0] + 2 * normal[1]
            expected = (summed - summed.mean()) / summed.std()
        else:
            expected = fused_rl.response_advantages(
                REWARDS, advantage, group_size=8, lengths=torch.arange(8)
            )
        torch.testing.assert_close(found[:8], expected)


def scores_of(scores):
    return [scores[name][:8].nan_to_num() for name in "ab"]


def test_the_overlong_penalty_is_dapos():
    """arXiv:2503.14476, eq. 13, with L_max = 10 and L_cache = 4."""
    config = config_of(max_new_tokens=10, overlong_buffer=4)
    lengths = torch.tensor([0, 5, 6, 7, 8, 9, 10])
    expected = [0 if n <= 6 else (n - (10 - 4)) / 4 for n in lengths.tolist()]
    assert groups.overlong_penalty(config, lengths).tolist() == expected
    assert (groups.overlong_penalty(config_of(), lengths) == 0).all()


# Of whole groups; and more than there are groups: of responses.
@pytest.mark.parametrize("minibatches", [2, 4])
def test_minibatches_are_drawn_anew_in_every_epoch(minibatches):
    torch.manual_seed(1)
    config = config_of(minibatches=minibatches, epochs=6)
    together = GROUP if groups.keeps_groups(config, 1) else 1
    updates = policy.plan(config, 2 * GROUP, lambda rows: list(rows.split(3)), together)
    assert len(updates) == 6 * minibatches
    orders = [
        torch.cat(sum(updates[i : i + minibatches], []))
        for i in range(0, len(updates), minibatches)
    ]
    assert len({tuple(order.tolist()) for order in orders}) > 1
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(2 * GROUP))
        if minibatches == 2:
            assert torch.equal(order // GROUP, (order // GROUP)[::GROUP].repeat_interleave(GROUP))


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
    tokenizer, sampling = (
        encode.load_tokenizer(config.model),
        policy.Sampling(TEMPERATURE, LENGTH, (EOS,)),
    )
    scorers, device = [Judge()], torch.device("cpu")
    # All that a rollout asks a model.
    text = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=200))
    module = Plain(SimpleNamespace(base=SimpleNamespace(config=text)))
    made = policy.Policy(config, module, None, Echo(), sampling, scorers, tokenizer, device)
    waiting, refills = list(numbers[config.prompts_per_step :]), []

    def more(count):
        refills.append(count)
        taken = [waiting.pop(0) for _ in range(math.ceil(count / world) * world)]
        return prompts_of(*taken[rank::world])

    drawn = groups.collect(
        made, prompts_of(*numbers[: config.prompts_per_step][rank::world]), more, 1
    )
    of_groups = [sample.prompt_ids[-1] for sample in drawn.rollout.samples[:: config.group_size]]
    return drawn, of_groups, refills


def test_groups_of_equal_rewards_are_kept_dropped_or_refilled(folder, monkeypatch):
    monkeypatch.setattr(time, "monotonic", itertools.count().__next__)  # a second at each look
    numbers = [11, 12, 14, 13, 16, 15, 18, 17, 19, 21]
    options = {"prompts_per_step": 4, "minibatches": 2}
    drawn, of_groups, refills = drawn_by(config_of(folder, **options), numbers)
    assert of_groups == [11, 12, 14, 13] and drawn.included.all() and not refills
    shared = {"groups/trained": 4, "frac_reward_zero_std": 0.5, "frac_groups_all_solved": 0.25}
    assert {key: drawn.metrics[key] for key in shared} == shared and drawn.metrics[
        "frac_groups_none_solved"
    ] == 0.25

    drawn, of_groups, refills = drawn_by(
        config_of(folder, zero_variance="drop", **options), numbers
    )
    assert of_groups == [11, 13] and drawn.included.all() and not refills
    assert (drawn.metrics["groups/sampled"], drawn.metrics["groups/trained"]) == (4, 2)
    assert drawn.metrics["frac_reward_zero_std"] == 0.5

    # Two are missing; of 16 and 15 one is there; of 18 none; of 17 one.
    drawn, of_groups, refills = drawn_by(
        config_of(folder, zero_variance="refill", **options), numbers
    )
    assert refills == [2, 1, 1] and of_groups == [11, 13, 15, 17] and drawn.included.all()
    assert (drawn.metrics["groups/sampled"], drawn.metrics["groups/trained"]) == (8, 4)
    assert drawn.metrics["verifier/judge/timeouts"] == 1 + len(refills)
    assert drawn.metrics["time/score"] == 1 + len(refills)
    assert drawn.metrics["episode"] == 8 * GROUP


def test_refilling_is_bounded_and_goes_on_with_what_there_is(folder, monkeypatch):
    monkeypatch.setattr(groups, "MAX_REFILLS", 2)
    numbers = [11, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 13]
    config = config_of(folder, zero_variance="refill", prompts_per_step=4, minibatches=2)
    drawn, of_groups, refills = drawn_by(config, numbers)
    assert (
        refills == [3, 3]
        and drawn.metrics["groups/sampled"] == 10
        and drawn.metrics["groups/trained"] == 1
    )
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
    groups_of_ranks, counts, refills, (metrics, again) = zip(*few, strict=True)
    assert groups_of_ranks == ([11, 15], [13, 16]) and refills == ([2], [2]) and again == metrics
    assert counts == ([[True] * GROUP] * 2, [[True] * GROUP, [False] * GROUP])
    assert (metrics["groups/sampled"], metrics["groups/trained"]) == (6, 3)
    groups_of_ranks, counts, refills, (metrics, again) = zip(*many, strict=True)
    assert refills == ([1], [1]) and counts == ([[True] * GROUP] * 2,) * 2 and again == metrics
    assert len({*sum(groups_of_ranks, [])} & {11, 13, 15, 17, 19}) == 4
    assert (metrics["groups/sampled"], metrics["groups/trained"]) == (6, 4)


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
        shares.append(setup.Setup.prompts_of_rank(given, [5, 1, 4, 2]))
    assert sorted(sum(shares, [])) == [*"bcef"] and len(shares[0]) == 2


def test_a_mean_per_response_is_over_those_that_are_included():
    included = torch.tensor([True, True, False])
    columns = {"kl": torch.tensor([[1.0], [2.0], [30.0]])}
    assert grpo._per_response(columns, included) == {"kl": 1.5}
    assert grpo._per_response(columns, included & False) == {}
