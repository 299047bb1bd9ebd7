"""Whether a run learned: its held-out figure at the beginning and at the end, with the error of the difference.

A figure is a ratio of two sums over rows, `sums / weights`: for example, solved problems divided by problems, or nats
divided by tokens. Its standard error is that of a ratio over independent rows. Both evaluations have the same rows, so
the error of the change is that of the rows' differences, because a row that was hard stays hard.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from .metrics import ByRow

# The number of standard errors beyond which a change counts, with about 95 % confidence: Student's quantile, because
# the error of few rows is itself uncertain. A quantile holds up to the degrees of freedom that are its key.
STUDENT = {1: 12.7, 2: 4.3, 3: 3.2, 4: 2.8, 6: 2.5, 10: 2.3, 30: 2.1, math.inf: 2.0}
# A change must also be a larger share of the figure than this; a smaller one does not show in three digits.
MIN_RELATIVE_CHANGE = 1e-3
# The training figure is compared over at most this many steps at either end of a run.
WINDOW = 10


class Figure(NamedTuple):
    """A metric that says whether a run learned."""

    key: str
    """Its key in metrics.jsonl."""
    name: str
    """Its name in a sentence."""
    better: int = 1
    """1 if it should rise, -1 if it should fall."""


# The first of these that a run has is its held-out figure. Sampled accuracy is preferred to greedy accuracy, which
# stops rising earlier, and it comes before the score, which also pays for other things.
HELD_OUT = (
    Figure("eval/distill/kl", "KL to the teacher (nats per token)", -1),
    Figure("eval/accuracy_sampled", "accuracy of sampled responses"),
    Figure("eval/score", "score of sampled responses"),
    Figure("eval/rm/accuracy", "accuracy on pairs"),
    Figure("eval/dpo/accuracy", "accuracy on pairs"),
    Figure("eval/kto/accuracy", "accuracy on marked responses"),
    Figure("eval/loss", "loss (nats per token)", -1),
)
GREEDY = Figure("eval/accuracy_greedy", "accuracy of greedy responses")
# Figures that are printed beside that of the run, without a verdict, and their names there.
SIDE_FIGURES = {
    "eval/accuracy_sampled": "solved",
    "eval/accuracy_greedy": "greedy",
    "eval/score": "score",
    "eval/dpo/loss": "loss",
    "eval/kto/loss": "loss",
    "eval/rm/loss": "loss",
    "eval/loss": "loss",
}
# The figures on training rows, for a run without held-out ones; again the first one counts.
REWARDS = Figure("reward", "reward"), Figure("objective/scores", "score")
TRAINING = (
    *REWARDS,
    Figure("distill/kl", "KL to the teacher (nats per token)", -1),
    Figure("train/rm/loss", "loss", -1),
    Figure("train/dpo/loss", "loss", -1),
    Figure("train/kto/loss", "loss", -1),
    Figure("train/loss", "loss (nats per token)", -1),
)
# The figure of a run that trains only its critic.
CRITIC = Figure("val/var_explained", "explained variance of the critic")


class Change(NamedTuple):
    """A figure at the beginning and at the end of a run."""

    figure: Figure
    when: tuple[str, str]
    """The names of both moments, such as "step 0"."""
    start: float
    end: float
    error: float
    """The standard error of the difference; NaN if it is not known."""
    freedom: float
    """Degrees of freedom of that error."""
    rows: int = 0
    """The number of held-out rows; 0 for a figure of training."""

    @property
    def allowed(self) -> float:
        """The largest change that is within the error; NaN if that is not known."""
        return self.error * next(count for limit, count in STUDENT.items() if self.freedom <= limit)

    @property
    def direction(self) -> int:
        """1 if the figure rose beyond the error, -1 if it fell, and 0 otherwise."""
        # NaN, which is the first argument, stays NaN, and no change is beyond it.
        beyond = max(self.allowed, MIN_RELATIVE_CHANGE * max(abs(self.start), abs(self.end)))
        difference = self.end - self.start
        return (difference > beyond) - (difference < -beyond)

    @property
    def gain(self) -> int:
        """1 if the figure became better beyond the error, -1 if worse, and 0 otherwise."""
        return self.direction * self.figure.better

    def __str__(self) -> str:
        is_known = not math.isnan(self.error)
        is_beyond = abs(self.end - self.start) > self.allowed
        unchanged = (
            "changed by less than a thousandth,"
            if is_beyond
            else "shows no change beyond the error:"
        )
        unchanged = unchanged if is_known else "went"
        verb = {1: "rose", -1: "fell", 0: unchanged}[self.direction]
        text = f"{self.figure.name} {verb} from {self.start:.3g} ({self.when[0]}) to {self.end:.3g} ({self.when[1]})"
        if is_known:
            text += f", a change of {self.end - self.start:+.3g} ± {self.error:.2g}"
        return text + (f" on {self.rows} rows" if is_known and self.rows else "")


def residuals(columns: Sequence[Sequence[float]]) -> list[float]:
    """Return how much each row moves its figure, times the number of rows; the mean of these numbers is 0.

    `columns` are the sums of the rows, and optionally their weights, as in `ByRow`.
    """
    # The linearisation of sum(sums) / sum(weights), whose residuals have the error of the ratio.
    sums = columns[0]
    weights = columns[1] if len(columns) > 1 else [1.0] * len(sums)
    ratio = sum(sums) / sum(weights)
    return [(s - ratio * w) / mean(weights) for s, w in zip(sums, weights, strict=True)]


def error_of(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values; NaN if there are fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def held_out_change(
    figure: Figure,
    first: tuple[int, Mapping[str, Any], ByRow],
    last: tuple[int, Mapping[str, Any], ByRow],
) -> Change:
    """Return the change of a figure between two evaluations, each given as its step, its metrics and its rows."""
    (begin, before, rows_before), (end, after, rows_after) = first, last
    when = f"step {begin}", f"step {end}"
    columns_by_row = (rows[figure.key] for rows in (rows_before, rows_after) if figure.key in rows)
    row_residuals = [residuals(columns) for columns in columns_by_row]
    error, count = math.nan, len(row_residuals[-1]) if row_residuals else 0
    if len(row_residuals) == 2 and len(row_residuals[0]) == count:
        error = error_of([b - a for a, b in zip(*row_residuals, strict=True)])
    values = float(before[figure.key]), float(after[figure.key])
    return Change(figure, when, *values, error, freedom=count - 1, rows=count)


def training_change(figure: Figure, values: Sequence[tuple[int, float]]) -> Change | None:
    """Return the change of a figure from the first steps of a run to its last ones; None for fewer than four steps.

    `values` are pairs of a step and the figure in it.
    """
    count = min(WINDOW, len(values) // 2)
    if count < 2:
        return None
    ends = values[:count], values[-count:]
    first_steps, last_steps = (f"steps {window[0][0]} to {window[-1][0]}" for window in ends)
    start, end = ([value for _, value in window] for window in ends)
    error = math.hypot(error_of(start), error_of(end))
    return Change(
        figure, (first_steps, last_steps), mean(start), mean(end), error, freedom=2 * (count - 1)
    )
