"""Everything that needs a GPU, in one command of at most 9 minutes, with torch, triton and pytest alone.

    python -m bench gpu --out folder

First what decides the design (bench/prototypes.py), then the tests marked gpu, then the kernels and linear groups, each
with a limit of its own: what runs out of time or breaks does not end the rest. Results are files in one folder.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
# name, command, seconds after which it is stopped, seconds that it is asked to keep to; 500 in all, of 9 minutes
STEPS = [
    ("prototypes", ["bench/prototypes.py", "--device", "cuda"], 90, None),
    ("tests", ["-m", "pytest", "-q", "-m", "gpu", "--continue-on-collection-errors", "tests"], 170, None),
    ("kernels", ["bench/kernels.py", "--device", "cuda"], 140, 120),
    ("linear", ["bench/linear.py", "--device", "cuda"], 100, 80),
]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "bench/results"), help="folder for all results")
    parser.add_argument("--steps", default=",".join(s[0] for s in STEPS), help="comma-separated, of the default")
    args = parser.parse_args(arguments)
    unknown = set(args.steps.split(",")) - {s[0] for s in STEPS}
    if unknown:
        parser.error(f"--steps {unknown.pop()}: expected some of {', '.join(s[0] for s in STEPS)}")
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False")
        return 1
    Path(args.out).mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    outcome = []
    for name, command, limit, budget in STEPS:
        if name not in args.steps.split(","):
            continue
        command = [sys.executable, "-u", *command, *(["--out", args.out] if name != "tests" else [])]
        command += ["--budget", str(budget)] if budget else []
        print(f"\n== {name} (at most {limit} s) ==", flush=True)
        started = time.perf_counter()
        with (Path(args.out) / f"{name}.txt").open("w") as log:
            status = _run(command, environment | {"BENCH_COMMAND": "python -m bench gpu"}, limit, log)
        outcome.append((name, status, time.perf_counter() - started))
    print("\n" + "\n".join(f"{name}: {status}, {seconds:.0f} s" for name, status, seconds in outcome))
    return int(any(status != "ok" for _, status, _ in outcome))


def _run(command, environment, limit, log) -> str:
    """Runs it, its output both here and in the log; "ok", or what went wrong."""
    with subprocess.Popen(["timeout", "-k", "5", str(limit), *command], cwd=ROOT, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:  # fmt: skip
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
    if process.returncode in (124, 137):
        return f"stopped after {limit} s"
    return "ok" if process.returncode == 0 else f"exit status {process.returncode}"
