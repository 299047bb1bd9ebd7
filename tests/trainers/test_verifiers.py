import sys
import time

import pytest

from fused_rl.trainers import cli, verifiers
from fused_rl.trainers.verifiers import answer_of, check_scores, load_verifier


@pytest.fixture(scope="module")
def math():
    verifier = verifiers.MathVerifier(timeout=30)
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
        ("no idea", "42", 0.0),
        ("", "42", 0.0),
        ("\\boxed{\\frac{", "42", 0.0),
    ]
    responses, rows = [c[0] for c in cases], [{"answer": c[1]} for c in cases]
    assert math(responses, rows) == [c[2] for c in cases]


def test_an_expression_that_never_ends_is_killed_and_the_next_one_is_scored(math):
    math(["1"], [{"answer": "1"}])
    math.timeout, worker = 3.0, math.worker
    began = time.monotonic()
    assert math(["\\boxed{(10^{10})!}"], [{"answer": "5"}]) == [0.0]
    assert worker.poll() is not None and time.monotonic() - began < 30
    math.timeout = 60.0
    assert math(["\\boxed{7}"], [{"answer": "7"}]) == [1.0]
    assert math.worker is not worker


def test_reasoning_gym_scores_its_own_problems():
    gym = verifiers.import_reasoning_gym()
    for name in ("chain_sum", "basic_arithmetic"):
        rows = list(gym.create_dataset(name, size=3, seed=1))
        scored = load_verifier("reasoning_gym")([row["answer"] for row in rows] + ["x"], [*rows, rows[0]])
        assert scored[:3] == [1.0] * 3 and scored[3] < 0.1
    row = {"question": rows[0]["question"], "ground_truth": rows[0]["answer"]}  # a file without metadata
    assert load_verifier("reasoning_gym:basic_arithmetic")([f" {rows[0]['answer']} "], [row]) == [1.0]
    with pytest.raises(cli.InputError, match="source_dataset"):
        load_verifier("reasoning_gym")(["1"], [row])


def test_reasoning_gym_is_imported_without_pycosat(monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] in ("reasoning_gym", "pycosat")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pycosat", None)  # what `import` sees where it is not installed: ImportError
    assert verifiers.import_reasoning_gym().create_dataset("chain_sum", size=1, seed=1)[0]["answer"]


def test_a_function_of_the_users_own():
    verifier = load_verifier("tests.trainers.tiny:odd_characters")
    assert verifier(["a1", "bd"], [{}, {}]) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["maths", "no_such_module:f", "math:no_such_function", "reasoning_gim:x"])
def test_an_unknown_verifier_is_named(name):
    with pytest.raises(cli.InputError, match=name.split(":")[0]):
        load_verifier(name)


def test_scores_are_checked():
    assert check_scores("v", [1, True], 2) == [1.0, 1.0]
    with pytest.raises(cli.InputError, match="'v' returned nan"):
        check_scores("v", [0.0, float("nan")], 2)
    with pytest.raises(cli.InputError, match="'v' returned 1 scores for 2 responses"):
        check_scores("v", [0.0], 2)


def test_the_ground_truths_column():
    assert answer_of({"ground_truth": 5, "answer": 6}, None) == "5"
    assert answer_of({"answer": "6 * 7\n#### 42"}, None) == "42"
    assert answer_of({"target": "7"}, "target") == "7"
    with pytest.raises(cli.InputError, match="'ground_truth'.*\\['x'\\].*--answer_column"):
        answer_of({"x": 1, "__line__": 3}, None)
    with pytest.raises(cli.InputError, match="d.jsonl, line 3: column 'y'"):
        answer_of({"x": 1, "__where__": "d.jsonl, line 3"}, "y")
