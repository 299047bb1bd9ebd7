"""The folder of a run: one run at a time, in which nothing is deleted that no run wrote.

A run opens its folder (`Folder.open`), which changes nothing in it; when all that it reads is read, `claim` does.
"""

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

import filelock

from fused_rl.trainers.base import ranks, written
from fused_rl.trainers.base.files import storing, write_atomically
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.options.config import InputError, RunConfig
from fused_rl.trainers.run import hub
from fused_rl.trainers.run.checkpoint import Checkpoints, steps_in
from fused_rl.trainers.run.logger import require_trackers

LOCK = ".lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # Lustre, NFS, as they are mounted
_held: dict[Path, filelock.FileLock] = {}  # of this process, which runs one training at a time


def take(folder: Path) -> None:
    """Hold an existing folder until `release` or the end of this process; what it held before is released.

    Raises:
        InputError: another process holds it; names that process.
        OSError: no lock can be written there.
    """
    release()
    path = folder / LOCK
    lock = filelock.FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        holder = ""
        with contextlib.suppress(OSError):  # it has just ended
            holder = path.read_text(errors="replace")[:200]
        raise InputError(
            f"output_dir={folder} is in use by {holder or 'another process'}; wait for it, or choose another folder"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        tell(f"output_dir={folder}: no locks on this file system; see that no other run writes there")
    _held[folder] = lock
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}")


def release() -> None:
    """Let go of the folder that this process holds, if any; leaves no file, and no folder that holds nothing."""
    for folder, lock in _held.items():
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    _held.clear()


def in_use(folder: Path) -> bool:
    """Whether a process holds the folder; nothing in it changes."""
    with contextlib.suppress(FileNotFoundError), open(folder / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    return False


class Folder:
    """The output folder of a run."""

    def __init__(self, config: RunConfig):
        self.config, self.path, self.checkpoints = config, Path(config.output_dir), Checkpoints(config)

    def open(self) -> Path:
        """Lock it for this run, and find it fit for that; nothing in it has changed yet. Returns where it is.

        Raises:
            InputError: the folder cannot be written, another run lives in it or has left
                files, the run would delete what it reads, there is nothing whole to resume from, or what the run will
                tell of itself has nowhere to go.
        """
        require_trackers(self.config)
        if self.config.push_to_hub:
            ranks.on_first_rank(lambda: hub.check(self.config))
        ranks.on_first_rank(self._check)
        if self.config.resume:
            self.checkpoints.check()
        return self.path

    def _check(self) -> None:
        self._check_asked()

        # The lock.
        folder = self.path
        release()  # of a run before this one in the process: releasing may remove the folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            take(folder)
        except OSError as error:
            raise InputError(f"output_dir={folder} cannot be used: {error.strerror}; choose another folder") from error
        self._check_left()

    def foresee(self) -> None:
        """Of what `open` refuses that which can be known without a lock; makes no folder."""
        self._check_asked()
        self._check_left()

    def _check_asked(self) -> None:
        """What is asked for is there."""
        folder, config = self.path, self.config
        if config.resume and config.overwrite:
            raise InputError(
                "resume continues the run in output_dir and overwrite deletes it: give one of them; --overwrite false "
                "takes back what a config file says"
            )
        if config.resume and not self.checkpoints.folder.exists():
            done = f"; its trained model is {folder / 'model'}" if (folder / "model").exists() else ""
            anew = "replace the run with --overwrite" if written.there(folder) else "start without --resume"
            raise InputError(f"resume: there is no checkpoint in {self.checkpoints.folder}{done}; {anew}")

    def _check_left(self) -> None:
        """What the run will delete, or put others in the place of."""
        folder, config = self.path, self.config
        found = written.there(folder)
        if config.resume:
            models = [name for name in ("model", "critic") if name in found]
            if written.has_list(folder):  # a run of an earlier version has none
                written.check(folder, models, "move it elsewhere, or resume in a copy of the folder without it")
        elif found and not config.overwrite:
            ways = "it left no checkpoint to resume; replace it with --overwrite, or choose another folder"
            if steps_in(self.checkpoints.folder):
                ways = "continue it with --resume or replace it: --overwrite"
            raise InputError(f"output_dir={folder} already holds a run ({', '.join(found)}); {ways}")
        else:
            self._check_overwrite(found)

    def _check_overwrite(self, names: list[str]) -> None:
        """Refuse to delete what stands under `names` where the run reads of it, or where no run wrote it."""
        if not names:  # no question to the Hub about what the run reads
            return
        written.check(self.path, names, "move it elsewhere or delete it yourself, or choose another folder")

    def claim(self, step: int) -> None:
        """Make it this run's: what lies beyond `step` goes, and all of another run; the config is kept."""
        ranks.on_first_rank(lambda: self._claim(step))

    def _claim(self, step: int) -> None:
        with storing("config.yaml", self.path):
            if not self.config.resume:
                self._check_overwrite(written.there(self.path))  # looked at again: reading models takes its time
                written.remove(self.path)
            if not (self.config.resume and written.has_list(self.path)):
                written.begin(self.path)
            if self.config.resume:
                self.checkpoints.forget_after(step)
            write_atomically(self.path / "config.yaml", self.checkpoints.config_file())
