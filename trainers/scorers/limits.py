"""A time-out for a call in this process: it interrupts what Python can interrupt, and ends the process otherwise.

The call runs in the main thread, because what users write may need it: signals (math-verify's own limits), the current
GPU, event loops.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

from fused_rl.trainers.base.guests import Expired
from fused_rl.trainers.base.screen import tell

Result = TypeVar("Result")

GRACE = 60.0  # seconds for C code to give Python the turn
NUDGE = signal.SIGVTALRM  # of a timer that nobody uses: SIGALRM is math-verify's


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


def within_cpu(seconds: float, call: Callable[[], Result]) -> Result:
    """`call()`, which may take so many seconds of this process's CPU time: for C code that looks for signals.

    Matching of regular expressions does, without ever letting another thread run, so that `within` is blind to it.
    Outside the main thread there is no limit.

    Raises:
        Expired: the time is over.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()

    def expire(number, frame):
        raise Expired

    before = signal.signal(NUDGE, expire)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
            return call()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
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
