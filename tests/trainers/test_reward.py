"""The reward trainer: runs that do not depend on how they were split or interrupted."""

import json
from pathlib import Path

import pytest
import torch

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
    rejected, chosen = (
        RewardScorer(model, 3)([p for p, _ in sides], [r for _, r in sides]).view(-1, 2).T
    )
    constants = json.loads((Path(config.output_dir) / "evaluation.json").read_text())[
        "normalization"
    ]
    assert constants["after"] == [model.score_mean, model.score_std]
    # Undone: metrics are in the scale of the training loss.
    chosen, rejected = (
        (s.double() * model.score_std + model.score_mean - constants["before"][0])
        / constants["before"][1]
        for s in (chosen, rejected)
    )
    assert chosen.mean().item() == pytest.approx(last["eval/rm/chosen_rewards"], abs=1e-5)
    assert rejected.mean().item() == pytest.approx(last["eval/rm/rejected_rewards"], abs=1e-5)
    both = torch.cat([chosen, rejected])
    assert both.min().item() == pytest.approx(last["eval/rm/min_reward"], abs=1e-5)
    assert both.max().item() == pytest.approx(last["eval/rm/max_reward"], abs=1e-5)
    assert (chosen > rejected).double().mean().item() == last["eval/rm/accuracy"]
    assert (chosen - rejected).mean().item() == pytest.approx(
        last["eval/rm/reward_margin"], abs=1e-5
    )
