"""A Triton driver without a device: everything of a launch up to the GPU is real, and what would reach it is checked.

    with driver.session() as seen:
        fused_rl.token_logprobs(...)  # on tensors that say cuda
    seen.launches, seen.compiled

Kernels are specialised, bound and compiled for sm_90 as on an H100, by the ptxas in Triton's wheel. A session executes
the PTX of each launch on the memory behind those tensors, and so the results are right, or only checks and records.
TRITON_INTERPRET=0 must stand before the first import of triton.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.device import tensors
from tests.device.memory import Block
from tests.device.ptx import Program

TARGET = GPUTarget("cuda", 90, 32)
LARGEST_GRID = (2**31 - 1, 65535, 65535)
H100 = {
    "max_shared_mem": 232448,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "warpSize": 32,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 2619000,
    "mem_bus_width": 5120,
}


class LaunchError(AssertionError):
    """What a GPU would refuse, or misread."""


class Argument(NamedTuple):
    """What a kernel gets for one of its parameters."""

    name: str
    kind: str
    value: int | float
    storage: Block | None = None
    """What a pointer may reach."""


class Launch(NamedTuple):
    """One launch of a kernel, checked."""

    name: str
    grid: tuple[int, int, int]
    arguments: list[Argument]
    ptx: str
    shared: int
    """Bytes of shared memory of a program."""

    def run(self, chosen=None):
        """Execute all programs, or those of the chosen numbers (triples)."""
        values = [argument.value for argument in self.arguments]
        blocks = [argument.storage for argument in self.arguments if argument.storage]
        _program(self.ptx).run(self.grid, values, blocks, self.shared, chosen)


_program = functools.lru_cache(Program)

# --------------------------------------------------------------------------- what reaches the GPU, checked


def argument(name: str, kind: str, value, device: str) -> Argument:
    if kind.startswith("*"):
        return pointer(name, kind, value, device)
    return number(name, kind, value)


def pointer(name: str, kind: str, tensor, device: str) -> Argument:
    """A tensor as a kernel gets it: where it begins, and the storage that may be reached from there."""
    if tensor.device.type != device:
        raise LaunchError(f"{name} is a pointer to {tensor.device}, not to {device}")
    storage = tensors.values(tensor).untyped_storage()
    block = Block(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name)
    address = tensor.data_ptr()
    if tensor.numel() and not block.begin <= address < block.end:
        raise LaunchError(f"{name} does not point into its storage")
    return Argument(name, kind, address, block)


def number(name: str, kind: str, value) -> Argument:
    """A number as a kernel gets it, in a type that holds it."""
    if kind[0] in "iu" and kind[1:].isdigit():
        bits = int(kind[1:])
        lowest = -(2 ** (bits - 1)) if kind[0] == "i" and bits > 1 else 0
        if not lowest <= value < lowest + 2**bits:
            raise LaunchError(f"{name} = {value} does not fit into {kind}")
        value = int(value)
    return Argument(name, kind, value)


def check_grid(name: str, grid: tuple[int, int, int]):
    for size, largest in zip(grid, LARGEST_GRID, strict=True):
        if not 0 < size <= largest:
            raise LaunchError(f"{name}: a grid of {grid}, where {LARGEST_GRID} is the largest")


def check_promises(name: str, arguments: list[Argument], divisible: list[bool]):
    """That what was compiled for multiples of 16 is one."""
    for argument, promised in zip(arguments, divisible, strict=True):
        if promised and argument.value % 16:
            raise LaunchError(
                f"{name}: {argument.name} = {argument.value} is no multiple of 16, as was promised"
            )


# --------------------------------------------------------------------------- what Triton asks of a driver


class Session:
    """What happened under a driver: the launches, and the names of the kernels that were compiled, in order."""

    def __init__(self, device: str, on_launch: Callable[[Launch], None]):
        self.device, self.on_launch = device, on_launch
        self.launches: list[Launch] = []
        self.compiled: list[str] = []

    def note_compilation(self, *, fn, **_):
        self.compiled.append(fn.name.rpartition(".")[2])


class Launcher:
    """Made by Triton for a compiled kernel, and called for each launch of it."""

    def __init__(self, src, metadata):
        self.src, self.metadata = src, metadata
        self.session = driver.active.session

    def __call__(self, x, y, z, stream, ptx, packed, launch_metadata, enter, leave, *values):
        arguments, divisible = [], []
        for at, (name, kind) in enumerate(self.src.signature.items()):
            if kind != "constexpr":
                arguments.append(argument(name, kind, values[at], self.session.device))
                divisible.append(bool(self.src.attrs.get((at,))))
        launch = Launch(self.metadata.name, (x, y, z), arguments, ptx, self.metadata.shared)
        check_grid(launch.name, launch.grid)
        check_promises(launch.name, arguments, divisible)
        self.session.launches.append(launch)
        self.session.on_launch(launch)


class Utils:
    """Loads a kernel; what stands for its handle is its PTX."""

    def find(self, module, function, name, files, hash):
        """Triton's hook before it loads a kernel: the files of its compilation."""
        with open(files[f"{name}.ptx"]) as file:
            self.ptx = file.read()

    def load_binary(self, name, kernel, shared, device):
        registers = spills = 0
        most_threads = 1024
        return name, self.ptx, registers, spills, most_threads

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return H100


class Driver:
    """Names its target, and hands launches to a session."""

    numbers = itertools.count()
    launcher_cls = Launcher

    def __init__(self, session: Session):
        self.session, self.utils = session, Utils()
        self.device = next(self.numbers)  # Triton has a cache of kernels for each

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def session(
    on_launch: Callable[[Launch], None] = Launch.run, device: str = "cuda"
) -> Iterator[Session]:
    """Launches within go to a driver without a device, which has compiled nothing yet.

    Each `Launch` that passes its checks (else LaunchError) goes to `on_launch`, or its PTX is executed (else Fault).
    """
    seen = Session(device, on_launch)
    ours = Driver(seen)
    previous, driver._active = driver._active, ours
    knobs.runtime.jit_post_compile_hook = seen.note_compilation
    knobs.runtime.kernel_load_start_hook.add(ours.utils.find)
    try:
        yield seen
    finally:
        knobs.runtime.kernel_load_start_hook.remove(ours.utils.find)
        knobs.runtime.jit_post_compile_hook = None
        driver._active = previous
