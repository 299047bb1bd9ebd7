"""The processes of a run, their sums, and what one does alone; the launcher ends the others when one fails."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from fused_rl.trainers.base.text import InputError

Item = TypeVar("Item")


def processes() -> int:
    """Return the number of processes that train together, also before they have met; 1 without a launcher."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))  # a launcher's


def divide_over(name: str, count: int, world: int) -> int:
    """Return each process's share of `count`, which the option `name` gives; refuse a count that does not divide."""
    if count % world:
        raise InputError(f"{name}={count} does not divide over {world} processes")
    return count // world


def rank() -> int:
    """Return this process's rank; 0 outside a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes that train together; 1 outside a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_ranks():
    """Return the process group of all ranks; None if there is one rank."""
    return dist.group.WORLD if world_size() > 1 else None


def barrier() -> None:
    """Wait for all ranks, by a sum on the CPU: on GPUs gloo's, whatever device is current."""
    global_sum(torch.zeros(()))


def gather(item: Item) -> list[Item]:
    """Return every rank's `item`, by rank, on every rank."""
    items = [item] * world_size()
    if world_size() > 1:
        dist.all_gather_object(items, item)
    return items


def check_equal(facts: Mapping[str, object]) -> None:
    """Refuse processes that have other options or inputs than rank 0, on all of them."""
    # Every rank sees all facts, so every rank raises, and none is left waiting for the others.
    facts_of_ranks = gather(dict(facts))
    first = facts_of_ranks[0]
    for number, facts_of_rank in enumerate(facts_of_ranks):
        for name, value in facts_of_rank.items():
            if value != first.get(name):
                what = f"{name} is {first.get(name)} on rank 0 and {value} on rank {number}"
                raise InputError(
                    f"the processes of a run must have the same options and read the same files: {what}"
                )


def on_first_rank(work: Callable[[], object]) -> None:
    """Run `work` on rank 0 while the others wait; an InputError that it raises is raised on every rank."""
    refusal = None
    if rank() == 0:
        try:
            work()
        except InputError as error:
            refusal = error
    # The others have waited for this; one that went on would hang in its next collective.
    refusal = gather(refusal)[0]
    if refusal is not None:
        raise refusal


def global_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks of a tensor of any shape, in fp64 on the CPU."""
    return _reduced(values, dist.ReduceOp.SUM)


def global_max(value: torch.Tensor) -> float:
    """Return the largest value of a scalar over ranks."""
    return _reduced(value, dist.ReduceOp.MAX).item()


def _reduced(values: torch.Tensor, op) -> torch.Tensor:
    # In fp64 a sum of counts is exact, and one of metrics hardly depends on how many ranks share the work.
    values = values.detach().double().clone()
    if world_size() > 1:
        dist.all_reduce(values, op=op)
    return values.cpu()


def global_sums(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the sums over ranks of scalars by name; every rank gives the same names."""
    totals = global_sum(stacked_on_cpu([value.double() for value in values.values()]))
    return dict(zip(values, totals.tolist(), strict=True))


def global_counts(*counts: torch.Tensor) -> list[int]:
    """Return the sums of scalars over all ranks, each at least 1: the denominators of a whole minibatch."""
    return global_sum(stacked_on_cpu(counts)).clamp(min=1).tolist()


def stacked_on_cpu(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return scalars of one dtype, from any device, as one CPU tensor; the device is waited for once."""
    on_device = [x for x in scalars if x.device.type != "cpu"]
    arrived = iter(torch.stack(on_device).cpu()) if on_device else iter(())
    on_cpu = []
    for x in scalars:  # in their order, whichever device each was on
        on_cpu.append(x if x.device.type == "cpu" else next(arrived))
    return torch.stack(on_cpu)
