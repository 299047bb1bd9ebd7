"""Whether a run learned: its held-out figure at the beginning and at the end, with the error of the difference.

A figure is a ratio of two sums over rows, `sums / weights`: for example, solved problems divided by problems, or nats
divided by tokens. Its standard error is that of a ratio over independent rows. If both evaluations have the same rows,
the error of the change is that of the rows' differences, because a row that was hard stays hard.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

ByRow = Mapping[str, Sequence[Sequence[float]]]
"""The key of a figure -> one list with the sum of each row, and a second one with its weight if that is not 1."""
NOTHING: dict[str, Any] = {}


class Evaluation(NamedTuple):
    """The results of an evaluation, as `Run.log` takes them."""

    metrics: dict[str, float] = NOTHING
    samples: Sequence[dict] = ()
    by_row: ByRow = NOTHING


# The number of standard errors beyond which a change counts, with about 95 % confidence: Student's quantile, because
# the error of few rows is itself uncertain. A quantile holds up to the degrees of freedom that are its key; above the
# last key it is 2.
STUDENT = {1: 12.7, 2: 4.3, 3: 3.2, 4: 2.8, 6: 2.5, 10: 2.3, 30: 2.1}
# A change must also be a larger share of the figure than this; a smaller one does not show in three digits.
SMALLEST = 1e-3
# The scores that scorers give a response without an answer.
FAILED = (0, -1)
# The training figure is compared over at most this many steps at either end of a run.
WINDOW = 10


class Figure(NamedTuple):
    """A metric that says whether a run learned."""

    key: str
    """Its key in metrics.jsonl."""
    name: str
    """Its name in a sentence."""
    better: str = "rose"
    """The verdict that is an improvement: "rose" or "fell"."""


# The first of these that a run has is its held-out figure. Sampled accuracy is preferred to greedy accuracy, which
# stops rising earlier, and it comes before the score, which also pays for other things.
HELD_OUT = (
    Figure("eval/distill/kl", "KL to the teacher (nats per token)", "fell"),
    Figure("eval/accuracy_sampled", "accuracy of sampled responses"),
    Figure("eval/score", "score of sampled responses"),
    Figure("eval/rm/accuracy", "accuracy on pairs"),
    Figure("eval/dpo/accuracy", "accuracy on pairs"),
    Figure("eval/kto/accuracy", "accuracy on marked responses"),
    Figure("eval/loss", "loss (nats per token)", "fell"),
)
# All figures whose error is known.
WITH_ERROR = (*HELD_OUT, Figure("eval/accuracy_greedy", "accuracy of greedy responses"))
# Figures that are printed beside that of the run, without a verdict, and their names there.
BESIDE = {
    "eval/accuracy_sampled": "solved",
    "eval/accuracy_greedy": "greedy",
    "eval/score": "score",
    "eval/dpo/loss": "loss",
    "eval/kto/loss": "loss",
    "eval/rm/loss": "loss",
    "eval/loss": "loss",
}
# The figures on training rows, for a run without held-out ones; again the first one counts.
TRAINING = (
    Figure("reward", "reward"),
    Figure("objective/scores", "score"),
    Figure("distill/kl", "KL to the teacher (nats per token)", "fell"),
    Figure("train/rm/loss", "loss", "fell"),
    Figure("train/dpo/loss", "loss", "fell"),
    Figure("train/kto/loss", "loss", "fell"),
    Figure("train/loss", "loss (nats per token)", "fell"),
)
# The figure of a run that trains only its critic.
CRITIC = Figure("val/var_explained", "explained variance of the critic")


def quantile(freedom: float) -> float:
    """Return the number of standard errors beyond which a change with so many degrees of freedom counts."""
    return next((errors for most, errors in STUDENT.items() if freedom <= most), 2)


class Change(NamedTuple):
    """A figure at the beginning and at the end of a run, with standard errors, which are NaN if they are not known."""

    figure: Figure
    when: tuple[str, str]
    """The names of both moments, such as "step 0"."""
    start: float
    end: float
    start_error: float = math.nan
    end_error: float = math.nan
    error: float = math.nan
    """The standard error of the difference."""
    rows: int = 0
    """The number of held-out rows; 0 for a figure of training."""
    freedom: float = math.inf
    """Degrees of freedom of that error."""

    @property
    def verdict(self) -> str:
        """Return "rose", "fell", "no change" (none beyond the error), or "unknown" if the error is not known."""
        difference = self.end - self.start
        if self.is_small or not (math.isnan(self.error) or self.is_seen):
            return "no change"
        if math.isnan(self.error):
            return "unknown"
        return "rose" if difference > 0 else "fell"

    @property
    def is_seen(self) -> bool:
        """Return True if the change is beyond its error."""
        return abs(self.end - self.start) > quantile(self.freedom) * self.error

    def may_equal(self, other: "Change") -> bool:
        """Return True if this change and another one of the same kind may be equally large, within their errors."""
        difference = (self.end - self.start) - (other.end - other.start)
        error = math.hypot(self.error, other.error)
        return abs(difference) <= quantile(min(self.freedom, other.freedom)) * error

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
        """Return the verdict as the verb of a sentence about the figure."""
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
        """Return the change of the figure in words, with both values and their errors."""
        start = f"{with_error(self.start, self.start_error)} ({self.when[0]})"
        end = f"{with_error(self.end, self.end_error)} ({self.when[1]})"
        colon = ":" if self.verdict == "no change" else ""
        line = f"{self.figure.name} {self.in_words}{colon} from {start} to {end}"
        if math.isnan(self.error):
            return line
        by = with_error(self.end - self.start, self.error, sign="+")
        return f"{line}, a change of {by}" + (f" on {self.rows} rows" if self.rows else "")


def with_error(value: float, error: float, sign: str = "") -> str:
    """Return a value and its standard error as text, without the error if it is not known."""
    text = f"{value:{sign}.3g}"
    return text if math.isnan(error) else f"{text} ± {error:.2g}"


def residuals(columns: Sequence[Sequence[float]]) -> list[float]:
    """Return how much each row moves its figure, times the number of rows; the mean of these numbers is 0.

    `columns` are the sums of the rows, and optionally their weights, as in `ByRow`.
    """
    # The linearisation of sum(sums) / sum(weights), whose residuals have the error of the ratio.
    sums = columns[0]
    weights = columns[1] if len(columns) > 1 else [1.0] * len(sums)
    scale = len(sums) / sum(weights)
    ratio = sum(sums) / sum(weights)
    return [(s - ratio * w) * scale for s, w in zip(sums, weights, strict=True)]


def error_of(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values; NaN if there are fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def held_out_change(
    figure: Figure,
    first: tuple[int, Mapping[str, Any], ByRow],
    last: tuple[int, Mapping[str, Any], ByRow],
    eval_size: float,
) -> Change:
    """Return the change of a figure between two evaluations, each given as its step, its metrics and its rows.

    If the rows of the figure are not known, an accuracy has the error of `eval_size` independent rows, and any other
    figure has none.
    """
    (begin, before, rows_before), (end, after, rows_after) = first, last
    values = float(before[figure.key]), float(after[figure.key])
    known = Change(figure, (f"step {begin}", f"step {end}"), *values)
    if figure.key in rows_before and figure.key in rows_after:
        both = residuals(rows_before[figure.key]), residuals(rows_after[figure.key])
        errors = error_of(both[0]), error_of(both[1])
        error = math.hypot(*errors)
        # Both have the same rows, so the difficulty of each row cancels in its difference.
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
    """Return the change of a figure from the first steps of a run to its last ones; None for fewer than four steps.

    `values` are pairs of a step and the figure in it.
    """
    count = min(WINDOW, len(values) // 2)
    if count < 2:
        return None
    first, last = values[:count], values[-count:]
    start, end = ([value for _, value in part] for part in (first, last))
    errors = error_of(start), error_of(end)
    when = f"steps {first[0][0]} to {first[-1][0]}", f"steps {last[0][0]} to {last[-1][0]}"
    known = Change(figure, when, mean(start), mean(end), *errors, math.hypot(*errors))
    return known._replace(freedom=2 * (count - 1))
