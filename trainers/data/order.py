"""The order in which rows are trained on, across passes, and how many steps `num_train_epochs` passes come to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from fused_rl.trainers.base.screen import print_rank0
from fused_rl.trainers.base.text import InputError, in_a_line
from fused_rl.trainers.data.rows import number_in
from fused_rl.trainers.options import RunConfig, StepsConfig

SHUFFLED, AS_IN_FILE = ORDERS = ("shuffled", "file")


class Located(Protocol):
    """What a trainer makes of a row."""

    @property
    def where(self) -> str:
        """The file and line that it comes from, as `Rows.where` says it."""
        ...


@dataclass
class RowOrder:
    """Endless batches of row indices, the same on every rank, resumable anywhere: in each pass a fresh permutation, or
    the same order.
    """

    size: int
    batch_size: int
    seed: int
    position: int = 0
    epoch: int = -1
    fixed: list[int] | None = None
    """The indices of each pass, `size` of them; None for permutations."""

    @classmethod
    def of(cls, config: RunConfig, rows: Sequence[Located]) -> "RowOrder":
        """Return the order in which a run takes its rows."""
        fixed = fixed_order(config.order, rows)
        size = len(rows) if fixed is None else len(fixed)
        return cls(size, config.rows_per_step, config.seed, fixed=fixed)

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
            taken = self.permutation[offset : offset + count - len(batch)].tolist()
            self.position += len(taken)
            batch += taken
        return batch

    def _permutation(self, epoch: int) -> torch.Tensor:
        if self.fixed is not None:
            return torch.tensor(self.fixed)
        # The factor keeps the epochs of one seed apart from those of its neighbours.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.size, generator=generator)

    def first(self, batches: int) -> list[int]:
        """Return the indices that the first `batches` of a run take, each once."""
        begin = RowOrder(self.size, self.batch_size, self.seed, fixed=self.fixed)
        # A file may name a row twice.
        return [*dict.fromkeys(begin.take(min(self.size, batches * self.batch_size)))]

    def after(self, batches: int) -> list[int]:
        """Return the batch that comes `batches` after the last one, without taking it; 0 is the last one."""
        # The permutation is kept: it is a function of the seed and the epoch, and `take` makes it
        # again where it must.
        position = self.position
        self.position += (batches - 1) * self.batch_size
        ahead = next(self)
        self.position = position
        return ahead


def fixed_order(order: str, rows: Sequence[Located]) -> list[int] | None:
    """Return the indices of the rows in the order of each pass, None where each pass shuffles them."""
    if order == SHUFFLED:
        return None
    if order == AS_IN_FILE:
        return list(range(len(rows)))

    # A row of the dataset may come to several things to train on, or to none.
    indices: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        indices.setdefault(number_in(row.where), []).append(index)
    numbers = read_order(Path(order))
    fixed = []
    absent = []
    for number in numbers:
        fixed += indices.get(number, [])
        absent += [] if number in indices else [number]
    if not fixed:
        raise InputError(f"order={order}: none of its {len(numbers)} rows is trained on")
    if absent:
        what = f"{len(absent)} of its {len(numbers)} rows are not trained on"
        print_rank0(
            f"order={order}: {what}, as they are held out, too long or not there; the first is {absent[0]}"
        )
    return fixed


def read_order(path: Path) -> list[int]:
    """Return the numbers of rows in a file, one in each line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeError) as error:
        expected = "expected shuffled, file, or a text file with the number of a row in each line"
        raise InputError(f"order={path}: {expected}; {in_a_line(error)}") from error
    numbers = []
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.strip().isdecimal() or int(line) < 1:
            expected = "expected the number of a row, the first being 1"
            raise InputError(f"order={path}, line {place}: {expected}, got {line.strip()[:40]!r}")
        numbers.append(int(line))
    return numbers


Config = TypeVar("Config", bound=StepsConfig)


def steps_of(passes: float, rows: int, per_step: int) -> int:
    """Return the steps that so many passes over rows come to."""
    # 0.1 of 30 rows is 3 rows, and not the 3.0000000000000002 of binary numbers, which would be a
    # step more.
    return math.ceil(Fraction(str(passes)) * rows / per_step)


def in_steps(config: Config, rows: int) -> Config:
    """Return the config with the steps that its passes over `rows` rows come to; refuse a step of more than these."""
    per_step = config.rows_per_step
    if per_step > rows:
        what = f"{config.batch_option}={per_step}, but there are {rows} rows to train on"
        raise InputError(f"{what}: a step would take some of them twice; choose at most {rows}")
    if config.num_train_epochs is None:
        return config
    resolved = config.replace(steps=steps_of(config.num_train_epochs, rows, per_step))
    what = f"num_train_epochs={config.num_train_epochs:g} of {rows} rows, {config.batch_option}={per_step}"
    print_rank0(f"{what}: {resolved.steps} steps")
    return resolved
