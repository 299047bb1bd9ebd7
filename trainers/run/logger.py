"""The output of a run: its JSONL files, TensorBoard, Weights & Biases, curves.png, and what the screen shows."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean
from textwrap import indent
from typing import Any

import torch

from ..base.engine import torch_dtype
from ..base.files import as_json, unfinished, write_rows
from ..base.screen import print_line
from ..base.text import escaped
from ..options import RunConfig
from .metrics import EMPTY, HELD_OUT, ByRow, keys_by

# The number of panels of curves.png, and of those in a row, which are read in a page of 800 pixels.
MAX_PANELS, IN_A_ROW = 8, 2
# Columns of samples.jsonl for which the table on the screen has no room.
IN_FILE_ALONE = ("columns", "row", "scores", "prompt_tokens", "tokens")


class Logger:
    """Writes and shows the metrics of a run that continues after step `start` (0 for a new run). It is for one rank."""

    def __init__(self, config: RunConfig, start: int):
        self.folder = Path(config.output_dir).absolute()
        self.steps = config.steps
        self.last_printed = 0.0
        # JSON has no NaN or infinity, so a null in the file stands for a number that was not finite.
        self.history = []
        for entry in _cut(self.folder / "metrics.jsonl", start):
            values = {key: math.nan if value is None else value for key, value in entry.items()}
            self.history.append(values)
        _cut(self.folder / "samples.jsonl", start)
        self.by_row = rows_by_step(_cut(self.folder / "held_out.jsonl", start))

        from .rules import Watch  # the doctor's, which only rank 0 needs

        # Findings of earlier entries were printed when these were written, so here they are not printed again.
        dtype = str(torch_dtype(config)).removeprefix("torch.")  # what `auto` is on this machine
        self.watch = Watch(config.to_dict() | {"dtype": dtype})
        for entry in self.history:
            self.watch.update(entry, self.by_row.get(entry["step"], EMPTY))

        # TensorBoard hides the points from `purge_step` on, which a resumed run writes again.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = start + 1 if config.resume else None
        self.board = SummaryWriter(self.folder / "tensorboard", purge_step=purge_step)
        self.wandb = None
        if config.wandb_project is not None:
            import wandb

            self.wandb = wandb.init(
                project=config.wandb_project, dir=config.output_dir, config=config.to_dict()
            )
        self.bar = None
        if sys.stdout.isatty():
            # The bar fits 80 columns: count and remaining time are never cut, but the metrics may be.
            from rich import progress
            from rich.table import Column

            left = progress.TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True))
            count = progress.MofNCompleteColumn(table_column=Column(no_wrap=True))
            metrics = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            columns = progress.TextColumn("{task.fields[columns]}", table_column=metrics)
            self.bar = progress.Progress(
                count, left, progress.BarColumn(bar_width=8), columns, expand=True
            )
            self.bar.add_task("train", total=config.steps, completed=start, columns="")
            self.bar.start()

    def log(self, step: int, metrics: dict[str, float], by_row: ByRow = EMPTY) -> None:
        """Write the metrics of a step to all files, and show the progress as a bar, or as a line now and then.

        `by_row` has the held-out figures of each row after an evaluation; it goes to held_out.jsonl.
        """
        if torch.cuda.is_initialized():
            metrics = metrics | {"perf/peak_memory_gb": torch.cuda.max_memory_allocated() / 2**30}

        # The file comes first, so that the entry is kept whatever fails after that.
        entry = {"step": step, **{key: float(value) for key, value in metrics.items()}}
        self.history.append(entry)
        _append(self.folder / "metrics.jsonl", [entry])
        # Rounded as in the file, so that the run and the doctor conclude the same from these rows.
        by_row = rounded(by_row)
        if by_row:
            _append(self.folder / "held_out.jsonl", [{"step": step, **by_row}])
            self.by_row[step] = by_row
        for key, value in metrics.items():
            self.board.add_scalar(key, value, step)
        self.board.flush()  # its thread writes every two minutes, and a run may be killed before
        if self.wandb is not None:
            self.wandb.log(metrics, step=step)

        # The conditions of the doctor, each of which is reported once.
        for finding in self.watch.update(entry, by_row):
            print_line(f"warning: {finding}")

        # Only what this step has measured is shown, because an older value would be taken for a new one. So the line of
        # an evaluation must not be left out. It is printed even with a bar, which soon shows the next step.
        columns = columns_of(metrics)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step, columns=columns)
        is_due = step == self.steps or time.monotonic() - self.last_printed > 10
        is_evaluation = any(key.startswith("eval/") for key in metrics)
        if columns and (is_evaluation or (is_due and self.bar is None)):
            self.last_printed = time.monotonic()
            print_line(f"step {step}/{self.steps}  {columns}")

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Print a table of a few responses, and write them to samples.jsonl and TensorBoard."""
        if not rows:
            return
        import rich
        from rich.table import Table
        from rich.text import Text

        rows = [rounded(row) for row in rows]
        _append(self.folder / "samples.jsonl", [{"step": step, **row} for row in rows])
        for number, row in enumerate(rows):
            text = "\n\n".join(
                f"{name}:\n\n{indent(str(value), '    ')}" for name, value in row.items()
            )
            self.board.add_text(f"samples/{number}", text, step)

        # The screen shows the end of a long text, which has the answer, with control characters escaped. Scorers may
        # have logged columns for some of the rows only, and columns of the dataset's row stand behind the others.
        rows = [dict.fromkeys(row) | row.get("columns", {}) | row for row in rows]
        names = [
            name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in IN_FILE_ALONE
        ]
        table = Table(*names, title=f"samples at step {step}", title_justify="left")
        for row in rows:
            values = []
            for name in names:
                value = row.get(name, "")
                values.append(f"{value:.4g}" if isinstance(value, float) else str(value)[-200:])
            table.add_row(*(Text(escaped(value, keep="\n\t")) for value in values))
        rich.print(table) if self.bar is None else self.bar.console.print(table)

    def close(self) -> None:
        """Flush everything and draw curves.png."""
        # The bar stops first, because it would write over lines that are printed after it.
        if self.bar is not None:
            self.bar.stop()
        self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
        self.draw_curves(ended=True)

    def draw_curves(self, *, ended: bool = False) -> None:
        """Write curves.png, with the run's name and whether it has learned."""
        answer = self.watch.learned(ended=ended).partition(":")[0]
        title = f"{self.folder.name} · {answer}"
        draw_curves(self.history, self.folder / "curves.png", self.by_row, title)


def rounded(value: Any) -> Any:
    """Return a value with its floats, at any depth, rounded to six digits, as more would be rounding of fp32."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: rounded(inner) for name, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def _append(path: Path, entries: list[dict]) -> None:
    """Append entries to a JSONL file in one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(as_json(entry) + "\n" for entry in entries))


def read_metrics(path: Path) -> list[dict]:
    """Return the entries of a metrics.jsonl; a damaged line is named on the screen and left out.

    A run that was killed may leave its last line damaged.
    """
    entries = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line) if line else None
            entries += [] if entry is None else [{"step": entry["step"]} | entry]
        except (ValueError, TypeError, KeyError):  # not JSON, not UTF-8, or no entry
            print_line(f"{path}, line {number} is damaged and left out")
    return entries


def rows_by_step(entries: list[dict]) -> dict[int, ByRow]:
    """Return the entries of a held_out.jsonl by their step, which is removed from the entries."""
    return {entry.pop("step"): entry for entry in entries}


def _cut(path: Path, start: int) -> list[dict]:
    """Return a file's entries up to step `start`, after which the run continues, and cut later ones from the file."""
    entries = [entry for entry in read_metrics(path) if entry["step"] <= start]
    write_rows(path, entries)
    return entries


def columns_of(metrics: Mapping[str, float]) -> str:
    """Return the line in which a step's metrics are printed; "" if none of them has a column."""
    cells = []
    before = ""
    for header, keys in keys_by("column").items():
        values = [metrics[key] for key in keys if key in metrics]
        if not values:
            continue
        follows = before.startswith(HELD_OUT)
        label = header.removeprefix(HELD_OUT) if follows else header
        value = f"{values[0]:.0f}" if abs(values[0]) >= 1000 else f"{values[0]:.3g}"
        cells.append(f"{label} {value}")
        before = header
    return "  ".join(cells)


def _alike(points: list, other: list) -> bool:
    """Return True if nobody sees two curves where both are drawn. One that does not vary is like none."""
    steps, values = zip(*points, strict=True)
    others = dict(other)
    if [*steps] != [*others]:
        return False
    height = max(values) - min(values)
    return max(abs(value - others[step]) for step, value in points) < 0.05 * height


def draw_curves(
    history: list[dict], path: Path, by_row: Mapping[Any, ByRow] = EMPTY, title: str = ""
) -> Any:
    """Write a PNG of the curves, with one panel per title in `METRICS`: a running mean over the single steps.

    Args:
        history: the lines of a metrics.jsonl, in which a key may be missing or None.
        path: the file to write.
        by_row: the held-out figures of each row by step, which give held-out figures their errors.
        title: one line above all panels.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    from .learned import error_of, residuals

    # A run has only some of the table's metrics, and some of these are the same in this run.
    panels: dict[str, dict[str, list]] = {}
    drawn = []
    for panel, keys in keys_by("panel").items():
        for key in keys:
            points = [(line["step"], line[key]) for line in history if line.get(key) is not None]
            if points and not any(_alike(points, other) for other in drawn):
                drawn.append(points)
                panels.setdefault(panel, {})[key] = points
    panels = dict([*panels.items()][:MAX_PANELS])
    wide = min(max(len(panels), 1), IN_A_ROW)
    high = max(-(-len(panels) // IN_A_ROW), 1)
    figure = Figure(figsize=(4 * wide, 2.4 * high + 0.4), layout="constrained")
    figure.suptitle(title, fontsize="medium", wrap=True)
    for number, (panel, curves) in enumerate(panels.items(), 1):
        name, _, unit = panel.partition(" (")
        axes = figure.add_subplot(high, wide, number, xlabel="step", ylabel=unit.removesuffix(")"))
        axes.set_title(name, fontsize="medium")
        axes.grid(alpha=0.3)
        for key, points in curves.items():
            steps, values = zip(*points, strict=True)
            if key.startswith("eval/"):
                columns = [by_row.get(step, EMPTY).get(key) for step in steps]
                errors = [error_of(residuals(rows)) if rows else math.nan for rows in columns]
                axes.errorbar(steps, values, errors, fmt="o-", ms=3, lw=1, capsize=3, label=key)
                continue
            # The mean of a fifteenth of the run around each step, so that it does not lag behind.
            side = len(values) // 30
            means = [mean(values[max(i - side, 0) : i + side + 1]) for i in range(len(values))]
            (line,) = axes.plot(steps, means, label=key)
            axes.plot(steps, values, color=line.get_color(), alpha=0.25, lw=1)
        axes.legend(fontsize="x-small", framealpha=0.5)
    figure.savefig(unfinished(path), dpi=200)
    unfinished(path).replace(path)
    return figure
