"""The base of the CPU path: blocks and chunks, whether there is a compiler, and memory in huge pages."""

import ctypes
import functools
import logging
import os
import shutil
import sys

import torch

CHUNK = 1 << 18  # elements that eager passes over again and again, in the cache
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


@functools.cache
def has_compiler() -> bool:
    """Return True if rows.c can be compiled: on Linux, with a compiler."""
    compiler = os.environ.get("CXX", "g++")
    obstacles = {
        "this is not Linux": sys.platform != "linux",
        f"no C++ compiler {compiler!r}": shutil.which(compiler) is None,
    }
    missing = [reason for reason, holds in obstacles.items() if holds]
    path = f"eager: {', '.join(missing)}" if missing else "compiled"
    _log.info("large logits on the CPU: %s", path)
    return not missing
