"""Vocabulary split unevenly over gloo processes, as over ranks in one process, which tests/test_hostile.py draws."""

import functools
import os
from unittest import mock

import pytest
import torch

import fused_rl
from fused_rl import TokenSupport
from tests.distributed import run_distributed
from tests.kept_sets import random_logits, some_rows
from tests.marks import slow
from tests.one_process import in_one_process
from tests.pairs import DIRECTIONS

VOCAB = 2003
# Rank i has the columns from the i-th to the next.
BOUNDS = {
    2: [0, 500, VOCAB],
    3: [0, 7, 1100, VOCAB],
}
ROWS = (2, 4)


def columns_of(rank, world):
    return slice(*BOUNDS[world][rank : rank + 2])


def inputs():
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(*ROWS, VOCAB, generator=generator)
    y = x + 0.5 * torch.randn(*ROWS, VOCAB, generator=generator)
    return x, y, torch.tensor([[0, 1600, 40, 1900], [6, 7, 1201, 5]])


def results(op, *tensors):
    """Outputs of op of leaves, and the leaves' gradients for random upstream gradients."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    outputs = op(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
    upstream = torch.randn(len(outputs), *ROWS, generator=torch.Generator().manual_seed(1))
    return [o.detach() for o in outputs], torch.autograd.grad(outputs, leaves, [*upstream])


def assert_as_in_one_process(columns, split, whole, *tensors):
    outputs, gradients = results(split, *(x[..., columns] for x in tensors))
    wanted, exact = results(whole, *tensors)
    for a, b in zip(
        [*outputs, *gradients], [*wanted, *(g[..., columns] for g in exact)], strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def communicated(columns):
    """What a forward and backward communicate: one maximum, one packed sum, nothing backward."""
    calls, original = [], torch.distributed.all_reduce

    def counted(tensor, op=torch.distributed.ReduceOp.SUM, **options):
        calls.append((op == torch.distributed.ReduceOp.MAX, tensor.numel()))
        return original(tensor, op=op, **options)

    x, y, targets = inputs()
    x = x[..., columns].clone().requires_grad_()
    with mock.patch("torch.distributed.all_reduce", counted):
        logprobs = fused_rl.vocab_parallel_token_logprobs(x, targets, columns.start).logprobs
        divergence = fused_rl.vocab_parallel_token_kl(x, y[..., columns])
        (logprobs + divergence).sum().backward()
    return calls


def run_all(rank, world):
    """Every case in one process group: starting processes is what costs."""
    os.environ["TRITON_INTERPRET"] = "0"
    x, y, targets = inputs()
    columns, bounds = columns_of(rank, world), BOUNDS[world]
    logprobs, divergence = fused_rl.vocab_parallel_token_logprobs, fused_rl.vocab_parallel_token_kl
    assert_as_in_one_process(
        columns,
        lambda x: logprobs(x, targets, columns.start),
        lambda x: in_one_process(logprobs, bounds)(x, targets),
        x,
    )
    for direction in DIRECTIONS:
        split, whole = (
            functools.partial(op, direction=direction)
            for op in (divergence, in_one_process(divergence, bounds))
        )
        assert_as_in_one_process(columns, split, whole, x, y)
    with pytest.raises(ValueError, match="target 2003 of row 3 is in the columns of 0 ranks"):
        logprobs(x[..., columns], targets.where(targets != 1900, VOCAB), columns.start)
    return communicated(columns)


@pytest.mark.parametrize("world", [2, slow(3)])
def test_processes_are_as_ranks_in_one_process(world):
    once = [(True, 8), (False, 5 * 8), (True, 3 * 8), (False, 5 * 8)]
    assert run_distributed(run_all, world, timeout=240) == [once] * world


# 3 ranks, of which the first has no id of most sets
@pytest.mark.usefixtures("cpu")
def test_what_ranks_find_wrong_together():
    lists, targets = some_rows()
    support, leaf = TokenSupport.from_lists(lists), random_logits(12)
    op = in_one_process(fused_rl.vocab_parallel_token_logprobs, [0, 7, 200, 603])
    with pytest.raises(ValueError, match="is not in its kept set"):
        op(leaf, targets + 1, support=support)
    beyond = TokenSupport.from_lists([[1, 603], [1]])
    with pytest.raises(
        ValueError, match="of the 2 kept ids of row 0 the ranks hold 1; check vocab_start"
    ):
        op(leaf[:2], torch.ones(2).long(), support=beyond)
    shifted, few = targets.view(3, 4), support.select(torch.arange(9))
    with pytest.raises(ValueError, match="support has 9 rows, the targets .* have 12; with shift"):
        op(leaf.view(3, 4, -1), shifted, shift=True, support=few)
