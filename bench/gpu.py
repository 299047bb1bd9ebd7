"""The first checks on a GPU, in one command of at most 10, 30 or 45 minutes.

    python -m bench gpu --out folder --minutes 10

It needs torch, triton, numpy, transformers and pytest alone, and for its first step what the trainers need. First come
sampling and steps of trainers, as far as time allows, because only a GPU can rank their ways. Then every test of the
kernels runs on the device, graphs and torch.compile among them; then what a call costs the host, and groups of the
suite. Each step has a limit of its
own, and what breaks or runs out of time ends nothing else. Written at once: gpu-facts.jsonl (the machine and what is
predicted, then a line per failed test, per file of tests and per step), tests.txt, groups.txt, and a JSON file per
group. Without .git the variable COMMIT names the commit.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TextIO

from bench import machine


class Step(NamedTuple):
    name: str
    limit: int  # seconds after which it is stopped; 570 in all, of 10 minutes
    budget: int | None = None  # time limit of a group of the suite, in seconds


STEPS = [
    Step("trainers", 220, 190),
    Step("tests", 130),
    Step("host", 35, 20),
    Step("kernels", 60, 40),
    Step("kl", 35, 22),
    Step("linear", 35, 25),
    Step("support", 30, 18),
    Step("topk", 25, 12),
]
# What is expected on an H100 (a copy moves 3.0 TB/s), written before anything runs: ms by phase, or of the host.
# The bytes of a row at the share of a copy that it had or, for token_kl at 50257, should have now; for the head what it
# took, and by `bench.passes` at H = 2048; for the host what a stand-in for the device counted.
PREDICTED = {
    "host": {
        "token_logprobs": {"host forward": 0.10, "host both": 0.23},
        "token_kl": {"host forward": 0.09, "host both": 0.30},
        "linear": {"host both": 0.60},
    },
    "kernels": {
        "8192 x 151936": {"forward": 0.85, "both": 2.6},
        "16384 x 32000": {"forward": 0.44, "both": 1.2},
        "1024 x 151936": {"forward": 0.12, "both": 0.36},
        "8192 x 50257": {"forward": 0.29, "both": 0.88},
        "8192 x 50304": {"forward": 0.28, "both": 0.86},
    },
    "kl": {
        "8192 x 151936": {"forward": 1.8, "both": 4.4},
        "8192 x 50257": {"forward": 0.64, "both": 1.5},
        "8192 x 50304": {"forward": 0.60, "both": 1.5},
    },
    "linear": {
        "8192 x 896 x 151936": {"both": 15.1},
        "8192 x 2048 x 151936": {"both": 28.5},
        "8192 x 4096 x 128256": {"both": 40.5},
    },
}
FACTS_FILE = "gpu-facts.jsonl"
AT_ONCE = max(1, min(8, (os.cpu_count() or 1) // 2))  # files of tests: to compile takes a core each
PYTEST = [
    "-m",
    "pytest",
    "-v",
    "--tb=short",
    "-p",
    "no:cacheprovider",
    "--on-device",
]
PARTS = {"tests/test_hostile.py": 5}
"""Files whose tests compile for minutes, and in how many processes."""
OUTCOME = re.compile(r"^(tests/\S+?::.*) (PASSED|FAILED|SKIPPED|ERROR)\b")


def parse(words: list[str]) -> tuple[Path, list[Step]]:
    """The folder of the results, and the steps to run."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", default=os.environ.get("OUT", "bench/results"), help="folder for all results"
    )
    parser.add_argument("--steps", default=",".join(names), help="comma-separated, of the default")
    parser.add_argument("--minutes", type=int, choices=(10, 30, 45), default=10, help="in all")
    args = parser.parse_args(words)
    wanted = args.steps.split(",")
    unknown = [name for name in wanted if name not in names]
    if unknown:
        parser.error(f"--steps {unknown[0]}: expected some of {', '.join(names)}")
    steps = []
    for step in STEPS:
        limit, budget = (
            seconds and seconds * args.minutes // 10 for seconds in (step.limit, step.budget)
        )
        if step.name in wanted:
            steps.append(Step(step.name, limit, budget))
    return Path(args.out), steps


def command(name: str, words: list[str]) -> int:
    """Run the steps; 1 where one of them did not end well, or there is no GPU."""
    import torch

    out, steps = parse(words)
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} of {sys.executable} sees none")
        return 1
    out.mkdir(parents=True, exist_ok=True)
    for path in (FACTS_FILE, "tests.txt", "groups.txt"):
        (out / path).unlink(missing_ok=True)
    os.environ["BENCH_COMMAND"] = "python -m bench gpu"
    os.environ.pop("TRITON_INTERPRET", None)
    tell(out, machine.environment("cuda"))
    tell(out, {"predicted": {step.name: PREDICTED.get(step.name) for step in steps}})
    outcome = {}
    for step in steps:
        print(f"\n== {step.name} (at most {step.limit} s) ==", flush=True)
        started = time.perf_counter()
        status = (tests if step.name == "tests" else group)(step, out)
        outcome[step.name] = f"{status}, {time.perf_counter() - started:.0f} s"
        tell(out, {"step": step.name, "ended": outcome[step.name]})
    return int(not all(status.startswith("ok,") for status in outcome.values()))


def tell(out: Path, fact: dict) -> None:
    """Write one fact, and print it."""
    line = json.dumps(fact)
    with (out / FACTS_FILE).open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


# ------------------------------------------------------------------ tests


def tests(step: Step, out: Path) -> str:
    """Every file with tests of kernels, each a process, several at once."""
    from tests.paths import ON_DEVICE

    end = time.monotonic() + step.limit
    with (out / "tests.txt").open("w") as log, ThreadPoolExecutor(AT_ONCE) as pool:
        # The files in parts go first: they take the longest.
        parts = [(path, part) for path, count in PARTS.items() for part in range(count)]
        parts += [(path, 0) for path in ON_DEVICE if path not in PARTS]
        ended = list(pool.map(lambda part: test_file(*part, end, out, log), parts))
    broken = [path for (path, _), status in zip(parts, ended, strict=True) if status != "ok"]
    return "ok" if not broken else f"not ok: {', '.join(broken)}"


def test_file(path: str, part: int, end: float, out: Path, log: TextIO) -> str:
    """Runs a part of one file until `end`; its counts and each failure are facts."""
    left = int(end - time.monotonic())
    if left < 5:
        tell(out, {"tests": path, "left out": "no time"})
        return "left out"
    counts = collections.Counter()

    def note(line: str) -> None:
        found = OUTCOME.match(line)
        if not found:
            return
        test, outcome = found.groups()
        counts[outcome.lower()] += 1
        if outcome in ("FAILED", "ERROR"):
            tell(out, {"test": test, "outcome": outcome.lower()})

    started = time.monotonic()
    words = ["--part", f"{part}/{PARTS.get(path, 1)}", path]
    status = run([*PYTEST, *words], left, log, note)
    tell(
        out,
        {"tests": path, **counts, "ended": status, "seconds": round(time.monotonic() - started)},
    )
    return status


# ------------------------------------------------------------------ groups


def group(step: Step, out: Path) -> str:
    """A group of the suite, on the device."""
    words = [
        "-m",
        "bench",
        step.name,
        "--device",
        "cuda",
        "--out",
        str(out),
        "--budget",
        str(step.budget),
    ]
    with (out / "groups.txt").open("a") as log:
        return run(words, step.limit, log, lambda line: print(line, end="", flush=True))


def run(words: list[str], limit: int, log: TextIO, see) -> str:
    """Runs Python with these words; each line it prints is written, and passed to `see`. "ok", or what went wrong."""
    command = ["timeout", "-k", "5", str(limit), sys.executable, "-u", *words]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }
    with subprocess.Popen(command, cwd=machine.ROOT, **pipes) as process:
        for line in process.stdout:
            log.write(line)
            log.flush()
            see(line)
    if process.returncode in (124, 137):
        return f"stopped after {limit} s"
    return "ok" if process.returncode == 0 else f"exit status {process.returncode}"
