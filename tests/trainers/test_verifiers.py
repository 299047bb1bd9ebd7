import json

import pytest
import torch

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.roll_out import Sampling, roll_out, rollout_metrics
from fused_rl.trainers.rollouts.types import Prompt, Response, Sample
from fused_rl.trainers.scorers import builtin
from fused_rl.trainers.scorers.builtin import answers_of
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
    scorers = [
        Fixed("judge", [1.0, 0.0, 1.0, None], solved_at=1.0),
        Fixed("other", [None, 0.0, 0.0, None], weight=0.0, solved_at=0.0),
        Fixed("bonus", [0.0, 0.5, None, 0.5], weight=0.2),
    ]
    rollout = rolled_out(scorers, ["a", "a", "a", ""], [{}] * 4)
    assert rollout.rewards.tolist() == pytest.approx([1.0, 0.1, 1.0, 0.1])
    assert rollout.solved.tolist() == [True, False, True, False]  # nobody judged the last one
    assert rollout.lengths.tolist() == [1, 1, 1, 0] and not rollout.stopped.any()
    assert rollout.batch.response_mask.sum(1).tolist() == [1, 1, 1, 0]
    metrics = rollout_metrics(rollout, {}, 1)
    means = [metrics[f"rewards/{name}/mean"] for name in ("judge", "bonus")]
    assert means == pytest.approx([2 / 3, 1 / 3])


BAD = [
    ({"x": 1}, None, "no answer in ground_truth, answer or solution; the row has .'x'."),
    ({"x": 1}, "y", "'y' is missing"),
    ({"a": '{"b": {"c": 1}}'}, "a.b.d", "a.b has .'c'."),
    ({"a": "b: 1"}, "a.b", "a is 'b: 1', which has no columns"),
    ({"a": {"b": {"c": 1}}}, "a.b", "'a.b' must be text, .* got .'c': 1."),
    ({"answer": []}, None, r"must list right answers, .* got \[\]"),
    ({"answer": float("nan")}, None, "'answer' must be text, .* got nan"),
    ({"answer": "6*7\n####"}, None, "'answer' has no answer"),
    # The answers to several questions.
    ({"answer": ["B", "C", "B"]}, None, "must list right answers, .*questions a row"),
    ({"answer": [True, False]}, None, "must list right answers"),
]
NESTED = {"reward_model": {"ground_truth": 42, "style": "rule", "solution": "It is \\boxed{42}."}}
AS_TEXT = {"reward_model": json.dumps(NESTED["reward_model"])}
GOOD = [
    ({"ground_truth": 5, "answer": 6}, None, "5"),
    ({"answer": "6 * 7\n#### 42"}, None, "42"),
    ({"answer": False}, None, "false"),
    ({"solution": "\\boxed{3} or \\boxed{\\frac{1}{2}}, as asked"}, None, "\\frac{1}{2}"),
    ({"solution": "$\\frac{63}{400}$"}, None, "$\\frac{63}{400}$"),
    ({"solution": 7}, None, "7"),
    ({"answer": "5", "solution": 7}, None, "5"),
    (NESTED, "reward_model.ground_truth", "42"),
    (AS_TEXT, "reward_model.solution", "42"),
    # A dot in a name is no path where there is such a column, at any depth.
    ({"a.b": 1, "a": {"b": 2}}, "a.b", "1"),
    ({"a.b": {"c": 1}, "a": {"c": 2}}, "a.b.c", "1"),
]


def test_the_ground_truths_column():
    for row, column, answer in GOOD:
        assert answers_of(row, column) == [answer]
    for row, column, message in BAD:
        with pytest.raises(InputError, match=message):
            answers_of(row, column)


def test_any_of_several_answers_counts_and_a_bool_is_a_word():
    scorer, row = builtin.ExactMatch(name="exact_match"), {"answer": ["Paris", "the city of light"]}
    rights = [scorer.is_right(text, row) for text in ("Paris", "the city  of light", "Rome")]
    assert rights == [True, True, False]
    assert scorer.answer(row) == "any of: Paris, the city of light"
    assert scorer.is_right("true", {"answer": True}) and scorer.answer({"answer": [7]}) == "7"


@pytest.mark.parametrize(
    "verifier", ["exact_match", "exact_match:ignore_case", r"regex:(\d+)", "math"]
)
def test_every_scorer_that_compares_reads_nested_columns_in_its_check_and_its_scores(verifier):
    (scorer,) = load_scorers(verifier, answer_column="reward_model.ground_truth")
    for row in (NESTED, AS_TEXT):
        scorer.check(row)
    assert scorer(samples(["42", "43"], [NESTED, AS_TEXT])) == [1.0, 0.0]
    with pytest.raises(InputError, match="reward_model has .'truth'."):
        scorer.check({"reward_model": {"truth": 1}})
