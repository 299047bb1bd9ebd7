"""The processes of a run, their sums, and what one does alone; the launcher ends the others when one fails.

A rank is a share of the rows. It is one process, unless `sequence_parallel` neighbouring processes hold parts of the
same sequences: these have the same rows, the same seeds and, after each forward pass, the same numbers. So losses,
denominators and metrics are of ranks; files, printing, the engine's mean of gradients and checkpoints of processes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .text import InputError

Item = TypeVar("Item")
Sources = Sequence[Sequence[tuple[int, int]]]
"""For each rank the items that it gets: the rank that holds an item, and the item's number there."""


planned: int | None = None  # processes of the run that a dry run is of
_per_rank = 1  # processes that hold parts of the same sequences
_sequence_group: Any = None  # the process group of these
_data_group: Any = (
    None  # the process group of those that hold the same part of each rank's sequences
)


def set_sequence_parallel(per_rank: int) -> None:
    """From now on so many neighbouring processes are one rank; all processes call this together."""
    global _per_rank, _sequence_group, _data_group
    _per_rank, _sequence_group, _data_group = per_rank, None, None
    if per_rank == 1 or planned:
        return
    # Every process takes part in making every group, also those that it is not in.
    starts = range(0, processes(), per_rank)
    sequence_groups = [dist.new_group(range(start, start + per_rank)) for start in starts]
    data_groups = [
        dist.new_group([start + offset for start in starts]) for offset in range(per_rank)
    ]
    _sequence_group = sequence_groups[rank()]
    _data_group = data_groups[process_index() % per_rank]


def sequence_group() -> "dist.ProcessGroup | None":
    """Return the process group of those that hold parts of this rank's sequences; None if each is whole."""
    return _sequence_group


def processes() -> int:
    """Return the number of processes that train together, also before they have met; 1 without a launcher."""
    if planned:
        return planned
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))  # a launcher's


def process_index() -> int:
    """Return this process's number; 0 outside a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of a weight, of which ZeRO 3 may leave a part in each process."""
    return getattr(weight, "ds_shape", weight.shape)


def divide_over(name: str, count: int, world: int) -> int:
    """Return each process's share of `count`, which the option `name` gives; refuse a count that does not divide."""
    if count % world:
        raise InputError(f"{name}={count} does not divide over {world} processes")
    return count // world


def planned_ranks(sequence_parallel: int) -> int:
    """Return the number of ranks that the processes will be, also before they have met."""
    if processes() % sequence_parallel:
        raise InputError(
            f"sequence_parallel={sequence_parallel} does not divide the {processes()} processes of the run; choose "
            "one that does"
        )
    return processes() // sequence_parallel


def rank() -> int:
    """Return the number of this process's share of the rows; 0 outside a process group."""
    return process_index() // _per_rank


def world_size() -> int:
    """Return the number of shares of the rows."""
    return processes() // _per_rank


def share_of_rank(count: int) -> list[int]:
    """Return the indices of this rank's share of `count` items, as many on every rank: ZeRO 3 needs equal passes.

    Where the ranks do not divide the items, the last shares are filled up with the first item.
    """
    world = world_size()
    filled = [*range(count), *[0] * (-count % world)]
    return filled[rank() :: world]


def all_ranks():
    """Return a process group with one process of each rank; None if there is one rank."""
    if world_size() == 1:
        return None
    return dist.group.WORLD if _data_group is None else _data_group


def barrier() -> None:
    """Wait for all processes, by a sum on the CPU: on GPUs gloo's, whatever device is current."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(()))


def gather(item: Item) -> list[Item]:
    """Return every rank's `item`, by rank, on every rank."""
    return _gathered(item, all_ranks())


def gather_processes(item: Item) -> list[Item]:
    """Return every process's `item`, by process, on every process."""
    return _gathered(item, _all_processes())


def _all_processes():
    return dist.group.WORLD if dist.is_initialized() else None


def _gathered(item: Item, group) -> list[Item]:
    if group is None:
        return [item]
    items = [item] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items


def exchange(items: Sequence[Item], sources: Sources) -> list[Item]:
    """Return the items of which `sources` of this rank says which rank holds them, and their numbers there.

    All ranks call it with the same sources.
    """
    if world_size() == 1:
        return [items[number] for _, number in sources[0]]
    received = []
    for source in range(world_size()):
        parcel: list = [None]
        # Only those of the source are sent.
        parcels = [{i: items[i] for holder, i in wanted if holder == source} for wanted in sources]
        dist.scatter_object_list(parcel, parcels, group_src=source, group=all_ranks())
        received += parcel
    return [received[holder][number] for holder, number in sources[rank()]]


# Work that the processes of a rank, which have the same items, share.


def my_items(count: int) -> list[int]:
    """Return which of a rank's `count` items are this process's work: neighbours, as many as the others have.

    Where they do not divide, the last item is the work of several.
    """
    if _sequence_group is None:
        return list(range(count))
    size = -(-count // _per_rank)
    begin = size * (process_index() % _per_rank)
    return [min(i, count - 1) for i in range(begin, begin + size)]


def gather_items(results: list[Item], count: int) -> list[Item]:
    """Return the results of all `count` items of this rank, from those of each process's `my_items`."""
    if _sequence_group is None:
        return results
    return sum(_gathered(results, _sequence_group), [])[:count]


def on_sequence_leader(work: Callable[[], Item]) -> Item:
    """Return what `work` returns on the first process of this rank, which alone does it; generators stay alike.

    An InputError that it raises is raised on every process of the rank.
    """
    result, state = _on_first(_sequence_group, lambda: (work(), torch.get_rng_state()))
    torch.set_rng_state(state)
    return result


def on_first_rank(work: Callable[[], Item]) -> Item:
    """Return what `work` returns on process 0, while the others wait; its InputError is raised on every process."""
    return _on_first(_all_processes(), work)


def _on_first(group, work: Callable[[], Item]) -> Item:
    """Return what `work` returns on the first process of a group, or raise its InputError, on all of them."""
    result: Any = None
    refusal = None
    if group is None or dist.get_rank(group) == 0:
        try:
            result = work()
        except InputError as error:
            refusal = error
    # The others have waited for this; one that went on would hang in its next collective.
    result, refusal = _gathered((result, refusal), group)[0]
    if refusal is not None:
        raise refusal
    return result


def check_equal(facts: Mapping[str, object]) -> None:
    """Refuse processes that have other options or inputs than process 0, on all of them."""
    # Every process sees all facts, so every one raises, and none is left waiting for the others.
    facts_of_processes = gather_processes(dict(facts))
    first = facts_of_processes[0]
    for number, facts_of_process in enumerate(facts_of_processes):
        for name, value in facts_of_process.items():
            if value != first.get(name):
                difference = f"{name} is {first.get(name)} on rank 0 and {value} on rank {number}"
                raise InputError(
                    f"the processes of a run must have the same options and read the same files: {difference}"
                )


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
        dist.all_reduce(values, op=op, group=all_ranks())
    return values.cpu()


def global_sums(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the sums over ranks of scalars by name; every rank gives the same names."""
    totals = global_sum(stacked_on_cpu([value.double() for value in values.values()]))
    return dict(zip(values, totals.tolist(), strict=True))


def gather_rows(values: torch.Tensor) -> torch.Tensor:
    """Return (N, ...) fp64 on the CPU of every rank's `values` (n, ...), where row i of N is rank i % world's.

    The ranks have equally many rows, or the last of them one less.
    """
    total = int(global_sum(torch.tensor(len(values))).item())
    return gather_share(values, list(range(rank(), total, world_size())), total)


def gather_share(values: torch.Tensor, indices: list[int], count: int) -> torch.Tensor:
    """Return (count, ...) fp64 on the CPU, from the `values` that each rank has of the `indices` of its share."""
    rows = torch.zeros(count, *values.shape[1:], dtype=torch.float64)
    rows[indices] = values.double().cpu()
    if rank() > 0:
        # The first item is rank 0's; in another share it only fills up.
        rows[:1] = 0
    return global_sum(rows)


def global_counts(*counts: torch.Tensor) -> list[int]:
    """Return the sums of scalars over all ranks: the denominators of a whole minibatch."""
    return global_sum(stacked_on_cpu(counts)).tolist()


def stacked_on_cpu(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return scalars of one dtype, from any device, as one CPU tensor; the device is waited for once."""
    on_device = [x for x in scalars if x.device.type != "cpu"]
    arrived = iter(torch.stack(on_device).cpu()) if on_device else iter(())
    on_cpu = []
    for x in scalars:  # in their order, whichever device each was on
        on_cpu.append(x if x.device.type == "cpu" else next(arrived))
    return torch.stack(on_cpu)
