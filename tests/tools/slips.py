"""`make test-mutations`: break the code, one slip of tests/mutations.py at a time, and see which test notices.

A slip runs the tests that executed the changed function, the most specific ones first, until one fails. Which these are
is recorded once, by a run of the fast suite, in build/executed.jsonl, and again for test files that have changed since.

    python -m tests.tools.slips                   all slips, one per core at a time
    python -m tests.tools.slips "forward is"      those whose name or file contains one of the words
"""

import argparse
import ast
import hashlib
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "build/executed.jsonl"
FAST = "not slow and not gpu and not server"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
PASSED, FAILED = 0, 1  # of pytest; every other status says that the tests did not run
LONGEST = 600  # seconds for the tests of a slip: what never ends is seen


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


def recorded() -> list[Test]:
    """Return the tests of the record, after a run of the test files that are not in it, or have changed."""
    files = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "tests/**test_*.py"], cwd=ROOT, text=True
    ).split()
    files = [file for file in files if not file.startswith(("tests/device/", "tests/hosts/"))]
    lines = map(json.loads, RECORD.read_text().splitlines()) if RECORD.exists() else ()
    kept = [line for line in lines if line["digest"] == digest(line["test"].partition("::")[0])]
    stale = sorted({*files} - {line["test"].partition("::")[0] for line in kept})
    RECORD.parent.mkdir(exist_ok=True)
    if stale:
        print(f"recording what {len(stale)} files of tests execute ...", flush=True)
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as new:
            command = [*PYTEST, "-p", "tests.tools.executed", "-m", FAST, *stale]
            environment = os.environ | {"FUSED_RL_EXECUTED": new.name, "PYTHONPATH": str(ROOT)}
            ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            print(*ran.stdout.splitlines()[-10:], sep="\n", flush=True)
            tests = [json.loads(line) for line in new]
        tests += [{"test": file, "seconds": 0, "outcome": "empty", "called": {}} for file in stale]
        kept += [test | {"digest": digest(test["test"].partition("::")[0])} for test in tests]
        RECORD.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return [Test(x["test"], x["seconds"], x["called"]) for x in kept if x["outcome"] == "passed"]


def function_of(mutation: Mutation) -> str | None:
    """Return the name of the innermost function that the slip changes, None at the top of a module."""
    text = (ROOT / mutation.file).read_text()
    line = text[: text.index(mutation.old)].count("\n") + 1
    line += len(mutation.old) - len(mutation.old.lstrip("\n"))
    inner = None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first <= line <= node.end_lineno and (inner is None or node.lineno > inner.lineno):
                inner = node
    return inner and inner.name


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


def tests_of(mutation: Mutation, tests: list[Test]) -> list[Test]:
    """Return the tests that executed what the slip changes, those that execute little else first."""
    chosen = []
    if mutation.file.endswith(".py"):
        function = function_of(mutation)
        chosen = [test for test in tests if function in test.called.get(mutation.file, ())]
        if function is None:
            chosen = [test for test in tests if mutation.file in test.called]
    if (
        not chosen
    ):  # Triton reads a kernel's text, a compiler C, and a module's constants are no calls
        users = users_of(mutation.file)
        chosen = [test for test in tests if users & test.called.keys()]
    narrowest: dict[str, int] = {}
    for test in chosen:
        narrowest[test.file] = min(test.breadth(), narrowest.get(test.file, 10**9))
    return sorted(chosen, key=lambda test: (narrowest[test.file], test.file))


class Verdict(NamedTuple):
    name: str
    seen_by: str  # "" where every test has passed
    seconds: float
    tests: int


class Judge:
    """Copies of the checkout, in each of which one slip stands at a time."""

    def __init__(self, tests: list[Test], jobs: int, folder: Path):
        self.tests = tests
        self.copies: queue.Queue[Path] = queue.Queue()
        listed = ["git", "ls-files", "-co", "--exclude-standard"]
        files = subprocess.check_output(listed, cwd=ROOT, text=True).splitlines()
        for number in range(jobs):
            copy = folder / f"copy{number}"
            for file in files:
                if (ROOT / file).exists() or (ROOT / file).is_symlink():
                    (copy / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / file, copy / file, follow_symlinks=False)
            self.copies.put(copy)

    def judge(self, name: str) -> Verdict:
        mutation, begin = MUTATIONS[name], time.monotonic()
        copy = self.copies.get()
        path = copy / mutation.file
        code = path.read_text()
        path.write_text(code.replace(mutation.old, mutation.new))
        chosen = tests_of(mutation, self.tests)
        try:
            seen_by = self.run(copy, shlex.split(mutation.tests)) if mutation.tests else ""
            if not seen_by and chosen:
                only = copy.parent / f"{copy.name}.only"
                only.write_text("\n".join(test.name for test in chosen))
                files = [*dict.fromkeys(test.file for test in chosen)]
                arguments = ["-p", "tests.tools.executed", "-m", FAST, *files]
                seen_by = self.run(copy, arguments, FUSED_RL_ONLY=str(only))
        finally:
            path.write_text(code)
            self.copies.put(copy)
        verdict = Verdict(name, seen_by, time.monotonic() - begin, len(chosen))
        print("." if seen_by else f"\nNOT SEEN: {name}\n", end="", flush=True)
        return verdict

    def run(self, copy: Path, arguments: list[str], **more: str) -> str:
        """Return the first test that fails, "" where all pass."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | more
        # Compiled Python of another moment would hide a change.
        environment |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"PYTHONPYCACHEPREFIX": str(copy / "none"), "OMP_NUM_THREADS": "1"}
        options = {"cwd": copy, "env": environment, "capture_output": True, "text": True}
        try:
            ran = subprocess.run([*PYTEST, "-x", *arguments], timeout=LONGEST, **options)
        except subprocess.TimeoutExpired:
            return "no end"
        if ran.returncode == PASSED:
            return ""
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", ran.stdout, re.MULTILINE)
        if ran.returncode not in (FAILED, 2) and not found:
            raise RuntimeError(f"no test ran: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        return found[1] if found else "the collection of tests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only slips whose name or file contains one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    names = [
        name
        for name, mutation in MUTATIONS.items()
        if not given.words or any(word in f"{name} {mutation.file}" for word in given.words)
    ]
    tests = recorded()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        judge = Judge(tests, given.jobs, Path(folder))
        verdicts = [*pool.map(judge.judge, names)]
    print("\n| slip | file | seen by | tests | seconds |\n|---|---|---|---|---|")
    for verdict in verdicts:
        seen_by, file = verdict.seen_by or "**nothing**", MUTATIONS[verdict.name].file
        counts = f"{verdict.tests} | {verdict.seconds:.0f}"
        print(f"| {verdict.name} | {file} | {seen_by} | {counts} |")
    unseen = sum(not verdict.seen_by for verdict in verdicts)
    print(f"{len(verdicts)} slips, {unseen} not seen")
    return int(unseen > 0)


if __name__ == "__main__":
    sys.exit(main())
