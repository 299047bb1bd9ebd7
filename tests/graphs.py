"""A CUDA graph where there is no CUDA: the operators of a function are noted, and replayed on the same tensors.

As on a GPU, a number of the host stays what it was at the capture, and what the host does is done once.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph(TorchDispatchMode):
    """Stands for torch.cuda.CUDAGraph; all that were captured are in `captured`."""

    captured: list["Graph"] = []

    def __init__(self):
        super().__init__()
        self.calls, self.written = [], []
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        returns = [a.alias_info for a in func._schema.returns]
        if any(alias is not None and alias.is_write for alias in returns):
            self.written.append((args[0], args[0].clone()))
        out = func(*args, **kwargs)
        # A view of a tensor stays one.
        if not returns or returns[0] is None or returns[0].is_write:
            self.calls.append((func, args, kwargs, out))
        return out

    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


@contextlib.contextmanager
def capture(graph: Graph, **options):
    """Stands for torch.cuda.graph, which notes what is launched and runs nothing: what is written is undone."""
    with graph:
        yield
    for tensor, before in reversed(graph.written):
        tensor.copy_(before)
    Graph.captured.append(graph)
