"""tests/device in a process of its own, which believes in a CUDA device: see tests/device/process.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import process

ROOT = Path(__file__).parents[1]
NOTHING_COLLECTED = 5
COMMAND = [
    "-m",
    "pytest",
    "-q",
    "-p",
    "tests.device.process",
    "-p",
    "no:cacheprovider",
    "tests/device",
    "-m",
    "not slow",
]


@pytest.mark.release
def test_on_a_device_that_is_not_there():
    """Its quick tests; `make test-device` runs the slow ones too, and shows them one by one."""
    if reason := process.missing():
        pytest.skip(reason)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }
    done = subprocess.run(
        [sys.executable, *COMMAND],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, NOTHING_COLLECTED), done.stdout[-20000:] + done.stderr[-2000:]
