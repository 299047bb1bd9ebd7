"""Processes that judge one answer each, under limits on CPU time and memory, forked from one that is warm.

    with Pool(Path("judge.py"), cpu_seconds=1.0) as pool:
        verdicts = pool.judge([("\\boxed{2}", "2"), …])

A judge is a Python file with `load()`, which imports what it needs and returns a function of a case's items to a score.
The pool starts one server process, which loads the judge once and then forks a child for every case (a millisecond
each, where importing sympy takes seconds). A child that breaks a limit costs its own case only, and a case never sees
what another one left behind. CPU time decides, not the clock: a loaded machine gives the same verdicts.

The server has a session of its own, so a terminal's Ctrl-C does not reach it; it and its children end with the process
that started it, also where that one is killed. This file is run as the server too, so it imports the standard library
alone: torch would take seconds to import and gigabytes of address space.
"""

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import queue
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

GIB = 1 << 30
DEATHS = 3  # in a row on the same case: then it is not by chance
OUT_OF_MEMORY, RAISED = 81, 82  # exit statuses of a child
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
BOOT = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"


class WorkerError(Exception):
    """The server does not start, or a case cannot be judged; `case` is its index, None where there is none."""

    def __init__(self, message: str, case: int | None = None):
        super().__init__(message)
        self.case = case


class Verdict(NamedTuple):
    """What became of one case."""

    score: float
    """0 where a limit was broken."""
    broke: str | None = None
    """How it broke a limit, in words; None where it did not."""


# The caller's side.


def cores() -> int:
    """How many children may run at once: this process's share of the machine's cores, at most 8."""
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(share, 1), 8)


class Pool:
    """Judges cases side by side.

    Args:
        judge: the file with `load()`.
        cpu_seconds: of one case.
        memory: address space of one child, in bytes.
        wall_seconds: a child that sleeps this long is killed and its case judged again.
        start_seconds: for the server to load the judge.
        size: children at once; None for as many as there are cores.

    Raises:
        WorkerError: the server does not start; says why.
    """

    def __init__(
        self,
        judge: Path,
        *,
        cpu_seconds: float,
        memory: int = GIB,
        wall_seconds: float = 300.0,
        start_seconds: float = 120.0,
        size: int | None = None,
    ):
        self.size, self.start_seconds, self.reply_seconds = size or cores(), start_seconds, wall_seconds + 60
        limits = {"cpu_seconds": cpu_seconds, "memory": memory, "wall_seconds": wall_seconds}
        self.command = [sys.executable, "-c", BOOT, __file__, str(judge), json.dumps(limits), str(os.getpid())]
        self.restarts, self.numbers, self.server = 0, 0, None
        self.start()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def start(self) -> None:
        """Start the server and wait until it is ready."""
        # One order of sets in every run, and the modules that this process sees.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.server = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self.closing = weakref.finalize(self, _end, self.server)
        self.replies = queue.Queue()
        threading.Thread(target=_read, args=(self.server.stdout, self.replies), daemon=True).start()
        try:
            ready = self.replies.get(timeout=self.start_seconds)
        except queue.Empty:
            ready = {"error": f"it was not ready within {self.start_seconds:g} s"}
        if ready is None:
            ready = {"error": f"it ended with exit status {self.server.wait()}"}
        if "error" in ready:
            self.close()
            raise WorkerError(ready["error"])

    def close(self) -> None:
        """End the server and its children; `judge` starts another."""
        if self.server is not None:
            self.closing()
            self.server = None

    def judge(self, cases: Sequence[Sequence]) -> list[Verdict]:
        """A verdict for each case, whose items must be JSON.

        A child that dies of something else than its limits, or the server, is replaced and the case judged again;
        `restarts` counts these deaths.

        Raises:
            WorkerError: a case whose child died 3 times in a row, or the server could not be started again.
        """
        verdicts: list[Verdict | None] = [None] * len(cases)
        deaths, waiting, running = [0] * len(cases), deque(range(len(cases))), {}
        while waiting or running:
            if self.server is None:
                self.start()
            while waiting and len(running) < self.size:
                self.numbers += 1
                running[self.numbers] = waiting.popleft()
                self._send(self.numbers, cases[running[self.numbers]])
            for number, answer in self._receive(list(running)):
                case = running.pop(number, None)
                if case is None:
                    continue  # of an earlier call that was interrupted
                if "died" not in answer:
                    verdicts[case] = Verdict(answer["score"], answer["broke"])
                    continue
                self.restarts += 1
                deaths[case] += 1
                if deaths[case] == DEATHS:
                    raise WorkerError(f"its process died {DEATHS} times in a row, at last of {answer['died']}", case)
                waiting.appendleft(case)
        return verdicts

    def _send(self, number: int, case: Sequence) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reader finds the end of the server
            self.server.stdin.write(json.dumps([number, list(case)]).encode() + b"\n")
            self.server.stdin.flush()

    def _receive(self, running: list[int]) -> list[tuple[int, dict]]:
        """The next answer; where the server is gone, the deaths of all that it was at."""
        try:
            reply = self.replies.get(timeout=self.reply_seconds)
        except queue.Empty:
            reply = None
        if reply is not None:
            return [(reply["number"], reply)]
        self.close()
        return [(number, {"died": "the end of the server that it was forked from"}) for number in running]


def _read(stream, replies: queue.Queue) -> None:
    """Every line of the server, and None at its end."""
    with stream:
        for line in stream:
            replies.put(json.loads(line))
    replies.put(None)


def _end(server: subprocess.Popen) -> None:
    server.kill()
    server.wait()
    with contextlib.suppress(BrokenPipeError):  # what it had not read
        server.stdin.close()


# The server's side.


class Child(NamedTuple):
    """A process at work on one case."""

    pid: int
    number: int
    deadline: float
    """When it has slept for too long, in seconds of the monotonic clock."""


class Server:
    """Forks a child for every line [number, case] of standard input, and writes a line for every child that ended."""

    def __init__(self, judge, limits: dict, parent: int, replies):
        self.judge, self.limits, self.parent, self.replies = judge, limits, parent, replies
        self.nowhere = os.open(os.devnull, os.O_RDWR)
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.children: dict[int, Child] = {}
        """By the pipe that ends with the child."""

    def run(self) -> None:
        """Until the caller closes the pipe or is no more."""
        for line in self._lines():
            number, case = json.loads(line)
            self._fork(number, case)

    def _lines(self) -> Iterator[bytes]:
        """Lines of standard input; looks after the children while it waits."""
        unread = b""
        # A process that the caller forked may hold the pipe open after the caller's end: so ask who the parent is.
        while os.getppid() == self.parent:
            for key, _ in self.selector.select(timeout=0.5):
                if key.fd:
                    self._reap(key.fd)
                    continue
                read = os.read(0, 1 << 20)
                if not read:
                    return
                *lines, unread = (unread + read).split(b"\n")
                yield from lines
            for child in self.children.values():
                if time.monotonic() > child.deadline:
                    os.kill(child.pid, signal.SIGKILL)

    def _fork(self, number: int, case: list) -> None:
        ended, held = os.pipe()
        pid = os.fork()
        if not pid:
            self._serve_one(case, held)
        os.close(held)
        self.children[ended] = Child(pid, number, time.monotonic() + self.limits["wall_seconds"])
        self.selector.register(ended, selectors.EVENT_READ)

    def _serve_one(self, case: list, held: int) -> None:
        """The child: judges, tells, and ends here."""
        status = RAISED
        try:
            for stream in range(3):
                os.dup2(self.nowhere, stream)  # what a library prints is for nobody
            limit_this_process(**self.limits)
            os.write(held, repr(float(self.judge(*case))).encode())
            status = 0
        except MemoryError:
            status = OUT_OF_MEMORY
        except BaseException as error:
            os.write(held, f"{type(error).__name__}: {error}"[:1000].encode(errors="replace"))
        finally:
            os._exit(status)

    def _reap(self, ended: int) -> None:
        child = self.children.pop(ended)
        written = os.read(ended, 4096).decode()
        self.selector.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(child.pid, 0)
        late = time.monotonic() > child.deadline
        send(
            self.replies, {"number": child.number, **self._became_of(os.waitstatus_to_exitcode(status), written, late)}
        )

    def _became_of(self, status: int, written: str, late: bool) -> dict:
        """{score, broke} of a child that ended with `status` (negative: of this signal), or {died}."""
        if status == 0:
            return {"score": float(written), "broke": None}
        if status == -signal.SIGPROF:
            return {"score": 0.0, "broke": f"took more than {self.limits['cpu_seconds']:g} s of CPU"}
        if status == OUT_OF_MEMORY:
            return {"score": 0.0, "broke": f"took more than {self.limits['memory'] / GIB:.3g} GiB of memory"}
        if status == RAISED:
            return {"score": 0.0, "broke": f"raised {written}"}
        if -status in CRASHES:  # by its own doing, and again the next time: memory that C code did not get, recursion
            return {"score": 0.0, "broke": f"crashed ({signal.Signals(-status).name})"}
        if late:
            return {"died": f"sleep: it did not end within {self.limits['wall_seconds']:g} s"}
        return {"died": signal.Signals(-status).name if status < 0 else f"exit status {status}"}


def limit_this_process(cpu_seconds: float, memory: int, wall_seconds: float) -> None:
    """End with SIGPROF after this CPU time, get no more memory (in bytes) than this, end with the parent."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # The default action, unlike a handler in Python, ends C code too.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def send(replies, message: dict) -> None:
    """One line to the caller; where the caller is gone, so are we."""
    try:
        replies.write(json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        os._exit(0)


def load_judge(path: str):
    """The function that the file's `load` returns."""
    spec = importlib.util.spec_from_file_location("judge", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load()


def serve(judge: str, limits: str, parent: str) -> None:
    """The server: `ready` or why not, then an answer per case."""
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.SIG_IGN)  # the caller decides what they mean; the server ends with it
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a library's print must not look like an answer
    try:
        loaded = load_judge(judge)
    except BaseException as error:  # also sys.exit in a module
        send(replies, {"error": f"{type(error).__name__}: {error}"})
        return
    gc.collect()
    gc.freeze()  # else the first collection of each child copies every page
    send(replies, {"ready": True})
    Server(loaded, json.loads(limits), int(parent), replies).run()


if __name__ == "__main__":
    serve(*sys.argv[2:])
