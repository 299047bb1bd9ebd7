"""`make test-mutations`: break the code, one drawn slip at a time, and see which test notices.

A slip runs the tests that executed the changed function, the most specific ones first, until one fails. Which these are
is recorded once, by a run of the fast suite, in build/, and again for test files that have changed since.

    python -m tests.tools.slips --seed 7 --count 300     one slip per core at a time
    python -m tests.tools.slips --room kernels           of one room (`draw.ROOMS`)
    python -m tests.tools.slips --slow                   by the slow tests as well, which are recorded first
    python -m tests.tools.slips --list                   print the slips, and run nothing

A slip that cannot matter is a line of tests/tools/harmless.txt: `before => after => why`.
"""

import argparse
import contextlib
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tools import draw
from tests.tools.draw import Slip

ROOT = Path(__file__).resolve().parents[2]
ON_DEVICE = ["-p", "tests.device.process"]
FAST, DEVICE, SLOW = "fast", "device", "slow"
# The arguments of each suite, and where it is recorded.
SUITES = {
    FAST: (["-m", "not slow and not gpu and not server"], ROOT / "build/executed.jsonl"),
    DEVICE: ([*ON_DEVICE, "-m", "not slow"], ROOT / "build/executed-device.jsonl"),
    SLOW: (["-m", "slow and not gpu and not server"], ROOT / "build/executed-slow.jsonl"),
}
PYTEST = ["-q", "-p", "no:cacheprovider", "--tb=line"]
PASSED, FAILED = 0, 1  # of pytest; every other status says that the tests did not run
DEFAULTS = "tests/trainers/test_options.py::test_a_default_is_changed_on_purpose"
FIRST_FILES = 4  # the most specific ones are run before the others are even read


class Test(NamedTuple):
    """A test of the fast suite, and what it has executed."""

    name: str
    seconds: float
    called: dict[str, list[str]]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    def breadth(self) -> int:
        return sum(map(len, self.called.values()))


def digest(file: str) -> str:
    path = ROOT / file
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def recorded(which: str = FAST) -> list[Test]:
    """Return the tests of the record, after a run of the test files that are not in it, or have changed."""
    arguments, record = SUITES[which]
    files = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "tests/**test_*.py"], cwd=ROOT, text=True
    ).split()
    files = [
        file
        for file in files
        if file.startswith("tests/device/") == (which == DEVICE)
        and not file.startswith("tests/hosts/")
    ]
    lines = map(json.loads, record.read_text().splitlines()) if record.exists() else ()
    kept = [line for line in lines if line["digest"] == digest(line["test"].partition("::")[0])]
    stale = sorted({*files} - {line["test"].partition("::")[0] for line in kept})
    record.parent.mkdir(exist_ok=True)
    if stale:
        print(f"recording what {len(stale)} files of tests execute ...", flush=True)
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as new:
            command = [sys.executable, "-m", "pytest", *PYTEST, "-p", "tests.tools.executed"]
            environment = os.environ | {"FUSED_RL_EXECUTED": new.name, "PYTHONPATH": str(ROOT)}
            command += [*arguments, *stale]
            ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            print(*ran.stdout.splitlines()[-10:], sep="\n", flush=True)
            tests = [json.loads(line) for line in new]
        tests += [{"test": file, "seconds": 0, "outcome": "empty", "called": {}} for file in stale]
        kept += [test | {"digest": digest(test["test"].partition("::")[0])} for test in tests]
        record.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return [Test(x["test"], x["seconds"], x["called"]) for x in kept if x["outcome"] == "passed"]


def executes(tests: list[Test]) -> Callable[[str, str | None], bool]:
    """Return who says if some test executes a function. Triton reads kernels, and a compiler C: these all are."""
    called = {
        (file, name) for test in tests for file, names in test.called.items() for name in names
    }
    called |= {(file, None) for file, _ in called}
    return lambda file, function: (
        (file, function) in called or file.startswith("kernels/") or file == draw.ROWS_C
    )


def users_of(file: str) -> set[str]:
    """Return `file` and those of its folder that read or import it, one through another."""
    found, folder = {file}, (ROOT / file).parent
    texts = {path: path.read_text() for path in folder.glob("*.py")}
    while True:
        names = "|".join(re.escape(Path(one).stem) for one in found)
        pattern = re.compile(rf"\bimport\b[^#]*\b({names})\b|[\"']({names})\.c")
        more = {str(path.relative_to(ROOT)) for path, text in texts.items() if pattern.search(text)}
        if more <= found:
            return found
        found |= more


def tests_of(slip: Slip, tests: list[Test]) -> list[Test]:
    """Return the tests that executed what the slip changes, those that execute little else first."""
    chosen = []
    if slip.function:
        chosen = [test for test in tests if slip.function in test.called.get(slip.file, ())]
    elif slip.file.endswith(".py"):
        chosen = [test for test in tests if slip.file in test.called]
    if slip.kind == "default":  # which is compared without a call
        chosen = [test for test in tests if test.name == DEFAULTS or test in chosen]
    if (
        not chosen
    ):  # Triton reads a kernel's text, a compiler C, and a module's constants are no calls
        users = users_of(slip.file)
        chosen = [test for test in tests if users & test.called.keys()]
    narrowest: dict[str, int] = {}
    for test in chosen:
        narrowest[test.file] = min(test.breadth(), narrowest.get(test.file, 10**9))
    return sorted(chosen, key=lambda test: (narrowest[test.file], test.file))


class Verdict(NamedTuple):
    room: str
    slip: Slip
    seen_by: str
    """A test, or "" where all have passed."""
    tests: int


def serve() -> None:
    """Run pytest in forks of a process that has imported what is slow to import, for each line of the input."""
    import peft  # noqa: F401
    import torch._dynamo  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    for line in sys.stdin:
        arguments, environment, output, limit = json.loads(line)
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(written, 1)
            os.dup2(written, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.update(environment)
            if arguments[: len(ON_DEVICE)] == ON_DEVICE:  # before anything is imported
                del os.environ["TRITON_INTERPRET"]
                os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
            status = pytest.main(arguments)
            sys.stdout.flush()
            os._exit(status)
        until = time.monotonic() + limit
        ended, status = os.waitpid(child, os.WNOHANG)
        while not ended and time.monotonic() < until:
            time.sleep(0.02)
            ended, status = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status) if ended else "no end", flush=True)


class Judge:
    """Copies of the checkout, in each of which one slip stands at a time."""

    def __init__(self, suites: dict[str, list[Test]], jobs: int, folder: Path):
        self.suites = suites
        self.copies: queue.Queue[tuple[Path, subprocess.Popen]] = queue.Queue()
        self.sound: set[str] = set()  # tests that pass in a copy where nothing is wrong
        self.unsound: set[str] = set()
        listed = ["git", "ls-files", "-co", "--exclude-standard"]
        files = subprocess.check_output(listed, cwd=ROOT, text=True).splitlines()
        for number in range(jobs):
            copy = folder / f"copy{number}"
            for file in files:
                if (ROOT / file).exists() or (ROOT / file).is_symlink():
                    (copy / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / file, copy / file, follow_symlinks=False)
            environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
            # Compiled Python of another moment would hide a change.
            environment |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
            environment |= {"PYTHONPYCACHEPREFIX": str(copy / "none"), "OMP_NUM_THREADS": "1"}
            environment |= {"TRITON_INTERPRET": "1"}  # before anything imports Triton
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.tools.slips", "--serve"],
                cwd=copy,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.copies.put((copy, server))

    def judge(self, drawn: tuple[str, Slip]) -> Verdict:
        room, slip = drawn
        copy = self.copies.get()
        try:
            for which, tests in self.suites.items():
                chosen = [test for test in tests_of(slip, tests) if test.name not in self.unsound]
                files = [*dict.fromkeys(test.file for test in chosen)]
                first = [test for test in chosen if test.file in files[:FIRST_FILES]]
                rest = [test for test in chosen if test.file in files[FIRST_FILES:]]
                seen_by = self.first_to_fail(copy, slip, which, first)
                seen_by = seen_by or self.first_to_fail(copy, slip, which, rest)
                if seen_by:
                    break
        finally:
            self.copies.put(copy)
        print("." if seen_by else f"\nNOT SEEN by {len(chosen)}: {slip}\n", end="", flush=True)
        return Verdict(room, slip, seen_by, len(chosen))

    def first_to_fail(self, copy, slip: Slip, which: str, chosen: list[Test]) -> str:
        """Return the test that sees a slip: it fails with it, and passes without."""
        path = copy[0] / slip.file
        code = path.read_bytes()
        while chosen:
            path.write_bytes(slip.applied())
            try:
                failed = self.run(copy, which, chosen)
            finally:
                path.write_bytes(code)
            suspects = [test for test in chosen if test.name == failed]
            if not suspects or failed in self.sound or not self.run(copy, which, suspects):
                self.sound.add(failed)
                return failed
            self.unsound.add(failed)
            chosen = chosen[chosen.index(suspects[0]) + 1 :]
        return ""

    def run(self, copy: tuple[Path, subprocess.Popen], which: str, chosen: list[Test]) -> str:
        """Return the first test that fails, "" where all pass."""
        folder, server = copy
        only, output = (folder.with_suffix(suffix) for suffix in (".only", ".output"))
        only.write_text("\n".join(test.name for test in chosen))
        files = [*dict.fromkeys(test.file for test in chosen)]
        arguments = [*SUITES[which][0], *PYTEST, "-x", "-p", "tests.tools.executed", *files]
        # Ten times as long is no measure of speed: what never ends is seen.
        limit = 120 + 10 * sum(test.seconds for test in chosen)
        order = [arguments, {"FUSED_RL_ONLY": str(only)}, str(output), limit]
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        status = server.stdout.readline().strip()
        if status in ("no end", "3") or status.startswith("-"):  # 3: pytest ended, -11: C did
            return status
        if status == str(PASSED):
            return ""
        written = output.read_text(errors="replace")
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", written, re.MULTILINE)
        if status not in (str(FAILED), "2") and not found:
            raise RuntimeError(f"no test ran ({status}): {written[-2000:]}")
        return found[1] if found else "the collection of tests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--room", choices=draw.ROOMS, default="")
    parser.add_argument("--slow", action="store_true", help="run the slow tests as well")
    parser.add_argument("--list", action="store_true", help="print the slips alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return 0
    suites = {which: recorded(which) for which in [FAST, DEVICE, SLOW][: 2 + given.slow]}
    drawn = draw.draw(given.seed, given.count, given.room, executes(suites[FAST]))
    if given.list:
        print(*(f"{room}: {slip}" for room, slip in drawn), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        verdicts = [*pool.map(Judge(suites, given.jobs, Path(folder)).judge, drawn)]
    print("\n| seen by | place | kind |\n|---|---|---|")
    for _, slip, seen_by, _ in verdicts:
        print(f"| {seen_by or '**nothing**'} | {slip.file}:{slip.number} | {slip.kind} |")
    print(f"\n| seed {given.seed} | slips | seen |\n|---|---|---|")
    for room in [*draw.ROOMS, ""]:
        of_room = [verdict for verdict in verdicts if room in ("", verdict.room)]
        seen = sum(bool(verdict.seen_by) for verdict in of_room)
        print(f"| {room or 'all'} | {len(of_room)} | {seen} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
