"""How the processes of a run come together: what a launcher tells each of them, and their process group."""

import atexit
import math
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.options.text import in_a_line

TIMEOUT = timedelta(minutes=30)
JOINING = timedelta(minutes=10)  # for all processes to have started
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what a launcher tells each of them
REMEDY = "start through torchrun or deepspeed, which set all of them, or unset RANK and WORLD_SIZE for one process"


def processes() -> int:
    """How many there are, by the process group, else by what a launcher says; 1 without a launcher.

    Raises:
        InputError: the launcher says half of what is needed, or numbers that are none.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    given = [name for name in LAUNCHED if name in os.environ]
    if not {"RANK", "WORLD_SIZE"} & set(given):
        return 1
    lacking = [name for name in LAUNCHED if name not in os.environ]
    if lacking:
        raise InputError(f"the environment has {', '.join(given)}, and not {', '.join(lacking)}: {REMEDY}")
    world = _number("WORLD_SIZE", 1, math.inf)
    _number("RANK", 0, world - 1)
    _number("MASTER_PORT", 0, 65535)
    local = _number("LOCAL_WORLD_SIZE", 1, world) if "LOCAL_WORLD_SIZE" in os.environ else world
    if world > 1 or "LOCAL_RANK" in os.environ:
        _number("LOCAL_RANK", 0, local - 1)
    return world


def _number(variable: str, low: int, high: float) -> int:
    text = os.environ.get(variable, "nothing")
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        bounds = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
        raise InputError(f"{variable} is {text!r:.40} in the environment; expected a whole number {bounds}: {REMEDY}")
    return int(text)


def meet(launched: Callable[[], None], alone: Callable[[], None]) -> None:
    """Join a process group; it stays until the process ends.

    DeepSpeed keeps groups of the first one for good: a run that left it would be the last one in its process.

    Args:
        launched: joins the others.
        alone: joins a group of one, or none.
    """
    world = processes()
    if "RANK" in os.environ:
        try:
            launched()
        except RuntimeError as error:  # a time-out, a port that is taken
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise InputError(f"the {world} processes of the run do not meet at {place}: {in_a_line(error)}") from error
        c10d._set_pg_timeout(TIMEOUT, dist.group.WORLD)
    else:
        alone()
    if dist.is_initialized():
        atexit.register(leave)


def leave() -> None:
    """Leave the process group, if any: for good, because DeepSpeed cannot join another one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.2)  # gloo's threads must drop their last work before the interpreter goes


def divide_over(name: str, count: int, world: int) -> int:
    """Each process's share of `count`, which the option `name` gives; refuses what does not divide."""
    if count % world:
        raise InputError(f"{name}={count} does not divide over {world} processes")
    return count // world
