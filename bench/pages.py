"""Sections of docs/benchmarks.md: sampling, and time to quality with its picture."""

import itertools
import math
import statistics
from pathlib import Path

from bench import plots, results

PICTURE = "time-to-quality.svg"
TITLES = {"grpo": "GRPO: greedy answers that are right", "reward": "reward model: pairs told apart"}
TO_QUALITY = (
    "Held-out accuracy over the CPU seconds of the training steps, evaluations apart: the same start, rows, order and "
    "hyperparameters, in turns in one process on one thread, three seeds. A line is a median over seeds, a dot a seed."
)
SAMPLED = (
    "Tokens of a small model's responses, all of the same length, in turns on one thread. A server's rate is per "
    "second on the clock."
)


def sampling_table(rows: list[dict], markdown: bool = False) -> str:
    """What was measured, in tokens per second."""
    lines = []
    for row in results.measured(rows):
        rates = row["samples_tokens_per_second"]
        cells = [row["implementation"], row["task"], round(row["tokens_per_second"]), row["per"]]
        lines.append([*cells, row["over_generate"], len(rates), results.remarks(row)])
    titles = ["sampler", "drawn", "tokens per second", "of", "times generate", "runs", "note"]
    return results.table(titles, lines, markdown)


def reached(rows: list[dict]) -> float:
    """The accuracy, a whole percent, that every run of one algorithm came to."""
    best = [max(point[2] for point in row["accuracy"]) for row in rows]
    return math.floor(100 * min(best) + 1e-9) / 100


def seconds_to(row: dict, wanted: float) -> float:
    """CPU seconds until a run first had this accuracy, between its evaluations by a straight line."""
    before = row["accuracy"][0]
    for point in row["accuracy"]:
        if point[2] >= wanted:
            rise = point[2] - before[2]
            share = (wanted - before[2]) / rise if rise > 0 else 1.0
            return before[1] + share * (point[1] - before[1])
        before = point
    raise ValueError(f"it never came to {wanted}")


def median_curve(rows: list[dict]) -> tuple[list[float], list[float]]:
    """CPU seconds and accuracies, each the median over seeds at a step."""
    seconds, accuracies = [], []
    for points in zip(*(row["accuracy"] for row in rows), strict=True):
        seconds.append(statistics.median(point[1] for point in points))
        accuracies.append(statistics.median(point[2] for point in points))
    return seconds, accuracies


def by_kind(rows: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """{algorithm: {implementation: its rows}}."""
    found = {}
    for row in rows:
        found.setdefault(row["op"], {}).setdefault(row["implementation"], []).append(row)
    return found


def reaching(kinds: dict[str, list[dict]]) -> tuple[float, dict[str, list[float]]]:
    """The accuracy that every run of one algorithm came to, and each implementation's CPU seconds to it, by seed."""
    wanted = reached(list(itertools.chain.from_iterable(kinds.values())))
    return wanted, {name: sorted(seconds_to(row, wanted) for row in rows) for name, rows in kinds.items()}


def quality_table(rows: list[dict], markdown: bool = False) -> str:
    """A line per algorithm and implementation: medians over seeds."""
    lines = []
    for op, kinds in by_kind(rows).items():
        wanted, times = reaching(kinds)
        theirs = None
        for name, found in reversed(kinds.items()):
            spent = times[name]
            middle = statistics.median(spent)
            theirs = middle if theirs is None else theirs
            last = statistics.median(row["accuracy"][-1][2] for row in found)
            whole = statistics.median(row["accuracy"][-1][1] for row in found)
            span = f"{results.number(spent[0])} to {results.number(spent[-1])}"
            faster = theirs / middle if middle else None
            cells = [op, name, f"{100 * wanted:.0f} %", middle, span, faster]
            lines.append([*cells, f"{100 * last:.1f} %", whole, len(found)])
    titles = ["", "implementation", "accuracy", "CPU s to it", "over seeds", "times as fast as TRL"]
    titles += ["accuracy at the end", "CPU s of all steps", "seeds"]
    return results.table(titles, lines, markdown)


def draw_quality(rows: list[dict], name: str | Path = PICTURE) -> None:
    """A panel per algorithm: a line per implementation, a dot per seed and evaluation."""
    kinds = by_kind(rows)
    figure, panels = plots.panels(len(kinds), (10, 3.8))
    for axes, (op, found) in zip(panels, kinds.items(), strict=True):
        for i, (implementation, of_seeds) in enumerate(found.items()):
            colour, marker = plots.LOOKS[i]
            for row in of_seeds:
                _, seconds, accuracies = zip(*row["accuracy"], strict=True)
                axes.scatter(seconds, accuracies, color=colour, marker=marker, s=8, alpha=0.35, linewidths=0)
            axes.plot(*median_curve(of_seeds), color=colour, label=implementation)
        axes.set(title=TITLES[op], xlabel="CPU seconds of training", ylabel="held-out accuracy")
    plots.save(figure, name)


def quality(result: dict, described: str = "") -> str:
    """The block of docs/benchmarks.md, and its picture; `described` is the line about machine and command."""
    draw_quality(result["rows"])
    picture = f"![Held-out accuracy over CPU seconds, ours and TRL's]({PICTURE})"
    table = quality_table(result["rows"], markdown=True)
    return f"## Time to quality\n\n{described}\n{TO_QUALITY}\n\n{picture}\n\n{table}"
