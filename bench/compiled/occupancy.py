"""How much of a copy's bandwidth a streaming kernel reaches, by counts: a model, of which no number was measured here.

Assumed: a copy moves 4.3 TB/s on an H200 and 7 TB/s on a B200; a load takes 700 ns; a scheduler issues an instruction
per clock, and a special function takes eight of its clocks. By Little's law an H200 then needs 23 KB in flight on each
multiprocessor, a B200 33 KB. What several limits give together is taken as the inverse of the sum of their inverses'
fourth powers, to the power of 1/4: at two equal limits 16 % less than either.
"""

from typing import NamedTuple

from fused_rl.kernels import launch

LATENCY = 700e-9  # seconds
THREADS = 128  # of a program: a warp for each of the four schedulers


class Device(NamedTuple):
    multiprocessors: int
    clock: float  # Hz
    copied: float  # bytes per second

    def programs(self, registers: int) -> int:
        """Programs that the registers of a multiprocessor hold."""
        return 65536 // (THREADS * -(-registers // 8) * 8)


H200 = Device(132, 1.755e9, 4.3e12)
B200 = Device(148, 1.85e9, 7e12)


def share_of_copy(loop: dict, ahead: float, programs: int, device: Device) -> float:
    """Of the copy bandwidth, by a main loop's figures (`machine_code.py`), its waits, and the programs that share it.

    Args:
        ahead: instructions of a round between a load and what first needs it.
        programs: resident on each multiprocessor.
    """
    elements = loop["elements"]  # of a thread, in a round
    moved = THREADS * loop["bytes"] / (device.copied / device.multiprocessors)
    issued = elements * loop["instructions"] / device.clock
    special = elements * loop["special"] * 8 / device.clock
    waited = max(0.0, LATENCY - ahead / device.clock)
    limits = programs * moved / (issued + waited), moved / issued, moved / special, 1.0
    return sum(limit**-4 for limit in limits) ** -0.25


def filled(rows: int, whole: int, segments: int, resident: int) -> float:
    """Time of all segments at the device's full rate, over that of the launch: the last wave is not full.

    Args:
        whole: rows that have a program each; those after them have one per segment.
        resident: programs that fit on the device.
    """
    ideal = rows * segments / resident
    split = (rows - whole) * segments
    return ideal / max(ideal, segments * launch.waves(whole, resident) + launch.waves(split, resident))
