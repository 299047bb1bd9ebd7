"""reasoning_gym's scores: its own problems, rows that it cannot score, an import without a C compiler."""

import sys

import pytest

from fused_rl.recipes import gym
from fused_rl.trainers.base.text import InputError
from tests.trainers.test_verifiers import load_scorers, samples


def test_reasoning_gym_scores_its_own_problems():
    (scorer,) = load_scorers("fused_rl.recipes.gym:score")
    for name in ("chain_sum", "basic_arithmetic"):
        rows = list(gym.import_reasoning_gym().create_dataset(name, size=3, seed=1))
        texts = [f" {row['answer']} " for row in rows]
        scored = scorer(samples([*texts, "x"], [*rows, rows[0]]))
        assert scored[:3] == [1.0] * 3 and scored[3] < 0.1
    for row, message in (
        ({"answer": "1"}, r"source_dataset is missing.*\['answer'\]"),
        ({"metadata": {"source_dataset": "sums"}}, "no dataset 'sums'"),
    ):
        with pytest.raises(InputError, match=message):
            gym.score("1", row)


def test_a_response_that_reasoning_gym_cannot_score_is_wrong(monkeypatch):
    monkeypatch.setattr(gym, "judge_of", lambda _: lambda response, entry: float(response))
    row = {"answer": "1", "metadata": {"source_dataset": "chain_sum"}}
    assert [gym.score(response, row) for response in ("1", "one")] == [1.0, 0.0]


def test_reasoning_gym_is_imported_without_pycosat(monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] in ("reasoning_gym", "pycosat")]:
        monkeypatch.delitem(sys.modules, name)
    # What `import` sees where it is not installed: ImportError.
    monkeypatch.setitem(sys.modules, "pycosat", None)
    assert gym.import_reasoning_gym().create_dataset("chain_sum", size=1, seed=1)[0]["answer"]
