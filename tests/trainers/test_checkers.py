"""exact_match, regex, format and length against their definitions."""

from fused_rl.trainers.rollouts.types import Response, Sample
from fused_rl.trainers.scorers.load import load_scorers
from fused_rl.trainers.scorers.options import ScorerConfig


def scores(verifier, *texts, answer="42", tokens=1):
    response = Response([5] * tokens, "length")
    made = [Sample({"answer": answer}, [], response, text, "d.jsonl, line 3") for text in texts]
    (scorer,) = load_scorers(ScorerConfig(verifiers=[verifier]))
    return scorer(made)


def test_a_whole_response_is_compared_after_normalisation():
    assert scores("exact_match", " 42\n", "4 2", "the 42", "", "4²", "42.") == [1, 0, 0, 0, 0, 0]
    assert scores("exact_match", "new\n York ", "New York", answer="It is #### New  York") == [0, 1]
    assert scores("exact_match:ignore_case", "NEW york", "Straße", answer="New York") == [1, 0]
    assert scores("exact_match:ignore_case", "STRASSE", answer="Straße") == [1]


def test_a_pattern_is_looked_for_or_its_group_compared_with_the_answer():
    assert scores(r"regex:\d+", "so 7", "seven", "") == [1, 0, 0]
    assert scores(r"regex:(?i)^final", "FINAL word", "not final") == [1, 0]
    last = r"regex:answer: (\d+)"
    several = "answer: 1, no, answer: 42", "answer: 42, no, answer: 1"
    assert scores(last, "answer: 42", *several, "42") == [1, 1, 0, 0]
    named = r"regex:(is|was) (?P<answer>[\w ]+)"
    assert scores(named, "it is New  York", "it was Rome", answer="New York") == [1, 0]
    assert scores(r"regex:a(b)?", "a", answer="b") == [0]  # the group did not take part


def test_a_form_is_of_the_whole_response():
    form = "<think>\na\n</think>\n<answer>42</answer>"
    wrong = [f"{form} more", f"so {form}", form.replace("</think>", ""), form + form]
    other_way_round = "<answer>1</answer><think>2</think>"
    twice = "<think>a</think><answer>1</answer><answer>2</answer>"
    nested = "<think>a<think>b</think><answer>1</answer>"
    wrong += [other_way_round, twice, nested]
    assert scores("format", form, f" {form}\n", *wrong) == [1, 1] + [0] * 7


def test_a_length_costs_what_its_formula_says():
    costs = [scores("length:4", "", tokens=tokens)[0] for tokens in (4, 3, 6, 40)]
    assert costs == [0.0, -0.25, -0.5, -1.0]
