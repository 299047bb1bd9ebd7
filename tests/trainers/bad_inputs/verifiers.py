"""Verifiers that a command must refuse: functions of judges.py, which stands in the folder of each case."""

from tests.trainers.bad_inputs.cases import Case, of
from tests.trainers.bad_inputs.data import cell

JUDGES = """
def even(response, row): return len(response) % 2
def trl(completions, answers, **columns): return [1.0]
def loss_sum(log_ratio, advantages, logprobs, sequences, options): return (-log_ratio * advantages).sum()
def other_text(text, row): return 1.0
class Called: pass
"""


def verifiers(spelled: str, message: str, *more: str) -> list[Case]:
    """What is refused before the run."""
    return of("grpo", f"verifiers {spelled!r}", message, "--verifiers", spelled, *more)


VERIFIERS = [
    *verifiers("exact_match:ignorecase", "expected math, .*exact_match:ignore_case"),
    *verifiers(
        "judges:trl",
        "rows.jsonl, line 1: verifier 'judges:trl' takes the column 'answers'; the row has",
    ),
    *verifiers("regex:(a", r"'regex': the pattern '\(a' does not compile"),
    *verifiers("regex:(a)", "column 'a' is missing", "--answer_column", "a"),
    *verifiers("length", "expected math, .*length:<tokens>"),
    *verifiers("length:0", "expected a whole number of tokens above 0"),
    *verifiers("exact_macth", "verifier 'exact_macth': expected .*exact_match"),
    *verifiers("judges:other_text", r"must take .*\(response, row\).* it takes \(text, row\)$"),
    *verifiers("judges:Called", r"'judges:Called' must take \(response, row\)"),
    *verifiers("", "verifiers='' is empty"),
    *verifiers("judges", "'judges': expected .* or module:function"),
    *verifiers("[math", r"verifiers='\[math': expected"),
    *verifiers("[judges:even, judges:even]", "names 'judges:even' twice"),
    *verifiers(
        "judges:even",
        "verifier_weights=.* should be",
        "--verifier_weights",
        "[nan]",
    ),
    *verifiers("judges:even", "has 2 numbers for 1 verifiers", "--verifier_weights", "[1, 2]"),
    *verifiers("reward_model:./rm", "./rm does not exist; the current folder"),
    *cell(
        "grpo",
        "answer",
        "Paris",
        "'Paris'.*exact_match",
        options=("--verifiers", "math"),
    ),
    *cell(
        "grpo",
        "answer",
        None,
        "there is no answer in ground_truth, answer or solution",
        options=("--verifiers", "math"),
    ),
]
