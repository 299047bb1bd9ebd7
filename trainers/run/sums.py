"""The metrics of one optimizer step, as losses return them, added up over micro-batches and ranks."""

import math
from collections.abc import Sequence

import torch

from fused_rl.trainers.base.ranks import gather, global_sum, rank
from fused_rl.trainers.options import InputError


class Sums:
    """The bare metrics of one optimizer step: of each micro-batch a share, added up over micro-batches and ranks."""

    def __init__(self, step: int):
        self.step = step
        self.parts = []
        self.names: tuple[str, ...] = ()

    def add(self, metrics: dict[str, torch.Tensor], where: Sequence[str]) -> None:
        """The scalars of one micro-batch, each divided by the whole step's count, and where its rows are from."""
        self.names = tuple(metrics)
        values = [value.detach().double() for value in metrics.values()]
        self.parts.append((torch.stack(values), where))

    def over_ranks(self) -> dict[str, float]:
        """What they add up to, the same on every rank.

        Raises:
            InputError: on every rank, where one of them is NaN or infinite on any: nothing may be trained on it.
        """
        # From the device at once, when all of the step has been handed to it.
        columns = torch.stack([values for values, _ in self.parts]).cpu()
        self.parts = [(values, where) for values, (_, where) in zip(columns, self.parts, strict=True)]
        total = global_sum(sum(columns))
        if not total.isfinite().all():
            told = [message for message in gather(self._not_finite()) if message is not None]
            raise InputError("; ".join(told))
        return dict(zip(self.names, total.tolist(), strict=True))

    def _not_finite(self) -> str | None:
        """The first micro-batch of this rank that is not finite, in words."""
        for number, (values, where) in enumerate(self.parts, 1):
            bad = [name for name, value in zip(self.names, values.tolist(), strict=True) if not math.isfinite(value)]
            if bad:
                rows = ", ".join(dict.fromkeys(where))
                what = f"{', '.join(bad)} {'is' if len(bad) == 1 else 'are'} NaN or infinite"
                return f"step {self.step}, micro-batch {number} of rank {rank()}: {what}; its rows: {rows}"
        return None
