"""The steps of a run, the same for every trainer: where it begins, when it evaluates, logs, saves and stops.

    loop = Loop(config, run, {"policy": engine}, order)
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

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import torch

from fused_rl.trainers.base.files import storing
from fused_rl.trainers.base.ranks import barrier, global_sum, on_first_rank_at_length, rank
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data.order import RowOrder
from fused_rl.trainers.options import RunConfig
from fused_rl.trainers.run import hub
from fused_rl.trainers.run.beginning import Run
from fused_rl.trainers.run.logger import Logger, phase
from fused_rl.trainers.run.store import NOTHING, Kept, RunFolder, release


class Stopped(KeyboardInterrupt):
    """The run was told to stop: every rank has ended the same step, and saved it."""


class Interruption:
    """From `begin` to `end` the first Ctrl-C or SIGTERM is only noted; the second one stops at once."""

    taken: ClassVar["Interruption | None"] = None  # the one of this process that has the signals

    def __init__(self):
        self.received = False
        self.previous = {}

    def begin(self) -> None:
        """Take over the signals, also from a run that died, where its traceback keeps its loop alive."""
        if Interruption.taken:
            Interruption.taken.end()
        Interruption.taken = self
        self.previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}

    def end(self) -> None:
        """Give the signals back, once."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}
        if Interruption.taken is self:
            Interruption.taken = None

    def _handle(self, number, _frame):
        self.received = True
        signal.signal(number, self.previous[number])
        if rank() == 0:  # os.write: a print could interrupt another one
            with contextlib.suppress(OSError):
                os.write(1, b"\nstopping after this step, with a checkpoint; again to stop at once\n")

    def on_any_rank(self) -> bool:
        """Whether any process was told to stop; every rank gets the same answer."""
        return bool(global_sum(torch.tensor(float(self.received))))


class Loop:
    """An iterator over (step, indices of the step's rows).

    Args:
        config, run: of the run (`beginning.begin`), which has read all its rows (`has_read`).
        engines: DeepSpeed engines by name, for the checkpoints.
        order: which rows come next; its position is in the checkpoints.
        state: returns what else the trainer needs to continue, JSON.
        own: what each rank keeps for itself, by name.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        engines: dict[str, object],
        order: RowOrder,
        state: Callable[[], dict] = dict,
        own: Mapping[str, Kept] = NOTHING,
    ):
        self.config = config
        self.run = run
        self.folder = run.folder
        self.engines = engines
        self.output = RunFolder(config)
        self.order = order
        self.state = state
        self.own = own
        self.step = 0
        self.restored = {}
        self.save_seconds = 0.0
        if config.resume:
            self.restored = self.output.load(engines, own)
            self.step, order.position = self.restored["step"], self.restored["position"]
        self.output.claim(self.step)
        with storing("metrics.jsonl", self.folder):
            self.logger = Logger(config, self.step)
        self.interruption = Interruption()

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
        saved = False
        try:
            while not self.last:
                self.step += 1
                yield self.step, next(self.order)
                self._save_or_stop()
            saved = True
        finally:
            if not saved:  # else the signals stay ours until the model is there, too
                self.interruption.end()

    def log(self, metrics: dict[str, float], samples: list[dict] = ()) -> None:
        """Write one line of metrics, show a few responses; with an evaluation within the run draw its curves."""
        timed = {} if self.begins else {"time/save": self.save_seconds}
        with storing("metrics.jsonl", self.folder):
            self.logger.log(self.step, metrics | timed)
            self.logger.samples(self.step, samples)
        if self.evaluates and not self.begins and not self.last:  # at the end they are drawn anyhow
            with storing("curves.png", self.folder):
                self.logger.draw()

    def _save_or_stop(self) -> None:
        """A checkpoint on schedule, when the run is told to stop, and at the end: the model is not saved yet."""
        stop = self.interruption.on_any_rank() and not self.last
        every = self.config.save_every
        if stop or self.last or (every and self.step % every == 0):
            began = time.monotonic()
            state = {"position": self.order.position, "inputs": self.run.inputs, **self.state()}
            self.output.save(self.engines, self.step, state, self.own)
            self.save_seconds = time.monotonic() - began
        if stop:
            with storing("curves.png", self.folder):
                self.logger.close()
            release()
            if rank() == 0:
                tell(f"stopped after step {self.step}; continue with --resume")
            barrier()  # else two processes can abort at exit
            raise Stopped

    def finish(self, save: Callable[[Path], None]) -> str:
        """Draw the curves, save the trained model with `save(folder)`, push it where that is asked; returns where."""
        model = self.folder / "model"
        try:
            with storing("curves.png", self.folder):
                self.logger.close()
            with storing("model", self.folder), phase("saved the model"):
                save(model)
            if not self.config.save_every:  # there was one only until the model was safe
                self.output.remove_checkpoints()
        finally:
            self.interruption.end()
            release()
        if rank() == 0:
            kept = self.output.checkpoints
            told = f", checkpoints: {kept}" if kept.exists() else ""
            tell(f"model: {model}, curves: {self.folder / 'curves.png'}{told}")
        if self.config.push_to_hub:
            message = f"fused-rl {self.config.command}, step {self.step}"
            on_first_rank_at_length(lambda: hub.push(self.config, model, message))
        return str(model)
