"""These tests believe in a CUDA device that is not there, in a process of its own: see process.py.

Elsewhere they are not collected.
"""

import sys

import pytest

IN_PROCESS = "tests.device.process" in sys.modules and sys.modules["tests.device.process"].begun
collect_ignore_glob = [] if IN_PROCESS else ["test_*.py"]


@pytest.fixture
def device():
    """`device="cuda"` makes tensors of the device, and the CPU twins stand where the kernels would run."""
    from tests.device import tensors, twins

    with twins.in_place_of_kernels(), tensors.present():
        yield tensors.DEVICE


@pytest.fixture
def kernels(poisoned):
    """`device="cuda"` makes tensors of the device; kernels are compiled, checked and executed: see driver.py.

    Memory that nobody has written holds NaN. Yields the `driver.Session`.
    """
    pytest.importorskip("triton")
    from tests.device import driver, tensors

    with driver.session() as seen, tensors.present():
        yield seen
