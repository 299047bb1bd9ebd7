"""The verifier reasoning_gym: its own problems, rows that it cannot score, an import without a C compiler."""

import sys

import pytest

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.scorers.builtin import import_reasoning_gym
from tests.trainers.test_verifiers import load_scorers, samples


def test_reasoning_gym_scores_its_own_problems():
    gym = import_reasoning_gym()
    (scorer,) = load_scorers("reasoning_gym")
    for name in ("chain_sum", "basic_arithmetic"):
        rows = list(gym.create_dataset(name, size=3, seed=1))
        scored = scorer(samples([row["answer"] for row in rows] + ["x"], [*rows, rows[0]]))
        assert scored[:3] == [1.0] * 3 and scored[3] < 0.1
    row = {
        "question": rows[0]["question"],
        "ground_truth": rows[0]["answer"],
    }  # a file without metadata
    (named,) = load_scorers("reasoning_gym:basic_arithmetic")
    assert named(samples([f" {rows[0]['answer']} "], [row])) == [1.0]
    with pytest.raises(InputError, match="source_dataset"):
        scorer.check(row)


def test_a_response_that_reasoning_gym_cannot_score_is_wrong(monkeypatch):
    (scorer,) = load_scorers("reasoning_gym:chain_sum")
    monkeypatch.setattr(scorer, "_judge_of", lambda row: lambda response, entry: float(response))
    assert scorer(samples(["1", "one"], [{"answer": "1"}] * 2)) == [1.0, 0.0]


def test_reasoning_gym_is_imported_without_pycosat(monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] in ("reasoning_gym", "pycosat")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(
        sys.modules, "pycosat", None
    )  # what `import` sees where it is not installed: ImportError
    assert import_reasoning_gym().create_dataset("chain_sum", size=1, seed=1)[0]["answer"]
