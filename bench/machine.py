"""The machine: its memory, its copy bandwidth, and the description that a reader needs to repeat a run."""

import ctypes
import gc
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench import timing

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "numpy", "trl", "liger-kernel")


def synchronize(device: str):
    if device != "cpu":
        torch.cuda.synchronize()


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
        run()
        return None
    ctypes.CDLL(None).malloc_trim(0)  # what is free but still resident would hide an allocation
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _process_bytes("VmRSS")
    run()
    return _process_bytes("VmHWM") - before


def free_bytes() -> float:
    """The memory that programs may still take; infinite where it is not known."""
    if not sys.platform.startswith("linux"):
        return float("inf")
    return _process_bytes("MemAvailable", "/proc/meminfo")


def _process_bytes(field: str, file: str = "/proc/self/status") -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {field} in {file}")


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a plain copy: the roof that rows are measured against."""
    size = (1 << 30) if device != "cpu" else (1 << 28)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    run = timing.Run(target.copy_, None, [source], False)
    if device != "cpu":
        samples = timing.phases_gpu(run)["forward"]
    else:
        target.copy_(source)  # touches its pages
        once = timing.phases_cpu(run)
        samples = [1e3 * once()["forward"] for _ in range(11)]
    return 2 * size / (1e-3 * timing.median(samples))


def read_bandwidth() -> float:
    """Bytes per second that a GPU reads for a sum: the roof of a forward pass."""
    source = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")
    return source.nbytes / (
        1e-3
        * timing.median(timing.phases_gpu(timing.Run(torch.sum, None, [source], False))["forward"])
    )


def clocks() -> dict:
    """The GPU's clock in MHz, its power in W and its temperature in °C, now; empty where nvidia-smi says nothing."""
    names = ("clocks.sm", "power.draw", "temperature.gpu")
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    line = _output(
        "nvidia-smi", "-i", index, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"
    )
    return dict(zip(names, line.split(", "), strict=False)) if line else {}


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """What a command prints; empty where it does not run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
        return done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _processor() -> str:
    for line in _output("lscpu").splitlines():
        if line.startswith("Model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def command_line() -> str:
    """The command as typed, without the interpreter's path and options of this machine alone."""
    words = []
    for word in sys.argv:
        path = Path(word)
        if path.is_absolute() and ROOT in path.resolve().parents:
            word = str(path.resolve().relative_to(ROOT))
        words.append(word)
    return " ".join(["python", *words]).replace("bench/__main__.py", "-m bench")


def environment(device: str) -> dict:
    """Command, commit, device, driver and versions: what a reader needs to repeat a run."""
    processor = _processor()
    changes = _output(
        "git",
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ":!bench/results",
        ":!docs",
        ":!README.md",
    )
    versions = {package: version(package) for package in PACKAGES}
    described = {
        "command": os.environ.get("BENCH_COMMAND", command_line()),
        "commit": _output("git", "rev-parse", "--short=12", "HEAD") or os.environ.get("COMMIT"),
        "modified": bool(changes),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": f"CPU: {processor}, {os.cpu_count()} cores",
        "cpu": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {package: found for package, found in versions.items() if found},
    }
    if device != "cpu":
        described["device"] = torch.cuda.get_device_name()
        described["driver"] = (
            _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or None
        )
        described["cuda"] = torch.version.cuda or torch.version.hip
    return described


def heading(device: str) -> str:
    """The device, with the threads that a CPU run uses."""
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    return environment(device)["device"] + threads
