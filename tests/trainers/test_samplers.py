"""The seam to whoever draws: what a sampler declares and is held to, its seeds, and a sampler of the user's own."""

import random
from pathlib import Path
from unittest import mock

import pytest
import torch

from fused_rl.objectives.presets import resolve_options
from fused_rl.trainers import grpo
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.mismatch import agrees, mismatch
from fused_rl.trainers.rollouts.roll_out import batch_of, roll_out
from fused_rl.trainers.rollouts.sampling import Sampling, Seeds
from fused_rl.trainers.rollouts.types import Prompt, Response, Rollout, Sample, Sampler
from fused_rl.trainers.run.parse import parse
from tests.trainers import tiny
from tests.trainers.runs import VERIFIER, grpo_config

CPU = torch.device("cpu")

# How far the sampler is from the policy.


def reported_off_by(difference: torch.Tensor) -> tuple[Rollout, torch.Tensor]:
    """A rollout of 3, 1 and 2 ids of the policy, whose sampler is off by (6,) nats; the second id is another's."""
    samples = []
    for length in (3, 1, 2):
        trained = [True, False] + [True] * (length - 1)
        response = Response([7] * (length + 1), "length", trained=trained)
        samples.append(Sample({}, [1, 70], response, ""))
    batch = batch_of(samples, 0, CPU)
    mask = batch.response_mask
    old = torch.where(
        mask, -3 * torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)), 0
    )
    for sample, reported in zip(samples, (old[mask] + difference).split((3, 1, 2)), strict=True):
        first, *others = reported.tolist()
        sample.response.logprobs = [first, 1e9, *others]
    return Rollout(samples, batch, {}, torch.zeros(3), torch.zeros(3), {}), old


@pytest.mark.parametrize(
    ("correction", "cut"),
    [("token-truncate", 2 / 6), ("token-mask", 2 / 6), ("sequence-mask", 5 / 6), (None, None)],
)
def test_the_sampler_s_distance_is_logged_before_any_correction(correction, cut):
    # Policy less sampler: 0.5, -0.25, 1.5 | -0.1 | 1, -0.25.
    difference = torch.tensor([-0.5, 0.25, -1.5, 0.1, -1.0, 0.25])
    rollout, old = reported_off_by(difference)
    bounds = {} if correction is None else {"rollout_low": 0.5, "rollout_high": 2.0}
    options = resolve_options("grpo", {"rollout_correction": correction, **bounds})
    metrics = mismatch(rollout, old, options)
    exact = difference.double()
    expected = {
        "rollout/logprob_diff_mean": exact.mean().item(),
        "rollout/logprob_diff_abs": exact.abs().mean().item(),
        "rollout/logprob_diff_max": 1.5,
        "rollout/kl_k3": (torch.expm1(-exact) + exact).mean().item(),
    }
    expected |= {} if cut is None else {"rollout/correction_cut": cut}
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert metrics.keys() <= tiny.documented("grpo")


# Seeds.


@pytest.mark.parametrize(("size", "exact"), [(9e-4, True), (0.04, False)])
def test_differences_of_both_signs_do_not_cancel(size, exact):
    signs = torch.tensor([0.0, -1.0, 1.0, -1.0])
    assert agrees(size * signs, exact) and not agrees(2 * size * signs, exact)


def test_seeds_draw_from_a_generator_of_their_own():
    torch.manual_seed(1)
    random.seed(1)
    before, seeds = torch.get_rng_state(), Seeds(5)
    first = seeds.draw(4)
    state = seeds.state_dict()
    then = seeds.draw(3)
    assert torch.equal(torch.get_rng_state(), before) and first != then
    seeds.load_state_dict(state)
    assert seeds.draw(3) == then and Seeds(5).draw(4) == first != Seeds(6).draw(4)


def test_some_responses_keep_their_own_seeds_and_prompts():
    whole = Sampling(1.0, 8, (0,), seeds=(5, 6, 7), prompts=("a", "b", "c"))
    assert whole.select([2, 0]) == Sampling(1.0, 8, (0,), seeds=(7, 5), prompts=("c", "a"))


def test_a_sampler_around_another_hands_it_the_weights():
    built, save = mock.Mock(reports_logprobs=True, records_support=False), Path.mkdir
    around = Sampler(built)
    around.publish(3, save)
    around.rest()
    assert built.method_calls == [mock.call.publish(3, save), mock.call.rest()]
    assert around.reports_logprobs and not around.records_support


# A sampler of the user's own.

OWN = """
from fused_rl.trainers.rollouts.types import Sampler
class Half(Sampler):
    def sample(self, prompts, sampling):
        return self.built.sample(prompts, sampling)
def number(built, tokenizer):
    return 7
class Late(Half):
    def sample(self, prompts, sampling):
        raise KeyError("the game")
class Forgetful(Half):
    def sample(self, prompts, sampling):
        super().sample(prompts, sampling)
class Short(Half):
    def sample(self, prompts, sampling):
        return super().sample(prompts, sampling)[1:]
class OneByOne(Half):
    def sample(self, prompts, sampling):
        yield from super().sample(prompts, sampling)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_sampler.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "own_sampler:number",
            InputError,
            "sampler=own_sampler:number: expected a .*types.Sampler, got 7",
        ),
        ("own_sampler:Late", KeyError, "the game"),
        ("own_sampler:Forgetful", InputError, "^the sampler returned 0 responses .None."),
        ("own_sampler:Short", InputError, "^the sampler returned 15 responses .* a list of 16"),
    ],
)
def test_a_sampler_that_is_none_is_a_line_and_what_it_raises_is_its_own(
    files, tmp_path, own, name, error, message
):
    with pytest.raises(error, match=message):
        grpo.train(grpo_config(files, tmp_path / "run", sampler=name, steps=1, eval_size=0))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_sampler_may_be_a_generator(files, tmp_path, own, lag):
    options = {"steps": 2, "eval_size": 0, "save_every": 1, "lag": lag}
    config = grpo_config(files, tmp_path / "run", sampler="own_sampler:OneByOne", **options)
    with pytest.raises(InputError, match="sampler=own_sampler:OneByOne and another from Python"):
        grpo.train(config, sampler=Clearing)
    grpo.train(config)


class Clearing(tiny.Sampler):
    def sample(self, prompts, sampling):
        prompts[0].clear()
        return [Response([5], "length")]


def test_a_sampler_may_change_the_prompts_that_it_gets():
    sampling = Sampling(1.0, 1, ())
    rollout = roll_out(Clearing(), [], [Prompt([7, 8], {})], sampling, tiny.tokenizer(), CPU)
    assert rollout.batch.input_ids.tolist() == [[7, 8, 5]]


def test_servers_are_a_list():
    words = ["--model=m", "--dataset=d.jsonl", "--output_dir=o", f"--verifiers={VERIFIER}"]
    named = parse(grpo.GRPOConfig, [*words, "--server", "http://a:1,http://b:2", "--steps=3"])
    assert named.server == ["http://a:1", "http://b:2"] and named.steps == 3
    with pytest.raises(InputError, match="expected a URL"):
        named.server = " , "
