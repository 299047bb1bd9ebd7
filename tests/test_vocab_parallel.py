"""Vocabulary split unevenly over 2 and 3 ranks against the unsharded reference: values and every gradient."""

import math
import os

import pytest
import torch

import fused_rl
from fused_rl import TokenSupport, reference, vocab_parallel
from tests.distributed import run_distributed
from tests.kept_sets import random_logits, some_rows
from tests.marks import slow
from tests.one_process import in_one_process

VOCAB = 2003
STARTS = {
    2: [0, 500, VOCAB],
    3: [0, 7, 1100, VOCAB],
}  # the columns of rank i are [starts[i], starts[i + 1])
ROWS = (2, 4)


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(*ROWS, VOCAB, generator=generator)
    y = x + 0.5 * torch.randn(*ROWS, VOCAB, generator=generator)
    x[0, 0] += 1000.0  # an offset cancels
    x[0, 1, :1500], y[0, 1, :1500] = -torch.inf, -torch.inf  # nothing allowed on the first rank
    x[0, 2, 40] = 60.0  # one token has all the mass
    x[0, 3, 5], x[0, 3, 1900] = 30.0, 30.0  # the maximum on two ranks
    y[1, 0] = x[1, 0] + 1e-3 * torch.randn(VOCAB, generator=generator)  # close
    y[1, 1] = 40 * torch.randn(VOCAB, generator=generator)  # far
    x[1, 2, ::3], y[1, 2, ::3] = -torch.inf, -torch.inf
    targets = torch.tensor([[0, 1600, 40, 1900], [6, 7, 1201, 5]])
    return x.to(dtype), y.to(dtype), targets


def shard(x, rank, world):
    return x[..., STARTS[world][rank] : STARTS[world][rank + 1]]


def gathered(values, rank, world):
    """[of every rank], on every rank."""
    everyone = [None] * world
    torch.distributed.all_gather_object(everyone, values)
    return everyone


def assert_close(name, ours, best, plain, atol=5e-6):
    """Error against fp64 at most twice that of the reference in the inputs' dtype, or some fp32 ulps of the largest.

    atol: log(p / q), up to 100 nats, in fp32.
    """
    assert not ours.isnan().any(), name
    infinite = best.isinf()
    assert torch.equal(ours[infinite].double(), best[infinite]), name
    error, theirs = ((z.double() - best).abs().masked_fill(infinite, 0).max() for z in (ours, plain.nan_to_num()))
    largest = best.abs().masked_fill(infinite, 0).max()
    assert error <= 2 * theirs + 1e-6 * largest + atol, (name, error, theirs, largest)


def gradients(outputs, leaves, upstream):
    return torch.autograd.grad(outputs, leaves, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)])


def check_logprobs(rank, world, dtype, options, which):
    """Outputs and the gradient of the outputs in `which`, alone or together."""
    x, _, targets = inputs(dtype)
    upstream = torch.randn(3, *ROWS, generator=torch.Generator().manual_seed(1))[which]

    def run(op, x):
        x = x.detach().requires_grad_()
        out = op(x)
        (dx,) = gradients([out[i] for i in which], [x], upstream)
        return *(o.detach() for o in out), dx

    start = STARTS[world][rank]
    got = run(
        lambda x: vocab_parallel.vocab_parallel_token_logprobs(x, targets, start, **options),
        shard(x, rank, world),
    )
    want, plain = (run(lambda x: reference.token_logprobs(x, targets, **options), z) for z in (x.double(), x))
    best, theirs = ([*w[:3], shard(w[3], rank, world)] for w in (want, plain))
    for name, *values in zip(("logprobs", "entropy", "lse", "dlogits"), got, best, theirs, strict=True):
        assert_close(name, *values)
    assert (got[0] <= 0).all()
    assert (got[1] >= 0).all()
    assert got[3].dtype == dtype
    for other in gathered(got[:3], rank, world):
        assert all(torch.equal(a, b) for a, b in zip(got[:3], other, strict=True)), "ranks differ"


def check_kl(rank, world, dtype, direction, options):
    x, y, _ = inputs(dtype)
    upstream = torch.randn(ROWS, generator=torch.Generator().manual_seed(1))

    def run(op, x, y):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        value = op(x, y, direction=direction, **options)
        return value.detach(), *gradients([value], [x, y], [upstream])

    got = run(vocab_parallel.vocab_parallel_token_kl, shard(x, rank, world), shard(y, rank, world))
    want, plain = (run(reference.token_kl, *z) for z in ((x.double(), y.double()), (x, y)))
    best, theirs = ([w[0], shard(w[1], rank, world), shard(w[2], rank, world)] for w in (want, plain))
    for name, *values in zip((direction, "dlogits", "dref"), got, best, theirs, strict=True):
        assert_close(name, *values)
    assert (got[0] >= 0).all()
    # rows that are close keep their relative precision: as good as the op on the whole row
    whole = fused_rl.token_kl(x, y, direction=direction, **options)
    torch.testing.assert_close(got[0], whole, rtol=3e-6, atol=0)
    for other in gathered(got[0], rank, world):
        assert torch.equal(got[0], other), "ranks differ"
    same = vocab_parallel.vocab_parallel_token_kl(got_shard := shard(x, rank, world), got_shard, direction=direction)
    assert (same == 0).all()


def check_edges(rank, world):
    """A row without any allowed column, a masked row full of NaN, a bad target, -inf in the reference alone."""
    x, y, targets = inputs(torch.float32)
    x[0, 0] = -torch.inf
    x[1, 1] = torch.nan
    mask = torch.ones(ROWS, dtype=torch.bool)
    mask[1, 1] = False
    local = shard(x, rank, world).clone().requires_grad_()
    start = STARTS[world][rank]
    out = vocab_parallel.vocab_parallel_token_logprobs(local, targets, start, mask=mask)
    assert [o[0, 0].item() for o in out] == [-torch.inf, 0, -torch.inf]
    assert all(o[1, 1] == 0 for o in out)
    (dx,) = torch.autograd.grad([o[mask][1:].sum() for o in out], local)
    assert (dx[0, 0] == 0).all()
    assert (dx[1, 1] == 0).all()
    assert torch.isfinite(dx).all()
    shown = vocab_parallel.vocab_parallel_token_logprobs(local, targets, start)  # NaN on one rank or all, seen by all
    assert all(o[1, 1].isnan() for o in shown)
    with pytest.raises(ValueError, match="target 2003 of row 3 is in the columns of 0 ranks"):
        vocab_parallel.vocab_parallel_token_logprobs(local, targets.where(targets != 1900, VOCAB), start)
    y[1, 3, 10] = -torch.inf
    x[1, 3, 1999] = torch.nan
    x[0, 0] = y[0, 0]
    kl = vocab_parallel.vocab_parallel_token_kl(local.detach(), shard(y, rank, world), mask=mask)
    assert kl[1, 3] == torch.inf
    assert kl[1, 1] == 0
    kl = vocab_parallel.vocab_parallel_token_kl(shard(x, rank, world), shard(y, rank, world), mask=mask)
    assert kl[1, 3].isnan()
    assert kl[0, 0] == 0
    x[:, :, 1600], y[:, :, 1600] = 300.0, -torch.inf  # all of the policy's mass where the reference has none
    js = vocab_parallel.vocab_parallel_token_kl(
        shard(x, rank, world), shard(y, rank, world), mask=mask, direction="jensen-shannon"
    )
    torch.testing.assert_close(js[0], torch.full((4,), math.log(2)))


def run_all(rank, world, interpret):
    """Every case in one process group: starting processes is what costs."""
    os.environ["TRITON_INTERPRET"] = interpret
    torch.manual_seed(0)
    rows_t = torch.tensor([[0.5, 1.0, 2.0, 0.9], [1.1, 1.0, 3.0, 0.8]])
    mask = torch.tensor([[True, True, False, True], [False, True, True, True]])
    check_logprobs(rank, world, torch.bfloat16, {}, [0, 1, 2])
    check_kl(rank, world, torch.bfloat16, "reverse", {})
    for which in ([0], [1], [2]):
        check_logprobs(rank, world, torch.float32, {"temperature": 0.7, "softcap": 50.0}, which)
    check_logprobs(rank, world, torch.float32, {"temperature": rows_t, "mask": mask}, [0, 1, 2])
    check_kl(rank, world, torch.float32, "forward", {"temperature": 0.7, "mask": mask})
    check_kl(rank, world, torch.float32, "jensen-shannon", {"temperature": rows_t})
    check_edges(rank, world)
    return True


# on the CPU path; on the kernels the ranks of one process stand in tests/test_hostile.py
@pytest.mark.parametrize("world", [2, slow(3)])
def test_equals_the_unsharded_reference(world):
    assert run_distributed(run_all, world, "0", timeout=240) == [True] * world


# 3 ranks, of which the first has no id of most sets
@pytest.mark.usefixtures("cpu")
def test_shift_of_kept_sets_of_a_split_vocabulary():
    """Values and gradients, the last position's exactly 0; and what the ranks find wrong together."""
    lists, targets = some_rows()
    targets, support = targets.view(3, 4), TokenSupport.from_lists(lists)
    logits = random_logits(12).view(3, 4, -1)
    options = {"temperature": torch.linspace(0.5, 2, 9).view(3, 3), "mask": torch.arange(9).view(3, 3) % 4 != 2}
    options |= {"support": support, "shift": True}
    op = in_one_process(fused_rl.vocab_parallel_token_logprobs, [0, 7, 200, 603])
    leaf, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found, wanted = op(leaf, targets, **options), reference.token_logprobs(wide, targets, **options)
    upstream = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad(torch.stack([*found]), leaf, upstream)
    (exact,) = torch.autograd.grad(torch.stack([*wanted]), wide, upstream.double())
    for a, b in zip((*found, gradient), (*wanted, exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=3e-6, atol=3e-6)
    assert (gradient[:, -1] == 0).all()
    with pytest.raises(ValueError, match="support has 9 rows, the targets .3, 4. have 12; with shift=True it has"):
        op(leaf, targets, shift=True, support=support.select(torch.arange(9)))
    with pytest.raises(ValueError, match="is not in its kept set"):
        op(leaf, targets + 1, support=support)
    beyond = TokenSupport.from_lists([[1, 603], [1]])
    with pytest.raises(ValueError, match="of the 2 kept ids of row 0 the ranks hold 1; check vocab_start"):
        op(leaf[0, :2], torch.ones(2).long(), support=beyond)


def count(rank, world):
    """What a forward and backward communicate: one maximum, one packed sum, nothing backward."""
    os.environ["TRITON_INTERPRET"] = "0"
    calls, original = [], torch.distributed.all_reduce

    def counted(tensor, op=torch.distributed.ReduceOp.SUM, **options):
        calls.append((op, tensor.numel()))
        return original(tensor, op=op, **options)

    torch.distributed.all_reduce = counted
    x, y, targets = inputs(torch.float32)
    x = shard(x, rank, world).requires_grad_()
    vocab_parallel.vocab_parallel_token_logprobs(x, targets, STARTS[world][rank]).logprobs.sum().backward()
    vocab_parallel.vocab_parallel_token_kl(x, shard(y, rank, world)).sum().backward()
    return [(op == torch.distributed.ReduceOp.MAX, n) for op, n in calls]


def test_communication():
    n = 8
    assert run_distributed(count, 2) == [[(True, n), (False, 5 * n), (True, 3 * n), (False, 5 * n)]] * 2
