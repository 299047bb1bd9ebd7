"""What a worker is asked in tests; it imports nothing, so that a process costs a tenth of a second."""

import os
import signal
import time


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def echo(*words):
    print("this is no answer")
    return [*words, os.getpid()]


def breaks():
    raise OutOfMemoryError("tried to allocate 2.32 GiB\nand more")


def exits(status):
    os._exit(status)


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    time.sleep(60)


def is_wrong():
    raise ValueError("device-side assert")
