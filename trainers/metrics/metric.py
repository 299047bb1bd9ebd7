"""What the tables of metrics are made of."""

from collections.abc import Callable
from typing import NamedTuple


class Metric(NamedTuple):
    """One key of metrics.jsonl."""

    unit: str
    definition: str
    adds: str
    """How it comes together over micro-batches and ranks. "sum": each part is divided by the whole step's count, and
    the parts are added. "moments": computed from such sums. "min", "max". "whole": computed once, of the whole step.
    Over the optimizer updates of one step all are averaged, but for `lr`, which is the last."""
    of: str | Callable[[dict[str, float]], float] | None = None
    """The bare name of a loss's metric, or a function of several; None where the trainer computes it by itself."""
    healthy: str = ""
    """The values of a run that goes well, where theory or a measurement says them; empty where nothing does."""
    outside: str = ""
    """What other values mostly mean, and what to change."""
