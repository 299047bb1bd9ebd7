"""How far the metrics of healthy runs go: bands.json, measured on the demos by `python -m bench bands`.

A band is in a unit that other runs have too: a metric's own beginning, a nat per token.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("bands.json")
MARGIN = 2.0
"""A run may go so many times further than the demos did: they are a few seeds of one small task."""


class Unit(NamedTuple):
    """What a value is told in."""

    words: str
    first: int = 0
    """The median of so many first values above 0 is 1; 0: the value as it is."""
    per: str | None = None
    """Divided by this metric of the same step."""


BEGINNING = Unit("times its first value", first=1)
FIRST_TEN = Unit("times its first 10 steps' median", first=10)
PLAIN = Unit("")
UNITS = {
    "policy/entropy_avg": BEGINNING,
    "policy/approxkl_avg": Unit("nats"),
    "policy/clipfrac_avg": PLAIN,
    "val/ratio": PLAIN,
    "val/ratio_var": PLAIN,
    "val/stop_rate": PLAIN,
    "val/var_explained": PLAIN,
    "objective/kl_exact": Unit("nats per token", per="completions/mean_length"),
    "completions/mean_length": FIRST_TEN,
    "optim/grad_norm": FIRST_TEN,
    "optim/critic_grad_norm": FIRST_TEN,
    "train/loss": BEGINNING,
    "train/rm/loss": BEGINNING,
}


class Band(NamedTuple):
    """The least and the largest value of all steps of all seeds, in the metric's unit."""

    low: float
    high: float


def in_unit(key: str, values: Mapping[str, Sequence[float]]) -> float | None:
    """The last value of a metric in its unit; None where it cannot be told yet, or ever.

    Args:
        key: of `UNITS`.
        values: of each metric those of a run so far.
    """
    unit, of_key = UNITS[key], values.get(key, ())
    if not of_key:
        return None
    if unit.per is not None:
        trained, drawn = (values.get(f"groups/{of}", [1.0])[-1] for of in ("trained", "drawn"))
        # Of all that were drawn the mean length is known, of those trained on the most that it can be.
        per = unit.per if trained >= drawn else "completions/max_length"
        one = values[per][-1] if values.get(per) else 0.0
    elif unit.first:
        begun = [value for value in of_key if value > 0][: unit.first]
        one = statistics.median(begun) if len(begun) == unit.first else 0.0
    else:
        one = 1.0
    return of_key[-1] / one if one else None


def told(key: str, trainers: Sequence[str]) -> list[str]:
    """For each of the trainers whose demo was measured, its band in words."""
    found = []
    for trainer in trainers:
        if key in BANDS.get(trainer, {}):
            low, high = BANDS[trainer][key]
            found.append(f"Measured in {trainer}'s demo: {low:.2g} to {high:.2g} {UNITS[key].words}".rstrip())
    return found


def read() -> dict[str, dict[str, Band]]:
    """Trainer -> metric -> band, of the file."""
    measured = json.loads(FILE.read_text(encoding="utf-8"))["bands"]
    return {trainer: {key: Band(*edges) for key, edges in found.items()} for trainer, found in measured.items()}


BANDS = read()


def widest(key: str) -> Band | None:
    """Of all trainers whose demos have the metric: what is healthy in one of them is no alarm in another."""
    found = [of_trainer[key] for of_trainer in BANDS.values() if key in of_trainer]
    return Band(min(band.low for band in found), max(band.high for band in found)) if found else None
