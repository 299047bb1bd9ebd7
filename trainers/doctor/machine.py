"""`fused-rl doctor`: what of this machine training needs, a hint for each thing missing, and a kernel against its
definition. It is what a bug report begins with, so it works where next to nothing is installed.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import fused_rl
from fused_rl import reference
from fused_rl.trainers.base.screen import tell

GIB = 1 << 30
ROOM = 5 * GIB  # of disk and of memory: less than a small model with its optimizer and a checkpoint takes
EXTRAS = {
    "train": ("deepspeed", "transformers", "datasets", "peft", "jsonargparse", "tensorboard", "math-verify"),
    "demo": ("reasoning-gym",),
    "bnb": ("bitsandbytes",),
}
ROWS, VOCABULARY = 64, 5003  # of logits: several blocks and a tail


class Found(NamedTuple):
    """One line."""

    name: str
    what: str
    hint: str | None = None
    """How to mend it; None where nothing is missing."""
    needed: bool = False
    """Whether, without it, what is installed does not work."""


def look() -> int:
    """Print all of it; 0, or 1 where something that is needed is missing or a kernel is wrong."""
    status = 0
    for found in findings():
        tell(f"{found.name:<14} {found.what}")
        if found.hint is not None:
            tell(f"{'':<14} -> {found.hint}")
            status |= int(found.needed)
    return status


def findings() -> Iterator[Found]:
    """All lines, in order; what takes long comes last."""
    yield Found("fused_rl", fused_rl.__version__)
    yield Found("python", f"{platform.python_version()}, {platform.platform()}")
    yield _memory()
    yield _disk(Path.cwd())
    yield Found("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield _triton()
    yield _gpu()
    yield _compiler()
    yield from _extras()
    yield _kernel()


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> Found:
    told = Path("/proc/meminfo")
    if not told.is_file():  # elsewhere than on Linux
        return Found("memory", "not told by this system")
    fields = dict(line.split(":", 1) for line in told.read_text().splitlines())
    free, whole = (1024 * int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    hint = "a model takes 16 bytes for each weight that AdamW trains in bf16; close others" if free < ROOM else None
    return Found("memory", f"{free / GIB:.1f} of {whole / GIB:.1f} GiB free, {os.cpu_count()} cores", hint)


def _disk(folder: Path) -> Found:
    whole, _, free = shutil.disk_usage(folder)
    hint = "a checkpoint holds weights and optimizer: choose --output_dir on another disk" if free < ROOM else None
    return Found("disk", f"{free / GIB:.1f} of {whole / GIB:.1f} GiB free in this folder", hint)


def _triton() -> Found:
    found = version("triton") or version("pytorch-triton-rocm")
    if found is not None:
        return Found("triton", found)
    if torch.cuda.is_available():
        return Found("triton", "missing", "GPU tensors need it: pip install triton", needed=True)
    return Found("triton", "missing", "not needed on a CPU; for a GPU: pip install triton")


def _gpu() -> Found:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        if _driver() is None:
            return Found("GPU", "none: kernels run on the CPU path")
        why = "has no CUDA in it" if built is None else f"is made for {built}, and the driver is older, or hides it"
        hint = f"torch {torch.__version__} {why}: https://pytorch.org/get-started says which one to install"
        return Found("GPU", f"there (driver {_driver()}), but torch does not see it", hint, needed=True)
    about = torch.cuda.get_device_properties(0)
    free, whole = (size / GIB for size in torch.cuda.mem_get_info(0))
    others = f", {torch.cuda.device_count()} of them" if torch.cuda.device_count() > 1 else ""
    built = torch.version.cuda or torch.version.hip
    what = f"{about.name}{others}, {free:.1f} of {whole:.1f} GiB free, driver {_driver()}, torch for {built}"
    return Found("GPU", what)


def _driver() -> str | None:
    """As nvidia-smi tells it; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def _compiler() -> Found:
    """Of what is compiled when it is first used: Triton's launchers on a GPU, the CPU path's C."""
    on_gpu = torch.cuda.is_available()
    names = (os.environ.get("CC"), "cc", "gcc", "clang") if on_gpu else (os.environ.get("CXX", "g++"),)
    name = next((name for name in names if name and shutil.which(name)), None)
    install = "on Debian and Ubuntu: apt install g++ python3-dev"
    if name is None:
        cost = "Triton cannot launch a kernel" if on_gpu else "large logits take several times as long"
        return Found("compiler", "missing", f"without one {cost}; {install}", needed=on_gpu)
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return Found("compiler", f"{name}, but no Python.h", f"the headers of this Python; {install}", needed=on_gpu)
    return Found("compiler", name)


def _extras() -> Iterator[Found]:
    for extra, packages in EXTRAS.items():
        versions = {package: version(package) for package in packages}
        there = ", ".join(f"{package} {found}" for package, found in versions.items() if found)
        missing = [package for package, found in versions.items() if found is None]
        told = "; ".join(part for part in (there, "missing: " + ", ".join(missing) if missing else "") if part)
        yield Found(f"[{extra}]", told, f"pip install '.[{extra}]'" if missing else None)


def errors(device: str) -> tuple[float, float]:
    """The largest error of `token_logprobs` and of its gradient on a device, and with it that of plain PyTorch in fp32.

    Both are compared with the definition in fp64, in nats; a gradient counts as many of them as it has.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(ROWS, VOCABULARY, generator=generator)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)

    def of(op, dtype: torch.dtype, place: str) -> torch.Tensor:
        x = logits.to(place, dtype, copy=True).requires_grad_()
        rows = op(x, targets.to(place))
        (rows.logprobs.sum() + rows.entropy.sum()).backward()
        found = [rows.logprobs, rows.entropy, x.grad.flatten()]
        return torch.cat([tensor.detach().double().cpu() for tensor in found])

    exact = of(reference.token_logprobs, torch.float64, "cpu")
    fused = of(fused_rl.token_logprobs, torch.float32, device)
    plain = of(reference.token_logprobs, torch.float32, "cpu")
    return (fused - exact).abs().max().item(), (plain - exact).abs().max().item()


def _kernel() -> Found:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    which = "the Triton kernel" if device == "cuda" else "the CPU path"
    try:
        error, allowed = errors(device)
    except Exception as raised:  # of compilers and drivers: as many as ways to fail
        said = f"{type(raised).__name__}: {' '.join(str(raised).split())}"[:300]
        return Found("token_logprobs", f"{which} fails: {said}", _report(), needed=True)
    what = f"{which} is within {error:.1e} of the definition in fp64; plain PyTorch in fp32 is within {allowed:.1e}"
    if error <= 2 * allowed:
        return Found("token_logprobs", f"right: {what}")
    return Found("token_logprobs", f"WRONG: {what}", _report(), needed=True)


def _report() -> str:
    return "report it, with all of these lines; until then use no figure of this machine"


if __name__ == "__main__":
    sys.exit(look())
