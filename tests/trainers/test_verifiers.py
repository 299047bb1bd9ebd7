import json

import pytest
import torch

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.roll_out import Sampling, roll_out, rollout_metrics
from fused_rl.trainers.rollouts.types import Prompt, Response, Sample
from fused_rl.trainers.scorers import builtin
from fused_rl.trainers.scorers.builtin import answer_of
from fused_rl.trainers.scorers.load import load_scorers as load
from fused_rl.trainers.scorers.options import ScorerConfig
from tests.trainers import steps, tiny


def load_scorers(*verifiers, **options):
    return load(ScorerConfig(verifiers=list(verifiers), **options))


def samples(texts, rows, first=1):
    """What a scorer sees of these responses to these rows, the first of which stands on that line."""
    made = enumerate(zip(texts, rows, strict=True), first)
    return [
        Sample(row, [], Response([], "stop"), text, f"d.jsonl, line {i}") for i, (text, row) in made
    ]


def rolled_out(scorers, texts, rows):
    """A rollout whose responses are `texts`."""
    tokenizer = tiny.tokenizer()
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    sampler = steps.Sampler([Response(each, "length") for each in ids])
    prompts = [Prompt([7, 8], row, f"d.jsonl, line {i}") for i, row in enumerate(rows, 1)]
    return roll_out(
        sampler, scorers, prompts, Sampling(1.0, 1000, (3,)), tokenizer, torch.device("cpu")
    )


class Fixed:
    """A scorer with given scores."""

    def __init__(self, name, scores, weight=1.0, solved_at=None):
        self.name, self.scores, self.weight, self.solved_at = name, scores, weight, solved_at

    def __call__(self, samples):
        return self.scores


def test_rewards_are_weighted_sums_and_solved_is_what_the_judges_say():
    tokenizer = tiny.tokenizer()
    scorers = [
        Fixed("judge", [1.0, 0.0, 1.0, None], solved_at=1.0),
        Fixed("other", [None, 0.0, 0.0, None], weight=0.0, solved_at=0.0),
        Fixed("bonus", [0.0, 0.5, None, 0.5], weight=0.2),
    ]
    prompts = [Prompt([7, 8], {}) for _ in range(4)]
    sampler = steps.Sampler([*[Response([5], "length")] * 3, Response([], "length")])
    rollout = roll_out(
        sampler, scorers, prompts, Sampling(1.0, 1, (3,)), tokenizer, torch.device("cpu")
    )
    assert rollout.rewards.tolist() == pytest.approx([1.0, 0.1, 1.0, 0.1])
    assert rollout.solved.tolist() == [True, False, True, False]  # nobody judged the last one
    assert rollout.lengths.tolist() == [1, 1, 1, 0] and not rollout.stopped.any()
    assert rollout.batch.response_mask.sum(1).tolist() == [1, 1, 1, 0]
    metrics = rollout_metrics(rollout, {}, 1)
    assert metrics["rewards/judge/mean"] == pytest.approx(2 / 3) and metrics[
        "rewards/bonus/mean"
    ] == pytest.approx(1 / 3)


def test_the_ground_truths_column():
    assert answer_of({"ground_truth": 5, "answer": 6}, None) == "5"
    assert answer_of({"answer": "6 * 7\n#### 42"}, None) == "42"
    assert answer_of({"target": "7"}, "target") == "7"
    for row, column, message in (
        (
            {"x": 1},
            None,
            "^there is no answer in ground_truth, answer or solution; the row has .'x'.; name its",
        ),
        ({"x": 1}, "y", "^column 'y' is missing"),
        ({"a": {"b": 1}, "c": 2}, "a.c", "^column 'a.c' is missing or null; a has .'b'.; name an"),
        ({"a": '{"b": {"c": 1}}'}, "a.b.d", "; a.b has .'c'.;"),
        ({"a": "b: 1"}, "a.b", "; a is 'b: 1', which has no columns;"),
        ({"a": {"b": None}}, "a.b", "; a has .'b'.;"),
        (
            {"a": {"b": {"c": 1}}},
            "a.b",
            "^column 'a.b' must be text, .* got .'c': 1. .dict.",
        ),
        ({"answer": [{}]}, None, "^column 'answer' must be text, .* got {} .dict."),
        ({"answer": []}, None, r"^column 'answer' has no answer, got \[\]"),
        ({"answer": float("nan")}, None, "^column 'answer' must be text, .* got nan"),
        ({"answer": "6*7\n####"}, None, "^column 'answer' has no answer"),
        ({"answer": None}, "answer", "^column 'answer' is missing or null"),
    ):
        with pytest.raises(InputError, match=message):
            answer_of(row, column)


def test_any_of_several_answers_counts_and_a_bool_is_a_word():
    scorer = builtin.ExactMatch(name="exact_match")
    row = {"answer": ["Paris", "the city of light"]}
    assert [scorer.is_right(text, row) for text in ("Paris", "the city  of light", "Rome")] == [
        True,
        True,
        False,
    ]
    assert (
        scorer.is_right("true", {"answer": True}) and answer_of({"answer": False}, None) == "false"
    )


def test_an_answer_may_stand_in_nested_columns():
    nested = {"ground_truth": 42, "style": "rule", "solution": "It is \\boxed{42}."}
    text = json.dumps(nested)
    rows = [{"reward_model": nested}, {"reward_model": text}, {"a": {"reward_model": text}}]
    for row in rows:
        outside = "a." if "a" in row else ""
        for name in ("ground_truth", "solution"):
            assert answer_of(row, f"{outside}reward_model.{name}") == "42"
    # A dot in a name is no path where there is such a column, at any depth.
    assert answer_of({"a.b": 1, "a": {"b": 2}}, "a.b") == "1"
    assert answer_of({"x": {"a.b": 1, "a": {"b": 2}}}, "x.a.b") == "1"
    assert answer_of({"a.b": {"c": 1}, "a": {"c": 2}}, "a.b.c") == "1"

    # For every scorer that compares, in its check and its scores.
    column = {"answer_column": "reward_model.ground_truth"}
    for verifier in ("exact_match", "exact_match:ignore_case", r"regex:(\d+)", "math"):
        (scorer,) = load_scorers(verifier, **column)
        for row in rows[:2]:
            scorer.check(row)
        assert scorer(samples(["42", "43"], rows[:2])) == [1.0, 0.0]
        with pytest.raises(InputError, match="reward_model has .'truth'."):
            scorer.check({"reward_model": {"truth": 1}})
