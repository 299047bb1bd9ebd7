"""The order in which rows are trained on, across passes, and how many steps `num_train_epochs` passes come to."""

import math
from collections.abc import Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import torch

from ..base.screen import print_rank0
from ..base.text import InputError
from ..options import RunConfig, StepsConfig


@dataclass
class RowOrder:
    """Endless batches of row indices, the same on every rank, resumable anywhere."""

    size: int
    batch_size: int
    seed: int
    position: int = 0
    epoch: int = -1
    is_shuffled: bool = True
    """Each pass is a fresh permutation; False if all have the order of the rows."""

    @classmethod
    def of(cls, config: RunConfig, rows: Sized) -> "RowOrder":
        """Return the order in which a run takes its rows."""
        return cls(
            len(rows), config.rows_per_step, config.seed, is_shuffled=config.order == "shuffled"
        )

    def __next__(self) -> list[int]:
        return self.take(self.batch_size)

    def take(self, count: int) -> list[int]:
        """Return the next `count` indices."""
        # A batch at the end of a pass is filled up from the next pass, so every step has as many
        # rows.
        batch = []
        while len(batch) < count:
            epoch, offset = divmod(self.position, self.size)
            # Once per epoch, because a permutation of a million rows takes 80 ms.
            if epoch != self.epoch:
                self.epoch, self.permutation = epoch, self._permutation(epoch)
            indices = self.permutation[offset : offset + count - len(batch)].tolist()
            self.position += len(indices)
            batch += indices
        return batch

    def _permutation(self, epoch: int) -> torch.Tensor:
        if not self.is_shuffled:
            return torch.arange(self.size)
        # The factor keeps the epochs of one seed apart from those of its neighbours.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.size, generator=generator)

    def first(self, batches: int) -> list[int]:
        """Return the indices that the first `batches` of a run take, each once."""
        begin = RowOrder(self.size, self.batch_size, self.seed, is_shuffled=self.is_shuffled)
        return begin.take(min(self.size, batches * self.batch_size))

    def after(self, batches: int) -> list[int]:
        """Return the batch that comes `batches` after the last one, without taking it; 0 is the last one."""
        # The permutation is kept: it is a function of the seed and the epoch, and `take` makes it
        # again where it must.
        position = self.position
        self.position += (batches - 1) * self.batch_size
        ahead = next(self)
        self.position = position
        return ahead


Config = TypeVar("Config", bound=StepsConfig)


def in_steps(config: Config, rows: int) -> Config:
    """Return the config with the steps that its passes over `rows` rows come to; refuse a step of more than these."""
    per_step = config.rows_per_step
    if per_step > rows:
        problem = f"{config.batch_option}={per_step}, but there are {rows} rows to train on"
        raise InputError(f"{problem}: a step would take some of them twice; choose at most {rows}")
    if config.num_train_epochs is None:
        return config
    # 0.1 of 30 rows is 3 rows, and not the 3.0000000000000002 of binary numbers, which would be a step more.
    trained = Fraction(str(config.num_train_epochs)) * rows
    resolved = config.replace(steps=math.ceil(trained / per_step))
    passes = f"num_train_epochs={config.num_train_epochs:g} of {rows} rows, {config.batch_option}={per_step}"
    print_rank0(f"{passes}: {resolved.steps} steps")
    return resolved
