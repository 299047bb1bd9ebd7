"""The processes of a run: their sums, what one of them alone does, and errors that all of them hear of."""

import concurrent.futures
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fused_rl.trainers.base import launch
from fused_rl.trainers.base.launch import TIMEOUT
from fused_rl.trainers.base.screen import silent
from fused_rl.trainers.options.errors import InputError

PATIENCE = timedelta(seconds=60)  # of a rank that has failed, for the others to hear of it
HEARING = 5.0  # seconds, of a rank that has left the group
LAST_WORDS, HEARD = "fused_rl/last words", "fused_rl/heard"  # keys in the store
# What Gloo, NCCL and the store say where another process is gone, whichever operation hears of it.
GONE = ("gloo/", "NCCL", "TCPStore", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
IN_TOUCH = 10.0  # seconds
_agreements = itertools.count()
Part = TypeVar("Part")


def refused(error: Exception) -> None:
    """Have the other processes of a launched run hear why this one never joins them; alone it does nothing."""
    try:
        if launch.processes() == 1 or dist.is_initialized():
            return
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
        with contextlib.suppress(type(error)):
            agree(error)
    except (RuntimeError, InputError):  # nobody came, or the launcher tells nonsense: this process says so itself
        pass
    launch.leave()


def rank() -> int:
    """This process's rank; 0 outside a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_ranks():
    """The process group of all ranks; None where there is but one."""
    return dist.group.WORLD if world_size() > 1 else None


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def gather(part: Part) -> list[Part]:
    """Every rank's `part`, by rank, on every rank."""
    parts = [part] * world_size()
    if world_size() > 1:
        dist.all_gather_object(parts, part)
    return parts


def on_first_rank(work: Callable[[], None]) -> None:
    """Have rank 0 do something while the others wait; an InputError that it raises is raised on every rank."""
    refusal = None
    if rank() == 0:
        try:
            work()
        except InputError as error:
            refusal = error
    refusal = gather(refusal)[0]
    if refusal is not None:
        raise _known(refusal)


def on_first_rank_at_length(work: Callable[[], None]) -> None:
    """`on_first_rank` for work that may take longer than ranks wait for each other: they keep in touch meanwhile."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(work if rank() == 0 else lambda: None)
        ended = False
        while not ended:
            concurrent.futures.wait([future], timeout=IN_TOUCH)
            ended = gather(future.done())[0]
    on_first_rank(future.result)


def global_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of a tensor of any shape, in fp64 on the CPU."""
    values = values.detach().double().clone()
    if world_size() > 1:
        values = values.cuda() if dist.get_backend() == "nccl" else values
        dist.all_reduce(values)
    return values.cpu()


def global_sums(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """The sums over ranks of scalars by name, which every rank names alike."""
    totals = global_sum(arrived([value.double() for value in values.values()]))
    return dict(zip(values, totals.tolist(), strict=True))


def counted(*counts: torch.Tensor) -> list[int]:
    """The sums of scalars over all ranks, each at least 1: the denominators of a whole minibatch, with which no split
    of it changes the gradient. All ranks meet once."""
    return global_sum(arrived(counts)).clamp(min=1).tolist()


def arrived(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Scalars of one dtype, on a device or on the CPU, as one tensor on the CPU; the device is waited for once."""
    there = [x for x in scalars if x.device.type != "cpu"]
    found = iter(torch.stack(there).cpu()) if there else iter(())
    return torch.stack([x if x.device.type == "cpu" else next(found) for x in scalars])


def global_max(value: torch.Tensor) -> float:
    """The largest of a scalar over ranks."""
    value = value.detach().double().clone()
    if world_size() > 1:
        value = value.cuda() if dist.get_backend() == "nccl" else value
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


@contextlib.contextmanager
def together():
    """All ranks leave the block, or none: an error on one of them is an error on all, in bounded time.

    The rank that failed raises its own error, the others an InputError that begins with `rank 1: `; a rank that died is
    one too. For what one rank alone may stumble over, such as its rows or its verifier. Every rank must enter.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    if error is not None and _all_know(error):
        raise error
    agree(error)


@contextlib.contextmanager
def shared_fate():
    """Around a whole run: what ends one rank, outside of `together` too, ends the others with a line, in seconds.

    The rank that fails leaves its error in the store and then the process group, so that no collective waits for it; of
    one that was killed the others hear by its closed connections.
    """
    try:
        yield
    except Exception as error:
        if world_size() == 1 or _all_know(error):
            raise
        store, world = c10d._get_default_store(), world_size()
        if isinstance(error, RuntimeError) and any(words in str(error) for words in GONE):
            with silent():
                told = InputError(_told(store, LAST_WORDS))
            _wait_until_heard(store, 0)
            raise told from error
        _tell(store, LAST_WORDS, error)
        dist.destroy_process_group()
        _wait_until_heard(store, world)
        raise


def _wait_until_heard(store, ranks: int) -> None:
    """Count this rank, and wait for so many: the store may be this process's, and others may still read in it."""
    until = time.monotonic() + HEARING
    with contextlib.suppress(RuntimeError), silent():  # it may go with its rank, and warns of that in 30 lines
        heard = store.add(HEARD, 1)
        while heard < ranks and time.monotonic() < until:
            time.sleep(0.05)
            heard = store.add(HEARD, 0)


def _all_know(error: Exception) -> bool:
    """Whether all ranks have raised for this error already, each its own."""
    return getattr(error, "all_ranks_know", False)


def _known(error: Exception) -> Exception:
    error.all_ranks_know = True
    return error


def agree(error: Exception | None) -> None:
    """Raise on every rank if one of them has an error; `together` without the block."""
    if world_size() == 1:
        if error is not None:
            raise error
        return
    # The store is beside the ranks' connections: what went wrong is known even where a collective never ends.
    store, key = c10d._get_default_store(), f"fused_rl/error/{next(_agreements)}"
    first = error is None or _tell(store, key, error)

    # A rank that failed in the middle of a collective must not wait for others that wait for it.
    flag = torch.tensor([float(error is not None)], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    try:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True).wait(TIMEOUT if error is None else PATIENCE)
    except RuntimeError as lost:
        if error is None:
            raise InputError(_told(store, key, LAST_WORDS)) from lost
    if error is not None and (first or isinstance(error, InputError)):
        raise _known(error)
    if flag.item():  # of another rank; an error of ours that came later may be no more than a lost connection
        raise _known(InputError(_told(store, key))) from error


def _tell(store, key: str, error: Exception) -> bool:
    """Leave the error in the store for the other ranks; whether it is the first there."""
    said = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    line = f"rank {rank()}: {' '.join(said.split())}"
    try:
        return store.compare_set(key, "", line).decode() == line
    except RuntimeError:  # the store has gone with its rank
        return True


def _told(store, *keys: str) -> str:
    """The first error that a rank left in the store; else all that can be said."""
    with contextlib.suppress(RuntimeError):  # the store may have gone with its rank
        for key in keys:
            if store.check([key]):
                return store.get(key).decode()
    return "another process of the run ended or does not answer; its own output says why"
