"""The demo's wrong answers are wrong, of the kind that they say, and its held-out problems are not trained on."""

import json
import random

import pytest

from fused_rl.recipes import demo_reward


@pytest.mark.parametrize(
    ("expression", "kind", "answer"),
    [
        ("7 - 4 - 8", "last term forgotten", "3"),
        ("7 - 4 - 8", "grouped from the right", "11"),  # 7 - (4 - 8)
        ("7 - 4 + 8", "grouped from the right", "-5"),  # 7 - (4 + 8)
        ("7 - 4 - 8", "minus lost or added", "5"),
        ("7 + 4 + 8", "grouped from the right", None),  # right all the same
        ("4 - 4 + 0", "minus lost or added", None),
    ],
)
def test_kinds_of_wrong_answers(expression, kind, answer):
    right = str(demo_reward.evaluate(expression.split()))
    entry = {"metadata": {"expression": expression}, "answer": right}
    for seed in range(5):
        wrong = demo_reward.wrong_answers(entry, random.Random(seed))
        assert wrong.get(kind) == answer
        assert right not in wrong.values()
        assert abs(int(wrong["off by one"]) - int(right)) == 1


def test_files(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_reward, "NUM_TRAIN", 40)
    monkeypatch.setattr(demo_reward, "NUM_EVAL", 10)
    demo_reward.prepare(tmp_path, 1)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / "data" / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "eval")
    )
    assert {row["question"] for row in train}.isdisjoint(row["question"] for row in held_out)
    assert len({row["kind"] for row in train}) == 6 and len(train) > 4 * 40
    assert (tmp_path / "init" / "config.json").exists()
