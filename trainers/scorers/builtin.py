r"""Scorers by name that compare a response with the row's answer, or look at its text or length.

    exact_match    regex:answer: (\d+)    format    length:100

Each is a `Scorer` (rollouts/types.py). docs/verifiers.md has their definitions.
"""

import numbers
import unicodedata
from collections.abc import Collection, Iterable, Sequence

import regex

from ..base.text import InputError
from ..data.forms import FIX, as_list, at_path
from ..data.rows import BadRow
from ..rollouts.types import NO_PROGRESS, Progress, Sample, one_line

ANSWER_COLUMNS = ("ground_truth", "answer", "solution")
# One <think> and one <answer>, in this order, and nothing outside them. `(?s)` lets the dot match ends of lines.
THINK_THEN_ANSWER = (
    r"(?s)\A\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*\Z"
)
BOXED = regex.compile(r"\\boxed\{((?:[^{}]|\{(?1)\})*)\}")


def answers_of(row: dict, column: str | None) -> list[str]:
    """Return the row's right answers; of a worked solution what follows `####`, as in gsm8k, or its last box.

    Raises:
        BadRow: the row has none, or they cannot be compared with.
    """
    # A column that is there and null is passed over, as in tables that several datasets were joined to.
    columns = ANSWER_COLUMNS if column is None else (column,)
    name = next((name for name in columns if row.get(name) is not None), columns[0])
    value, where, level = at_path(row, name)
    if value is None:
        missing = f"column {name!r} is missing or null"
        if column is None:
            missing = f"there is no answer in {', '.join(columns[:-1])} or {columns[-1]}"
        remedy = "name its column with --answer_column, or fix the row"
        raise BadRow(missing, remedy, got=f"{where} {level}")
    answers = [_answer(name, one) for one in as_list(value)]
    # The answers to several questions, such as letters of choices, repeat themselves.
    if len({*answers}) < max(1, len(answers)) or {"true", "false"} <= {*answers}:
        reason = f"column {name!r} must list right answers, of which any counts, each once, and not true and false"
        remedy = "give each of several questions a row, or score with a function"
        raise BadRow(reason, remedy, got=f"got {value!r:.80}")
    return answers


def _answer(name: str, value: object) -> str:
    # NaN is how a missing cell of a table is read.
    if not isinstance(value, (str, numbers.Number)) or value != value:
        got = f"got {one_line(value)} ({type(value).__name__})"
        raise BadRow(f"column {name!r} must be text, a number, true or false, or a list", got=got)

    # Of a worked solution what follows the last marks, or the last box; other answers are taken whole.
    text = str(value).lower() if isinstance(value, bool) else str(value)
    answer = text.rsplit("####", 1)[-1].strip()
    if name.rpartition(".")[2] == "solution":
        answer = ([answer] + BOXED.findall(answer))[-1].strip()
    if not answer:
        raise BadRow(f"column {name!r} has no answer", FIX, got=f"got {value!r:.80}")
    return answer


def normalized(text: str) -> str:
    """Return the text as answers are compared: in Unicode's form NFC, and white space as one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


class BaseScorer:
    """The base of scorers: what `Scorer` names, and the column of the row's answer (None: `ANSWER_COLUMNS`)."""

    compares = False
    """With the row's answers, of which any counts; then a score of 1 is solved."""
    ignore_case = False
    longest = ""
    """The longest answer of the rows that were checked; where any of several is right, the shortest one counts."""
    progress: Progress = NO_PROGRESS

    def __init__(
        self,
        name: str,
        weight=1.0,
        solved_at: float | None = None,
        answer_column: str | None = None,
    ):
        self.name = name
        self.weight = weight
        # What compares with an answer gives 1 where it is right; for other scores the user says what is solved.
        self.solved_at = 1.0 if solved_at is None and self.compares else solved_at
        self.answer_column = answer_column

    def answer(self, row: dict) -> str | None:
        """Return the row's answer, or all of them, which samples are shown with; None if it has none."""
        try:
            answers = answers_of(row, self.answer_column)
        except BadRow:
            return None
        return f"any of: {', '.join(answers)}" if len(answers) > 1 else answers[0]

    @property
    def columns(self) -> Collection[str] | None:
        """The columns of a row that the scorer may read; None is any."""
        if not self.compares:
            return ()
        column = self.answer_column
        return ANSWER_COLUMNS if column is None else (column, column.partition(".")[0])

    def is_right(self, text: str, row: dict) -> bool:
        """Return True if a text is one of the row's answers."""
        # Both sides are normalised alike, so how a dataset was typed does not matter.
        texts = [normalized(one) for one in (text, *answers_of(row, self.answer_column))]
        if self.ignore_case:
            texts = [one.casefold() for one in texts]
        return texts[0] in texts[1:]

    def read_ahead(self, rows: Iterable[dict]) -> None:
        """Read nothing."""

    def check(self, row: dict) -> None:
        """Check that the row has an answer, if this scorer compares with one."""
        if self.compares:
            shortest = min(answers_of(row, self.answer_column), key=len)
            self.longest = max(self.longest, shortest, key=len)


class ExactMatch(BaseScorer):
    """1.0 where the whole response equals the row's answer, both `normalized`, else 0.0."""

    compares = True

    def __init__(self, *, ignore_case: bool = False, **common):
        super().__init__(**common)
        self.ignore_case = ignore_case

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [float(self.is_right(sample.text, sample.row)) for sample in samples]


class Pattern(BaseScorer):
    """1.0 where a regular expression matches, else 0.0.

    Args:
        pattern: a pattern of the package `regex`, which reads those of Python's `re` and more. If it has a group, the
            group named `answer`, or else the first one, is compared with the row's answer, in the last place where the
            pattern matches.
        **common: as `BaseScorer` takes them.
    """

    def __init__(self, pattern: str, **common):
        try:
            self.pattern = regex.compile(pattern)
        except regex.error as error:
            raise InputError(
                f"verifier 'regex': the pattern {pattern!r} does not compile: {error}"
            ) from error
        self.compares = self.pattern.groups > 0
        self.group = self.pattern.groupindex.get("answer", 1)
        super().__init__(**common)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        # The last place counts, since a response may try several answers before the one that it gives.
        scores = []
        for sample in samples:
            matches = list(self.pattern.finditer(sample.text))
            right = bool(matches)
            if self.compares and matches:
                last = matches[-1][self.group]
                right = last is not None and self.is_right(last, sample.row)
            scores.append(float(right))
        return scores


class Length(BaseScorer):
    """The cost of a response of n tokens, its stop token included: -min(1, |n - target| / target)."""

    def __init__(self, target: str, **common):
        super().__init__(**common)
        if not target.isdecimal() or int(target) == 0:
            expected = "expected a whole number of tokens above 0 after the colon"
            raise InputError(f"verifier 'length:{target}': {expected}")
        self.target = int(target)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        lengths = [len(sample.response.sampled(sample.response.ids)) for sample in samples]
        return [0.0 - min(1.0, abs(length - self.target) / self.target) for length in lengths]
