"""The reward trainer: runs that do not depend on how they were split or interrupted."""

import json
from pathlib import Path

import pytest

from fused_rl.trainers import reward
from fused_rl.trainers.data import encode, preferences
from fused_rl.trainers.data.reading import load_train_eval
from fused_rl.trainers.models.reward_model import RewardModel, RewardScorer
from tests.trainers import figures
from tests.trainers.reward_runs import make_config, make_model, write_pairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    make_model(folder / "model")
    write_pairs(folder / "pairs.jsonl")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    """One finished run: its config and its metrics."""
    config = make_config(folder)
    with figures.drawn(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        reward.train(config)
    return config, [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def held_out_pairs(config) -> list[preferences.Pair]:
    tokenizer = encode.load_tokenizer(config.model)
    return preferences.pairs_of(
        config, load_train_eval(config)[1], encode.Encoder.of(config, tokenizer)
    )


def test_the_scorer_gives_the_trainers_scores(run):
    """From another folder, in other batches, other order: what PPO sees is what was trained."""
    config, metrics = run
    pairs, last = held_out_pairs(config), metrics[-1]
    model = RewardModel.from_pretrained(Path(config.output_dir) / "model")
    sides = sum(([p.rejected, p.chosen] for p in pairs), [])
    scores = RewardScorer(model, 3)([p for p, _ in sides], [r for _, r in sides])
    of_run = json.loads((Path(config.output_dir) / "evaluation.json").read_text())
    (mean, std), after = (of_run["normalization"][when] for when in ("before", "after"))
    assert after == [model.score_mean, model.score_std]
    # Undone: metrics are in the scale of the training loss.
    scores = (scores.double() * model.score_std + model.score_mean - mean) / std
    rejected, chosen = scores.view(-1, 2).T
    for name, value in {
        "chosen_rewards": chosen.mean(),
        "rejected_rewards": rejected.mean(),
        "min_reward": scores.min(),
        "max_reward": scores.max(),
        "accuracy": (chosen > rejected).double().mean(),
        "reward_margin": (chosen - rejected).mean(),
    }.items():
        assert value.item() == pytest.approx(last[f"eval/rm/{name}"], abs=1e-5), name
