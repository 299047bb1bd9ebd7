"""Scorers of responses whose answers can be checked: mathematics, reasoning-gym's own, or a function of yours.

Each is a `Scorer` (rollout.py): it knows its weight, and from which score on a sample counts as solved. What each may
do to a run, and what the limits are: docs/verifiers.md.
"""

import difflib
import inspect
import math
import numbers
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from fused_rl.trainers import engine, patience
from fused_rl.trainers.config import InputError, in_a_line, load_function
from fused_rl.trainers.patience import Expired, within
from fused_rl.trainers.rollout import Incidents, Sample, Scorer, where
from fused_rl.trainers.workers import Pool, WorkerError

ANSWER_COLUMNS = ("ground_truth", "answer")
MATH_TIMEOUT = 1.0  # seconds of CPU for one answer: they take 0.02 to 0.3, or never end
FUNCTION_TIMEOUT = 600.0  # seconds for one call of a user's function, or for the import of its module
SPELLING = re.compile(r"(?:(?P<weight>[^*]+)\*)?(?P<name>[^*>]+)(?:>=(?P<solved_at>.+))?")


def load_scorers(spelled: str, answer_column: str | None = None) -> list[Scorer]:
    """The scorers that a config names, comma-separated: `math`, or `1*math, 0.2*my_module:format_bonus`.

    A sample is solved when `math` and `reasoning_gym` say so (a score of 1), whatever else is among the scorers;
    functions alone decide by 1 too. `my_module:f>=0.5` gives a function a threshold of its own.

    Args:
        spelled: per scorer `[weight*]name[>=threshold]`. Names: `math` (1.0 where the final answer equals the ground
            truth), `reasoning_gym` (the row's `metadata` names the dataset), `reasoning_gym:chain_sum`, or
            `module:function`: (responses, rows) -> scores, texts and dataset rows to numbers.
        answer_column: of the ground truth, for `math` and `reasoning_gym`; None takes ground_truth or answer.

    All ranks call it together: where one cannot load its scorers, all raise.
    """
    with engine.together():
        scorers = [_load(part.strip(), answer_column) for part in spelled.split(",")]
    names = [scorer.name for scorer in scorers]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"verifiers: {twice[0]!r} is named {names.count(twice[0])} times; for a weight: 2*{twice[0]}")
    undecided = [scorer for scorer in scorers if scorer.solved_at is None]
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
    try:
        function = within(FUNCTION_TIMEOUT, lambda: load_function(name, "verifier"))
    except Expired as error:
        raise InputError(f"verifier {name!r}: its module was not imported within {FUNCTION_TIMEOUT:g} s") from error
    return FunctionScorer(name, function, weight=weight, solved_at=_number(spelled, found["solved_at"], None))


def _number(spelled: str, text: str | None, default: float | None) -> float | None:
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError as error:
        raise InputError(f"verifier {spelled!r}: {text.strip()!r} is not a number") from error
    if not math.isfinite(number):
        raise InputError(f"verifier {spelled!r}: {text.strip()!r} is not a finite number")
    return number


def answer_of(row: dict, column: str | None) -> str:
    """The row's ground truth; of a worked solution that ends in `#### 42`, as in gsm8k, the part after the marks."""
    column = column or next((c for c in ANSWER_COLUMNS if row.get(c) is not None), ANSWER_COLUMNS[0])
    place, value = row.get("__where__", "a row"), row.get(column)
    if value is None:
        present = sorted(key for key in row if not key.startswith("__"))
        raise InputError(f"{place}: column {column!r} is missing; the row has {present}; use --answer_column")
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Number)) or value != value:
        came = f"{value!r:.80} ({type(value).__name__})"
        raise InputError(f"{place}: column {column!r} is {came}; expected the answer as text or a number")
    answer = str(value).rsplit("####", 1)[-1].strip()
    if not answer:
        raise InputError(f"{place}: column {column!r} has no answer: {value!r:.80}")
    return answer


def import_reasoning_gym():
    """reasoning_gym, which takes over a second to import; its logic puzzles need pycosat, arithmetic does not."""
    try:
        import pycosat  # noqa: F401
    except ImportError:
        # pycosat is C source without wheels, and reasoning_gym imports it whatever is used: without a compiler an
        # empty module stands in, and only the one logic-puzzle generator that calls it fails.
        sys.modules["pycosat"] = types.ModuleType("pycosat")
    try:
        import reasoning_gym
    except ImportError as error:
        raise InputError(f"reasoning_gym cannot be imported ({error}); pip install reasoning-gym==0.1.25") from error
    return reasoning_gym


class FunctionScorer:
    """A function of the user's own: (responses, rows) -> one score each, None where it does not apply.

    It runs in this process, in the main thread, so that it may hold state, a GPU or a client. What goes wrong in it
    (an exception, `sys.exit`, a call of more than FUNCTION_TIMEOUT seconds, a result that is no list of finite numbers)
    is an InputError. What cannot be caught in a process is `os._exit` or a crash in C code: the run ends there, and
    `--resume` continues from its last checkpoint.
    """

    def __init__(self, name: str, function: Callable, *, weight: float = 1.0, solved_at: float | None = None):
        self.name, self.function, self.weight, self.solved_at = name, function, weight, solved_at
        try:
            inspect.signature(function).bind([], [])
        except TypeError as error:
            raise InputError(f"verifier {name!r} must take (responses, rows): {error}") from error
        except ValueError:  # a function in C that does not tell
            pass

    def check(self, row: dict) -> None:
        """Any row will do: the function knows what it reads."""

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        texts, rows = [sample.text for sample in samples], [sample.row for sample in samples]
        try:
            return within(FUNCTION_TIMEOUT, lambda: self._called(texts, rows))
        except Expired as error:
            what = f"did not return within {FUNCTION_TIMEOUT:g} s; give what it waits for a time-out of its own"
            raise InputError(f"verifier {self.name!r} {what}; {_batch(samples)}") from error
        except SystemExit as error:
            what = f"called sys.exit({error.code!r}){_place(error)}; raise an exception to end the run"
            raise InputError(f"verifier {self.name!r} {what}; {_batch(samples)}") from error
        except Exception as error:
            what = " ".join(f"raised {type(error).__name__}: {error}".split())
            what += f"{_place(error)}; for a response that it cannot score, return None"
            raise InputError(f"verifier {self.name!r} {what}; {_batch(samples)}") from error

    def _called(self, texts: list[str], rows: list[dict]):
        scores = self.function(texts, rows)
        return list(scores) if isinstance(scores, types.GeneratorType) else scores


def _place(error: BaseException) -> str:
    """The line of the user's code that it came from; nothing where the call itself failed."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename not in (__file__, patience.__file__)]
    return f" ({Path(theirs[0].filename).name}, line {theirs[0].lineno})" if theirs else ""


def _batch(samples: Sequence[Sample]) -> str:
    """What a function was called with."""
    if not samples:
        return "it was called with no responses"
    return f"it was called with {len(samples)} responses, to {where(samples[0])} … {where(samples[-1])}"


class ReasoningGymVerifier:
    """The `score_answer` of the reasoning-gym dataset that made the row."""

    def __init__(
        self, dataset: str = "", answer_column: str | None = None, *, weight: float = 1.0, solved_at: float = 1.0
    ):
        self.name = f"reasoning_gym:{dataset}" if dataset else "reasoning_gym"
        self.weight, self.solved_at = weight, solved_at
        self.dataset, self.answer_column = dataset, answer_column
        self.tried: set[str] = set()
        self.broken: list[str] = []
        gym = import_reasoning_gym()
        self.scorer, self.datasets = gym.get_score_answer_fn, gym.factory.DATASETS
        if dataset:
            self._known(dataset, f"verifier {self.name!r}")

    def check(self, row: dict) -> None:
        """The row must have an answer, and name a dataset; of each dataset one row's own answer is scored."""
        answer, dataset = answer_of(row, self.answer_column), self._dataset_of(row)
        if dataset in self.tried:
            return
        self.tried.add(dataset)
        try:
            self.score(answer, row)
        except Exception as error:
            place, what = row.get("__where__", "a row"), in_a_line(error)
            raise InputError(f"{place}: reasoning_gym:{dataset} cannot score the row's own answer: {what}") from error

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        try:
            return within(FUNCTION_TIMEOUT, lambda: [self._score(sample) for sample in samples])
        except Expired as error:
            what = f"{self.name}: scoring took more than {FUNCTION_TIMEOUT:g} s; {_batch(samples)}"
            raise InputError(what) from error

    def _score(self, sample: Sample) -> float:
        try:
            return self.score(sample.text, sample.row)
        except Exception as error:  # of the dataset's generator, on nonsense: a wrong answer, and told
            self.broken.append(f"{where(sample)} raised {in_a_line(error)}"[:200])
            return 0.0

    def take_incidents(self) -> Incidents:
        """Responses that it could not score, since this was last called."""
        incidents = Incidents(len(self.broken), 0, self.broken[0] if self.broken else None)
        self.broken.clear()
        return incidents

    def _dataset_of(self, row: dict) -> str:
        place, metadata = row.get("__where__", "a row"), row.get("metadata")
        if metadata is not None and not isinstance(metadata, dict):
            came = f"{metadata!r:.80} ({type(metadata).__name__})"
            raise InputError(f"{place}: column 'metadata' is {came}; reasoning_gym expects an object")
        dataset = self.dataset or (metadata or {}).get("source_dataset")
        if not dataset:
            raise InputError(f"{place}: metadata has no source_dataset; name it with reasoning_gym:<dataset>")
        return self._known(dataset, place)

    def _known(self, dataset, place: str) -> str:
        if isinstance(dataset, str) and dataset in self.datasets:
            return dataset
        near = difflib.get_close_matches(str(dataset), self.datasets, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{place}: reasoning_gym has no dataset {dataset!r:.80}{hint}")

    def score(self, response: str, row: dict) -> float:
        """0 to 1, as the dataset's generator judges a response's text."""
        entry = {**row, "answer": answer_of(row, self.answer_column), "metadata": row.get("metadata") or {}}
        return float(self.scorer(self._dataset_of(row))(response.strip(), entry))


class MathVerifier:
    """1.0 where math-verify finds the response's final answer equal to the ground truth, else 0.0.

    Every answer is judged in a process of its own (workers.py): some expressions keep sympy busy for hours. One that
    takes more than `timeout` seconds of CPU, or too much memory, scores 0; these are counted and reported.
    """

    name = "math"
    judge = Path(__file__).with_name("math_judge.py")

    def __init__(
        self,
        answer_column: str | None = None,
        timeout: float = MATH_TIMEOUT,
        *,
        weight: float = 1.0,
        solved_at: float = 1.0,
    ):
        self.weight, self.solved_at = weight, solved_at
        self.answer_column = answer_column
        self.broken: list[str] = []
        self.restarts_told = 0
        try:
            self.pool = Pool(self.judge, cpu_seconds=timeout)
        except WorkerError as error:
            raise InputError(
                f"verifier 'math': math-verify does not start: {error}; pip install 'math-verify>=0.9'"
            ) from error

    def check(self, row: dict) -> None:
        """The row must have an answer."""
        answer_of(row, self.answer_column)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        cases = [(sample.text, answer_of(sample.row, self.answer_column)) for sample in samples]
        distinct = list(dict.fromkeys(cases))  # a group often agrees
        try:
            verdicts = dict(zip(distinct, self.pool.judge(distinct), strict=True))
        except WorkerError as error:
            place = "" if error.case is None else f" of {where(samples[cases.index(distinct[error.case])])}"
            remedy = "is there enough memory?"
            raise InputError(f"verifier 'math': an answer{place} cannot be judged: {error}; {remedy}") from error
        for sample, case in zip(samples, cases, strict=True):
            if verdicts[case].broke is not None:
                self.broken.append(f"{where(sample)} {verdicts[case].broke}")
        return [verdicts[case].score for case in cases]

    def take_incidents(self) -> Incidents:
        """Those since this was last called."""
        restarts = self.pool.restarts - self.restarts_told
        incidents = Incidents(len(self.broken), restarts, self.broken[0] if self.broken else None)
        self.broken.clear()
        self.restarts_told = self.pool.restarts
        return incidents

    def close(self) -> None:
        """End its processes; the next call starts others."""
        self.pool.close()
