"""Scorers of responses whose answers can be checked: mathematics, reasoning-gym's own, or a function of yours.

Each is a `Scorer` (rollout.py): it knows its weight, and from which score on a sample counts as solved.
"""

import json
import os
import queue
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence

from fused_rl.trainers.config import InputError, load_function
from fused_rl.trainers.rollout import Sample, Scorer

ANSWER_COLUMNS = ("ground_truth", "answer")
MATH_TIMEOUT = 10.0  # seconds for one answer: they take milliseconds, or never end
SPELLING = re.compile(r"(?:(?P<weight>[^*]+)\*)?(?P<name>[^*>]+)(?:>=(?P<solved_at>.+))?")


def load_scorers(spelled: str, answer_column: str | None = None) -> list[Scorer]:
    """The scorers that a config names, comma-separated: `math`, or `math, 0.2*my_module:format_bonus`.

    A sample is solved when `math` and `reasoning_gym` say so (a score of 1), whatever else is among the scorers;
    functions alone decide by 1 too. `my_module:f>=0.5` gives a function a threshold of its own.

    Args:
        spelled: per scorer `[weight*]name[>=threshold]`. Names: `math` (1.0 where the final answer equals the ground
            truth), `reasoning_gym` (the row's `metadata` names the dataset), `reasoning_gym:chain_sum`, or
            `module:function`: (responses, rows) -> scores, texts and dataset rows to numbers.
        answer_column: of the ground truth, for `math` and `reasoning_gym`; None takes ground_truth or answer.
    """
    scorers = [_load(part.strip(), answer_column) for part in spelled.split(",")]
    names = [scorer.name for scorer in scorers]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"verifiers: {twice[0]!r} is named {names.count(twice[0])} times; for a weight: 2*{twice[0]}")
    undecided = [scorer for scorer in scorers if isinstance(scorer, FunctionScorer) and scorer.solved_at is None]
    if len(undecided) == len(scorers):
        for scorer in undecided:
            scorer.solved_at = 1.0
    return scorers


def _load(spelled: str, answer_column: str | None) -> Scorer:
    found = SPELLING.fullmatch(spelled)
    if found is None:
        raise InputError(f"verifier {spelled!r}: expected [weight*]name[>=threshold], as in 0.5*math")
    name, weight = found["name"].strip(), _number(spelled, found["weight"], 1.0)
    kind, _, detail = name.partition(":")
    if name == "math":
        return MathVerifier(answer_column, weight=weight, solved_at=_number(spelled, found["solved_at"], 1.0))
    if kind == "reasoning_gym":
        solved_at = _number(spelled, found["solved_at"], 1.0)
        return ReasoningGymVerifier(detail, answer_column, weight=weight, solved_at=solved_at)
    if not detail:
        raise InputError(f"verifier {name!r}: expected math, reasoning_gym, reasoning_gym:<dataset> or module:function")
    function = load_function(name, "verifier")
    return FunctionScorer(name, function, weight=weight, solved_at=_number(spelled, found["solved_at"], None))


def _number(spelled: str, text: str | None, default: float | None) -> float | None:
    try:
        return default if text is None else float(text)
    except ValueError as error:
        raise InputError(f"verifier {spelled!r}: {text.strip()!r} is not a number") from error


def answer_of(row: dict, column: str | None) -> str:
    """The row's ground truth; of a worked solution that ends in `#### 42`, as in gsm8k, the part after the marks."""
    column = column or next((c for c in ANSWER_COLUMNS if row.get(c) is not None), ANSWER_COLUMNS[0])
    if row.get(column) is None:
        present = sorted(key for key in row if not key.startswith("__"))
        where = row.get("__where__", "a row")
        raise InputError(f"{where}: column {column!r} is missing; the row has {present}; use --answer_column")
    return str(row[column]).rsplit("####", 1)[-1].strip()


def import_reasoning_gym():
    """reasoning_gym, which takes over a second to import; its logic puzzles need pycosat, arithmetic does not."""
    try:
        import pycosat  # noqa: F401
    except ImportError:
        # pycosat is C source without wheels, and reasoning_gym imports it whatever is used: without a compiler an
        # empty module stands in, and only the one logic-puzzle generator that calls it fails.
        sys.modules["pycosat"] = types.ModuleType("pycosat")
    import reasoning_gym

    return reasoning_gym


class FunctionScorer:
    """A function of the user's own: (responses, rows) -> one score each."""

    def __init__(self, name: str, function: Callable, *, weight: float = 1.0, solved_at: float | None = None):
        self.name, self.function, self.weight, self.solved_at = name, function, weight, solved_at

    def check(self, row: dict) -> None:
        """Any row will do: the function knows what it reads."""

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        scores = self.function([sample.text for sample in samples], [sample.row for sample in samples])
        return [None if score is None else float(score) for score in scores]


class ReasoningGymVerifier:
    """The `score_answer` of the reasoning-gym dataset that made the row."""

    def __init__(
        self, dataset: str = "", answer_column: str | None = None, *, weight: float = 1.0, solved_at: float = 1.0
    ):
        self.name = f"reasoning_gym:{dataset}" if dataset else "reasoning_gym"
        self.weight, self.solved_at = weight, solved_at
        self.dataset, self.answer_column = dataset, answer_column
        self.scorer = import_reasoning_gym().get_score_answer_fn

    def check(self, row: dict) -> None:
        """The row must have an answer, and name its dataset where the scorer does not."""
        answer_of(row, self.answer_column)
        self._dataset_of(row)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self.score(sample.text, sample.row) for sample in samples]

    def _dataset_of(self, row: dict) -> str:
        dataset = self.dataset or (row.get("metadata") or {}).get("source_dataset")
        if not dataset:
            raise InputError("reasoning_gym: the row's metadata has no source_dataset; use reasoning_gym:<dataset>")
        return dataset

    def score(self, response: str, row: dict) -> float:
        """0 to 1, as the dataset's generator judges a response's text."""
        entry = {**row, "answer": answer_of(row, self.answer_column), "metadata": row.get("metadata") or {}}
        return float(self.scorer(self._dataset_of(row))(response.strip(), entry))


class MathVerifier:
    """1.0 where math-verify finds the response's final answer equal to the ground truth, else 0.0.

    It runs in a process of its own: some expressions keep it (and sympy) busy for hours, and no signal or thread stops
    that. An answer that takes longer than `timeout` seconds kills the process and scores 0.
    """

    name = "math"

    def __init__(
        self,
        answer_column: str | None = None,
        timeout: float = MATH_TIMEOUT,
        *,
        weight: float = 1.0,
        solved_at: float = 1.0,
    ):
        self.weight, self.solved_at = weight, solved_at
        self.answer_column, self.timeout, self.worker = answer_column, timeout, None

    def check(self, row: dict) -> None:
        """The row must have an answer."""
        answer_of(row, self.answer_column)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [self._score(sample.text, answer_of(sample.row, self.answer_column)) for sample in samples]

    def _score(self, response: str, answer: str) -> float:
        if self.worker is None:
            self._start()
        self.worker.stdin.write(json.dumps([response, answer]) + "\n")
        self.worker.stdin.flush()
        try:
            return float(self.replies.get(timeout=self.timeout))
        except queue.Empty:
            self.close()
            return 0.0

    def _start(self) -> None:
        command = [sys.executable, "-c", "from fused_rl.trainers.verifiers import serve_math; serve_math()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        )
        self.replies = replies = queue.Queue()
        threading.Thread(
            target=lambda out: [replies.put(line) for line in out], args=(self.worker.stdout,), daemon=True
        ).start()
        if replies.get(timeout=300).strip() != "ready":  # importing takes seconds on a loaded machine
            raise RuntimeError("the math-verify process did not start")

    def close(self) -> None:
        """End the process; the next score starts another."""
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()
            self.worker = None


def serve_math() -> None:
    """The worker: one JSON line [response, answer] in, one line 1 or 0 out."""
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that nobody keeps the time

    replies, sys.stdout = sys.stdout, sys.stderr  # a library's print must not look like a score
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        response, answer = json.loads(line)
        try:
            # The caller keeps the time, by killing: math-verify's own limit is a signal that C code does not see.
            gold = parse(f"${answer}$", configs, parsing_timeout=None) or [answer]
            found = parse(response.rsplit("####", 1)[-1], configs, parsing_timeout=None)
            equal = verify(gold, found, timeout_seconds=None)
        except Exception as error:  # of sympy, on nonsense: that is a wrong answer, not a reason to stop
            print(f"math-verify: {type(error).__name__} on {response[-80:]!r}", file=sys.stderr)
            equal = False
        print(int(equal), file=replies, flush=True)
