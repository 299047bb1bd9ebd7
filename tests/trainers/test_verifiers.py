import re
import sys
import time

import pytest
import torch

from fused_rl.trainers import verifiers
from fused_rl.trainers.config import InputError
from fused_rl.trainers.rollout import Prompt, Response, Sample, Sampling, check_scores, roll_out, scorer_metrics
from fused_rl.trainers.verifiers import answer_of, load_scorers
from tests.trainers import tiny


def samples(texts, rows):
    """What a scorer sees of these responses to these rows."""
    return [Sample(row, [], Response([], "stop"), text) for text, row in zip(texts, rows, strict=True)]


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
    assert math(samples(responses, rows)) == [c[2] for c in cases]


def test_an_expression_that_never_ends_is_killed_and_the_next_one_is_scored(math):
    math(samples(["1"], [{"answer": "1"}]))
    math.timeout, worker = 3.0, math.worker
    began = time.monotonic()
    assert math(samples(["\\boxed{(10^{10})!}"], [{"answer": "5"}])) == [0.0]
    assert worker.poll() is not None and time.monotonic() - began < 30
    math.timeout = 60.0
    assert math(samples(["\\boxed{7}"], [{"answer": "7"}])) == [1.0]
    assert math.worker is not worker


def test_reasoning_gym_scores_its_own_problems():
    gym = verifiers.import_reasoning_gym()
    (scorer,) = load_scorers("reasoning_gym")
    for name in ("chain_sum", "basic_arithmetic"):
        rows = list(gym.create_dataset(name, size=3, seed=1))
        scored = scorer(samples([row["answer"] for row in rows] + ["x"], [*rows, rows[0]]))
        assert scored[:3] == [1.0] * 3 and scored[3] < 0.1
    row = {"question": rows[0]["question"], "ground_truth": rows[0]["answer"]}  # a file without metadata
    (named,) = load_scorers("reasoning_gym:basic_arithmetic")
    assert named(samples([f" {rows[0]['answer']} "], [row])) == [1.0]
    with pytest.raises(InputError, match="source_dataset"):
        scorer.check(row)


def test_reasoning_gym_is_imported_without_pycosat(monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] in ("reasoning_gym", "pycosat")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pycosat", None)  # what `import` sees where it is not installed: ImportError
    assert verifiers.import_reasoning_gym().create_dataset("chain_sum", size=1, seed=1)[0]["answer"]


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


HERE = "tests.trainers.test_verifiers"


def thresholds(spelled):
    return {scorer.name: (scorer.weight, scorer.solved_at) for scorer in load_scorers(spelled)}


def test_a_scorer_knows_its_weight_and_when_a_sample_is_solved():
    assert thresholds(f"{HERE}:half") == {f"{HERE}:half": (1.0, 1.0)}
    assert thresholds(f"0.5*{HERE}:half>=0.5") == {f"{HERE}:half": (0.5, 0.5)}
    # Where one knows right from wrong, the others are a bonus, unless they are given a threshold.
    assert thresholds(f"math, 0.1*{HERE}:bonus") == {"math": (1.0, 1.0), f"{HERE}:bonus": (0.1, None)}
    assert thresholds(f"reasoning_gym:chain_sum,{HERE}:half>=0.5") == {
        "reasoning_gym:chain_sum": (1.0, 1.0),
        f"{HERE}:half": (1.0, 0.5),
    }


class Fixed:
    """A scorer with given scores."""

    def __init__(self, name, scores, weight=1.0, solved_at=None):
        self.name, self.scores, self.weight, self.solved_at = name, scores, weight, solved_at

    def __call__(self, samples):
        return self.scores


class OneToken:
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


def test_two_scorers_of_one_name_are_refused():
    with pytest.raises(InputError, match="named 2 times; for a weight: 2[*]"):
        load_scorers(f"{HERE}:half,{HERE}:half")


@pytest.mark.parametrize("name", ["maths", "no_such_module:f", "math:no_such_function", "reasoning_gim:x", "x*math"])
def test_an_unknown_verifier_is_named(name):
    with pytest.raises(InputError, match=re.escape(name.split(":")[0])):
        load_scorers(name)


def test_scores_are_checked():
    one, two = samples(["a"], [{"__where__": "d.jsonl, line 3"}]), samples(["a", "b"], [{}, {}])
    assert check_scores("v", [1, True], two).tolist() == [1.0, 1.0]
    with pytest.raises(InputError, match="'v' returned nan as the score of d.jsonl, line 3"):
        check_scores("v", [float("nan")], one)
    with pytest.raises(InputError, match="'v' returned 1 scores for 2 responses"):
        check_scores("v", [0.0], two)


def test_the_ground_truths_column():
    assert answer_of({"ground_truth": 5, "answer": 6}, None) == "5"
    assert answer_of({"answer": "6 * 7\n#### 42"}, None) == "42"
    assert answer_of({"target": "7"}, "target") == "7"
    with pytest.raises(InputError, match="'ground_truth'.*\\['x'\\].*--answer_column"):
        answer_of({"x": 1, "__line__": 3}, None)
    with pytest.raises(InputError, match="d.jsonl, line 3: column 'y'"):
        answer_of({"x": 1, "__where__": "d.jsonl, line 3"}, "y")
