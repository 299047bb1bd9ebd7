"""curves.png: what a run's metrics look like over its steps, or over each other."""

from pathlib import Path
from typing import NamedTuple

from fused_rl.trainers.base.files import unfinished

IN_A_ROW = 4  # panels


class Against(NamedTuple):
    """A panel with a point for every step that has both metrics: `y` over `x`, coloured by the step."""

    x: str
    y: str


Curves = dict[str, list[str] | Against]
"""Title of a panel -> the keys that are drawn over the steps, or two over each other."""


def draw_curves(history: list[dict], curves: Curves, path: Path) -> None:
    """Write a PNG with one panel per title.

    Args:
        history: the lines of a metrics.jsonl; a key may be missing or None in any of them.
        curves: the panels.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    wide = min(len(curves), IN_A_ROW)
    high = -(-len(curves) // IN_A_ROW)
    figure = Figure(figsize=(4.5 * wide, 3.2 * high), layout="constrained")
    panels = figure.subplots(high, wide, squeeze=False).flatten()
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    for axes, (title, drawn) in zip(panels, curves.items(), strict=False):
        axes.set(title=title)
        axes.grid(alpha=0.3)
        if isinstance(drawn, Against):
            _points(figure, axes, history, drawn)
        else:
            _lines(axes, history, drawn)
    figure.savefig(unfinished(path), dpi=120)
    unfinished(path).replace(path)


def _lines(axes, history: list[dict], keys: list[str]) -> None:
    """Each key over the steps that have it."""
    for key in keys:
        points = [(m["step"], m[key]) for m in history if m.get(key) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, label=key, marker="o" if len(points) < 20 else None)
    axes.set(xlabel="step")
    if axes.lines:
        axes.legend(fontsize="small")


def _points(figure, axes, history: list[dict], drawn: Against) -> None:
    """One key over another."""
    points = [(m.get(drawn.x), m.get(drawn.y), m["step"]) for m in history]
    points = [point for point in points if None not in point]
    axes.set(xlabel=drawn.x, ylabel=drawn.y)
    if points:
        x, y, steps = zip(*points, strict=True)
        figure.colorbar(axes.scatter(x, y, c=steps, s=12), ax=axes, label="step")
