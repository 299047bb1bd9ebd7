"""What every group shares: time, peak memory, copy bandwidth, the description of the machine, and the result files."""

import argparse
import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "trl",
    "liger-kernel",
    "flash-attn",
    "quack-kernels",
    "cut-cross-entropy",
    "verl",
)


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every group understands; a group ignores those that mean nothing to it."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    made.add_argument("--dtype", default="bf16,fp32", help="comma-separated: bf16, fp16, fp32")
    made.add_argument("--shapes", default=None, help="comma-separated, rows x vocabulary: 1024x32000,256x151936")
    made.add_argument("--peers", default="all", help="all, none, or comma-separated names")
    made.add_argument("--budget", type=float, default=None, help="seconds for a group: more cases, less for each")
    made.add_argument("--out", default=None, help="folder for the JSON result (default: none is written)")
    return made


def checked(made: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with dtypes and shapes as lists; ends with a message where one means nothing."""
    from bench import linear, peers  # they import this file

    args.dtype = args.dtype.split(",")
    if unknown := [d for d in args.dtype if d not in DTYPES]:
        made.error(f"--dtype {unknown[0]}: expected one of {', '.join(DTYPES)}")
    if args.device != "cpu" and not torch.cuda.is_available():
        made.error(f"--device {args.device}: torch sees no such device here")
    if args.budget is not None and not args.budget > 0:
        made.error("--budget: expected seconds above 0")
    names = list(dict.fromkeys((*peers.LOGPROBS, *peers.KL, *peers.GAE, *linear.KNOWN)))
    if unknown := [n for n in args.peers.split(",") if n not in ("all", "none", *names)]:
        made.error(f"--peers {unknown[0]}: expected all, none or some of {', '.join(names)}")
    if args.shapes:
        try:
            args.shapes = [tuple(int(n) for n in shape.split("x")) for shape in args.shapes.split(",")]
        except ValueError:
            made.error(f"--shapes {args.shapes}: expected sizes such as 1024x32000, comma-separated")
        if any(n < 1 for shape in args.shapes for n in shape):
            made.error("--shapes: sizes start at 1")
    return args


def arguments(description: str, group: str) -> argparse.Namespace:
    """Those of a group's own script."""
    made = parser(description)
    args = checked(made, made.parse_args())
    args.group = group
    return args


# ------------------------------------------------------------------ time


def synchronize(device: str):
    if device != "cpu":
        torch.cuda.synchronize()


class Budget:
    """Seconds of wall time, shared out among the parts to come: what one leaves over, the next ones get."""

    def __init__(self, seconds: float, parts: int):
        self.end, self.parts = time.perf_counter() + seconds, parts

    def share(self) -> float:
        """Seconds for the next part."""
        seconds = max(0.0, self.end - time.perf_counter()) / max(1, self.parts)
        self.parts -= 1
        return seconds


def interleaved(runs: dict, budget_s: float, first: dict, keep=(), most: int = 40) -> dict:
    """Samples in ms of each run: name -> {phase: [ms, ...]}.

    Each run is a function that returns {phase: seconds}; `first` holds what it returned when it ran before. They take
    turns, so that what slows the machine slows all, and each repeats as often as its equal part of the time allows: a
    slow one less often, spread over the rounds; one that has no time to repeat at all keeps its first sample. Those in
    `keep`, to which others are compared, run three times at least.
    """
    part = budget_s / max(1, len(runs))
    counts = {n: max(3 * (n in keep), min(most, int(part / max(1e-6, sum_of(first[n]))))) for n in runs}
    samples = {name: {} for name in runs}
    rounds = max(counts.values(), default=0)
    started = time.perf_counter()
    for turn in range(rounds):
        late = time.perf_counter() - started > 1.5 * budget_s  # the machine has become slower since
        for name, run in runs.items():
            due = (turn + 1) * counts[name] // rounds > turn * counts[name] // rounds
            if not due or (late and name not in keep):
                continue
            for phase, seconds in run().items():
                samples[name].setdefault(phase, []).append(1e3 * seconds)
    return {n: found or {k: [1e3 * v] for k, v in first[n].items()} for n, found in samples.items()}


def sum_of(phases: dict) -> float:
    """Seconds that a run took."""
    return phases.get("both", phases["forward"])


def sampled(runs: dict, device: str, budget_s: float, first: dict, keep=()) -> dict:
    """{name: {phase: [ms, ...]}} of runs given as {name: (forward, backward, inputs, whether backward repeats)}."""
    if device == "cpu":
        return interleaved({n: phases_cpu(*run[:3]) for n, run in runs.items()}, budget_s, first, keep)
    ms = int(min(200, max(20, 1e3 * budget_s / max(1, len(runs)) / 4)))
    samples = {}
    for name, (forward, backward, inputs, twice) in runs.items():
        try:
            samples[name] = phases_gpu(forward, backward, inputs, ms, twice)
        except torch.OutOfMemoryError:  # several input sets, each with its graph, are more than one
            torch.cuda.empty_cache()
            samples[name] = phases_gpu(forward, backward, inputs[:1], ms, twice)
    return samples


def phases_cpu(forward, backward, inputs):
    """A run for `interleaved`: `forward(x)`, then `backward(outputs, x)`, each timed, over each input set in turn."""
    turn = iter(range(1 << 30))

    def run():
        x = inputs[next(turn) % len(inputs)]
        t0 = time.perf_counter()
        outputs = forward(x)
        t1 = time.perf_counter()
        if backward is None:
            return {"forward": t1 - t0}
        gradient = backward(outputs, x)
        t2 = time.perf_counter()
        del outputs, gradient
        return {"forward": t1 - t0, "backward": t2 - t1, "both": t2 - t0}

    return run


def phases_gpu(forward, backward, inputs, ms: int = 100, twice: bool = True) -> dict:
    """{phase: [ms, ...]} by triton's do_bench, which empties the L2 cache before each run; input sets take turns.

    `twice=False`: the backward pass cannot be repeated on one forward pass, so it is not timed alone.
    """
    from triton.testing import do_bench

    turn = iter(range(1 << 30))

    def pick():
        return inputs[next(turn) % len(inputs)]

    samples = {"forward": do_bench(lambda: forward(pick()), rep=ms, return_mode="all")}
    if backward is not None:
        if twice:
            saved = [(forward(x), x) for x in inputs]
            samples["backward"] = do_bench(lambda: backward(*saved[next(turn) % len(saved)]), rep=ms, return_mode="all")
            del saved

        def both():
            x = pick()
            backward(forward(x), x)

        samples["both"] = do_bench(both, rep=ms, return_mode="all")
    return samples


def median(samples: list) -> float:
    return statistics.median(samples)


def repeats(row: dict) -> int | None:
    """How many times a row was timed."""
    return len(next(iter(row["samples_ms"].values()))) if "samples_ms" in row else None


# ------------------------------------------------------------------ memory


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")


def peak_extra_bytes(run, device: str) -> int | None:
    """The most memory in bytes that `run()` holds at once beyond what was there before; None where it is not known.

    On CPU this is the resident set (Linux), so compiled code and workspaces count too.
    """
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if not sys.platform.startswith("linux"):
        return None
    ctypes.CDLL(None).malloc_trim(0)  # what is free but still resident would hide an allocation
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


# ------------------------------------------------------------------ the device


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a plain copy: the roof that rows are measured against."""
    n = (1 << 30) if device != "cpu" else (1 << 28)
    source, target = torch.zeros(n, dtype=torch.uint8, device=device), torch.empty(n, dtype=torch.uint8, device=device)
    if device != "cpu":
        samples = phases_gpu(lambda x: target.copy_(x), None, [source])["forward"]
    else:
        target.copy_(source)
        run = phases_cpu(target.copy_, None, [source])
        samples = [1e3 * run()["forward"] for _ in range(11)]
    return 2 * n / (1e-3 * median(samples))


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    for line in _run("lscpu").splitlines():
        if line.startswith("Model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def command_line() -> str:
    """The command as typed, without the interpreter's path and options of this machine alone."""
    words = [str(Path(w).resolve().relative_to(ROOT)) if Path(w).is_absolute() and ROOT in Path(w).resolve().parents
             else w for w in sys.argv]  # fmt: skip
    return " ".join(["python", *words]).replace("bench/__main__.py", "-m bench")


def environment(device: str) -> dict:
    """Command, commit, device, driver and versions: what a reader needs to repeat a run."""
    described = {
        "command": os.environ.get("BENCH_COMMAND", command_line()),
        "commit": _run("git", "rev-parse", "--short=12", "HEAD") or None,
        "modified": bool(
            _run("git", "status", "--porcelain", "--untracked-files=no", "--", ":!bench/results", ":!docs")
        ),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": device,
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {p: v for p in PACKAGES if (v := version(p))},
    }
    if device != "cpu":
        described["device"] = torch.cuda.get_device_name()
        described["driver"] = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or None
        described["cuda"] = torch.version.cuda or torch.version.hip
    else:
        described["device"] = f"CPU: {described['cpu']}, {described['cores']} cores"
    return described


def heading(device: str) -> str:
    """The device, with the threads that a CPU run uses."""
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    return environment(device)["device"] + threads


# ------------------------------------------------------------------ results


def save(args, rows: list, **more) -> Path | None:
    """Write {environment, rows, more} as JSON into the folder args.out; after each case, lest time runs out."""
    if args.out is None:
        return None
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{args.group}-{'cpu' if args.device == 'cpu' else 'gpu'}.json"
    text = dumps({"group": args.group, "environment": environment(args.device), **more, "rows": rows})
    part = path.with_suffix(".part")  # a run that is stopped while it writes leaves the last result whole
    part.write_text(text)
    part.replace(path)
    return path


def dumps(result: dict) -> str:
    """JSON with one row per line and 5 significant digits, so that a result is small and its diff readable."""

    def short(value):
        if isinstance(value, float):
            return float(f"{value:.5g}") if value == value and abs(value) != float("inf") else str(value)
        if isinstance(value, dict):
            return {k: short(v) for k, v in value.items()}
        return [short(v) for v in value] if isinstance(value, list | tuple) else value

    head = json.dumps(short({k: v for k, v in result.items() if k != "rows"}), indent=1)
    rows = ",\n".join("  " + json.dumps(short(row)) for row in result["rows"])
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def table(columns: list[str], rows: list[list]) -> str:
    """Text table, columns as wide as their contents, numbers to the right."""
    cells = [[c if isinstance(c, str) else "" if c is None else f"{c:.4g}" for c in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) if cells else len(name) for i, name in enumerate(columns)]
    numeric = [bool(rows) and all(not isinstance(row[i], str) for row in rows) for i in range(len(columns))]

    def line(row):
        return "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)).rstrip()

    return "\n".join([line(columns), "  ".join("-" * w for w in widths), *(line(row) for row in cells)])
