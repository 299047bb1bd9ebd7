import re
from pathlib import Path

import pytest
import torch

from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.rollouts.checks import check_responses
from fused_rl.trainers.rollouts.roll_out import Sampling, roll_out, rollout_metrics, scorer_metrics
from fused_rl.trainers.rollouts.types import Incidents, Prompt, Response, Sample
from fused_rl.trainers.scorers.answers import answer_of
from fused_rl.trainers.scorers.functions import FunctionScorer
from fused_rl.trainers.scorers.load import load_scorers as load
from fused_rl.trainers.scorers.math import MathVerifier
from fused_rl.trainers.scorers.options import ScorerConfig
from tests.trainers import tiny

ROOT = Path(__file__).parent.parent.parent


def load_scorers(*verifiers, **options):
    return load(ScorerConfig(verifiers=list(verifiers), **options))


def samples(texts, rows, first=1):
    """What a scorer sees of these responses to these rows, the first of which stands on that line."""
    made = enumerate(zip(texts, rows, strict=True), first)
    return [Sample(row, [], Response([], "stop"), text, f"d.jsonl, line {i}") for i, (text, row) in made]


@pytest.fixture(scope="module")
def math():
    verifier = MathVerifier(timeout=30)
    yield verifier
    verifier.close()


def test_mathematics_is_compared_by_value(math):
    cases = [
        ("The answer is \\boxed{42}.", "42", 1.0),
        ("so we get 42", "6*7 = 42\n#### 42", 1.0),
        ("#### 1,000", "#### 1000", 1.0),
        ("#### 41", "#### 42", 0.0),
        ("$\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("\\boxed{-5}", "-$5", 1.0),
        ("#### 1234.5", "$1,234.50", 1.0),
        ("no idea", "42", 0.0),
        ("", "42", 0.0),
        ("\\boxed{\\frac{", "42", 0.0),
    ]
    responses, rows = [c[0] for c in cases], [{"answer": c[1]} for c in cases]
    assert math(samples(responses, rows)) == [c[2] for c in cases]


MATHEMATICS = (
    "42|-3|1,234|0.5|50%|$5.00|1e-05|1/2|3 and 4|1, 2|(1, 2)|[-2,7]|{1, 2}|x = 3|2xy|y=mx+b|x_1|5!|10^5|x < 3|"
    "n(n+1)/2|−3|90°|\\pi|\\frac{3\\pi}{4}|[0, \\infty)|(-\\infty, 2) \\cup (3, 4)|\\sin x|5 \\text{ cm}|\\text{Paris}|"
    "\\text{(B)}|3\\frac{1}{2}|\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}|$\\frac12$|"
    "\\(5\\)|\\boxed{5}|x \\in (0,1)|x=5|5t|2020/13|ab/c|\\{x : x > 3\\}|"
    "4343_6|A \\cap B|π|2πr|007"
)
NOT_MATHEMATICS = (
    "Paris|yes|no|B|(A)|b.|x|xy|on|A, C|True|None|hello world|IV|12:30|9:05 PM|3 PM|2024-01-05|5/1/2024|2024-01|10-20|"
    "2024-01-05T10:00|1.2.3|v1.0|H2O|CO2|0x1F|abc123|[1, 2]|[1,2,3]|[[1,2]]|[]|['a']|\"a\"|{'a': 1}|1 1/2|1 000|"
    "+1 555 1234|5 dollars|5 km/h|80 miles|1.5 million|sin(x)|sqrt(2)|2pi|2**3|1_000|½|5²|√2|٣|北京|żaba|n/a|-|?|"
    "0.\\overline{3}|yes/no|AB = 5|3:4|3:1|B) 15|A. 5|(x) 5|5 m|2 x|25 C|"
    "3 - 5|$5-$10|>=3|\\leq 3|2020/05|2023/12|on/off|he/she|#5|5+|0xff|5'11|x == 1|x+=1|5!=120|1..10|0.333...|2+3=5|"
    "1.234,56|H_2O|O-O|γ|ναι|3 + ναι|x \\equiv 2 \\pmod 5|5 \\mod 3"
)


def test_math_refuses_answers_that_it_would_read_otherwise_than_they_are_meant(math):
    for answer in MATHEMATICS.split("|"):
        math.check({"answer": answer})
    for answer in NOT_MATHEMATICS.split("|"):
        with pytest.raises(InputError, match="^verifier 'math' cannot judge the answer .*exact_match"):
            math.check({"answer": answer})


def test_letters_do_not_commute_and_dates_do_not_subtract(math):
    cases = [
        ("\\boxed{Siarp}", "Paris", 0.0),
        ("\\boxed{on}", "no", 0.0),
        ("\\boxed{2018}", "2024-01-05", 0.0),
        ("\\boxed{2024-01-05}", "2018", 0.0),
        ("\\boxed{12:30}", "0.4", 0.0),
        ("\\boxed{23}", "4 4 6 9", 0.0),
        ("\\boxed{2yx}", "2xy", 1.0),
        ("\\boxed{3:2}", "3", 0.0),
        ("y=5", "x=5", 0.0),
        ("With y=2 we find x=5", "x=5", 1.0),
        ("5", "x=5", 1.0),
        ("x=5", "5", 1.0),
        ("$2$", "2t", 0.0),
        ("$t+t$", "2t", 1.0),
        ("$2x+3$", "2x+3t", 0.0),
        ("\\boxed{3 \\text{ cm}}", "x = 3", 1.0),
    ]
    # What is written as the answer is, is right.
    cases += [
        (text, "[0,3]", 1.0) for text in ("[0,3]", "so it is\nThe answer is: [0,3].", "\\boxed{[0,3]}", "#### [0,3]")
    ]
    cases += [
        ("x+1", "x+1", 1.0),
        ("\\boxed{0.00001}", "1e-05", 1.0),
        ("\\boxed{3}", "1e-05", 0.0),
        ("[0,3]?", "[0,3]", 0.0),
    ]
    responses, rows = [c[0] for c in cases], [{"answer": c[1]} for c in cases]
    assert math(samples(responses, rows)) == [c[2] for c in cases]


def test_an_expression_that_never_ends_scores_0_and_is_reported_and_the_others_are_scored():
    rows = [{"answer": "7"}] * 3
    verifier = MathVerifier(timeout=2.0)
    assert verifier(samples(["\\boxed{7}", "\\boxed{(10^{10})!}", "\\boxed{7}"], rows)) == [1.0, 0.0, 1.0]
    assert verifier.take_incidents() == Incidents(1, 0, "d.jsonl, line 2 took more than 2 s of CPU")
    assert verifier.take_incidents() == Incidents(0, 0, None)
    verifier.close()


def test_math_verify_that_cannot_be_imported_is_told_at_once(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no sympy here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="does not start: ImportError: no sympy here; pip install 'math-verify"):
        load_scorers("math")


def test_math_verify_that_judges_wrongly_is_told_at_once(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(
        "def parse(text, configs, parsing_timeout): return [text]\n"
        "def verify(gold, found, **options): return False\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Units: units: bool = True\n"
        "@dataclass(frozen=True)\n"
        "class LatexExtractionConfig: normalization_config: object = Units()\n"
        "class ExprExtractionConfig: pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="math_verify says False where"):
        load_scorers("math")


@pytest.fixture
def fake_math(tmp_path, monkeypatch):
    """MathVerifier with a judge whose answers are commands."""
    path = tmp_path / "judge.py"
    path.write_text(
        "import os, signal\n"
        "def load(): return judge\n"
        "def judge(response, answer):\n"
        "    while response == 'spin': pass\n"
        "    if response.startswith('die'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if response.startswith('once ') and not os.path.exists(response[5:]):\n"
        "        open(response[5:], 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return True\n"
    )
    monkeypatch.setattr(MathVerifier, "judge", path)
    verifier = MathVerifier(timeout=0.5)
    yield verifier
    verifier.close()


def test_a_worker_that_dies_again_and_again_stops_the_run_with_the_row(fake_math):
    rows = [{"answer": "7"}] * 3
    with pytest.raises(InputError, match="'math': an answer of d.jsonl, line 3 cannot be judged: .*SIGKILL"):
        fake_math(samples(["a", "a", "die"], rows))


def test_equal_answers_are_judged_once_and_counted_each(fake_math, monkeypatch):
    judged, judge = [], fake_math.pool.judge
    monkeypatch.setattr(fake_math.pool, "judge", lambda cases: judged.extend(cases) or judge(cases))
    rows = [{"answer": "7"}, {"answer": "7"}, {"answer": "7"}, {"answer": "8"}]
    assert fake_math(samples(["spin", "a", "spin", "a"], rows)) == [0.0, 1.0, 0.0, 1.0]
    assert judged == [("spin", "7"), ("a", "7"), ("a", "8")]
    assert fake_math.take_incidents() == Incidents(2, 0, "d.jsonl, line 1 took more than 0.5 s of CPU")


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


def test_timeouts_and_restarts_are_metrics_and_a_line(fake_math, tmp_path, capsys):
    rows = [{"answer": "7"}] * 4
    rollout = rolled_out([fake_math], ["a", "spin", f"once {tmp_path}/marker", "spin"], rows)
    assert rollout.scores["math"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert rollout.incidents == {"verifier/math/timeouts": 2.0, "verifier/math/restarts": 1.0}
    assert capsys.readouterr().out == (
        "math: 2 of 4 answers broke a limit and score 0; first: d.jsonl, line 2 took more than 0.5 s of CPU; "
        "1 processes died, and their answers were scored again\n"
    )
    assert rollout_metrics(rollout, 2, 1)["verifier/math/timeouts"] == 2.0
    quiet = rolled_out([fake_math], ["a"], rows[:1])
    assert quiet.incidents == {"verifier/math/timeouts": 0.0, "verifier/math/restarts": 0.0}
    assert not capsys.readouterr().out


def half(response, row):
    """A verifier of the user's own whose scores end at 0.5."""
    return 0.5


def bonus(response, row):
    """0.2 for short responses; not applicable to empty ones."""
    return None if not response else 0.2 * (len(response) < 3)


def test_a_function_of_the_users_own():
    (scorer,) = load_scorers("tests.trainers.tiny:odd_characters")
    assert scorer(samples(["a1", "bd"], [{}, {}])) == [0.5 * 2, 0.5 * 0 + scorer(samples(["bd"], [{}]))[0]]
    scorer.check({})  # it needs no answer column


@pytest.mark.parametrize("option", ["verifier_weights", "solved_at"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), "a", [1.0]])
def test_a_weight_or_threshold_that_is_not_finite_is_refused_before_anything_starts(option, number):
    with pytest.raises(InputError, match=f"{option}=.*: expected a list of finite numbers"):
        load_scorers("math", **{option: [number]})


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
        (Response([-1], "length"), "ids must be whole numbers from 0 to below 264, got -1"),
        (Response([5, 264], "length"), "ids must be whole numbers from 0 to below 264, got 264"),
        (Response([5.0], "length"), "ids must be whole numbers from 0 to below 264, got 5.0"),
        (Response("text", "length"), "expected a Response with a list of token ids, got Response.ids='text'"),
        ("text", "expected a Response with a list of token ids, got 'text'"),
        (Response([5], "length", logprobs=[3.0]), "a logprob is 3.0; it must be finite, and at most 0"),
        (Response([5], "length", logprobs=[None]), "a logprob is None; it must be finite, and at most 0"),
        (Response([5], "length", logprobs=[-0.1, -0.2]), "2 logprobs for 1 ids"),
        (Response([5], "length", logprobs=[float("nan")]), "a logprob is nan; it must be finite, and at most 0"),
    ],
)
def test_a_response_that_breaks_its_promises_names_the_row(response, message):
    prompt, sampling = Prompt([7], {}, "d.jsonl, line 4"), Sampling(1.0, 2, (3,))
    with pytest.raises(InputError, match=f"the sampler's response to d.jsonl, line 4: {message}"):
        check_responses([response], [prompt], sampling, 264)
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
    scorer = FunctionScorer("f", lambda completions: [0.0, 3e38], weight=2.0)
    with pytest.raises(InputError, match="the reward of d.jsonl, line 2 is inf"):
        rolled_out([scorer], ["a", "b"], [{}, {}])
