"""The reward trainer: what PPO sees is what was trained."""

import json
from pathlib import Path

import pytest

from fused_rl.trainers import reward
from fused_rl.trainers.data import encode, preferences
from fused_rl.trainers.data.reading import load_train_eval
from fused_rl.trainers.models.reward_model import RewardModel, RewardScorer
from tests.trainers import tiny
from tests.trainers.reward_runs import make_config, make_model, write_pairs


def test_the_scorer_gives_the_trainers_scores(tmp_path):
    """From another folder, in other batches, other order."""
    make_model(tmp_path / "model")
    write_pairs(tmp_path / "pairs.jsonl")
    config = make_config(tmp_path)
    reward.train(config)
    run = Path(config.output_dir)
    encoder = encode.Encoder.of(config, encode.load_tokenizer(config.model))
    pairs = preferences.pairs_of(config, load_train_eval(config)[1], encoder)
    sides = sum(([pair.rejected, pair.chosen] for pair in pairs), [])
    model = RewardModel.from_pretrained(run / "model")
    scores = RewardScorer(model, 3)([p for p, _ in sides], [r for _, r in sides])

    constants = json.loads((run / "evaluation.json").read_text())["normalization"]
    (mean, std), after = constants["before"], constants["after"]
    assert after == [model.score_mean, model.score_std]
    # Undone: metrics are in the scale of the training loss.
    scores = (scores.double() * model.score_std + model.score_mean - mean) / std
    rejected, chosen = scores.view(-1, 2).T
    last = tiny.read_metrics(run)[-1]
    for name, value in {
        "chosen_rewards": chosen.mean(),
        "rejected_rewards": rejected.mean(),
        "min_reward": scores.min(),
        "max_reward": scores.max(),
        "accuracy": (chosen > rejected).double().mean(),
        "reward_margin": (chosen - rejected).mean(),
    }.items():
        assert value.item() == pytest.approx(last[f"eval/rm/{name}"], abs=1e-5), name
