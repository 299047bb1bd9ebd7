"""A public op on tensors of the device, for a caller whose tensors are the CPU's: gradients come back to them."""

import functools
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map

from fused_rl import TokenSupport
from tests.device import tensors


class _Put(torch.autograd.Function):
    """The same memory and strides, on the device."""

    @staticmethod
    def forward(ctx, x):
        return tensors.OnDevice(x.detach())

    @staticmethod
    def backward(ctx, g):
        return tensors.values(g)


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return tensors.values(x).clone()

    @staticmethod
    def backward(ctx, g):
        return tensors.OnDevice(g)


def _put(x):
    if isinstance(x, TokenSupport):
        return TokenSupport(_put(x.ids), _put(x.offsets))
    return _Put.apply(x) if isinstance(x, torch.Tensor) else x


def _back(x):
    return _Back.apply(x) if isinstance(x, tensors.OnDevice) else x


def on_device(op: Callable) -> Callable:
    """`op`, called with its tensors on the device, for a caller on the CPU."""

    @functools.wraps(op)
    def called(*args, **options):
        return tree_map(
            _back, op(*map(_put, args), **{name: _put(x) for name, x in options.items()})
        )

    return called
