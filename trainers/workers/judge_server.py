"""The process behind `limits.Pool`: loads a judge once, and has pebble's processes judge cases with it, under limits.

    python -c BOOT judge_server.py math_judge.py '{"cpu_seconds": 1, …}' PARENT

It reads lines [number, case] and writes a line {number, score, broke} or {number, died} for each. It is run as a file,
and imports the standard library and pebble alone: torch would take seconds to import and gigabytes of address space.
"""

import ctypes
import functools
import gc
import json
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import threading
import time
from concurrent.futures import Future, TimeoutError
from pathlib import Path

import pebble

GIB = 1 << 30
CASES = 50  # of one process, which then makes way for a fresh one: what a case leaves behind is bounded
OUT_OF_MEMORY = 81  # exit status of a process
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def limit_this_process(memory: int, cases: int, replies: int) -> None:
    """In a process of pebble's: get so many bytes beyond what is there, end with the server, say nothing."""
    os.close(cases)
    os.close(replies)  # else the caller would not see the server's end
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        memory += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a scheduler, which knows of no sessions
    # The default action, unlike a handler in Python, ends C code too.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)  # what a library prints is for nobody


def judged(case: list, cpu_seconds: float) -> dict:
    """There, {score, broke} of a case; a process that runs out of time or memory ends."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return {"score": float(judge(*case)), "broke": None}
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:
        return {"score": 0.0, "broke": f"raised {type(error).__name__}: {error}"[:1000]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def outcome(future: Future, limits: dict) -> dict:
    """What became of a case: {score, broke}, or {died} where its process ended by something else than its limits."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, TimeoutError):
        return {"died": f"sleep: it did not end within {limits['wall_seconds']:g} s"}
    status = getattr(error, "exitcode", None)  # negative: of this signal
    if status == -signal.SIGPROF:
        return {"score": 0.0, "broke": f"took more than {limits['cpu_seconds']:g} s of CPU"}
    if status == OUT_OF_MEMORY:
        return {"score": 0.0, "broke": f"took more than {limits['memory'] / GIB:.3g} GiB of memory"}
    if status is None:
        return {"died": f"{type(error).__name__}: {error}"}
    if -status in CRASHES:  # by its own doing, and again the next time: memory that C code did not get, recursion
        return {"score": 0.0, "broke": f"crashed ({signal.Signals(-status).name})"}
    return {"died": signal.Signals(-status).name if status < 0 else f"exit status {status}"}


def send(replies: int, message: dict) -> None:
    """One line to the caller; where the caller is gone, so are we."""
    try:
        os.write(replies, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        os._exit(0)


def end_with(parent: int) -> None:
    """End where the caller is no more: a process that it forked may still hold the pipe open."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def serve(limits: dict, size: int, cases: int, replies: int) -> None:
    """Judge what comes in by `cases` until the caller closes it; raises where pebble's pool is broken."""
    pebble.CONSTS.term_timeout = 0.1  # seconds before it kills a process that sleeps: they do not hear SIGTERM
    options = {"max_workers": size, "max_tasks": CASES, "context": multiprocessing.get_context("fork")}
    pool = pebble.ProcessPool(initializer=limit_this_process, initargs=(limits["memory"], cases, replies), **options)

    def reply(number: int, future: Future) -> None:
        send(replies, {"number": number} | outcome(future, limits))

    for line in os.fdopen(cases, "rb"):
        number, case = json.loads(line)
        future = pool.schedule(judged, (case, limits["cpu_seconds"]), timeout=limits["wall_seconds"])
        future.add_done_callback(functools.partial(reply, number))


if __name__ == "__main__":
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.SIG_IGN)  # the caller decides what they mean; the server ends with it
    # Not sys.stdin, which every process that is forked closes, and waits for whoever reads it.
    asked, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # a library's print must not look like an answer
    threading.Thread(target=end_with, args=(int(sys.argv[5]),), daemon=True).start()
    try:
        judge = runpy.run_path(sys.argv[2])["load"]()
    except BaseException as error:  # also sys.exit in a module
        send(answers, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    gc.collect()
    gc.freeze()  # else the first collection of each process copies every page
    send(answers, {"ready": True})
    try:
        serve(json.loads(sys.argv[3]), int(sys.argv[4]), asked, answers)
    finally:
        os._exit(0)  # pebble would wait for its processes, which end with this one
