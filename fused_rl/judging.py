"""Answers to mathematical questions, compared by math-verify in processes of pebble's.

Each process is under a limit of CPU time and of memory. It is forked from this one, so what it needs is imported
before.
"""

import ctypes
import functools
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import util
from pathlib import Path

from fused_rl.base.checks import described

CASES = 50  # judged by one process, which then makes way for a fresh one
MEMORY, WALL = (
    1 << 30,
    300.0,
)  # bytes beyond what a process begins with; seconds, of a case that sleeps
CPU_SECONDS = 1.0  # for one answer: they take 0.01 to 0.3, or never end


def judge(
    responses: Sequence[str], answers: Sequence[str], *, cpu_seconds: float = CPU_SECONDS
) -> list[float]:
    """Return 1.0 for each response whose final answer equals the reference answer by math-verify, else 0.0.

    Nothing that a response contains can hang the caller: a comparison that takes too much CPU time or memory ends with
    its process and scores 0.0. Call it from any reward function, also of another trainer.

    Args:
        responses: whole texts; the final answer follows the last "####", or is what math-verify finds.
        answers: one reference per response, a number or a formula in LaTeX.
        cpu_seconds: the limit for one comparison; wall time does not count, so a busy machine changes nothing.

    Raises:
        ImportError: math-verify or pebble is not installed: pip install 'math-verify>=0.9' pebble.
        ValueError: not as many answers as responses, or one that is not text.
    """
    for text in (*responses, *answers):
        if not isinstance(text, str):
            raise ValueError(
                f"responses and answers must be texts, got {described(text)}; a number is str(number)"
            )
    return [
        score for score, _ in pool(cpu_seconds).judge(list(zip(responses, answers, strict=True)))
    ]


@functools.cache
def pool(cpu_seconds: float) -> "Pool":
    """Return the processes that compare answers, started at the first call."""
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns at each call that nobody keeps the time
    agrees("1/2", "0.5")  # imports what the processes that are forked need
    made = Pool(agrees, cpu_seconds)
    made.judge(
        [("1/2", "0.5")]
    )  # starts the processes before engines reserve memory, when a fork is cheap
    return made


class Pool:
    """Judges cases, as many at once as this process has cores, at most 8. CPU time decides, so load changes nothing."""

    def __init__(self, judge: Callable[..., float], cpu_seconds: float):
        self.judge_one = judge
        self.cpu_seconds = cpu_seconds
        share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        options = {
            "max_workers": min(max(share, 1), 8),
            "max_tasks": CASES,
            "initializer": _limit_this_process,
        }
        import pebble

        self.pool = pebble.ProcessPool(context=multiprocessing.get_context("fork"), **options)
        # Before multiprocessing waits for its processes, which pebble would replace.
        self.close = util.Finalize(self, _end, (self.pool,), exitpriority=10)

    def judge(self, cases: Sequence[Sequence]) -> list[tuple[float, str | None]]:
        """Return the score of each case, and in words the limit that it broke; then the score is 0."""
        limited = [(self.judge_one, case, self.cpu_seconds) for case in cases]
        verdicts = []
        for future in [self.pool.schedule(_judge_in_time, args, timeout=WALL) for args in limited]:
            error = future.exception()
            broke = (
                None if error is None else f"could not be judged: {type(error).__name__}: {error}"
            )
            if getattr(error, "exitcode", None) == -signal.SIGPROF:
                broke = f"took more than {self.cpu_seconds:g} s of CPU"
            verdicts.append((0.0 if error else future.result(), broke))
        return verdicts


def _limit_this_process() -> None:
    """In a new process: limit memory, print nothing, end with the run, and leave Ctrl-C to it."""
    memory = MEMORY
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        memory += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (
        signal.SIGTERM,
        signal.SIGPROF,
    ):  # by default they end the process, in C code too
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _judge_in_time(judge: Callable[..., float], case: Sequence, cpu_seconds: float) -> float:
    """Return the score of one case; SIGPROF ends a process that is out of time."""
    random.seed(0)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return float(judge(*case))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _end(pool) -> None:
    pool.stop()
    pool.join()


def parsed(answer: str) -> list:
    """Return the reference answer as math-verify reads it; empty if it cannot."""
    from math_verify import parse

    return parse(f"${answer.replace('$', '')}$", fallback_mode="no_fallback", parsing_timeout=None)


def agrees(response: str, answer: str) -> bool:
    """Return True if the response's final answer equals the reference, as text or by math-verify."""
    from math_verify import parse, verify
    from sympy.core import random as sympy_random

    if response.strip() == answer:
        return True
    sympy_random.seed(0)  # it compares at random points
    try:
        found = parse(response.rsplit("####", 1)[-1], parsing_timeout=None)
        return verify(parsed(answer), found, timeout_seconds=None)
    except MemoryError:
        raise
    except Exception:  # of sympy, on nonsense: a wrong answer
        return False
