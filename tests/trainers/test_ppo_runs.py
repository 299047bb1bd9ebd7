"""Whole runs of ppo on models of a few thousand weights: split, stopped, resumed, saved, and given bad input."""

import pytest
import torch

from fused_rl.trainers import ppo
from fused_rl.trainers.base import engine
from fused_rl.trainers.data import encode
from fused_rl.trainers.policy import setup
from fused_rl.trainers.policy.critic import load_critic
from fused_rl.trainers.rollouts.types import Prompt, Response
from fused_rl.trainers.scorers.load import load_scorers
from tests.trainers import steps, tiny
from tests.trainers.runs import VERIFIER


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


# What a run leaves, and what its options do.


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


def test_empty_responses_have_no_token_to_train_and_their_scores_are_counted(files):
    full = [Response([90, 91, 3], "stop"), Response([92, 93], "length")]
    metrics = step_with(
        files, [*full, Response([], "length"), Response([], "length")], micro_batch_size=1
    )
    alone = step_with(files, full)
    assert metrics["loss/value_avg"] == pytest.approx(alone["loss/value_avg"], rel=1e-5)
    assert metrics["optim/grad_norm"] == pytest.approx(alone["optim/grad_norm"], rel=1e-4)
    assert metrics["completions/min_length"] == 0
    # Nothing but empty responses: no gradient at all, and no crash.
    metrics = step_with(files, [Response([], "length")] * 2)
    assert metrics["optim/grad_norm"] == metrics["optim/critic_grad_norm"] == 0
