"""Volumes in memory, as containers have for their runs and as small disks."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tmpfs(folder: Path, kilobytes: int = 1 << 16) -> Iterator[None]:
    """Mount an empty volume at the folder; a test is skipped where that is not allowed."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder]
    try:
        made = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no command mount")
    if made.returncode:
        pytest.skip("mounting is not allowed")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
