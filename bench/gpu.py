"""Everything that needs a GPU, in one command of at most 9 minutes, with torch, triton and pytest alone.

    python -m bench gpu --out folder

First the tests marked gpu, then the kernels and linear groups, each with a limit of its own: what runs out of time or
breaks does not end the rest. Results are files in one folder.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from bench.machine import ROOT


class Step(NamedTuple):
    name: str
    command: list[str]  # the words after `python`, without --out and --budget
    limit: int  # seconds after which it is stopped; 480 in all, of 9 minutes
    budget: int | None = None  # seconds that it is asked to keep to; only a group of the suite is


TESTS = ["-m", "pytest", "-q", "-m", "gpu", "--continue-on-collection-errors", "tests"]
STEPS = [
    Step("tests", TESTS, 170),
    Step("kernels", ["-m", "bench", "kernels", "--device", "cuda"], 180, 160),
    Step("linear", ["-m", "bench", "linear", "--device", "cuda"], 130, 110),
]


def parse(words: list[str]) -> tuple[Path, list[Step]]:
    """The folder of the results, and the steps to run."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "bench/results"), help="folder for all results")
    parser.add_argument("--steps", default=",".join(names), help="comma-separated, of the default")
    args = parser.parse_args(words)
    wanted = args.steps.split(",")
    unknown = [name for name in wanted if name not in names]
    if unknown:
        parser.error(f"--steps {unknown[0]}: expected some of {', '.join(names)}")
    return Path(args.out), [step for step in STEPS if step.name in wanted]


def command(name: str, words: list[str]) -> int:
    """Run the steps; 1 where one of them did not end well, or there is no GPU."""
    out, steps = parse(words)
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False")
        return 1
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"BENCH_COMMAND": "python -m bench gpu"}
    environment.pop("TRITON_INTERPRET", None)
    summary, failed = [], False
    for step in steps:
        words = [sys.executable, "-u", *step.command]
        if step.budget:
            words += ["--out", str(out), "--budget", str(step.budget)]
        print(f"\n== {step.name} (at most {step.limit} s) ==", flush=True)
        started = time.perf_counter()
        with (out / f"{step.name}.txt").open("w") as log:
            status = run(words, environment, step.limit, log)
        failed = failed or status != "ok"
        summary.append(f"{step.name}: {status}, {time.perf_counter() - started:.0f} s")
    print("\n" + "\n".join(summary))
    return int(failed)


def run(words: list[str], environment: dict, limit: int, log) -> str:
    """Runs a command, its output both here and in the log; "ok", or what went wrong."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = ["timeout", "-k", "5", str(limit), *words]
    with subprocess.Popen(words, cwd=ROOT, env=environment, **pipes) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
    if process.returncode in (124, 137):
        return f"stopped after {limit} s"
    return "ok" if process.returncode == 0 else f"exit status {process.returncode}"
