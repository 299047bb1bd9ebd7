"""What `torch.compile` sees as an operator, what it leaves to eager PyTorch, and calls that it does not see at all."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fused_rl.base.checks import PLAIN

_REASON = "how it divides its work depends on the number of rows that count; leave out fullgraph"
_Function = TypeVar("_Function", bound=Callable)


def skips_dispatcher(*tensors: torch.Tensor) -> bool:
    """Return True if nothing observes operators, whose dispatch is more than half of the host's time in a call."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return False
    # no generator: at a small input each call of Python's counts
    for x in tensors:  # noqa: SIM110
        if type(x) not in PLAIN or not (x.is_cuda or x.is_cpu):
            return False
    return True


def breaks_graph(function: _Function) -> _Function:
    """Return the function, which under `torch.compile` runs eagerly between two graphs."""
    # `torch.compiler.disable` imports the compiler, which takes seconds: only what is compiled waits for it
    eager = {}

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not eager:
            torch._dynamo.graph_break(msg=_REASON)  # the message of fullgraph=True
            eager[function] = torch.compiler.disable(function, reason=_REASON)
        return eager[function](*args, **kwargs)

    return call  # type: ignore[return-value]
