"""Where the weights for servers are written."""

import contextlib
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ..base import ranks
from ..base.files import io_errors_in_a_line

SHARED_MEMORY = Path("/dev/shm")
# Copies of the weights: two publications exist at once, and others write there too.
ROOM = 2.5
BYTES_IN_4_BIT = 4  # that one packed byte is saved as: two weights of 16 bits


def folder_of(urls: Sequence[str], published_dir: str | None, output_dir: Path, lm) -> Path:
    """Return the empty folder that a run publishes into, the same for every process. Call it on all.

    Args:
        urls: the servers.
        published_dir: the user's choice; None is /dev/shm where it will do, and else the run's own folder.
        output_dir: the run's, which exists.
        lm: the policy, whose bytes the first process counts.
    """

    def choose() -> Path:
        # Two runs never have one name, and a run that is resumed on its machine has the one that it had before it was
        # killed. Machines of one image may number their folders alike.
        run_stat = output_dir.stat()
        name = f"fused-rl-{socket.gethostname()}-{run_stat.st_dev:x}-{run_stat.st_ino:x}"
        if published_dir is not None:
            chosen = Path(published_dir).absolute() / name
            with io_errors_in_a_line("the weights for the servers", chosen):
                _remove(chosen)
            return chosen
        chosen = SHARED_MEMORY / name
        is_usable = all(map(is_here, urls)) and _make_if_room(chosen, lm)
        return chosen if is_usable else output_dir / "published"

    return ranks.on_first_rank(choose)


def _remove(folder: Path) -> None:
    """Remove what a killed run has left."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _make_if_room(folder: Path, lm) -> bool:
    """Make an empty folder in shared memory; return False without room, or with something of another's in its place."""
    # Everyone may write there, and the name can be known: no link is followed, and what is not this user's stays.
    try:
        _remove(folder)
        if not _fits(lm):
            return False
        folder.mkdir(mode=0o755)  # servers may be another user's
    except OSError:
        return False
    return True


def _fits(lm) -> bool:
    """Return True if shared memory has room for two publications and a half."""
    total = 0
    for weight in lm.parameters():
        elements = ranks.whole_shape(weight).numel()
        total += elements * (weight.itemsize if weight.is_floating_point() else BYTES_IN_4_BIT)
    return shutil.disk_usage(SHARED_MEMORY).free >= ROOM * total


def is_here(url: str) -> bool:
    """Return True if the URL is of this machine."""
    host = urlsplit(url).hostname or ""
    names = ("localhost", "::1", socket.gethostname().lower())
    return host.startswith("127.") or host in names
