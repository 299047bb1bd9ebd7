"""Scores of responses whose answers can be checked: reasoning-gym's own scorers, mathematics, or a function of yours.

A verifier takes (responses, rows): B response texts and the B dataset rows they answer; it returns B floats.
"""

import importlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import types
from collections.abc import Callable

from fused_rl.trainers.cli import InputError

Verifier = Callable[[list[str], list[dict]], list[float]]
ANSWER_COLUMNS = ("ground_truth", "answer")
MATH_TIMEOUT = 10.0  # seconds for one answer: they take milliseconds, or never end


def load_verifier(name: str, answer_column: str | None = None) -> Verifier:
    """The verifier that a config names.

    Args:
        name: `math` (1.0 where the final answer equals the ground truth), `reasoning_gym` (the row's `metadata` names
            the dataset), `reasoning_gym:chain_sum`, or `module:function` on the Python path.
        answer_column: of the ground truth, for `math` and `reasoning_gym`; None takes ground_truth or answer.
    """
    if name == "math":
        return MathVerifier(answer_column)
    kind, _, detail = name.partition(":")
    if kind == "reasoning_gym":
        return ReasoningGymVerifier(detail, answer_column)
    if not detail:
        raise InputError(f"verifier {name!r}: expected math, reasoning_gym, reasoning_gym:<dataset> or module:function")
    try:
        return getattr(importlib.import_module(kind), detail)
    except (ImportError, AttributeError) as error:
        raise InputError(f"verifier {name!r}: {error}") from error


def check_scores(name: str, scores: list[float], count: int) -> list[float]:
    """The scores as finite floats, one per response; an error names the verifier."""
    scores = [float(s) for s in scores]
    if len(scores) != count:
        raise InputError(f"verifier {name!r} returned {len(scores)} scores for {count} responses")
    if not all(map(math.isfinite, scores)):
        raise InputError(f"verifier {name!r} returned {next(s for s in scores if not math.isfinite(s))} as a score")
    return scores


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


class ReasoningGymVerifier:
    """The `score_answer` of the reasoning-gym dataset that made the row."""

    def __init__(self, dataset: str, answer_column: str | None):
        self.dataset, self.answer_column = dataset, answer_column
        self.scorer = import_reasoning_gym().get_score_answer_fn

    def __call__(self, responses: list[str], rows: list[dict]) -> list[float]:
        return [self._score(response, row) for response, row in zip(responses, rows, strict=True)]

    def _score(self, response: str, row: dict) -> float:
        metadata = row.get("metadata") or {}
        dataset = self.dataset or metadata.get("source_dataset")
        if not dataset:
            raise InputError("reasoning_gym: the row's metadata has no source_dataset; use reasoning_gym:<dataset>")
        entry = {**row, "answer": answer_of(row, self.answer_column), "metadata": metadata}
        return float(self.scorer(dataset)(response.strip(), entry))


class MathVerifier:
    """1.0 where math-verify finds the response's final answer equal to the ground truth, else 0.0.

    It runs in a process of its own: some expressions keep it (and sympy) busy for hours, and no signal or thread stops
    that. An answer that takes longer than `timeout` seconds kills the process and scores 0.
    """

    def __init__(self, answer_column: str | None = None, timeout: float = MATH_TIMEOUT):
        self.answer_column, self.timeout, self.worker = answer_column, timeout, None

    def __call__(self, responses: list[str], rows: list[dict]) -> list[float]:
        return [self._score(r, answer_of(row, self.answer_column)) for r, row in zip(responses, rows, strict=True)]

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
