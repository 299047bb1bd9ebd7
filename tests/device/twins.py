"""The CPU twins where the kernels would run: the same functions on the values of tensors of the device."""

import contextlib
import functools
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from fused_rl.base import backend
from tests.device import tensors


def _twin(function):
    """`function` for arguments of the device: a tensor of the CPU among them raises, as a kernel's pointer would."""

    @functools.wraps(function)
    def stands_in(*args, **kwargs):
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        foreign = [x for x in found if not isinstance(x, tensors.OnDevice)]
        if foreign:
            tensors.mixes(f"kernel {function.__name__}", foreign)
        with _disable_current_modes():
            out = function(*tensors.values(args), **tensors.values(kwargs))
        return tree_map(tensors.wrapped, out)

    return stands_in


@functools.cache
def _twins() -> backend.Backend:
    modules = []
    for module in backend._backend(False):
        functions = {name: value for name, value in vars(module).items() if callable(value)}
        twins = {
            name: value if isinstance(value, type) else _twin(value)
            for name, value in functions.items()
        }
        modules.append(SimpleNamespace(**twins))
    return backend.Backend(*modules)


@contextlib.contextmanager
def in_place_of_kernels():
    """Inside, tensors of the device take the twins, and those of the CPU what they always take."""
    twins, original = _twins(), backend._backend
    backend._backend = lambda kernels: twins if kernels else original(False)
    try:
        yield
    finally:
        backend._backend = original
