"""The steps of a run, the same for every trainer: where it begins, when it evaluates, logs, saves and stops.

    loop = Loop(config, folder, {"policy": engine}, order, COLUMNS, CURVES)
    if loop.begins:
        loop.log(evaluate())
    for step, indices in loop:
        metrics = train_step(indices)
        if loop.evaluates:
            metrics |= evaluate()
        loop.log(metrics)
    return loop.finish(save)

The `for` stays in the trainer, and so does the algorithm.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fused_rl.trainers import checkpoint
from fused_rl.trainers.config import RunConfig
from fused_rl.trainers.data import RowOrder
from fused_rl.trainers.engine import rank
from fused_rl.trainers.metrics import Logger


class Stopped(KeyboardInterrupt):
    """The run was told to stop: every rank has ended the same step, and saved it."""


class Loop:
    """An iterator over (step, indices of the step's rows).

    Args:
        config: of the run.
        folder: its output folder, opened.
        engines: DeepSpeed engines by name, for the checkpoints.
        order: which rows come next; its position is in the checkpoints.
        columns: {header: key} of the progress bar.
        curves: {title: keys} of curves.png.
        state: returns what else the trainer needs to continue, JSON.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        engines: dict[str, object],
        order: RowOrder,
        columns: dict[str, str],
        curves: dict[str, list[str]],
        state: Callable[[], dict] = dict,
    ):
        self.config, self.folder, self.engines = config, folder, engines
        self.order, self.curves, self.state = order, curves, state
        self.step, self.restored, self.save_seconds = 0, {}, 0.0
        if config.resume:
            self.restored = checkpoint.load(engines, folder)
            self.step, order.position = self.restored["step"], self.restored["position"]
        self.logger = Logger(config, columns, self.step)
        self.interruption = checkpoint.Interruption()

    @property
    def begins(self) -> bool:
        """Whether nothing has been trained yet: the time for the evaluation before training."""
        return self.step == 0

    @property
    def evaluates(self) -> bool:
        """Whether this step is one after which to evaluate."""
        return self.step % self.config.eval_every == 0 or self.last

    @property
    def last(self) -> bool:
        """Whether this step is the last one."""
        return self.step >= self.config.steps

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        self.interruption.begin()
        try:
            while not self.last:
                self.step += 1
                yield self.step, next(self.order)
                self._save_or_stop()
        finally:
            if not self.last:  # at the last step the signals stay ours until the model is saved
                self.interruption.end()

    def log(self, metrics: dict[str, float], samples: list[dict] = ()) -> None:
        """Write one line of metrics, and show a few responses."""
        timed = {} if self.begins else {"time/save": self.save_seconds}
        self.logger.log(self.step, metrics | timed)
        self.logger.samples(self.step, samples)

    def _save_or_stop(self) -> None:
        """A checkpoint on schedule, and when the run is told to stop."""
        stop = self.interruption.on_any_rank() and not self.last
        every = self.config.save_every
        if stop or (every and (self.step % every == 0 or self.last)):
            began = time.monotonic()
            state = {"position": self.order.position, **self.state()}
            checkpoint.save(self.engines, self.folder, self.step, state, self.config.keep_checkpoints)
            self.save_seconds = time.monotonic() - began
        if stop:
            self.logger.close(self.curves)
            if rank() == 0:
                print(f"stopped after step {self.step}; continue with --resume", flush=True)
            raise Stopped

    def finish(self, save: Callable[[Path], None]) -> str:
        """Draw the curves, save the trained model with `save(folder)`, and say where everything is; returns where."""
        try:
            self.logger.close(self.curves)
            save(self.folder / "model")
        finally:
            self.interruption.end()
        return str(self.folder / "model")
