"""The memory of a CTA: what may be touched, by aligned accesses, and that no barrier is missing between two of them."""

import ctypes
import functools
from typing import NamedTuple

import numpy as np

from tests.device.instructions import BITS

PAGE = 4096
ADDRESSES = 1 << 47  # of a process


class Fault(AssertionError):
    """What a kernel must not do on a GPU."""


class Block(NamedTuple):
    """A storage that a kernel may touch."""

    begin: int
    end: int
    name: str


@functools.cache
def _process_bytes():
    return np.frombuffer((ctypes.c_uint8 * (ADDRESSES - PAGE)).from_address(PAGE), np.uint8)


def process_memory(blocks: list[Block]) -> "Memory":
    """All of this process but its first page; what is touched is looked up in the blocks before."""
    return Memory(_process_bytes(), PAGE, blocks)


def shared_memory(size: int) -> "Memory":
    """NaN, so far."""
    size = max(size, 16)
    return Memory(np.full(size, 255, np.uint8), 0, [Block(0, size, "shared memory")])


class Memory:
    """Bytes from address `begin` on, of which those in `blocks` may be touched."""

    def __init__(self, data, begin: int, blocks: list[Block]):
        self.data, self.begin, self.blocks = data, begin, blocks
        self.begins = np.array([block.begin for block in blocks])
        self.ends = np.array([block.end for block in blocks])
        self.forget()

    def forget(self):
        """A barrier: from here on every thread sees what any has written."""
        self.accesses: list[Access] = []

    def touch(self, addresses, threads, size: int, writes: bool):
        """Check an access of `size` bytes at each address, (threads,)."""
        if (addresses % size).any():
            raise Fault(
                f"not aligned to {size} bytes: {self.where(addresses[addresses % size != 0][0])}"
            )
        found = np.searchsorted(self.begins, addresses, side="right") - 1
        outside = (found < 0) | (addresses + size > self.ends[np.maximum(found, 0)])
        if outside.any():
            raise Fault(f"{size} bytes outside every argument: {self.where(addresses[outside][0])}")
        self.accesses.append(Access(addresses, threads, size, writes, len(self.accesses)))

    def check_races(self):
        """That no two threads touched a byte by two instructions since the last barrier, one of them writing."""
        written = _touched([access for access in self.accesses if access.writes])
        if not len(written.byte):
            return
        touched = _touched(self.accesses)
        # a scalar is loaded by every thread, for the one that stores to it
        scalar = np.array([access.scalar for access in self.accesses])
        alone = np.array([len(access.threads) == 1 for access in self.accesses])
        for side, last in (("left", 0), ("right", 1)):
            at = np.searchsorted(written.byte, touched.byte, side=side) - last
            at = np.clip(at, 0, len(written.byte) - 1)
            writer = written.number[at]
            race = written.byte[at] == touched.byte
            race &= written.thread[at] != touched.thread
            race &= writer != touched.number
            race &= ~(scalar[touched.number] & alone[writer] & (touched.number < writer))
            if race.any():
                raise Fault(
                    f"two threads and no barrier between them: {self.where(touched.byte[race][0])}"
                )

    def where(self, address) -> str:
        """An address for the reader, from the beginning of the block before it."""
        at = max(int(np.searchsorted(self.begins, address, side="right")) - 1, 0)
        block = self.blocks[at]
        return (
            f"byte {address - block.begin:,} of {block.name}, which has {block.end - block.begin:,}"
        )

    def load(self, addresses, width: int):
        data = self.data.view(BITS[width])
        return data[(addresses - self.begin) // (width // 8)]

    def store(self, addresses, width: int, bits):
        data = self.data.view(BITS[width])
        at = (addresses - self.begin) // (width // 8)
        data[at] = bits
        if (data[at] != bits).any():
            raise Fault(
                f"two threads store different values: {self.where(addresses[data[at] != bits][0])}"
            )


class Access(NamedTuple):
    """Of an instruction, by some threads."""

    addresses: np.ndarray
    threads: np.ndarray
    size: int
    writes: bool
    number: int

    @property
    def scalar(self) -> bool:
        return (self.addresses == self.addresses[0]).all()


class Touched(NamedTuple):
    """Bytes, sorted; by which thread, and by the access of which number since the last barrier."""

    byte: np.ndarray
    thread: np.ndarray
    number: np.ndarray


def _touched(accesses: list[Access]) -> Touched:
    parts = [Touched(*np.zeros((3, 0), np.int64))]
    for access in accesses:
        byte = access.addresses[:, None] + np.arange(access.size)
        thread = np.repeat(access.threads, access.size)
        parts.append(Touched(byte.ravel(), thread, np.full(byte.size, access.number)))
    byte, thread, number = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(byte, kind="stable")
    return Touched(byte[order], thread[order], number[order])
