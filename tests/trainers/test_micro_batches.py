"""Micro-batches by tokens: each sequence once, no more tokens than allowed, and the loss of any other division."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fused_rl import PolicyLossOptions, policy_loss
from fused_rl.objectives import surrogates
from fused_rl.trainers import grpo, sft
from fused_rl.trainers.data.micro_batches import Padding, by_tokens, padded_tokens
from fused_rl.trainers.models import packing
from fused_rl.trainers.policy import policy as policies
from tests.device import steps
from tests.distributed import run_distributed
from tests.trainers import tiny
from tests.trainers.steps import EOS

CPU = torch.device("cpu")


@pytest.mark.parametrize("together", [1, 4])
def test_a_micro_batch_has_no_more_tokens_than_it_may(together):
    draw = random.Random(together)
    for _ in range(50):
        lengths = [draw.randint(1, 40) for _ in range(24)]
        units = [list(range(i, i + together)) for i in range(0, 24, together)]
        draw.shuffle(units)
        tokens_of, most = padded_tokens(lengths), draw.randint(1, 300)
        found = by_tokens(units, tokens_of, most)
        assert sorted(sum(found, [])) == list(range(24))
        assert all(tokens_of(part) <= most or len(part) == 1 for part in found)
        for unit in units:
            if tokens_of(unit) <= most:
                assert any(set(unit) <= set(part) for part in found)
        # The shortest come first, so that few pads are needed.
        if together == 1:
            assert [lengths[i] for i in sum(found, [])] == sorted(lengths)


def test_the_padding_of_a_step_is_of_that_step_alone():
    padding = Padding()
    for tokens in (3, 6):
        padding.add(SimpleNamespace(input_ids=torch.zeros(3, 4), tokens=tokens))
        assert padding.fraction() == 1 - tokens / 12


def divided_on_ranks(rank, world):
    found = []
    for lengths in ([[9] * 6, [1] * 6], [[1] * 6, [1] * 6], [[9, 9, 9, 1], [1, 1, 9, 1]]):
        own = lengths[rank]
        found.append(by_tokens([[i] for i in range(len(own))], padded_tokens(own), 9))
    return found


def test_every_rank_has_as_many_micro_batches_and_none_is_empty():
    for first, second in zip(*run_distributed(divided_on_ranks, 2), strict=True):
        assert len(first) == len(second) and all(first) and all(second)
        assert sorted(sum(first, [])) == sorted(sum(second, []))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("micro-batches")
    made = tiny.model_folder(folder / "model")
    return made, tiny.reward_folder(folder / "reward", made)


def test_packed_rows_leave_room_for_their_pads():
    draw = random.Random(0)
    completions = [[1] * draw.randint(2, 60) for _ in range(200)]
    examples = [sft.Example([1], completion, "") for completion in completions]
    config = steps.small_config("sft", "model", micro_batch_tokens=512)
    made = sft.micro_batches(examples, config, 0, CPU, packing.Costs(token=1.0, pair=1e-4))
    packed = [part.packed for part in made if part.packed is not None]
    # In one row everything would be compared with everything.
    assert sum(len(rows.input_ids) > 1 for rows in packed) > len(made) / 2
    assert all(rows.input_ids.numel() <= 512 for rows in packed)


# Responses without a gradient.

ROWS = [torch.tensor([0]), torch.tensor([1])]
ALL = torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize("surrogate", surrogates.SURROGATES)
def test_what_runs_no_backward_pass_has_no_gradient(surrogate):
    options = PolicyLossOptions(surrogate=surrogate)
    running, backward = policies.needed_passes(options, torch.tensor([0.0, 1.0]), ALL, ALL, ROWS)
    assert running == ROWS and backward[1]
    if backward[0]:
        return
    torch.manual_seed(0)
    old, logprobs = -torch.rand(2, 1, 5)
    logprobs.requires_grad_()
    mask = torch.ones(1, 5, dtype=torch.bool)
    loss, _ = policy_loss(logprobs, old, torch.zeros(1), mask, options=options)
    loss.backward()
    assert loss == 0 and not logprobs.grad.any()


def of_users(log_ratio, advantages, logprobs, sequences, options):
    return log_ratio.square()


@pytest.mark.parametrize(
    "options",
    [{"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"surrogate": of_users}, {"surrogate": "kl-cov"}],
)
def test_another_term_of_the_loss_trains_every_response(options):
    nothing = torch.zeros(2)
    found = policies.needed_passes(PolicyLossOptions(**options), nothing, ALL, ALL, ROWS)
    assert found == (ROWS, [True, True])
    # The optimizer has a gradient, also one of 0.
    _, backward = policies.needed_passes(PolicyLossOptions(), nothing, ALL, ALL, ROWS)
    assert backward == [True, False]


def needed_on_ranks(rank, world):
    advantages = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]][rank])
    trained = torch.tensor([[True, True, False, False], [True, True, False, False]][rank])
    rows = list(torch.arange(4).split(1))
    read = trained | torch.tensor([False, False, False, rank == 0])
    running, backward = policies.needed_passes(PolicyLossOptions(), advantages, trained, read, rows)
    return torch.cat(running).tolist(), backward


def test_every_rank_runs_the_passes_that_one_needs():
    assert run_distributed(needed_on_ranks, 2) == [([0, 1, 3], [False, True, False])] * 2


class Judge(steps.Judge):
    def __call__(self, samples):
        # One group of four has equal rewards.
        return [float(i % 2 and i >= 4) for i in range(len(samples))]


def all_passes(options, advantages, trained, read, minibatch):
    return minibatch, [True] * len(minibatch)


SINGLE = {"share_prompts": False, "micro_batch_size": 1}
# Of 8 micro-batches, or of 32 of one response: how many run, and how many of these have a gradient.
WITHOUT_GRADIENT = {
    "keep, responses": (SINGLE, (32, 24)),
    "drop": ({"zero_variance": "drop"}, (6, 6)),
    "drop, a KL in the loss": ({"zero_variance": "drop", "kl_coef": 0.1}, (6, 6)),
    "top entropy": ({"preset": "gspo", "top_entropy": 0.5}, (8, 6)),
    "truncated, drop": (SINGLE | {"mask_truncated": True, "zero_variance": "drop"}, None),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_a_step_is_the_same_bit_for_bit_without_passes_for_nothing(folders, monkeypatch, name):
    options, expected = WITHOUT_GRADIENT[name]
    ran = []
    loss = policies.Policy.loss

    def counted(*inputs, **known):
        ran.append(torch.is_grad_enabled())
        return loss(*inputs, **known)

    monkeypatch.setattr(steps, "Judge", Judge)
    monkeypatch.setattr(policies.Policy, "loss", counted)
    found, passes = [], []
    with steps.process_group():
        responses = steps.responses_of(steps.small_config("grpo", folders[0]))
        # Of three, two end with the stop token; the others are truncated.
        for i in range(len(responses)):
            if i % 3:
                ids = [*responses[i].ids[:-1], EOS]
                responses[i] = replace(responses[i], ids=ids, finish="stop")
        for needed in (all_passes, policies.needed_passes):
            monkeypatch.setattr(grpo, "needed_passes", needed)
            torch.manual_seed(0)
            step = steps.grpo_step(folders[0], CPU, responses, epochs=2, **options)
            torch.manual_seed(1)
            ran.clear()
            found.append(step())
            passes.append((len(ran), sum(ran)))
    whole, few = passes
    assert few == expected if expected else few[1] <= few[0] < whole[0]
    a, b = (tiny.untimed([of_one.metrics]) for of_one in found)
    assert a == b
    weights = [[*made.modules[0].parameters()] for made in found]
    assert all(map(torch.equal, *weights))
