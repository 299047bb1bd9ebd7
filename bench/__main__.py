"""The benchmark suite.

    python -m bench                          every group that can run here; results go to bench/results
    python -m bench --group kernels,traffic --device cpu --dtype bf16 --shapes 1024x32000 --peers none --out folder
    python -m bench kernels --device cpu     one group, in this process: kernels, linear, support, topk, kl, ...
    python -m bench report                   bench/results -> docs/benchmarks.md with plots
    python -m bench quality                  our trainers and TRL's: held-out accuracy over training time
    python -m bench gpu --out folder         the first checks on a GPU, within 10 minutes
    python -m bench passes                   time and memory of the head on a GPU, on paper
    python -m bench rows --model FOLDER      what rows cost before the first step, beside a floor and TRL

Each group of a whole run is a process of its own: counting needs Triton's interpreter, cross-compilation must not have
it, and what one group breaks or exhausts does not end the others.
"""

import argparse
import importlib
import os
import shlex
import subprocess
import sys
import time

from bench import machine, options
from bench.groups import GROUPS
from bench.machine import ROOT

# Words that stand for a module with `command(name, words)`; imported only then, as each chooses how triton runs.
COMMANDS = {name: group.module for name, group in GROUPS.items()}
NAMED = ("quality", "report", "gpu", "passes", "rows")
COMMANDS |= {name: f"bench.{name}" for name in NAMED}
COMMANDS["host"] = "bench.run"  # for a GPU alone


def run_group(group: str, given: list[str]) -> str:
    """Runs a group as a process; returns "ok", with the most memory that it held, or why it did not run."""
    free, needed = machine.free_bytes() / 1e9, GROUPS[group].gigabytes
    if free < needed:
        return f"left out: it needs {needed} GB of memory, of which {free:.1f} are free"
    command = ["python", "-m", "bench", "--group", group, *given]
    environment = os.environ | {"BENCH_COMMAND": shlex.join(command)}
    environment.pop("TRITON_INTERPRET", None)  # each group chooses
    words = [sys.executable, "-m", "bench", group, *given]
    started = subprocess.Popen(words, cwd=ROOT, env=environment)
    _, status, used = os.wait4(started.pid, 0)
    status = os.waitstatus_to_exitcode(status)
    outcome = "ok" if status == 0 else f"failed (exit status {status})"
    return f"{outcome}, {used.ru_maxrss / 1e6:.1f} GB"  # of its largest process


def of_group(shapes: str | None, group: str) -> list[str]:
    """Those of the shapes that have as many dimensions as the group's cases."""
    listed = shapes.split(",") if shapes else []
    return [shape for shape in listed if len(shape.split("x")) == GROUPS[group].dimensions]


def parse():
    """(the arguments, the words that each group takes, the groups)."""
    parser = options.parser(__doc__)
    parser.add_argument("--group", default=",".join(GROUPS), help="comma-separated (default: all)")
    args = parser.parse_args()
    options.checked(parser, argparse.Namespace(**vars(args)))

    # Groups that exist, and shapes that one of them has.
    groups = args.group.split(",")
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        parser.error(f"--group {unknown[0]}: expected one of {', '.join(GROUPS)}")
    if args.shapes and not any(of_group(args.shapes, group) for group in groups):
        wanted = [
            f"{group.dimensions} dimensions for {name}"
            for name, group in GROUPS.items()
            if group.dimensions
        ]
        parser.error(f"--shapes {args.shapes}: expected {', '.join(wanted)}")

    # The options that were given, as words again.
    words = []
    for name in ("device", "dtype", "peers", "budget"):
        value = getattr(args, name)
        if value != parser.get_default(name):
            words += [f"--{name}", str(value)]
    # A run of chosen shapes, dtypes or peers does not replace the whole results unless it says where to.
    chosen = args.shapes or "--dtype" in words or "--peers" in words
    out = args.out or ("" if chosen else "bench/results")
    return args, words + (["--out", out] if out else []), groups


def suite() -> int:
    """Every group in its turn; 1 where one fails."""
    args, words, groups = parse()
    outcome = {}
    for group in groups:
        print(f"\n== {group} ==", flush=True)
        shapes = of_group(args.shapes, group)
        if args.shapes and not shapes:
            outcome[group] = "left out: --shapes has none for it"
            print(outcome[group])
            continue
        started = time.perf_counter()
        status = run_group(group, words + (["--shapes", ",".join(shapes)] if shapes else []))
        outcome[group] = f"{status}, {time.perf_counter() - started:.0f} s"
    print()
    for group, what in outcome.items():
        print(f"{group}: {what}")
    return int(any(what.startswith("failed") for what in outcome.values()))


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word not in COMMANDS:
        return suite()
    module = importlib.import_module(COMMANDS[word])
    return module.command(word, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
