"""Functions that `torch.compile` leaves to eager PyTorch."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_REASON = "how it divides its work depends on the number of rows that count; leave out fullgraph"
_Function = TypeVar("_Function", bound=Callable)


def breaks_graph(function: _Function, unless: Callable[..., Any] | None = None) -> _Function:
    """Return the function, which under `torch.compile` runs eagerly between two graphs.

    `unless` takes the same arguments and returns what a graph may hold in place of the function, or None.
    """
    # `torch.compiler.disable` imports the compiler, which takes seconds: only what is compiled waits for it
    eager = {}

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        outputs = None if unless is None else unless(*args, **kwargs)
        if outputs is not None:
            return outputs
        if not eager:
            torch._dynamo.graph_break(msg=_REASON)  # the message of fullgraph=True
            eager[function] = torch.compiler.disable(function, reason=_REASON)
        return eager[function](*args, **kwargs)

    return call  # type: ignore[return-value]
