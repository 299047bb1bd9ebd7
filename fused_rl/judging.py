"""Compare answers to mathematical questions by math-verify, in processes that pebble manages.

Each process has a limit of CPU time and of memory. It is forked from this one, so the modules that it needs are
imported before.
"""

import ctypes
import functools
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

from fused_rl.base.checks import described

# Cases judged by one process, which then makes way for a fresh one.
CASES = 50
# Bytes beyond what a process begins with.
MEMORY = 1 << 30
# Seconds for one answer, of CPU time and, if it sleeps, of the clock. Answers take 0.01 to 0.3 s of CPU, or never end.
CPU_SECONDS = 1.0
WALL_SECONDS = 300.0
# math-verify's own limits need signals of the main thread, and count wall time. Its types do not have None.
NO_LIMIT: Any = None


def judge(
    responses: Sequence[str], answers: Sequence[str], *, cpu_seconds: float = CPU_SECONDS
) -> list[float]:
    """Return 1.0 for each response whose final answer equals the reference answer by math-verify, else 0.0.

    Nothing that a response contains can make the caller hang: a comparison that takes too much CPU time or memory ends
        together with its process and scores 0.0. You can call it from any reward function, also of another trainer.

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
    cases = list(zip(responses, answers, strict=True))
    return [score for score, _ in pool(cpu_seconds).judge(cases)]


@functools.cache
def pool(cpu_seconds: float) -> "Pool":
    """Return the processes that compare answers, started at the first call."""
    # It warns at each call that it has no time limit; the processes have one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Imports what the forked processes need.
    agrees("1/2", "0.5")
    processes = Pool(agrees, cpu_seconds)
    # Starts them before engines reserve memory, while a fork is cheap.
    processes.judge([("1/2", "0.5")])
    return processes


class Pool:
    """Judges cases, as many at once as this process has cores, at most 8. CPU time decides, so load changes nothing."""

    def __init__(self, judge: Callable[..., float], cpu_seconds: float):
        self.judge_one = judge
        self.cpu_seconds = cpu_seconds
        import pebble

        # The ranks of a machine share its cores.
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.pool = pebble.ProcessPool(
            max_workers=min(max(cores, 1), 8),
            max_tasks=CASES,
            initializer=_limit_this_process,
            context=multiprocessing.get_context("fork"),
        )
        # Before multiprocessing waits for its processes, which pebble would replace.
        self.close = util.Finalize(self, _end, (self.pool,), exitpriority=10)

    def judge(
        self,
        cases: Sequence[Sequence],
        judge: Callable[..., Any] | None = None,
        cpu_seconds: float | None = None,
    ) -> list[tuple[Any, str | None]]:
        """Return the score of each case, and in words the limit that it broke; then the score is 0.

        `judge`, of a case, and `cpu_seconds` take the place of the pool's own.
        """
        cpu_seconds = cpu_seconds or self.cpu_seconds
        # All are scheduled before the first is waited for, so that every core has one.
        futures = []
        for case in cases:
            arguments = (judge or self.judge_one, case, cpu_seconds)
            futures.append(self.pool.schedule(_judge_in_time, arguments, timeout=WALL_SECONDS))
        verdicts = []
        for future in futures:
            error = future.exception()
            if error is None:
                verdicts.append((future.result(), None))
                continue
            limit = f"could not be judged: {type(error).__name__}: {error}"
            # The process ended by the signal of its CPU timer.
            if getattr(error, "exitcode", None) == -signal.SIGPROF:
                limit = f"took more than {cpu_seconds:g} s of CPU"
            verdicts.append((0.0, limit))
        return verdicts


def _limit_this_process() -> None:
    """In a new process: limit memory, print nothing, end with the run, and leave Ctrl-C to it."""
    memory = MEMORY
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: a run that is killed leaves no process behind.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        memory += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # By default these end the process, in C code too; a handler of Python would wait for it to return.
    for number in (signal.SIGTERM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _judge_in_time(judge: Callable[..., Any], case: Sequence, cpu_seconds: float) -> Any:
    """Return the score of one case; SIGPROF ends a process that is out of time."""
    # sympy compares at random points: the verdict of an answer depends on no other.
    random.seed(0)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return judge(*case)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _end(pool) -> None:
    pool.stop()
    pool.join()


def parsed(answer: str) -> list:
    """Return the reference answer as math-verify reads it; empty if it cannot."""
    from math_verify import LatexExtractionConfig, parse

    # Dollars are the marks of a formula or, as in \$6, a currency. Of a formula that it cannot read as LaTeX, such as
    # {x|-2<x<1}, math-verify would otherwise take the last number.
    formula = re.sub(r"\\?\$", "", answer.rsplit("####", 1)[-1])
    formula = " ".join(formula.split()).rstrip(" .")
    latex = [LatexExtractionConfig()]
    return parse(f"${formula}$", latex, fallback_mode="no_fallback", parsing_timeout=NO_LIMIT)


def agrees(response: str, answer: str) -> float:
    """Return 1.0 if the response's final answer equals the reference, as text or by math-verify."""
    from math_verify import parse, verify
    from sympy.core import random as sympy_random

    if response.strip() == answer:
        return 1.0
    sympy_random.seed(0)
    try:
        # Outside of a formula math-verify reads 6, and not the \$6 of Markdown.
        text = response.rsplit("####", 1)[-1].replace(r"\$", "")
        final = parse(text, parsing_timeout=NO_LIMIT)
        return float(verify(parsed(answer), final, timeout_seconds=None))
    except MemoryError:
        raise
    # sympy raises anything on nonsense, which is a wrong answer.
    except Exception:
        return 0.0
