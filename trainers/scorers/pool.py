"""Judging cases side by side in processes of pebble's, each under a limit of CPU time and of memory.

The processes are forked from this one, so what the judge imports must be imported before the first call.
"""

import ctypes
import multiprocessing
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing import util
from pathlib import Path
from typing import NamedTuple

import pebble

CASES = 50  # judged by one process, which then makes way for a fresh one
MEMORY, WALL = 1 << 30, 300.0  # bytes beyond what a process begins with; seconds, of a case that sleeps


class Verdict(NamedTuple):
    """The score of one case, and in words the limit that it broke; then the score is 0."""

    score: float
    broke: str | None = None


def limit_this_process() -> None:
    """In a new process: limit memory, print nothing, end with the run, and leave Ctrl-C to it."""
    memory = MEMORY
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        memory += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGPROF):  # by default they end the process, in C code too
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def judged(judge: Callable[..., float], case: Sequence, cpu_seconds: float) -> float:
    """There, the score of one case; SIGPROF ends a process that is out of time."""
    random.seed(0)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return float(judge(*case))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class Pool:
    """Judges cases, as many at once as this process has cores, at most 8. CPU time decides, so load changes nothing."""

    def __init__(self, judge: Callable[..., float], cpu_seconds: float):
        self.judge_one = judge
        self.cpu_seconds = cpu_seconds
        share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        options = {"max_workers": min(max(share, 1), 8), "max_tasks": CASES, "initializer": limit_this_process}
        self.pool = pebble.ProcessPool(context=multiprocessing.get_context("fork"), **options)
        # Before multiprocessing waits for its processes, which pebble would replace.
        self.close = util.Finalize(self, _end, (self.pool,), exitpriority=10)

    def judge(self, cases: Sequence[Sequence]) -> list[Verdict]:
        """A verdict on each case."""
        told = [(self.judge_one, case, self.cpu_seconds) for case in cases]
        futures = [self.pool.schedule(judged, args, timeout=WALL) for args in told]
        return [self._verdict(future) for future in futures]

    def _verdict(self, future: Future) -> Verdict:
        error = future.exception()
        if error is None:
            return Verdict(future.result())
        if getattr(error, "exitcode", None) == -signal.SIGPROF:
            return Verdict(0.0, f"took more than {self.cpu_seconds:g} s of CPU")
        return Verdict(0.0, f"could not be judged: {type(error).__name__}: {error}")


def _end(pool: pebble.ProcessPool) -> None:
    pool.stop()
    pool.join()
