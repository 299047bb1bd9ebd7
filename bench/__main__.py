"""The benchmark suite.

    python -m bench                          every group that can run here; results go to bench/results
    python -m bench --group kernels,traffic --device cpu --dtype bf16 --shapes 1024x32000 --peers none --out folder
    python -m bench report                   bench/results -> docs/benchmarks.md with plots, docs/numerics.md's table
    python -m bench gpu --out folder         all that needs a GPU, within 9 minutes

Each group runs as a process of its own: counting needs Triton's interpreter, cross-compilation must not have it, and
what one group breaks or exhausts does not end the others.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("kernels", "linear", "traffic", "codegen", "numerics", "growth", "trainers")
DIMENSIONS = {"kernels": 2, "linear": 3}  # of a shape: rows x vocabulary, rows x hidden x vocabulary


def run_group(group: str, options: list[str], timeout: float | None = None) -> str:
    """Runs `bench/<group>.py`; returns "ok", "failed" or why it did not run."""
    script = ROOT / "bench" / f"{group}.py"
    if not script.exists():
        return "not there"
    environment = os.environ | {"BENCH_COMMAND": shlex.join(["python", "-m", "bench", "--group", group, *options])}
    environment.pop("TRITON_INTERPRET", None)  # each script chooses
    command = [sys.executable, str(script.relative_to(ROOT)), *options]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"stopped after {timeout:.0f} s"
    return "ok" if done.returncode == 0 else f"failed (exit status {done.returncode})"


def run_codegen(out: str | None) -> str:
    """bench/codegen.py prints its table; here its rows are kept too."""
    from bench import codegen, measure

    rows = codegen.subprocess_lines()
    print(codegen.table(rows))
    measure.save(argparse.Namespace(out=out, device="cpu", group="codegen"), rows)
    return "ok"


def of_group(shapes: str | None, group: str) -> list[str]:
    """Those of the shapes that have as many dimensions as the group's cases."""
    return [s for s in (shapes or "").split(",") if s.count("x") + 1 == DIMENSIONS.get(group)]


def parse():
    """The arguments, `options` as each group's script takes them, and the groups."""
    from bench import measure

    parser = measure.parser(__doc__)
    parser.add_argument("--group", default=None, help=f"comma-separated: {', '.join(GROUPS)} (default: all)")
    args = parser.parse_args()
    measure.checked(parser, argparse.Namespace(**vars(args)))
    groups = args.group.split(",") if args.group else [g for g in GROUPS if (ROOT / "bench" / f"{g}.py").exists()]
    if unknown := [g for g in groups if g not in GROUPS]:
        parser.error(f"--group {unknown[0]}: expected one of {', '.join(GROUPS)}")
    if args.shapes and not any(of_group(args.shapes, group) for group in groups):
        wanted = ", ".join(f"{n} dimensions for {g}" for g, n in DIMENSIONS.items())
        parser.error(f"--shapes {args.shapes}: expected {wanted}")
    names = ("device", "dtype", "peers", "budget")
    given = {n: getattr(args, n) for n in names if getattr(args, n) != parser.get_default(n)}
    args.options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return args, groups


def main() -> int:
    if sys.argv[1:2] == ["report"]:
        from bench import report

        return report.main()
    if sys.argv[1:2] == ["gpu"]:
        from bench import gpu

        return gpu.main(sys.argv[2:])
    args, groups = parse()
    # A run of chosen shapes, dtypes or peers does not replace the whole results unless it says where to.
    chosen = args.shapes or "--dtype" in args.options or "--peers" in args.options
    out = args.out or (None if chosen else "bench/results")
    options = args.options + (["--out", out] if out else [])
    outcome = {}
    for group in groups:
        print(f"\n== {group} ==", flush=True)
        started = time.perf_counter()
        shapes = of_group(args.shapes, group)
        if args.shapes and not shapes:
            outcome[group] = "left out: --shapes has none for it"
            print(outcome[group])
            continue
        given = options + (["--shapes", ",".join(shapes)] if shapes else [])
        status = run_codegen(out) if group == "codegen" else run_group(group, given)
        outcome[group] = f"{status}, {time.perf_counter() - started:.0f} s"
    print("\n" + "\n".join(f"{group}: {what}" for group, what in outcome.items()))
    return int(any(not what.startswith(("ok", "left out")) for what in outcome.values()))


if __name__ == "__main__":
    sys.exit(main())
