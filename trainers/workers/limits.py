"""Processes that judge one case after the other, under limits of CPU time and memory.

with Pool(Path("judge.py"), cpu_seconds=1.0) as pool:
    verdicts = pool.judge([("\\boxed{2}", "2"), …])
"""

import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DEATHS = 3  # in a row on the same case: then it is not by chance
SERVER = Path(__file__).with_name("judge_server.py")
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


def cores() -> int:
    """How many processes may run at once: this process's share of the machine's cores, at most 8."""
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(share, 1), 8)


class Pool(contextlib.AbstractContextManager):
    """Judges cases side by side, in processes that a server of its own (judge_server.py) has forked.

    A judge is a Python file with `load()`, which imports what it needs and returns a function of a case's items to a
    score. CPU time decides, not the clock: a loaded machine gives the same verdicts. The server has a session of its
    own, so a terminal's Ctrl-C does not reach it; it and its processes end with this one, also where that is killed.

    Args:
        judge: the file with `load()`.
        cpu_seconds: of one case.
        memory: in bytes, of one process beyond what it begins with.
        wall_seconds: a process that sleeps this long is killed and its case judged again.
        start_seconds: for the server to load the judge.
        size: processes at once; None for as many as there are cores.

    Raises:
        WorkerError: the server does not start; says why.
    """

    def __init__(
        self,
        judge: Path,
        *,
        cpu_seconds: float,
        memory: int = 1 << 30,
        wall_seconds: float = 300.0,
        start_seconds: float = 120.0,
        size: int | None = None,
    ):
        self.start_seconds, self.reply_seconds = start_seconds, wall_seconds + 60
        limits = json.dumps({"cpu_seconds": cpu_seconds, "memory": memory, "wall_seconds": wall_seconds})
        told = [str(SERVER), str(judge), limits, str(size or cores()), str(os.getpid())]
        self.command = [sys.executable, "-c", BOOT, *told]
        self.restarts, self.numbers, self.server = 0, itertools.count(), None
        self.start()

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

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the server and its processes; `judge` starts another."""
        if self.server is not None:
            self.closing()
            self.server = None

    def judge(self, cases: Sequence[Sequence]) -> list[Verdict]:
        """A verdict for each case, whose items must be JSON.

        A process that dies of something else than its limits, or the server, is replaced and the case judged again;
        `restarts` counts these deaths.

        Raises:
            WorkerError: a case whose process died 3 times in a row, or the server could not be started again.
        """
        verdicts: dict[int, Verdict] = {}
        deaths, to_send, waiting = Counter(), list(range(len(cases))), {}
        while to_send or waiting:
            if self.server is None:
                self.start()
            fresh = {next(self.numbers): case for case in to_send}
            self._send({number: cases[case] for number, case in fresh.items()})
            waiting |= fresh
            to_send, answer = [], self._receive()
            if answer is not None and answer["number"] not in waiting:
                continue  # of an earlier call that was interrupted
            if answer is not None and "died" not in answer:
                verdicts[waiting.pop(answer["number"])] = Verdict(answer["score"], answer["broke"])
                continue

            # A death: of one process, or of the server and so of all.
            self.restarts += 1
            if answer is None:
                answered, died = list(waiting), "the end of the server that it was forked from"
            else:
                answered, died = [answer["number"]], answer["died"]
            to_send = [waiting.pop(number) for number in answered]
            deaths.update(to_send)
            for case in to_send:
                if deaths[case] == DEATHS:
                    raise WorkerError(f"its process died {DEATHS} times in a row, at last of {died}", case)
        return [verdicts[case] for case in range(len(cases))]

    def _send(self, numbered: dict[int, Sequence]) -> None:
        lines = [json.dumps([number, list(case)]).encode() + b"\n" for number, case in numbered.items()]
        with contextlib.suppress(BrokenPipeError):  # the reader finds the end of the server
            self.server.stdin.write(b"".join(lines))
            self.server.stdin.flush()

    def _receive(self) -> dict | None:
        """The next answer; None where the server is gone, or says nothing."""
        try:
            reply = self.replies.get(timeout=self.reply_seconds)
        except queue.Empty:
            reply = None
        if reply is None:
            self.close()
        return reply


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
