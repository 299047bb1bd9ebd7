"""A pytest plugin that makes its process believe in CUDA devices: `pytest -p tests.device.process tests/device`.

torch asks for its CUDA guard and hooks once in a process and keeps the answer, and Triton chooses its interpreter when
it is imported: neither can be undone, so tests/device has a process of its own (`make test`, `make test-device`).
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

GUARD = Path(__file__).with_name("guard.cpp")
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=140 << 30,
    L2_cache_size=60 << 20,
)


def missing() -> str | None:
    """Why there can be no such process here: then pytest ends at once."""
    compiler = os.environ.get("CXX", "g++")
    if sys.platform != "linux":
        return "needs Linux"
    return None if shutil.which(compiler) else f"needs a C++ compiler: there is no {compiler}"


def build() -> Path:
    """The guard's library, compiled once for a torch."""
    compiler, torch = os.environ.get("CXX", "g++"), torch_folder()
    options = [
        "-O1",
        "-shared",
        "-fPIC",
        "-std=c++20",
        f"-I{torch}/include",
        f"-L{torch}/lib",
        "-lc10",
        "-ltorch_cpu",
    ]
    key = [GUARD.read_text(), importlib.metadata.version("torch"), compiler, *options]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fused_rl"
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"guard-{hashlib.sha256(' '.join(key).encode()).hexdigest()[:20]}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / path.name
            subprocess.run([compiler, str(GUARD), "-o", str(made), *options], check=True)
            os.replace(made, path)  # whole, whoever else compiles it now
    return path


def torch_folder() -> Path:
    return Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def begin() -> None:
    """Loads guard and hooks, imports torch, and patches what asks torch.cuda."""
    for library in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / library), mode=ctypes.RTLD_GLOBAL)
    guard = ctypes.CDLL(str(build()))
    os.environ["TRITON_INTERPRET"] = "0"  # the CPU runs that are compared with take the CPU path
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would look for CUDA's libraries
    import torch

    # torch.tensor(..., device="cuda") is a copy from the host.
    torch._C._set_only_lift_cpu_tensors(True)
    torch.set_num_threads(1)
    patch(torch.cuda, guard)


def patch(cuda, guard) -> None:
    import torch
    import torch.distributed as dist

    from tests import graphs
    from tests.device import tensors

    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.current_device = lambda: guard.current_device()  # of the calling thread
    cuda.set_device = lambda device: guard.set_device(torch.device(device).index)
    # Of torch.cuda.device_of.
    # Two functions, because torch.compile knows each by its object.
    cuda._exchange_device = lambda device: min(device, 0)
    cuda._maybe_exchange_device = lambda device: min(device, 0)
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.get_device_properties = lambda device=None: PROPERTIES
    cuda.get_device_capability = lambda device=None: (PROPERTIES.major, PROPERTIES.minor)
    cuda.mem_get_info = lambda device=None: (1 << 30, 1 << 30)
    cuda.memory_reserved = cuda.memory_allocated = cuda.max_memory_allocated = lambda device=None: 0
    # one generator, that of the CPU, draws for both
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: None
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: None
    cuda.synchronize = lambda device=None: tensors.wait("synchronize")
    cuda.CUDAGraph, cuda.graph = tensors.Graph, graphs.capture
    cuda.set_sync_debug_mode = tensors.set_sync_debug_mode
    init = dist.init_process_group
    dist.init_process_group = lambda backend, **options: init(
        _over_gloo(backend, cuda.current_device()), **options
    )


def _over_gloo(backend: str, device: int) -> str:
    """The backend with gloo in place of NCCL, which two ranks cannot join with one device."""
    if "nccl" in backend and device != int(os.environ.get("LOCAL_RANK", "0")):
        raise RuntimeError(
            f"Duplicate GPU detected: local rank {os.environ['LOCAL_RANK']} joins with cuda:{device}"
        )
    return "cuda:gloo" if backend == "nccl" else backend.replace("nccl", "gloo")


def pytest_configure(config) -> None:
    """Too late, unless pytest loads this module as a plugin before conftest.py imports torch."""
    if reason := missing():
        import pytest

        pytest.exit(f"tests/device {reason}", returncode=0)
    if not begun:
        raise RuntimeError("torch was imported before: pytest -p tests.device.process")


begun = "torch" not in sys.modules and missing() is None
if begun and "pytest" in sys.modules:
    begin()
