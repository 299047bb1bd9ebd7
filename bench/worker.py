"""A process that is asked for one answer after another over a pipe, so that what ends it ends nothing else.

A question is a function's name, `module:function`, and arguments that JSON can hold; so is the answer. Where the
function raises, or the process dies, or is silent for too long, that is the answer, and the next question is put to a
process of its own: after an error of CUDA none of the old one's calls would be right, after running out of memory the
rest of it would still be taken.

    python -m bench.worker     the process: questions on standard input, answers on the descriptor in BENCH_ANSWERS
"""

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FAILED = "failed"
OUT_OF_MEMORY = "out of memory"


class Answer(NamedTuple):
    value: object = None
    status: str | None = None  # of what went wrong
    reason: str = ""


class Worker:
    """Starts its process when it is first asked, and again after a failure.

    Args:
        environment: what the process's differs by; what it prints goes to standard error.
        end: of `time.monotonic`, after which no question is waited for.
    """

    def __init__(self, environment: dict[str, str] | None = None, end: float = float("inf")):
        self.end = end
        self.environment = os.environ | (environment or {})
        self.process = None

    def start(self) -> None:
        """The process, which begins to import; nothing where there is one."""
        if self.process is not None:
            return
        self.answers, write = os.pipe()
        environment = self.environment | {"BENCH_ANSWERS": str(write)}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "bench.worker"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=[write],
            start_new_session=True,  # what it starts ends with it
        )
        os.close(write)

    def ask(self, function: str, *args, limit: float, **options) -> Answer:
        """What the function returns within `limit` seconds of now."""
        self.start()
        question = json.dumps({"function": function, "args": args, "options": options}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # it has died: there will be no answer
            self.process.stdin.write(question.encode())
            self.process.stdin.flush()
        limit = min(limit, self.end - time.monotonic())
        line = self._line(time.monotonic() + limit)
        if line is None:
            self.stop()
            return Answer(status=FAILED, reason=f"no answer within {max(0.0, limit):.0f} s")
        if not line.endswith(b"\n"):
            return Answer(status=FAILED, reason=f"its process ended: {_ending(self.stop(kill=False))}")
        answer = Answer(*json.loads(line))
        if answer.status:
            self.stop()
        return answer

    def _line(self, end: float) -> bytes | None:
        """What it says up to a newline, or all that it said before it ended; None when the time is over."""
        found = b""
        while not found.endswith(b"\n"):
            ready, _, _ = select.select([self.answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            read = os.read(self.answers, 1 << 20)
            if not read:
                break
            found += read
        return found

    def stop(self, kill: bool = True) -> int | None:
        """Ends the process; its exit status, negative for a signal."""
        if self.process is None:
            return None
        if not kill:  # it is about to end by itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        status = self.process.wait()
        self.process.stdin.close()
        os.close(self.answers)
        self.process = None
        return status

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def end_in_order() -> None:
    """Let SIGTERM end this process as an exit does, and with it its workers, which are sessions of their own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def failure(error: Exception) -> tuple[str, str]:
    """Status and reason of what raised."""
    out = type(error).__name__ == "OutOfMemoryError"  # torch's; to import it would take seconds
    text = str(error).strip() or "no message"
    return OUT_OF_MEMORY if out else FAILED, f"{type(error).__name__}: {text}".splitlines()[0][:160]


def serve(questions, answers) -> None:
    """Answers until there are no more questions, or one fails."""
    for line in questions:
        asked = json.loads(line)
        module, name = asked["function"].split(":")
        try:
            function = getattr(importlib.import_module(module), name)
            answer = Answer(function(*asked["args"], **asked["options"]))
        except Exception as error:  # noqa: BLE001 - each fails in its own way
            answer = Answer(None, *failure(error))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer.status:
            return


if __name__ == "__main__":
    with os.fdopen(int(os.environ["BENCH_ANSWERS"]), "w") as pipe:
        serve(sys.stdin, pipe)
