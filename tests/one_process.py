"""The ranks of a function that reduces over them, one after the other in this process, without any group."""

import functools
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

# What is checked of an argument; nothing reduces over it.
GROUP = torch.distributed.ProcessGroup(0, 2)
REDUCED = {torch.distributed.ReduceOp.SUM: torch.sum, torch.distributed.ReduceOp.MAX: torch.amax}


class _Waits(Exception):
    """A rank has come to a reduction whose result is not known yet."""


class _Reductions:
    """all_reduce of one rank over `GROUP`: what is known so far, in turn; then it waits."""

    def __init__(self, known):
        self.known = iter(known)
        self.waiting = None

    def all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, group=None):
        assert group is GROUP
        result = next(self.known, None)
        if result is None:
            self.waiting = tensor.clone(), op
            raise _Waits
        tensor.copy_(result)


def together(ranks: list[Callable]) -> list:
    """What each returns. Where all wait for a reduction, it is made and they begin again, knowing one more."""
    known = []
    while True:
        returned, waiting = [], []
        for rank in ranks:
            reductions = _Reductions(known)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.distributed, "all_reduce", reductions.all_reduce)
                try:
                    returned.append(rank())
                except _Waits:
                    waiting.append(reductions.waiting)
        if not waiting:
            return returned
        tensors, ops = zip(*waiting, strict=True)
        known.append(REDUCED[ops[0]](torch.stack(tensors), 0))


class _Replicated(torch.autograd.Function):
    """The output that all ranks have; its gradient is every rank's, as that of a replicated loss."""

    @staticmethod
    def forward(ctx, *outputs):
        ctx.ranks = len(outputs)
        return outputs[0].clone()

    @staticmethod
    def backward(ctx, g):
        return (g,) * ctx.ranks


def in_one_process(op: Callable, bounds: list[int] | None = None) -> Callable:
    """The op of logits whose columns are split at `bounds`: None is unevenly over two ranks, of few columns over one.

    Of its arguments floating-point tensors are logits; a rank's first column follows targets.
    """

    @functools.wraps(op)
    def whole(*tensors, **options):
        vocab = tensors[0].shape[-1]
        usual = [0, vocab // 3, vocab] if vocab > 2 else [0, vocab]

        def rank(begin, end):
            local = [x[..., begin:end] if x.is_floating_point() else x for x in tensors]
            start = [] if all(x.is_floating_point() for x in tensors) else [begin]
            return op(*local, *start, process_group=GROUP, **options)

        outputs = together([functools.partial(rank, *ends) for ends in pairwise(bounds or usual)])
        if isinstance(outputs[0], torch.Tensor):
            return _Replicated.apply(*outputs)
        return type(outputs[0])(
            *(_Replicated.apply(*parts) for parts in zip(*outputs, strict=True))
        )

    return whole
