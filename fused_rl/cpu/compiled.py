"""The base of the CPU path: blocks and chunks, when compiling pays, and memory in huge pages."""

import ctypes
import functools
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch

BLOCK = 512  # columns whose exponentials are summed in fp32: few enough for 1e-7, enough to hide the merge
CHUNK = 1 << 18  # elements that eager passes over again and again, in the cache
WORTH_COMPILING = 1 << 24  # elements; below, a hundred calls do not earn the compilation back
_HUGE = 1 << 25  # bytes; below, malloc may hand out memory that it has already touched
_MADV_HUGEPAGE = 14

_log = logging.getLogger(__name__)


def in_huge_pages(fresh: torch.Tensor) -> torch.Tensor:
    """Return the tensor, in huge pages if it is large: first touches of small ones take 20 to 30 % of a gradient."""
    size = fresh.nbytes
    if size >= _HUGE and fresh.device.type == "cpu" and sys.platform == "linux":
        page = os.sysconf("SC_PAGE_SIZE")
        begin = -(-fresh.data_ptr() // page) * page
        end = (fresh.data_ptr() + size) // page * page
        # advice: where it is refused, the memory is as it was
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE
        )
    return fresh


def compile_pays(rows: int, vocab: int) -> bool:
    large = rows > 1 and vocab >= 2 * BLOCK and rows * vocab >= WORTH_COMPILING
    return large and compiler_found()


@functools.cache
def compiler_found() -> bool:
    """Return True if Inductor can compile: on Linux, with a C++ compiler and Python's headers, and not switched off."""
    compiler = os.environ.get("CXX", "g++")
    obstacles = {
        "this is not Linux": sys.platform != "linux",
        f"no C++ compiler {compiler!r}": shutil.which(compiler) is None,
        "no Python.h": not (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        "TORCHDYNAMO_DISABLE=1": os.environ.get("TORCHDYNAMO_DISABLE") == "1",
    }
    missing = [reason for reason, holds in obstacles.items() if holds]
    path = f"eager: {', '.join(missing)}" if missing else "compiled"
    _log.info("large logits on the CPU: %s", path)
    return not missing


@functools.cache
def by_inductor(function: Callable) -> Callable:
    """The function compiled for any number of rows, once per dtype and kind of strides."""
    compiled = torch.compile(function, dynamic=True, fullgraph=True)

    def call(*args):
        # Each dtype, kind of strides and dispatch state is a variant; past the limit (8) the call would raise.
        with torch._dynamo.config.patch(recompile_limit=64), torch.no_grad():
            return compiled(*args)

    return call
