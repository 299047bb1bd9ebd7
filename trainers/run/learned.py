"""Did a run learn? Its held-out figure at the beginning and at the end, with the error of the difference.

A figure is a ratio of two sums over rows, `sums / weights`: solved problems by problems, or nats by tokens. Its error
is that of a ratio over independent rows; the error of a change is that of the rows' differences where both evaluations
have the same rows, because a row that was hard stays hard.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

ByRow = Mapping[str, Sequence[Sequence[float]]]
"""Key of an evaluation -> its sum of each row, and the weight of each row where that is not 1."""
NOTHING: dict[str, Any] = {}


class Evaluation(NamedTuple):
    """What `Run.log` takes of an evaluation."""

    metrics: dict[str, float] = NOTHING
    samples: Sequence[dict] = ()
    by_row: ByRow = NOTHING


# A change counts from so many standard errors on, about 95 %: Student's quantile by the degrees of freedom up to which
# it holds, since the error of few rows is itself uncertain. Of more of them it is 2.
STUDENT = {1: 12.7, 2: 4.3, 3: 3.2, 4: 2.8, 6: 2.5, 10: 2.3, 30: 2.1}
# And from such a share of the figure on: a smaller one does not show in three digits, however small its error.
SMALLEST = 1e-3
# What scorers give a response without an answer.
FAILED = (0, -1)
# At most so many steps at either end of a run stand for its training figure.
WINDOW = 10


class Figure(NamedTuple):
    """What says whether a run learned."""

    key: str
    name: str
    better: str = "rose"


# The first of them that a run has is its figure. Sampled accuracy comes before greedy accuracy, which reaches its
# highest value first, and before the score, which also pays for other things.
HELD_OUT = (
    Figure("eval/distill/kl", "KL to the teacher (nats per token)", "fell"),
    Figure("eval/accuracy_sampled", "accuracy of sampled responses"),
    Figure("eval/score", "score of sampled responses"),
    Figure("eval/rm/accuracy", "accuracy on pairs"),
    Figure("eval/dpo/accuracy", "accuracy on pairs"),
    Figure("eval/kto/accuracy", "accuracy on marked responses"),
    Figure("eval/loss", "loss (nats per token)", "fell"),
)
# All that have an error of their own.
WITH_ERROR = (*HELD_OUT, Figure("eval/accuracy_greedy", "accuracy of greedy responses"))
# Beside the figure, without a verdict.
BESIDE = {
    "eval/accuracy_sampled": "solved",
    "eval/accuracy_greedy": "greedy",
    "eval/score": "score",
    "eval/dpo/loss": "loss",
    "eval/kto/loss": "loss",
    "eval/rm/loss": "loss",
    "eval/loss": "loss",
}
# Of training, for a run without held-out rows.
TRAINING = (
    Figure("reward", "reward"),
    Figure("objective/scores", "score"),
    Figure("distill/kl", "KL to the teacher (nats per token)", "fell"),
    Figure("train/rm/loss", "loss", "fell"),
    Figure("train/dpo/loss", "loss", "fell"),
    Figure("train/kto/loss", "loss", "fell"),
    Figure("train/loss", "loss (nats per token)", "fell"),
)
# A run that trains its critic alone.
CRITIC = Figure("val/var_explained", "explained variance of the critic")


class Change(NamedTuple):
    """A figure at the beginning and at the end of a run. An error that is not known is NaN."""

    figure: Figure
    when: tuple[str, str]
    start: float
    end: float
    start_error: float = math.nan
    end_error: float = math.nan
    error: float = math.nan
    """Standard error of the difference."""
    rows: int = 0
    freedom: float = math.inf
    """Degrees of freedom of that error."""

    @property
    def verdict(self) -> str:
        """Return "rose", "fell", "no change", which is one within the error, or "unknown" without an error."""
        difference = self.end - self.start
        if self.is_small or not (math.isnan(self.error) or self.is_seen):
            return "no change"
        if math.isnan(self.error):
            return "unknown"
        return "rose" if difference > 0 else "fell"

    @property
    def is_seen(self) -> bool:
        """Return True if the change is beyond its error."""
        errors = next((many for most, many in STUDENT.items() if self.freedom <= most), 2)
        return abs(self.end - self.start) > errors * self.error

    @property
    def is_small(self) -> bool:
        """Return True if the change is too small a part of the figure to count, whatever its error."""
        return abs(self.end - self.start) <= SMALLEST * max(abs(self.start), abs(self.end))

    @property
    def learned(self) -> bool:
        """Return True if the figure is better than it was."""
        return self.verdict == self.figure.better

    @property
    def in_words(self) -> str:
        """Return the verdict as the verb of a sentence."""
        if self.verdict == "unknown":
            return "went"
        if self.verdict != "no change":
            return self.verdict
        return (
            f"changed by less than {SMALLEST:.1%}"
            if self.is_seen
            else "shows no change beyond the error"
        )

    def described(self) -> str:
        """Return what became of the figure, in words."""
        start = f"{with_error(self.start, self.start_error)} ({self.when[0]})"
        end = f"{with_error(self.end, self.end_error)} ({self.when[1]})"
        colon = ":" if self.verdict == "no change" else ""
        line = f"{self.figure.name} {self.in_words}{colon} from {start} to {end}"
        if math.isnan(self.error):
            return line
        by = with_error(self.end - self.start, self.error, sign="+")
        return f"{line}, a change of {by}" + (f" on {self.rows} rows" if self.rows else "")


def with_error(value: float, error: float, sign: str = "") -> str:
    """Return a value and its standard error, which is left out where it is not known."""
    text = f"{value:{sign}.3g}"
    return text if math.isnan(error) else f"{text} ± {error:.2g}"


def residuals(columns: Sequence[Sequence[float]]) -> list[float]:
    """Return how far each row moves its figure, times the number of rows; their mean is 0."""
    sums = columns[0]
    weights = columns[1] if len(columns) > 1 else [1.0] * len(sums)
    scale = len(sums) / sum(weights)
    ratio = sum(sums) / sum(weights)
    return [(s - ratio * w) * scale for s, w in zip(sums, weights, strict=True)]


def error_of(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values; NaN of fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def held_out_change(
    figure: Figure,
    first: tuple[int, Mapping[str, Any], ByRow],
    last: tuple[int, Mapping[str, Any], ByRow],
    eval_size: float,
) -> Change:
    """Compare two evaluations, each its step, its metrics and its rows; without rows, an accuracy has the error of
    `eval_size` independent rows.
    """
    (begin, before, rows_before), (end, after, rows_after) = first, last
    values = float(before[figure.key]), float(after[figure.key])
    known = Change(figure, (f"step {begin}", f"step {end}"), *values)
    if figure.key in rows_before and figure.key in rows_after:
        both = residuals(rows_before[figure.key]), residuals(rows_after[figure.key])
        errors = error_of(both[0]), error_of(both[1])
        error = math.hypot(*errors)
        # The same rows: what they have in common cancels.
        if len(both[0]) == len(both[1]):
            error = error_of([b - a for a, b in zip(*both, strict=True)])
        rows = len(both[1])
        return known._replace(
            start_error=errors[0], end_error=errors[1], error=error, rows=rows, freedom=rows - 1
        )
    if "accuracy" in figure.key and eval_size > 0:
        errors = [math.sqrt(max(value * (1 - value), 0) / eval_size) for value in values]
        return known._replace(start_error=errors[0], end_error=errors[1], error=math.hypot(*errors))
    return known


def training_change(figure: Figure, values: Sequence[tuple[int, float]]) -> Change | None:
    """Compare the first steps of a run with its last ones; None where there are fewer than four."""
    count = min(WINDOW, len(values) // 2)
    if count < 2:
        return None
    first, last = values[:count], values[-count:]
    start, end = ([value for _, value in part] for part in (first, last))
    errors = error_of(start), error_of(end)
    when = f"steps {first[0][0]} to {first[-1][0]}", f"steps {last[0][0]} to {last[-1][0]}"
    known = Change(figure, when, mean(start), mean(end), *errors, math.hypot(*errors))
    return known._replace(freedom=2 * (count - 1))
