"""Whole runs of ppo on models of a few thousand weights: split, stopped, resumed, saved, and given bad input."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import ppo
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data import encode
from fused_rl.trainers.policy import setup
from fused_rl.trainers.policy.critic import Critic, load_critic
from fused_rl.trainers.rollouts.types import Prompt, Response
from fused_rl.trainers.scorers.load import load_scorers
from tests.trainers import figures, runs, steps, tiny
from tests.trainers.runs import VERIFIER

ONE = {"verifier_weights": None}  # verifier alone


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model folder, a gsm8k-like file and a reward model folder."""
    folder = tmp_path_factory.mktemp("files")
    model = tiny.model_folder(folder / "model", pad_is_eos=True)
    return (
        model,
        tiny.jsonl(folder / "rows.jsonl", tiny.sums(20)),
        tiny.reward_folder(folder / "reward", model),
    )


def ppo_config(files, output_dir, **options) -> ppo.PPOConfig:
    model, dataset, reward = files
    settings = {
        "verifiers": [f"reward_model:{reward}", VERIFIER],
        "verifier_weights": [1, 0],
        "critic": reward,
        "eval_size": 4,
        "eval_samples": 2,
        "steps": 3,
        "prompts_per_step": 8,
        "minibatches": 2,
        "epochs": 2,
        "max_new_tokens": 6,
        "missing_eos_penalty": 0.5,
        "lr": 1e-3,
        "save_every": 0,
        "micro_batch_size": 4,
    }
    return tiny.config_of("ppo", model, dataset, output_dir, **(settings | options))


# One result, however the batch is split.


class Scripted(tiny.Sampler):
    """Responses that depend on the prompt alone, of every length from 1 on: what one process samples, two do too."""

    def __init__(self, model, **_):
        pass

    def sample(self, prompts, sampling):
        responses = []
        for prompt in prompts:
            made = torch.Generator().manual_seed(sum(prompt) + len(prompt))
            length = int(torch.randint(1, sampling.max_new_tokens + 1, (1,), generator=made))
            ids = torch.randint(10, 200, (length,), generator=made).tolist()
            stops = length % 3 > 0
            responses.append(
                Response([*ids[:-1], 3] if stops else ids, "stop" if stops else "length")
            )
        return responses


class ScriptedWithSets(Scripted):
    """The same, with sets that depend on the response alone."""

    records_support = True

    def sample(self, prompts, sampling):
        responses = super().sample(prompts, sampling)
        for response in responses:
            made = torch.Generator().manual_seed(sum(response.ids))
            response.support = []
            for nth, token in enumerate(response.ids):
                others = torch.randperm(250, generator=made)[: 40 * (nth % 3)].tolist()
                response.support.append(list({token, *others}))
        return responses


# A large epsilon, so that Adam does not turn the rounding of a gradient near 0 into a step of its own.
SMOOTH = {"lr": 1e-2, "adam_eps": 1e-2, "kl_target": 0.05, "kl_horizon": 50.0, "eval_size": 0}


def train_splits(rank, world, files, folder, cases, sets=False):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "TransformersSampler", ScriptedWithSets if sets else Scripted)
        # The same minibatches for all ranks.
        patch.setattr(torch, "randperm", lambda count, **_: torch.arange(count))
        for stage, micro, critic in cases:
            options = (
                {"zero_stage": stage}
                | runs.division(micro)
                | SMOOTH
                | ({"top_p": 0.9} if sets else {})
            )
            name = f"{world}-{stage}-{micro}-{Path(critic).name}"
            ppo.train(ppo_config(files, f"{folder}/{name}", critic=critic, **options))


def check_splits(files, tmp_path, world, cases, **options):
    """Every case against one process with ZeRO 0 and whole minibatches."""
    references = sorted({(0, 4, critic) for *_, critic in cases})
    runs.on_ranks(train_splits, 1, files, str(tmp_path), references, *options.values())
    runs.on_ranks(train_splits, world, files, str(tmp_path), cases, *options.values())
    for stage, micro, critic in cases:
        name = Path(critic).name
        reference, made = tmp_path / f"1-0-4-{name}", tmp_path / f"{world}-{stage}-{micro}-{name}"
        for folder in ("model", "critic"):
            runs.assert_same_weights(reference, made, 1e-6, folder)
        runs.assert_same_metrics(reference, made, 1e-5)
    last = tiny.read_metrics(reference)[-1]
    assert (
        last["objective/kl1_avg"] != pytest.approx(0, abs=1e-3)
        and last["objective/kl_coef"] != 0.05
    )


@pytest.mark.slow
def test_ranks_micro_batches_and_zero_stages_change_nothing_of_what_is_over_kept_sets(
    files, tmp_path
):
    check_splits(
        files, tmp_path, 2, [(2, 1, files[2]), (3, 4, files[2]), (3, 2, files[2])], sets=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_all_ranks_micro_batches_and_zero_stages_change_nothing(files, tmp_path, world):
    # One process's 4 at stage 0 is the reference.
    micro_batches = ("30 tokens", 1) if world == 1 else (4, "30 tokens", 1)
    check_splits(
        files, tmp_path, world, list(itertools.product(range(4), micro_batches, files[2:]))
    )


# What a run leaves, and what its options do.


@pytest.mark.slow
def test_the_critic_of_a_run_starts_another(files, tmp_path, capsys):
    with figures.drawn():
        ppo.train(ppo_config(files, tmp_path / "a", eval_every=2))
    assert (tmp_path / "a" / "curves.png").stat().st_size > 0
    evaluated = ["eval/accuracy_greedy" in m for m in tiny.read_metrics(tmp_path / "a")]
    assert evaluated == [True, False, True, True]
    assert "warning" not in capsys.readouterr().out  # the first ratio is 1
    ppo.train(ppo_config(files, tmp_path / "b", critic=str(tmp_path / "a" / "critic"), steps=1))
    first, again = (
        Critic.from_pretrained(tmp_path / "a" / "critic"),
        Critic.from_pretrained(files[2]),
    )
    assert not torch.equal(first.classifier.score.weight, again.classifier.score.weight)
    assert first.score_std == again.score_std == 0.7


@pytest.mark.slow
def test_critic_only_leaves_the_policy_alone_and_teaches_the_critic(files, tmp_path):
    options = {
        "critic": None,
        "critic_lr": 1e-2,
        "value_clip": None,
        "eval_size": 0,
        "gae_lambda": 1.0,
        "epochs": 4,
    }
    ppo.train(ppo_config(files, tmp_path, critic_only=12, **options))
    metrics = tiny.read_metrics(tmp_path)
    before, after = tiny.weights(files[0]), tiny.weights(tmp_path / "model")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(metrics) == 12 and {m["lr"] for m in metrics} == {0.0}
    assert metrics[-1]["loss/value_avg"] < 0.6 * metrics[0]["loss/value_avg"]
    assert all(m["val/ratio"] == pytest.approx(1, abs=1e-6) for m in metrics)


@pytest.mark.slow
def test_updates_stop_together_once_the_policy_has_moved_and_the_schedule_goes_on(files, tmp_path):
    config = {"target_kl": 1e-6, "epochs": 3, "eval_size": 0, "steps": 2}
    ppo.train(ppo_config(files, tmp_path / "early", **config))
    ppo.train(ppo_config(files, tmp_path / "whole", **(config | {"target_kl": None})))
    early, whole = (tiny.read_metrics(tmp_path / name) for name in ("early", "whole"))
    assert [m["optim/updates"] for m in early] == [2, 2] and [
        m["optim/updates"] for m in whole
    ] == [6, 6]
    # The second update of the second step: of 12 planned ones the eighth, though only the fourth that was made.
    assert early[1]["lr"] == pytest.approx(1e-3 * (12 - 7) / 12)
    assert early[1]["optim/critic_lr"] == pytest.approx(1e-3 * (12 - 7) / 12)


# What can go wrong.


def step_with(files, responses, scorers=None, **options):
    """The metrics of one step on these responses, one per prompt."""
    engine.setup(1)
    config = ppo_config(
        files, "", prompts_per_step=len(responses), **({"minibatches": 1, "epochs": 1} | options)
    )
    tokenizer, device = encode.load_tokenizer(files[0]), torch.device("cpu")
    reading = {"tokenizer": tokenizer, "device": device, "batch_size": 8}
    scorers = load_scorers(config, policy=config, held=config, **reading)
    made = setup.load_policy(config, tokenizer, scorers, device, updates=1)
    made.sampler = steps.Sampler(responses)
    prompts = [Prompt([1, 70 + i], {}, f"row {i}") for i in range(len(responses))]
    return ppo.train_step(made, load_critic(config, tokenizer, device, 1), prompts, 1, 0.05)


def assert_finite(metrics):
    bad = [key for key, value in metrics.items() if not torch.tensor(value).isfinite()]
    assert not bad, bad


@pytest.mark.slow
def test_a_run_whose_responses_are_all_left_out_blames_no_critic(files, tmp_path, capsys):
    ppo.train(
        ppo_config(
            files,
            tmp_path,
            max_new_tokens=1,
            mask_truncated=True,
            steps=2,
            stop_token=None,
            eval_size=0,
        )
    )
    assert not [
        line
        for line in capsys.readouterr().out.splitlines()
        if "warning" in line and "critic" in line
    ]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [
        json.loads(line, parse_constant=pytest.fail)["val/var_explained"] for line in lines
    ] == [None, None]


def test_empty_responses_have_no_token_to_train_and_their_scores_are_counted(files):
    full = [Response([90, 91, 3], "stop"), Response([92, 93], "length")]
    metrics = step_with(
        files, [*full, Response([], "length"), Response([], "length")], micro_batch_size=1
    )
    assert_finite(metrics)
    alone = step_with(files, full)
    assert metrics["loss/value_avg"] == pytest.approx(alone["loss/value_avg"], rel=1e-5)
    assert metrics["optim/grad_norm"] == pytest.approx(alone["optim/grad_norm"], rel=1e-4)
    assert metrics["completions/min_length"] == 0
    # Nothing but empty responses: no gradient at all, and no crash.
    metrics = step_with(files, [Response([], "length")] * 2)
    assert metrics["optim/grad_norm"] == metrics["optim/critic_grad_norm"] == 0


@pytest.mark.slow
def test_responses_that_all_were_cut_and_left_out_train_nothing(files):
    responses = [Response([90, 91, 92], "length"), Response([93, 94, 95], "length")]
    scores = {"missing_eos_score": -1.0, "missing_eos_penalty": 0.25}
    metrics = step_with(files, responses, mask_truncated=True, **scores)
    assert metrics["objective/scores"] == -1.25
    assert metrics["optim/grad_norm"] == metrics["optim/critic_grad_norm"] == 0


def test_a_prompt_over_the_limit_is_dropped_and_counted(files, tmp_path, capsys):
    rows = tiny.jsonl(
        tmp_path / "rows.jsonl", [*tiny.sums(9), {"question": "1+1" * 40, "answer": "#### 2"}]
    )
    ppo.train(
        ppo_config(
            (files[0], rows, files[2]), tmp_path / "run", eval_size=0, steps=1, max_prompt_length=40
        )
    )
    assert (
        "dropped 1 of 10 prompts: 1 with a prompt longer than max_prompt_length="
        in capsys.readouterr().out
    )


def other_tokenizer(folder, model):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["zebra"])
    shutil.copytree(model, folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_models_that_read_the_policys_tokens_otherwise_are_refused(files, tmp_path):
    model, _, reward = files
    other = other_tokenizer(tmp_path / "other", reward)
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(reward) / name, tmp_path / "bare" / name)
    for options, message in (
        (
            {"verifiers": f"reward_model:{other}", **ONE},
            f"reward model '{other}' has another tokenizer.*'{model}'.*zebra.*train",
        ),
        ({"critic": other}, f"critic '{other}' has another tokenizer than the policy '{model}'"),
        ({"critic": str(tmp_path / "bare")}, "comes without a tokenizer"),
        (
            {"verifiers": f"reward_model:{model}", **ONE},
            "without a head for scores; train it first",
        ),
        ({"verifiers": f"2*reward_model:{reward}", **ONE}, "expected math, exact_match"),
        ({"stop_token": "ab"}, "stop_token='ab' is 2 tokens"),
    ):
        with pytest.raises(InputError, match=message):
            ppo.train(ppo_config(files, tmp_path / "run", **options))
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
