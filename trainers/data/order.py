"""The order in which rows are trained on, across passes, and how many steps `num_train_epochs` passes come to."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import torch

from fused_rl.trainers.base.screen import print_rank0
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.options import StepsConfig


@dataclass
class RowOrder:
    """Endless batches of row indices: a fresh permutation per epoch, the same on every rank, resumable anywhere."""

    size: int
    batch_size: int
    seed: int
    position: int = 0
    epoch: int = -1

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
                # The factor keeps the epochs of one seed apart from those of its neighbours.
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                self.epoch, self.permutation = epoch, torch.randperm(self.size, generator=generator)
            taken = self.permutation[offset : offset + count - len(batch)].tolist()
            self.position += len(taken)
            batch += taken
        return batch

    def first(self, batches: int) -> list[int]:
        """Return the indices that the first `batches` of a run take, each once."""
        return RowOrder(self.size, self.batch_size, self.seed).take(
            min(self.size, batches * self.batch_size)
        )

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
        what = f"{config.batch_option}={per_step}, but there are {rows} rows to train on"
        raise InputError(f"{what}: a step would take some of them twice; choose at most {rows}")
    if config.num_train_epochs is None:
        return config
    # 0.1 of 30 rows is 3 rows, and not the 3.0000000000000002 of binary numbers, which would be a
    # step more.
    passes = Fraction(str(config.num_train_epochs))
    resolved = config.replace(steps=math.ceil(passes * rows / per_step))
    what = f"num_train_epochs={config.num_train_epochs:g} of {rows} rows, {config.batch_option}={per_step}"
    print_rank0(f"{what}: {resolved.steps} steps")
    return resolved
