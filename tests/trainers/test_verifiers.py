import contextlib
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from fused_rl.trainers.base import guests
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.rollouts.checks import check_responses, check_scores
from fused_rl.trainers.rollouts.roll_out import Sampling, roll_out, scorer_metrics
from fused_rl.trainers.rollouts.types import Prompt, Response, Sample
from fused_rl.trainers.scorers import functions
from fused_rl.trainers.scorers.answers import answer_of
from fused_rl.trainers.scorers.functions import FunctionScorer
from fused_rl.trainers.scorers.load import load_scorers as load
from fused_rl.trainers.scorers.options import ScorerConfig
from tests.trainers import tiny

ROOT = Path(__file__).parent.parent.parent


def load_scorers(*verifiers, **options):
    return load(ScorerConfig(verifiers=list(verifiers), **options))


def samples(texts, rows, first=1):
    """What a scorer sees of these responses to these rows, the first of which stands on that line."""
    made = enumerate(zip(texts, rows, strict=True), first)
    return [Sample(row, [], Response([], "stop"), text, f"d.jsonl, line {i}") for i, (text, row) in made]


class Said(tiny.Sampler):
    """A sampler that responds with what it is told to, in the tokenizer's ids."""

    def __init__(self, tokenizer, texts):
        self.ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]

    def sample(self, prompts, sampling):
        return [Response(ids, "length") for ids in self.ids]


def rolled_out(scorers, texts, rows):
    """A rollout whose responses are `texts`."""
    tokenizer = tiny.tokenizer()
    prompts = [Prompt([7, 8], row, f"d.jsonl, line {i}") for i, row in enumerate(rows, 1)]
    device = torch.device("cpu")
    return roll_out(Said(tokenizer, texts), scorers, prompts, Sampling(1.0, 1000, (3,)), tokenizer, device)


def half(responses, rows):
    """A verifier of the user's own whose scores end at 0.5."""
    return [0.5 for _ in responses]


def bonus(responses, rows):
    """0.2 for short responses; not applicable to empty ones."""
    return [None if not response else 0.2 * (len(response) < 3) for response in responses]


def test_a_function_of_the_users_own():
    (scorer,) = load_scorers("tests.trainers.tiny:odd_characters")
    assert scorer(samples(["a1", "bd"], [{}, {}])) == [1.0, 0.0]
    scorer.check({})  # it needs no answer column


def broken(kind):
    """A verifier that goes wrong in this way."""

    def function(responses, rows):
        if kind == "raises":
            return [1 / 0 for _ in responses]
        if kind == "exits":
            sys.exit(0)
        if kind == "sleeps":
            time.sleep(3600)
        if kind == "stubborn":
            with contextlib.suppress(BaseException):
                time.sleep(3600)
            time.sleep(3600)
        return RESULTS[kind]

    return function


RESULTS = {
    "nothing": None,
    "text": "11",
    "number": 1.0,
    "dictionary": {"a": 1.0, "b": 1.0},
    "count": [1.0],
    "words": [1.0, "1"],
    "nan": [1.0, float("nan")],
    "inf": [1.0, float("-inf")],
    "large": [1.0, 1e39],
    "lists": [1.0, [1.0]],
}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raises", "ZeroDivisionError: division by zero [(]test_verifiers.py, line [0-9]+[)].*return None; .*2 resp"),
        ("exits", "called sys.exit[(]0[)] [(]test_verifiers.py"),
        ("sleeps", "did not return within 0.3 s.*time-out of its own; .* to d.jsonl, line 1 … d.jsonl, line 2"),
        ("stubborn", "did not return within 0.3 s"),
        ("nothing", "returned None; it must return a list"),
        ("text", "returned '11' [(]str[)]; it must return a list"),
        ("number", "returned 1.0 [(]float[)]; it must return a list"),
        ("dictionary", "[(]dict[)]; it must return a list"),
        ("count", "returned 1 scores for 2 responses"),
        ("words", "returned '1' [(]str[)] as the score of d.jsonl, line 2"),
        ("nan", "returned nan [(]float[)] as the score of d.jsonl, line 2"),
        ("inf", "returned -inf [(]float[)] as the score of d.jsonl, line 2"),
        ("large", "returned 1e[+]39 [(]float[)] as the score of d.jsonl, line 2"),
        ("lists", "returned .*[(]list[)] as the score of d.jsonl, line 2"),
    ],
)
def test_a_function_that_goes_wrong_is_one_line_with_its_name_and_row(kind, message, monkeypatch):
    monkeypatch.setattr(functions, "FUNCTION_TIMEOUT", 0.3 if kind in ("sleeps", "stubborn") else 600.0)
    rows = [{}, {}]
    with pytest.raises(InputError, match=f"'my:f' .*{message}") as raised:
        rolled_out([FunctionScorer("my:f", broken(kind))], ["a", "b"], rows)
    assert "\n" not in str(raised.value)


def test_a_function_may_return_arrays_and_generators_print_and_use_signals(capfd):
    import numpy as np

    def in_the_main_thread(responses, rows):
        import signal

        print("hello")
        signal.signal(signal.SIGALRM, signal.signal(signal.SIGALRM, signal.SIG_DFL))  # raises in any other thread
        return (score for score in [1, None])

    for returned in (np.array([1.0, 0.5]), torch.tensor([1.0, 0.5]), (1.0, 0.5), np.array([1, 0.5], dtype=np.float32)):
        scorer = FunctionScorer("f", lambda responses, rows, returned=returned: returned)
        assert rolled_out([scorer], ["a", "b"], [{}, {}]).scores["f"].tolist() == [1.0, 0.5]
    rollout = rolled_out([FunctionScorer("f", in_the_main_thread)], ["a", "b"], [{}, {}])
    assert rollout.scores["f"][0] == 1.0 and rollout.scores["f"][1].isnan()


def test_what_a_call_cannot_be_kept_from_ends_with_a_line_and_a_status():
    code = """
        import signal, time
        from fused_rl.trainers.base import guests
        guests.GRACE = 0.2
        def call():
            signal.pthread_sigmask(signal.SIG_BLOCK, [guests.NUDGE])  # as deaf as C code
            while True:
                time.sleep(3600)
        guests.within(0.1, call)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "error: a call did not end within 0.1 s and cannot be interrupted\n"


def test_within_leaves_signals_as_they_were():
    import signal

    before = signal.getsignal(guests.NUDGE)
    assert guests.within(60, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        guests.within(60, lambda: 1 / 0)
    with pytest.raises(guests.Expired):
        guests.within(0.05, lambda: time.sleep(3600))
    assert signal.getsignal(guests.NUDGE) is before
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(_watch)")]


def other_arguments(texts, rows, answers):
    """Wants three."""


NO_FUNCTION = 3


@pytest.mark.parametrize("code", ["def f(:", "raise RuntimeError('a key\\nis missing')", "import sys; sys.exit(0)"])
def test_a_module_that_does_not_import_is_named(code, tmp_path, monkeypatch):
    (tmp_path / "does_not_import.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="'does_not_import:f': (SyntaxError|RuntimeError|SystemExit): ") as error:
        load_scorers("does_not_import:f")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", ["verifier_weights", "solved_at"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), "a", [1.0]])
def test_a_weight_or_threshold_that_is_not_finite_is_refused_before_anything_starts(option, number):
    with pytest.raises(InputError, match=f"{option}=.*: expected a finite number"):
        load_scorers("math", **{option: [number]})


def test_what_is_no_verifier_is_refused_before_the_run(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="other_arguments' must take [(]responses, rows[)].*: missing .*'answers'"):
        load_scorers(f"{HERE}:other_arguments")
    with pytest.raises(InputError, match="int is not a function"):
        load_scorers(f"{HERE}:NO_FUNCTION")
    (tmp_path / "never_imports.py").write_text("import time; time.sleep(3600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(functions, "FUNCTION_TIMEOUT", 0.3)
    with pytest.raises(InputError, match="'never_imports:f': its module was not imported within 0.3 s"):
        load_scorers("never_imports:f")


HERE = "tests.trainers.test_verifiers"


def thresholds(*verifiers, **options):
    return {scorer.name: (scorer.weight, scorer.solved_at) for scorer in load_scorers(*verifiers, **options)}


def test_a_scorer_knows_its_weight_and_when_a_sample_is_solved():
    half, bonus = f"{HERE}:half", f"{HERE}:bonus"
    assert thresholds(half) == {half: (1.0, 1.0)}
    assert thresholds(half, verifier_weights=[0.5], solved_at=[0.5]) == {half: (0.5, 0.5)}
    # Where one knows right from wrong, the others are a bonus, unless they are given a threshold.
    found = thresholds("math", bonus, verifier_weights=[1, 0.1])
    assert found == {"math": (1.0, 1.0), bonus: (0.1, None)}
    found = thresholds("reasoning_gym:chain_sum", half, solved_at=[None, 0.5])
    assert found == {"reasoning_gym:chain_sum": (1.0, 1.0), half: (1.0, 0.5)}


class Fixed:
    """A scorer with given scores."""

    def __init__(self, name, scores, weight=1.0, solved_at=None):
        self.name, self.scores, self.weight, self.solved_at = name, scores, weight, solved_at

    def __call__(self, samples):
        return self.scores


class OneToken(tiny.Sampler):
    """A sampler of single tokens, and of an empty response at last."""

    def sample(self, prompts, sampling):
        return [*(Response([5], "length") for _ in prompts[1:]), Response([], "length")]


def test_rewards_are_weighted_sums_and_solved_is_what_the_judges_say():
    tokenizer = tiny.tokenizer()
    scorers = [Fixed("judge", [1.0, 0.0, 1.0, None], solved_at=1.0), Fixed("bonus", [0.0, 0.5, None, 0.5], weight=0.2)]
    prompts = [Prompt([7, 8], {}) for _ in range(4)]
    rollout = roll_out(OneToken(), scorers, prompts, Sampling(1.0, 1, (3,)), tokenizer, torch.device("cpu"))
    assert rollout.rewards.tolist() == pytest.approx([1.0, 0.1, 1.0, 0.1])
    assert rollout.solved.tolist() == [True, False, True, False]  # nobody judged the last one
    assert rollout.lengths.tolist() == [1, 1, 1, 0] and not rollout.stopped.any()
    assert rollout.batch.response_mask.sum(1).tolist() == [1, 1, 1, 0]
    metrics = scorer_metrics(rollout.scores)
    assert metrics["rewards/judge/mean"] == pytest.approx(2 / 3) and metrics["rewards/bonus/mean"] == pytest.approx(
        1 / 3
    )


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (Response([5, 6, 7], "length"), "3 tokens, but max_new_tokens is 2"),
        (Response([5], "stop"), r"finish='stop' and stop tokens at \[\] of 1"),
        (Response([5, 3], "length"), r"finish='length' and stop tokens at \[1\] of 2"),
        (Response([3, 3], "stop"), r"finish='stop' and stop tokens at \[0, 1\] of 2"),
        (Response([5], "abort"), "finish='abort', which must be stop or length"),
        (Response([-1], "length"), "ids must be whole numbers"),
        (Response([5], "length", logprobs=[-0.1, -0.2]), "2 logprobs for 1 ids"),
        (Response([5], "length", logprobs=[float("nan")]), "a logprob is NaN or infinite"),
    ],
)
def test_a_response_that_breaks_its_promises_names_the_row(response, message):
    prompt, sampling = Prompt([7], {}, "d.jsonl, line 4"), Sampling(1.0, 2, (3,))
    with pytest.raises(InputError, match=f"the sampler's response to d.jsonl, line 4: {message}"):
        check_responses([response], [prompt], sampling)
    check_responses([Response([5, 3], "stop"), Response([], "length")], [prompt, prompt], sampling)
    with pytest.raises(InputError, match="returned 1 responses to 2 prompts"):
        check_responses([Response([5], "length")], [prompt, prompt], sampling)
    with pytest.raises(InputError, match="returned NoneType responses to 1 prompts"):
        check_responses(None, [prompt], sampling)


def test_two_scorers_of_one_name_are_refused():
    with pytest.raises(InputError, match="named 2 times; for a weight: verifier_weights"):
        load_scorers(f"{HERE}:half", f"{HERE}:half")


@pytest.mark.parametrize(
    "name", ["maths", "no_such_module:f", "math:no_such_function", "reasoning_gim:x", "x*math", ""]
)
def test_an_unknown_verifier_is_named(name):
    with pytest.raises(InputError, match=re.escape(name.split(":")[0])):
        load_scorers(name)


def test_scores_are_checked():
    one, two = samples(["a"], [{}], 3), samples(["a", "b"], [{}, {}])
    assert check_scores("v", [1, True], two).tolist() == [1.0, 1.0]
    with pytest.raises(InputError, match="'v' returned nan .*as the score of d.jsonl, line 3"):
        check_scores("v", [float("nan")], one)
    with pytest.raises(InputError, match="'v' returned 1 scores for 2 responses"):
        check_scores("v", [0.0], two)


def test_the_ground_truths_column():
    assert answer_of({"ground_truth": 5, "answer": 6}, None) == "5"
    assert answer_of({"answer": "6 * 7\n#### 42"}, None) == "42"
    assert answer_of({"target": "7"}, "target") == "7"
    with pytest.raises(InputError, match="'ground_truth'.*\\['x'\\].*--answer_column"):
        answer_of({"x": 1}, None)
    with pytest.raises(InputError, match="^column 'y'"):
        answer_of({"x": 1}, "y")
    for value in ({"a": 1}, [1], True, float("nan")):
        with pytest.raises(InputError, match="^column 'answer' is .*expected the answer as text or a n"):
            answer_of({"answer": value}, None)
    for value in ("", "  ", "6*7\n####"):
        with pytest.raises(InputError, match="^column 'answer' has no answer"):
            answer_of({"answer": value}, None)
    for column in ("answer", None):
        with pytest.raises(InputError, match="^column 'answer' is null; mend or remove the row"):
            answer_of({"answer": None}, column)


def test_a_weighted_sum_that_fp32_cannot_hold_is_refused():
    scorer = FunctionScorer("f", lambda responses, rows: [0.0, 3e38], weight=2.0)
    with pytest.raises(InputError, match="the reward of d.jsonl, line 2 is inf"):
        rolled_out([scorer], ["a", "b"], [{}, {}])
