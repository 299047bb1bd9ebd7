"""Rollouts drawn ahead: by a schedule, in a thread as one after the other, and over a stop as without one."""

import dataclasses
import threading

import pytest
import torch

from fused_rl.trainers import grpo, ppo
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.order import RowOrder
from fused_rl.trainers.rollouts import lag
from fused_rl.trainers.rollouts.lag import CopySampler, LaggedSampler
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt, Response
from fused_rl.trainers.run import store
from tests.trainers import tiny
from tests.trainers.runs import grpo_config, ppo_config
from tests.trainers.served import logprobs


class Late(threading.Thread):
    """A thread that is slow to begin."""

    def run(self):
        threading.Event().wait(0.02)
        super().run()


# The schedule.


class Recorder:
    """A sampler whose responses are a prompt's id, a seed and the step of the weights."""

    reports_logprobs = records_support = True
    is_checked = False

    def __init__(self):
        self.version, self.prompts_seen, self.fails_at = None, [], None

    def sample(self, prompts, sampling):
        self.prompts_seen.append(prompts[0][0])
        if self.fails_at == prompts[0][0]:
            raise InputError(f"no more of {prompts[0][0]}")
        seeds = sampling.seeds or [0] * len(prompts)
        ids = [[*prompt, seed, self.version] for prompt, seed in zip(prompts, seeds, strict=True)]
        prompts[0].clear()  # they are copies
        return [Response(of_one, "length", [-1.0] * 3) for of_one in ids]

    def publish(self, step, save):
        self.version = step


def nothing(folder):
    raise AssertionError("nothing is to be written")


def prompts_of(step):
    return lambda later: [Prompt([step + later], {})]


class Counted:
    """Seeds that count up."""

    def __init__(self):
        self.given = 0

    def __call__(self, count):
        self.given += count
        return Sampling(1.0, 2, (), seeds=tuple(range(self.given - count, self.given)))


def walked(ahead, seeds, steps, last=7):
    """Of each step the version and the seeds of its rollout; between steps another caller samples."""
    found = {}
    for step in steps:
        version = ahead.begin(step, last, prompts_of(step), 2, seeds)
        responses = ahead.sample([[step], [step]], Sampling(1.0, 2, ()))
        assert [response.ids[0] for response in responses] == [step, step]
        assert {response.ids[2] for response in responses} == {version}
        found[step] = (version, *(response.ids[1] for response in responses))
        ahead.publish(step, nothing)
        (beside,) = ahead.sample([[100 + step]], Sampling(0.0, 2, ()))  # an evaluation
        assert beside.ids[2] == step
    return found


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("kind", [threading.Thread, Late])
def test_a_rollout_is_of_the_weights_of_its_schedule(k, kind, monkeypatch):
    monkeypatch.setattr(lag, "Thread", kind)
    sampler = Recorder()
    ahead = LaggedSampler(sampler, k)
    ahead.publish(0, nothing)
    ahead.rest()  # which a sampler that goes on sampling is not told
    found = walked(ahead, Counted(), range(1, 8))
    assert found == {
        step: (max(0, step - 1 - k), 2 * step - 2, 2 * step - 1) for step in range(1, 8)
    }
    rollouts = [step for step in sampler.prompts_seen if step < 100]
    assert rollouts == list(range(1, 8))  # each once, in order, and none beyond the end
    assert not ahead.pending


def test_rollouts_of_prompts_that_changed_are_sampled_again():
    first = LaggedSampler(Recorder(), 2)
    first.publish(0, nothing)
    walked(first, Counted(), range(1, 4))
    second = LaggedSampler(Recorder(), 2)
    second.load_state_dict(first.state_dict())
    second.publish(3, nothing)
    assert second.begin(4, 7, prompts_of(14), 2, Counted()) == 3
    found = second.sample([[14], [14]], Sampling(1.0, 2, ()))
    assert [response.ids[0] for response in found] == [14, 14]


def test_what_the_sampler_raises_is_raised_where_its_rollout_is_waited_for():
    sampler = Recorder()
    sampler.fails_at = 3
    ahead = LaggedSampler(sampler, 1)
    ahead.publish(0, nothing)
    walked(ahead, Counted(), [1])
    ahead.begin(2, 7, prompts_of(2), 2, Counted())  # and with it the rollout of step 3
    assert len(ahead.sample([[2], [2]], Sampling(1.0, 2, ()))) == 2
    with pytest.raises(InputError, match="no more of 3"):
        ahead.publish(2, nothing)
    assert sampler.version == 1  # what is in doubt gets no new weights


def test_batches_to_come_are_those_that_come():
    order, again = RowOrder(10, 4, seed=3), RowOrder(10, 4, seed=3)
    batches = [next(again) for _ in range(9)]
    for number in range(6):
        assert next(order) == batches[number]
        assert [order.after(later) for later in range(4)] == batches[number : number + 4]
    assert order.position == 6 * 4


# The copy.


PROMPTS = [[1, 40, 41], [1, 40, 41], [1, 60], [1, 70, 71, 72]]


@pytest.fixture(scope="module")
def lm(folder):
    config = grpo_config((folder, ""), "")
    return tiny.load_lm(config).base.train()


def from_copy(lm, **options):
    made = CopySampler(lm, pad_id=0, batch_size=3, **options)
    made.publish(7, nothing)
    return made


def test_log_probabilities_are_of_what_was_drawn_from(lm):
    sampling = Sampling(0.7, 8, (3,), seeds=(5, 6, 7, 8))
    made, state, mode = from_copy(lm), torch.get_rng_state(), lm.training
    responses = made.sample(PROMPTS, sampling)
    assert torch.equal(torch.get_rng_state(), state) and lm.training == mode > made.lm.training
    drawn = [response.ids for response in responses]
    for seeds, same in ((sampling.seeds, True), ((5, 6, 7, 9), False)):
        again = from_copy(lm).sample(PROMPTS, dataclasses.replace(sampling, seeds=seeds))
        assert ([response.ids for response in again] == drawn) == same
    for prompt, response in zip(PROMPTS, responses, strict=True):
        expected = logprobs(lm, prompt, response.ids, 0.7)
        reported = torch.tensor(response.logprobs).double()
        torch.testing.assert_close(reported, expected, atol=2e-6, rtol=0)
    # Turns of a conversation draw other numbers.
    turns = [[1, 2]], [[1, 2, 4]]
    assert len({made.generator(turn, sampling).initial_seed() for turn in turns}) == 2


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_copy_follows_when_it_is_published_and_has_the_policys_frozen_weights(
    folder, lora_rank
):
    trained = tiny.load_lm(grpo_config((folder, ""), "", lora_rank=lora_rank))
    own, made = dict(trained.base.named_parameters()), from_copy(trained.base)
    with torch.no_grad():
        for weight in trained.parameters():
            if weight.requires_grad:
                weight.add_(1.0)
    copied = dict(made.lm.named_parameters())
    shared = {name for name in own if copied[name] is own[name]}
    assert shared == {name for name, weight in own.items() if not weight.requires_grad}
    assert all(torch.equal(copied[name], own[name]) == (name in shared) for name in own)
    made.publish(8, nothing)
    for name, weight in own.items():
        assert torch.equal(copied[name], weight) and not copied[name].requires_grad


def test_a_model_that_transformers_must_draw_for_is_refused(lm, monkeypatch):
    monkeypatch.setattr(
        "fused_rl.trainers.rollouts.generate.keeps_keys_and_values", lambda lm: False
    )
    with pytest.raises(
        InputError, match="lag: Qwen2ForCausalLM keeps its past in another form .* drop --lag$"
    ):
        CopySampler(lm, pad_id=0, batch_size=3)


# Runs.


SMALL = {"steps": 4, "eval_every": 2, "lr": 1e-2}


TRAIN = {"grpo": (grpo.train, grpo_config), "ppo": (ppo.train, ppo_config)}


def run(trainer, files, folder, **options):
    train, config_of = TRAIN[trainer]
    train(config_of(files, folder, **(SMALL | options)))


class Silent(Recorder, tiny.Sampler):
    reports_logprobs = False

    def __init__(self, built, tokenizer):
        super().__init__()


def test_a_sampler_that_tells_no_log_probabilities_is_refused(files, tmp_path):
    with pytest.raises(
        InputError, match="lag=1 trains on responses of earlier weights.* or leave lag out$"
    ):
        grpo.train(grpo_config(files, tmp_path / "run", lag=1), sampler=Silent)
    store.unlock()
