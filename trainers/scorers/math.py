"""Scorers that `--verifiers` names: mathematics and reasoning-gym's own here, others in checkers.py and functions.py.

Each is a `Scorer` (rollout.py): it knows its weight, and from which score on a sample counts as solved. What each may
do to a run, and what the limits are: docs/verifiers.md.
"""

import difflib
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.guests import Expired, load_function
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.options.text import in_a_line
from fused_rl.trainers.rollouts.types import Incidents, Sample, Scorer, where
from fused_rl.trainers.scorers import functions
from fused_rl.trainers.scorers.builtin import ANSWER_COLUMNS, THINK_THEN_ANSWER, ExactMatch, Length, Pattern, answer_of
from fused_rl.trainers.scorers.functions import FunctionScorer
from fused_rl.trainers.scorers.limits import Pool, WorkerError, within
from fused_rl.trainers.scorers.math_judge import unfit
from fused_rl.trainers.scorers.options import FUNCTION, KINDS, Spelled, read

MATH_TIMEOUT = 1.0  # seconds of CPU for one answer: they take 0.02 to 0.3, or never end
OTHER_JUDGES = "leave out the row, or name what can with --verifiers: exact_match, regex('…') or a function of yours"


def load_scorers(spelled: str | list[Spelled], answer_column: str | None = None) -> list[Scorer]:
    """The scorers that a config names, comma-separated: `math`, or `1*math, 0.2*my_module:format_bonus`.

    A sample is solved when those say so that compare with an answer (`math`, `reasoning_gym`, `exact_match`, a `regex`
    with a group: a score of 1), whatever else is among the scorers; where there is none, functions and patterns decide
    by 1 too. `my_module:f>=0.5` gives any scorer a threshold of its own.

    Args:
        spelled: per scorer `[weight*]name[>=threshold]`. Names: `math` (1.0 where the final answer equals the ground
            truth), `reasoning_gym` (the row's `metadata` names the dataset), `reasoning_gym:chain_sum`, `exact_match`,
            `regex('pattern')`, `format`, `length(target=100)` (checkers.py), or `module:function` (functions.py).
        answer_column: of the ground truth, for those that compare with it; None takes ground_truth or answer.

    All ranks call it together: where one cannot load its scorers, all raise.
    """
    with ranks.together():
        parts = read(spelled) if isinstance(spelled, str) else spelled
        scorers = [_load(part, answer_column) for part in parts]
    if all(scorer.solved_at is None for scorer in scorers):
        for scorer in scorers:
            if not isinstance(scorer, Length):
                scorer.solved_at = 1.0
    return scorers


def _unfit_for_math(row: dict, answer_column: str | None) -> str | None:
    """The row's answer and what it is, where mathematics cannot judge it."""
    answer = answer_of(row, answer_column)
    what = unfit(answer)
    return None if what is None else f"the answer {answer!r:.80}: {what}"


def verifiers_for(rows: Rows, answer_column: str | None) -> tuple[str, str]:
    """The verifiers that fit the rows, and why, where none are named; refuses to guess."""
    row = rows.rows[0]
    metadata = row.get("metadata")
    if isinstance(metadata, dict) and metadata.get("source_dataset"):
        return "reasoning_gym", "the rows name their dataset in metadata.source_dataset"
    found = [column for column in (answer_column, *ANSWER_COLUMNS) if column and row.get(column) is not None]
    if not found:
        present = sorted(key for key in row if not key.startswith("__"))
        remedy = "name scorers with --verifiers, or the column of the answers with --answer_column"
        raise InputError(f"{rows.where(0)}: nothing to judge responses by; the row has {present}; {remedy}")
    for i, row in enumerate(rows.rows):
        problem = _unfit_for_math({**row, "__where__": rows.where(i)}, answer_column)
        if problem is not None:
            raise InputError(f"{rows.where(i)}: nothing says what judges {problem}; {OTHER_JUDGES}")
    return "math", f"every answer, in column {found[0]!r}, is a number or a formula"


def check_loadable(spelled: list[Spelled], *, imports: bool) -> None:
    """Raise what loading would raise, as far as it can be known without models and processes.

    Args:
        spelled: the scorers.
        imports: also import the modules of functions, and reasoning_gym where a dataset of it is named.
    """
    for part in spelled:
        if part.kind == "math" and importlib.util.find_spec("math_verify") is None:
            raise InputError("verifier 'math': math-verify is not installed; pip install 'math-verify>=0.9'")
        lasting = part.kind in ("math", "reward_model") or (part.kind == "reasoning_gym" and not part.detail)
        needs_imports = part.kind in (FUNCTION, "reasoning_gym")
        if not lasting and (imports or not needs_imports):
            _load(part, None)


def _load(part: Spelled, answer_column: str | None) -> Scorer:
    judged = {"weight": 1.0 if part.weight is None else part.weight}
    if part.solved_at is not None:
        judged["solved_at"] = part.solved_at
    named = {"name": part.name, **judged}
    if part.kind == "math":
        return MathVerifier(answer_column, **judged)
    if part.kind == "reasoning_gym":
        return ReasoningGymVerifier(part.detail, answer_column, **judged)
    if part.kind == "exact_match":
        return ExactMatch(answer_column, **part.arguments, **named)
    if part.kind == "regex":
        if "pattern" not in part.arguments:
            raise InputError(f"verifier {part.text!r}: expected a pattern, as in regex('answer: (.+)')")
        return Pattern(part.arguments["pattern"], answer_column, **named)
    if part.kind == "format":
        return Pattern(part.arguments.get("pattern", THINK_THEN_ANSWER), whole=True, **named)
    if part.kind == "length":
        return Length(**part.arguments, **named)
    return FunctionScorer(part.name, _function(part), **judged)


def _function(part: Spelled) -> Callable:
    try:
        return within(functions.FUNCTION_TIMEOUT, lambda: load_function(part.detail, "verifier"))
    except Expired as error:
        late = f"its module was not imported within {functions.FUNCTION_TIMEOUT:g} s"
        raise InputError(f"verifier {part.name!r}: {late}") from error
    except InputError as error:
        near = difflib.get_close_matches(part.detail.partition(":")[0], KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{error}{hint}") from error


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
            return within(functions.FUNCTION_TIMEOUT, lambda: [self._score(sample) for sample in samples])
        except Expired as error:
            rows = f"{len(samples)} responses, to {where(samples[0])} … {where(samples[-1])}"
            what = f"{self.name}: scoring took more than {functions.FUNCTION_TIMEOUT:g} s; it was called with {rows}"
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
        """The row must have an answer, and one that mathematics can judge."""
        problem = _unfit_for_math(row, self.answer_column)
        if problem is not None:
            raise InputError(f"{row.get('__where__', 'a row')}: verifier 'math' cannot judge {problem}; {OTHER_JUDGES}")

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
