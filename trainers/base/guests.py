"""Functions of the user's in a run's process: generators and a time-out of their own, what they raise as one line.

What `Ctrl-C` raises inside of one is the user's will, and passes.
"""

import contextlib
import importlib
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy
import torch

from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.options.text import in_a_line

Result = TypeVar("Result")

GRACE = 60.0  # seconds for C code to give Python the turn
NUDGE = signal.SIGVTALRM  # of a timer that nobody uses: SIGALRM is math-verify's


@contextlib.contextmanager
def own_generators() -> Iterator[None]:
    """Leave Python's, numpy's and torch's generators as they were, and the type of new tensors.

    Inside, torch goes on from where it is, and the others are seeded from there: at each step with another number,
    and after a resume with the same ones.
    """
    python, arrays, tensors = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    floats, seed = torch.get_default_dtype(), int(torch.randint(2**31, ()))
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        yield
    finally:
        torch.set_default_dtype(floats)
        random.setstate(python)
        numpy.random.set_state(arrays)
        torch.set_rng_state(tensors)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device)


@contextlib.contextmanager
def ctrl_c() -> Iterator[list[int]]:
    """A list that has something in it as soon as the process has been interrupted, whatever that does otherwise."""
    received, previous = [], signal.getsignal(signal.SIGINT)

    def note(number, frame):
        received.append(number)
        if callable(previous):
            previous(number, frame)

    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield received
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # else the one before has chosen another for the next time
            signal.signal(signal.SIGINT, previous)


def raised(error: BaseException, *ours: str) -> str:
    """What it raised, in a line, with the line of the user's code that it came from; `ours` are files that are not."""
    return f"raised {in_a_line(error)}{place(error, *ours)}"


def place(error: BaseException, *ours: str) -> str:
    """The line of the user's code that an error came from; nothing where the call itself failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in (__file__, *ours)]
    theirs = [frame for frame in frames if Path(frame.filename).parent.name not in ("asyncio", "contextlib")]
    return f" ({Path(theirs[0].filename).name}, line {theirs[0].lineno})" if theirs else ""


def load_function(name: str, what: str):
    """The function that `module:function` names; `what` it is for stands in the error."""
    module, _, function = name.partition(":")
    if not function:
        raise InputError(f"{what} {name!r}: expected module:function")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # an installed command does not see the folder that it is called from
    with own_generators(), ctrl_c() as interrupted:
        try:
            found = getattr(importlib.import_module(module), function)
        except Expired:
            raise
        except BaseException as error:  # whatever the user's module raises while it is imported
            if isinstance(error, KeyboardInterrupt) and interrupted:
                raise
            elsewhere = (
                "; it was in the program that began the run: put it into a module" if module == "__main__" else ""
            )
            if isinstance(error, ModuleNotFoundError) and error.name == module != "__main__":
                elsewhere = f"; looked for in {folder}, the current folder, and among what is installed (PYTHONPATH)"
            raise InputError(f"{what} {name!r}: {in_a_line(error)}{elsewhere}") from error
    if not callable(found):
        raise InputError(f"{what} {name!r}: {type(found).__name__} is not a function")
    return found


class Expired(BaseException):
    """The time is over; not an Exception, so that the call's own `except Exception` does not swallow it."""


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """`call()`, which must return within `seconds`.

    From then on `Expired` is raised inside the call, every second until it gives way. One that has not given way after
    GRACE seconds more (it is in C code) ends the process with a line, as does one outside the main thread.

    Raises:
        Expired: the time is over.
    """
    ended = threading.Event()

    def expire(number, frame):
        if not ended.is_set():
            raise Expired

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(NUDGE, expire) if main else None
    watch = threading.Thread(target=_watch, args=(seconds, ended, main), daemon=True)
    watch.start()
    try:
        try:
            return call()
        finally:
            ended.set()
    finally:
        ended.set()  # again: the time may have ended just before the first
        watch.join()  # else its last signal could meet the default action, which ends the process
        if main:
            signal.signal(NUDGE, signal.SIG_DFL if before is None else before)


def _watch(seconds: float, ended: threading.Event, main: bool) -> None:
    if ended.wait(seconds):
        return
    late = 0.0
    while main and late < GRACE:
        signal.pthread_kill(threading.main_thread().ident, NUDGE)
        if ended.wait(min(1.0, GRACE)):
            return
        late += 1
    tell(f"error: a call did not end within {seconds:g} s and cannot be interrupted", to_errors=True)
    os._exit(1)
