"""The choice between `fused_rl.kernels` and `fused_rl.cpu` for a device."""

import functools
import os
from types import ModuleType
from typing import NamedTuple

import torch

# Triton, too, reads the variable only when it is imported.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Backend(NamedTuple):
    """The modules that serve a device; those of one name have the same functions."""

    logprob: ModuleType
    targets: ModuleType
    kl: ModuleType
    jensen_shannon: ModuleType
    gae: ModuleType
    support: ModuleType
    sampling: ModuleType


def backend_of(device: torch.device) -> Backend:
    """CUDA and ROCm tensors take the kernels, CPU tensors the CPU path, or the kernels if TRITON_INTERPRET=1."""
    if _INTERPRETED and device.type == "cpu":
        # The variable is read again, so that a process that interprets can compare both paths.
        return _backend(os.environ.get("TRITON_INTERPRET") == "1")
    return _backend(device.type == "cuda")


@functools.cache
def _backend(kernels: bool) -> Backend:
    # Imported at the first use, so that a machine without Triton can import the library.
    if kernels:
        from fused_rl.kernels import gae, jensen_shannon, kl, logprob, sampling, support, targets
    else:
        from fused_rl.cpu import gae, jensen_shannon, kl, logprob, sampling, support, targets
    return Backend(logprob, targets, kl, jensen_shannon, gae, support, sampling)
