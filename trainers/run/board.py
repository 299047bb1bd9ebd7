"""Curves and texts for TensorBoard, which are written to the disk at once.

PyTorch's SummaryWriter writes in a thread instead. On a full disk that thread prints its own traceback, and the error
is raised only by the next call.
"""

import os
import socket
import time
from pathlib import Path


class Board:
    """A file of TensorBoard events in a folder.

    TensorBoard then hides what the earlier files in the folder have from `purge_step` on, which a resumed run writes
    again.
    """

    def __init__(self, folder: Path, purge_step: int | None = None):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        # Without a buffer: on a full disk, one would be written and fail once more when it is deleted.
        self.file = (folder / name).open("wb", buffering=0)
        self.records = RecordWriter(self.file)
        self.event = Event
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def add_scalar(self, key: str, value: float, step: int) -> None:
        """Write a point of a curve."""
        from torch.utils.tensorboard.summary import scalar

        self._write(step=step, summary=scalar(key, value))

    def add_text(self, key: str, value: str, step: int) -> None:
        """Write a text of a step, which TensorBoard reads as Markdown."""
        from torch.utils.tensorboard.summary import text

        self._write(step=step, summary=text(key, value))

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _write(self, **content) -> None:
        event = self.event(wall_time=time.time(), **content)
        self.records.write(event.SerializeToString())
