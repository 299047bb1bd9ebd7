"""What a run writes down as it goes: metrics.jsonl, TensorBoard, trackers, the progress bar, lines on the screen."""

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent

from fused_rl.trainers.base.engine import torch_dtype
from fused_rl.trainers.base.files import as_json, write_atomically
from fused_rl.trainers.base.ranks import rank
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.base.text import shown
from fused_rl.trainers.options import InputError, OutputConfig, RunConfig
from fused_rl.trainers.run.curves import columns_of, draw_curves
from fused_rl.trainers.run.rules import Watch


class Logger:
    """Writes a run's metrics from step `start` on."""

    def __init__(self, config: RunConfig, start: int):
        self.folder = Path(config.output_dir)
        self.steps = config.steps
        self.last = {}
        self.line = 0.0
        self.active = rank() == 0
        if not self.active:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.history = _kept(self.folder / "metrics.jsonl", start)
        _kept(self.folder / "samples.jsonl", start)
        dtype = str(torch_dtype(config)).removeprefix("torch.")  # what auto is here
        self.watch = Watch(config.plain() | {"dtype": dtype})
        for entry in self.history:  # told when they were made
            self.watch.see(entry)
        self.file = (self.folder / "metrics.jsonl").open("a")
        self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=start + 1 if config.resume else None)
        self.trackers = _trackers(config, config.plain())
        self.progress = _progress_bar(self.steps, start)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one line of metrics.jsonl, and a point of each curve."""
        if not self.active:
            return
        entry = {"step": step, **{k: float(v) for k, v in metrics.items()}}
        self.history.append(entry)
        self.file.write(as_json(entry) + "\n")
        self.file.flush()
        for key, value in metrics.items():
            self.board.add_scalar(key, value, step)
        for tracker in self.trackers:
            tracker.log(metrics, step=step)
        for finding in self.watch.see(entry):
            tell(f"warning: {finding}")
        self.last.update(metrics)
        columns = columns_of(self.last)
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=step, shown=columns)
        elif columns and (step == self.steps or time.monotonic() - self.line > 10):  # no terminal: a line now and then
            self.line = time.monotonic()
            tell(f"step {step}/{self.steps}  {columns}")

    def samples(self, step: int, rows: list[dict[str, object]]) -> None:
        """Show a few responses as a table, and keep them in samples.jsonl."""
        if not self.active or not rows:
            return
        import rich.table
        from rich.text import Text

        with (self.folder / "samples.jsonl").open("a") as file:
            file.write("".join(as_json({"step": step, **row}) + "\n" for row in rows))
        for i, row in enumerate(rows):
            text = "\n\n".join(f"{name}:\n\n{indent(str(value), '    ')}" for name, value in row.items())
            self.board.add_text(f"samples/{i}", text, step)
        table = rich.table.Table(*map(shown, rows[0]), title=f"samples at step {step}", title_justify="left")
        for row in rows:
            table.add_row(*(Text(shown(_short(value), keep="\n\t")) for value in row.values()))
        (self.progress.console.print if self.progress is not None else rich.print)(table)

    def draw(self) -> None:
        """Draw curves.png of the metrics so far."""
        if self.active:
            draw_curves(self.history, self.folder / "curves.png")

    def close(self) -> None:
        """Flush everything and draw curves.png."""
        if not self.active:
            return
        if self.progress is not None:
            self.progress.stop()
        self.file.close()
        self.board.close()
        for tracker in self.trackers:
            tracker.finish()
        self.draw()


def _short(value: object) -> str:
    """Of a number four digits, of a text its end."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[-200:]


@contextmanager
def phase(what: str) -> Iterator[dict[str, float]]:
    """Print what was done and how long it took, with the metrics that the caller puts into the dictionary."""
    began = time.monotonic()
    found = {}
    yield found
    if rank() == 0:
        values = "".join(f"; {key.removeprefix('eval/')} {value:.4g}" for key, value in found.items())
        tell(f"{what} ({time.monotonic() - began:.1f} s){values}")


def read_metrics(path: Path) -> list[dict]:
    """The entries of a metrics.jsonl; a line that is damaged, as a kill leaves the last one, is told and left out."""
    entries = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            entries += [json.loads(line)] if line else []
        except ValueError:  # not JSON, or not UTF-8
            tell(f"{path}, line {number} is damaged and left out")
    return entries


def _kept(path: Path, start: int) -> list[dict]:
    """The entries up to step `start`, where the run begins; later ones are cut from the file."""
    entries = [entry for entry in read_metrics(path) if entry["step"] <= start]
    write_atomically(path, "".join(as_json(entry) + "\n" for entry in entries))
    return entries


def _progress_bar(steps: int, start: int):
    if not sys.stdout.isatty():
        return None
    from rich import progress
    from rich.table import Column

    # Step count and time left come first and are never cut; at 80 columns the metrics are, from their end.
    left = progress.TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True))
    count = progress.MofNCompleteColumn(table_column=Column(no_wrap=True))
    metrics = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    shown = progress.TextColumn("{task.fields[shown]}", table_column=metrics)
    bar = progress.Progress(count, left, progress.BarColumn(bar_width=8), shown, expand=True)
    bar.add_task("train", total=steps, completed=start, shown="")
    bar.start()
    return bar


def require_trackers(config: OutputConfig) -> None:
    """Refuse to log to Weights & Biases or trackio where they are not installed."""
    for package in ("wandb", "trackio"):
        project = getattr(config, f"{package}_project")
        if project is not None and importlib.util.find_spec(package) is None:
            raise InputError(f"{package}_project is set, but {package} is not installed: pip install {package}")


def _trackers(config: OutputConfig, told: dict[str, object]) -> list:
    """A run of each tracker that the config names, told all options: it has `log(metrics, step)` and `finish()`."""
    runs = []
    if config.wandb_project is not None:
        import wandb

        runs.append(wandb.init(project=config.wandb_project, dir=config.output_dir, config=told))
    if config.trackio_project is not None:
        import trackio

        # The same run again when it is resumed; trackio has no way to take back steps, and shows those twice.
        name = Path(config.output_dir).resolve().name
        resume = "allow" if config.resume else "never"
        options = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
        project = config.trackio_project
        runs.append(trackio.init(project=project, name=name, config=told, resume=resume, **options))
    return runs
