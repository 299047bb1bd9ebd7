"""What `--verifiers`, `--verifier_weights` and `--solved_at` may say; bad_inputs/verifiers.py has what they may not."""

import pytest

from fused_rl.trainers import grpo
from fused_rl.trainers.run.parse import parse
from fused_rl.trainers.scorers.load import check_scorers, load_scorers, parse_scorers
from fused_rl.trainers.scorers.options import ScorerConfig

FUNCTION = "tests.trainers.tiny:odd_characters"
BASE = ["--model=none", "--dataset=none", "--output_dir=none"]
CASES = [
    # text, kind, name, what its factory is called with
    ("a.b:f", "function", "a.b:f", ("a.b:f",)),
    ("a.b.f", "function", "a.b:f", ("a.b:f",)),
    ("reward_model.a:f", "function", "reward_model.a:f", ("reward_model.a:f",)),
    ("math.f", "function", "math:f", ("math:f",)),
    ("reward_model:runs/a(1)/it's", "reward_model", "reward_model", ("runs/a(1)/it's",)),
    (r"regex:\d+, (\d)\b: 'x'", "regex", "regex", (r"\d+, (\d)\b: 'x'",)),
    ("exact_match:ignore_case", "exact_match", "exact_match", ()),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_what_follows_a_prefix_is_taken_whole(case):
    text, *expected = case
    (one,) = parse_scorers(ScorerConfig(verifiers=text))
    assert [one.kind, one.name, one.make.args] == expected
    assert (one.weight, one.solved_at) == (1.0, None)


def test_the_three_lists_stand_side_by_side_and_are_described():
    verifiers, weights = ["math", FUNCTION, "format"], [2, -0.5, 0]
    config = ScorerConfig(verifiers=verifiers, verifier_weights=weights, solved_at=[None, 0.5, 1])
    found = [(one.name, one.weight, one.solved_at) for one in parse_scorers(config)]
    assert found == [("math", 2.0, None), (FUNCTION, -0.5, 0.5), ("format", 0.0, 1.0)]
    config = ScorerConfig(verifiers=verifiers[:2], verifier_weights=[2, 0.2])
    assert check_scorers(config) == f"2*math + 0.2*{FUNCTION}"


def test_two_of_a_kind_are_named_by_all_that_they_say():
    verifiers = ["regex:a", "regex:b", "reward_model:a", "reward_model:b", "length:3"]
    found = parse_scorers(ScorerConfig(verifiers=verifiers))
    assert [one.name for one in found] == [*verifiers[:4], "length"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["math"], ["math"]),
        (["[math, my_module:f]"], ["math", "my_module:f"]),
        ([r"['regex:answer: (\d+), it''s', math]"], [r"regex:answer: (\d+), it's", "math"]),
    ],
)
def test_a_command_line_has_a_word_or_a_list(argv, expected):
    assert parse(grpo.GRPOConfig, [*BASE, "--verifiers", *argv]).verifiers == expected
    assert parse(grpo.GRPOConfig, [*BASE, f"--verifiers={argv[0]}"]).verifiers == expected


def test_those_that_compare_with_the_answer_say_what_is_solved():
    def thresholds(*verifiers, **options):
        found = load_scorers(ScorerConfig(verifiers=list(verifiers), **options))
        return {scorer.name: scorer.solved_at for scorer in found}

    assert thresholds("exact_match", "format") == {"exact_match": 1.0, "format": None}
    assert thresholds("regex:a(b)", "length:4") == {"regex": 1.0, "length": None}
    given = thresholds("format", "exact_match", solved_at=[1, 0])
    assert given == {"format": 1.0, "exact_match": 0.0}
    assert thresholds("regex:ab", "length:4") == {"regex": 1.0, "length": None}  # nobody compares
