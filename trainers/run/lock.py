"""One run at a time in a folder: a lock that the kernel takes back however the process ends."""

import errno
import fcntl
import os
import socket
from pathlib import Path

from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.options.config import InputError

NAME = ".lock"
_held: dict[Path, int] = {}  # folder -> file descriptor; of this process, which runs one training at a time


def take(folder: Path) -> None:
    """Hold an existing folder until `release` or the end of this process; what it held before is released.

    Raises:
        InputError: another process holds it; names that process.
        OSError: no lock can be written there.
    """
    release()
    path = folder / NAME
    while folder not in _held:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        _lock(handle, folder)
        if _is(path, handle):
            os.truncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            _held[folder] = handle
        else:  # its holder has just released it, and with it the name
            os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
        os.close(handle)
        raise InputError(f"output_dir={folder} is in use by {holder}; wait for it, or choose another folder") from error
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # Lustre, NFS, as they are mounted
            raise
        tell(f"output_dir={folder}: no locks on this file system; see that no other run writes there")


def _is(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def release() -> None:
    """Let go of the folder that this process holds, if any; leaves no file, and no folder that holds nothing."""
    for folder, handle in _held.items():
        (folder / NAME).unlink(missing_ok=True)
        os.close(handle)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    _held.clear()
