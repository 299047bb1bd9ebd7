"""The verifier `math`: numbers and formulas, compared by math-verify in processes of pebble's.

Each process is under a limit of CPU time and of memory. It is forked from this one, so what the judge imports must be
imported before.
"""

import ctypes
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

import pebble

from fused_rl.trainers.options import InputError
from fused_rl.trainers.rollouts.types import Sample
from fused_rl.trainers.scorers.builtin import Named, answer_of

CASES = 50  # judged by one process, which then makes way for a fresh one
MEMORY, WALL = 1 << 30, 300.0  # bytes beyond what a process begins with; seconds, of a case that sleeps
MATH_TIMEOUT = 1.0  # seconds of CPU for one answer: they take 0.01 to 0.3, or never end
NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+%?")
# LaTeX's commands, whole texts in it among them: what is left of a formula has no three letters in a row.
COMMANDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")


class Pool:
    """Judges cases, as many at once as this process has cores, at most 8. CPU time decides, so load changes nothing."""

    def __init__(self, judge: Callable[..., float], cpu_seconds: float):
        self.judge_one = judge
        self.cpu_seconds = cpu_seconds
        share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        options = {"max_workers": min(max(share, 1), 8), "max_tasks": CASES, "initializer": _limit_this_process}
        self.pool = pebble.ProcessPool(context=multiprocessing.get_context("fork"), **options)
        # Before multiprocessing waits for its processes, which pebble would replace.
        self.close = util.Finalize(self, _end, (self.pool,), exitpriority=10)

    def judge(self, cases: Sequence[Sequence]) -> list[tuple[float, str | None]]:
        """Return the score of each case, and in words the limit that it broke; then the score is 0."""
        limited = [(self.judge_one, case, self.cpu_seconds) for case in cases]
        verdicts = []
        for future in [self.pool.schedule(_judge_in_time, args, timeout=WALL) for args in limited]:
            error = future.exception()
            broke = None if error is None else f"could not be judged: {type(error).__name__}: {error}"
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
    for number in (signal.SIGTERM, signal.SIGPROF):  # by default they end the process, in C code too
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


def _end(pool: pebble.ProcessPool) -> None:
    pool.stop()
    pool.join()


def parsed(answer: str) -> list:
    """Return the reference answer as math-verify reads it; empty if it cannot."""
    from math_verify import parse

    return parse(f"${answer.replace('$', '')}$", fallback_mode="no_fallback", parsing_timeout=None)


def judge(response: str, answer: str) -> bool:
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


class MathVerifier(Named):
    """1.0 where math-verify finds the final answer equal to the ground truth within `timeout` CPU seconds, else 0.0."""

    compares = True

    def __init__(self, name: str = "math", timeout: float = MATH_TIMEOUT, **judged):
        super().__init__(name, **judged)
        self.broken: list[str] = []
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that nobody keeps the time
        try:
            judge("1/2", "0.5")  # imports what the processes that are forked need
        except ImportError as error:
            raise InputError(f"verifier 'math': {error}; pip install 'math-verify>=0.9'") from error
        self.pool = Pool(judge, timeout)
        self.pool.judge([("1/2", "0.5")])  # starts the processes before engines reserve memory, when a fork is cheap

    def check(self, row: dict) -> None:
        """Check that the row has an answer that math-verify reads as a number or a formula."""
        answer = answer_of(row, self.answer_column)
        if NUMBER.fullmatch(answer):
            return
        words = re.findall(r"[^\W\d_]{3,}", COMMANDS.sub(" ", answer))  # read as products of variables
        if words or not parsed(answer):
            what = f"has the word {words[0]!r}" if words else "cannot be parsed"
            remedy = "write it as a number or in LaTeX, or compare it as text: --verifiers exact_match"
            raise InputError(f"verifier 'math': the answer {answer!r:.80} {what}; {remedy}")

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        cases = [(sample.text, answer_of(sample.row, self.answer_column)) for sample in samples]
        distinct = list(dict.fromkeys(cases))  # a group often agrees
        verdicts = dict(zip(distinct, self.pool.judge(distinct), strict=True))
        reasons = [verdicts[case][1] for case in cases]
        self.broken += [f"{sample.where} {why}" for sample, why in zip(samples, reasons, strict=True) if why]
        return [verdicts[case][0] for case in cases]
