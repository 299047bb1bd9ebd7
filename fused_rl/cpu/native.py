"""rows.c: compiled at its first use, in about a second, kept for later processes, called through ctypes."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from fused_rl.cpu.compiled import has_compiler

_SOURCE = Path(__file__).with_name("rows.c")
_FLAGS = [
    "-x",
    "c",
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-Wno-psabi",
]
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as rows.c counts them
_SERIAL = 1 << 15  # elements; below, waking other threads takes longer than the work

_log = logging.getLogger(__name__)


def takes(*tensors: torch.Tensor) -> bool:
    """Return True if rows.c serves these: adjacent columns, on a machine whose compiler compiles it."""
    for x in tensors:
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            return False
    return has_compiler() and _library() is not None


class Pair(ctypes.Structure):
    """Two tensors of logits with what counts of them, `Tensors` of rows.c; the tensors live as long as it does."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_batch", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("y_batch", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("mask", ctypes.c_void_p),
        ("inv_temperatures", ctypes.c_void_p),
        ("inv_temperature", ctypes.c_double),
        ("p_share", ctypes.c_double),
        ("q_share", ctypes.c_double),
    ]

    def __init__(self, *values: torch.Tensor | float | None):
        super().__init__(*[x.data_ptr() if isinstance(x, torch.Tensor) else x for x in values])
        self._alive = values
        self._as_parameter_ = ctypes.addressof(self)  # for `call`


def call(name: str, elements: int, *arguments: torch.Tensor | Pair | float | None) -> None:
    """Call a function of rows.c: tensors, contiguous per row, go as addresses, None as null, the threads last."""
    threads = torch.get_num_threads() if elements >= _SERIAL else 1
    # no function: at a few rows each call of Python's counts
    addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
    _function(name)(*addresses, threads)


_POINTER, _SIZE, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_TEMPERATURE = [_POINTER, _DOUBLE]  # one per row, or a number
_ARGUMENTS = {
    "logprob_fwd": [_POINTER, _SIZE, _INT, _SIZE, _SIZE, *[_POINTER] * 2, *_TEMPERATURE, *[_POINTER] * 5],
    "logprob_bwd": [
        *[_POINTER] * 3, _POINTER, _SIZE, _POINTER, _SIZE, _INT, _INT, _SIZE, _SIZE, *[_POINTER] * 5, *_TEMPERATURE
    ],
    "kl_fwd": [_POINTER] * 3,
    "js_fwd": [_POINTER] * 3,
    "pair_bwd": [*[_POINTER] * 5, _INT, _POINTER],
}  # fmt: skip


@functools.cache
def _function(name: str) -> Callable:
    function = getattr(_library(), name)
    function.argtypes = [*_ARGUMENTS[name], _INT]
    function.restype = None
    return function


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled file; None, with a warning, where the compiler refuses."""
    compiler = os.environ.get("CXX", "g++")
    path = _folder() / f"rows-{_fingerprint(compiler)}.so"
    if path.is_file():
        return ctypes.CDLL(str(path))
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        compiled = Path(scratch) / path.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(compiled), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            _log.warning("logits on the CPU: eager, %s fails:\n%s", " ".join(command), done.stderr)
            return None
        os.replace(compiled, path)  # whole, whoever else compiles it now
    return ctypes.CDLL(str(path))


def _folder() -> Path:
    """Return the folder of compiled files: the user's cache, or a temporary one if that is not writable."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "fused_rl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="fused_rl-"))


def _fingerprint(compiler: str) -> str:
    """Hash all that the compiled file depends on: machines share home folders, and compilers are updated."""
    binary = Path(shutil.which(compiler) or compiler).resolve()
    dependencies = [
        _SOURCE.read_text(),
        " ".join(_FLAGS),
        platform.machine(),
        str(binary),
        str(binary.stat().st_mtime_ns),
    ]
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features", "model name")):
            dependencies.append(line)
            if line.startswith(("flags", "Features")):
                break
    return hashlib.sha256("\n".join(dependencies).encode()).hexdigest()[:20]
