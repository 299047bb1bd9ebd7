"""The demo's wrong answers are wrong, of the kind that they say, and its held-out problems are not trained on."""

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
