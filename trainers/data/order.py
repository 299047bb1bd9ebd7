"""The order in which rows are trained on, and how many steps a number of passes over them comes to.

An order of rows runs on from one pass into the next, so that every step is whole: the steps are as many as it takes for
every row to have been trained on `num_train_epochs` times.
"""

import copy
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import torch

from fused_rl.trainers.base.ranks import rank
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data.rows import load_rows
from fused_rl.trainers.options import FILES, DataConfig, InputError, StepsConfig


class RowOrder:
    """Endless batches of row indices: a fresh permutation per epoch, the same on every rank, resumable anywhere."""

    def __init__(self, size: int, batch_size: int, seed: int):
        if size < 1:
            raise InputError("no rows to train on")
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.position = 0
        self.epoch = -1
        self.permutation = torch.empty(0, dtype=torch.int64)

    def __next__(self) -> list[int]:
        return self.take(self.batch_size)

    def take(self, count: int) -> list[int]:
        """The next so many indices, beside those of the batches."""
        batch = []
        while len(batch) < count:
            epoch, offset = divmod(self.position, self.size)
            taken = self._permutation_of(epoch)[offset : offset + count - len(batch)].tolist()
            self.position += len(taken)
            batch += taken
        return batch

    def after(self, batches: int) -> list[int]:
        """The batch that comes so many after the one taken last, which stays that; 0 is itself."""
        position = self.position
        self.position += (batches - 1) * self.batch_size
        ahead = next(self)
        self.position = position
        return ahead

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def _permutation_of(self, epoch: int) -> torch.Tensor:
        if epoch != self.epoch:  # drawn once per epoch: of a million rows it takes 80 ms
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.epoch, self.permutation = epoch, torch.randperm(self.size, generator=generator)
        return self.permutation


UNKNOWN = "known when the rows are read (num_train_epochs)"
Config = TypeVar("Config", bound=StepsConfig)


def in_run(config: StepsConfig, per_step: int) -> int | str:
    """How many of something a run has, of which a step has `per_step`; in words before the rows are read."""
    return UNKNOWN if config.steps is None else config.steps * per_step


def in_steps(config: Config, rows: int) -> Config:
    """The config with the steps that its passes over `rows` rows come to; itself where it names steps.

    Raises:
        InputError: a step of more rows than there are, some of which it would take twice.
    """
    per_step = getattr(config, config.batch_option)
    if per_step > rows:
        what = f"{config.batch_option}={per_step}, but there are {rows} rows to train on"
        raise InputError(f"{what}: a step would take some of them twice; choose at most {rows}")
    if config.num_train_epochs is None:
        return config
    resolved = _resolved(config, rows)
    if rank() == 0:
        tell(_told(resolved, rows))
    return resolved


def foresee(config: Config, data: DataConfig) -> tuple[Config, dict[str, str]]:
    """What `in_steps` will say, before anything is tokenised, and that as a line of the batch arithmetic.

    Rows that are too long are not known yet, and no Hub dataset is read. A file that is not there `there.check` tells.
    """
    if data.dataset is None:
        raise InputError("dataset is missing; give --dataset")
    is_file = Path(data.dataset).suffix in FILES and Path(data.dataset).is_file()
    if config.num_train_epochs is None or not is_file or config.splits_rows:
        return config, {}
    rows = load_rows(data.dataset)
    if data.eval_size and data.eval_dataset is None:
        rows, _ = rows.split(data.eval_size)
    resolved = _resolved(config, len(rows))
    return resolved, {"steps": f"at most {resolved.steps}, fewer where rows are dropped: {_told(resolved, len(rows))}"}


def _resolved(config: Config, rows: int) -> Config:
    resolved = copy.copy(config)
    passes = Fraction(str(config.num_train_epochs))  # 0.1 of 30 rows is 3 rows, and no bit more
    resolved.steps = math.ceil(passes * rows / getattr(config, config.batch_option))
    return resolved


def _told(resolved: StepsConfig, rows: int) -> str:
    per_step = getattr(resolved, resolved.batch_option)
    return (
        f"num_train_epochs={resolved.num_train_epochs:g} of {rows} rows, {resolved.batch_option}={per_step}: "
        f"{resolved.steps} steps"
    )
