"""Kept sets from hidden states: values, every gradient, bits, bytes."""

import pytest
import torch

import fused_rl
from fused_rl import TokenSupport
from fused_rl.kernels.states import RowSupport
from tests.heads import Work, make, peak_bytes, upstream_of
from tests.kept_sets import (
    BF16,
    FP32,
    assert_same_bits,
    outputs_and_gradient,
    random_logits,
    run_on,
)
from tests.marks import cpu_fast, on_backends
from tests.tools import interpreter


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="what a kernel does is watched in the interpreter"
)
def test_bytes_and_bounds():
    """K reads of the logits per row forward; V zeros and K values backward; no program in another's elements."""
    vocab, sizes = 4099, [1, 8, 120, 0]
    logits = random_logits(4, vocab).to(BF16)
    ids = torch.cat(
        [
            torch.randperm(vocab, generator=torch.Generator().manual_seed(i))[:n]
            for i, n in enumerate(sizes)
        ]
    )
    support = TokenSupport(ids, torch.tensor([0, 1, 9, 129, 129]))
    targets = ids[[0, 1, 9, 0]]
    mask = torch.tensor([True, True, True, False])
    upstream = upstream_of(targets)
    with interpreter.count_traffic() as launches, interpreter.check_memory():
        outputs_and_gradient(fused_rl, logits, targets, upstream, support=support, mask=mask)
    full_rows_fwd, fwd, full_rows_bwd, bwd = launches
    assert full_rows_fwd.bytes("x_ptr") == (0, 0)
    assert fwd.bytes("logits_ptr") == (2 * 129, 0)
    assert fwd.bytes("x_ptr")[1] == 4 * 129
    assert full_rows_bwd.bytes("x_ptr")[0] == 0
    assert full_rows_bwd.bytes("dx_ptr")[1] == 2 * 4 * vocab
    assert bwd.bytes("dx_ptr") == (0, 2 * 129)
    assert "logits_ptr" not in bwd.read

    # from hidden states: K rows of the head forward and K backward, and of its gradient each touched row once
    width = 48
    hidden = random_logits(4, width).requires_grad_()
    weight = random_logits(vocab, width, seed=1).requires_grad_()
    with interpreter.count_traffic() as launches, interpreter.check_memory():
        out = fused_rl.linear_token_logprobs(hidden, weight, targets, support=support, mask=mask)
        torch.autograd.grad(out, (hidden, weight), upstream)
    dot, _, _, dhidden, head = launches
    rows = 129 * width * 4
    assert dot.bytes("weight_ptr") == dhidden.bytes("weight_ptr") == (rows, 0)
    assert dhidden.bytes("dhidden_ptr") == (0, 3 * width * 4)
    assert head.bytes("hidden_ptr")[0] == rows
    assert head.bytes("dweight_ptr") == (0, len(ids.unique()) * width * 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launch of a GPU, in the interpreter")
def test_a_rank_reads_its_own_columns():
    kernels = pytest.importorskip("fused_rl.kernels.support")
    logits, x = random_logits(2, 40), torch.zeros(4)
    kept = RowSupport(torch.tensor([1, 12, 30, 25]), torch.tensor([0, 2]), torch.tensor([2, 4]))
    options = {"logits": logits[:, 10:].contiguous(), "first": 10}
    with interpreter.check_memory():
        kernels.kept_fwd(x, kept, torch.tensor([12, 25]), None, 1.0, None, **options)
    assert torch.equal(x, torch.tensor([0.0, logits[0, 12], logits[1, 30], logits[1, 25]]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launch of a GPU, in the interpreter")
def test_bad_sets_are_nan_on_a_gpu_and_touch_nothing():
    """What CPU tensors are checked for beforehand: an id outside the vocabulary, a target outside its set."""
    kernels = pytest.importorskip("fused_rl.kernels.support")
    logits, x = random_logits(3, 40), torch.zeros(6)
    kept = RowSupport(
        torch.tensor([1, 40, 2, 3, 5, -(2**40)]), torch.tensor([0, 2, 4]), torch.tensor([2, 4, 6])
    )
    targets = torch.tensor([1, 7, 5])
    with interpreter.check_memory():
        out = kernels.kept_fwd(x, kept, targets, None, 1.0, None, logits=logits)
        assert out.logprobs.isnan().all()
        assert out.entropy.isnan().tolist() == [True, False, True]
        hidden, weight = random_logits(3, 16), random_logits(40, 16)
        kernels.kept_dot(x, hidden, weight, None, kept)
        kernels.kept_hidden(x, weight, kept)
        entries = (
            torch.ones(3),
            torch.tensor([0, 0, 1]),
            torch.tensor([-1, 3, 40]),
            torch.arange(1, 4),
        )
        dweight, _ = kernels.kept_head(*entries, hidden, 40, None, None, (True, False))
    assert x.isnan().tolist() == [False, True, False, False, False, True]
    assert dweight.any(1).nonzero()[:, 0].tolist() == [3]


def make_head(n, width, vocab, dtype, device, bias=True):
    return make((n, width, vocab), dtype, device, bias)[0]


def linear(module, leaves, targets, upstream, **options):
    outputs = module.linear_token_logprobs(
        leaves[0], leaves[1], targets, bias=leaves[2] if len(leaves) > 2 else None, **options
    )
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(
        outputs, wanted, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)]
    )
    return [*(o.detach() for o in outputs), *grads]


# sets of all sizes with whole rows among them, so that some go through tiles
MIXED = [1, 0, 2, 3, 8, 64, 65, 700, 1, 0, 300, 701]


def sets_of(sizes, vocab=701):
    generator = torch.Generator().manual_seed(0)
    lists = [torch.randperm(vocab, generator=generator)[:size] for size in sizes]
    targets = [row[len(row) // 2] if len(row) else torch.tensor(vocab // 3) for row in lists]
    return TokenSupport.from_lists(lists), torch.stack(targets)


@on_backends("dtype, zeros", [BF16, FP32], [False, True], most=0)
def test_the_heads_gradient_has_the_same_bits_in_any_order_of_tokens(backend, dtype, zeros):
    """Also where tokens share hidden states or gradients, or all logits are equal: a head of zeros."""
    n = 24
    generator = torch.Generator().manual_seed(0)
    hidden, *head = make_head(n, 24, 97, dtype, backend)
    ids = torch.stack([torch.randperm(13, generator=generator)[:6] for _ in range(n)])
    support = TokenSupport(ids.flatten(), 6 * torch.arange(n + 1)).to(backend)
    upstream = torch.randn(3, n, generator=generator)
    upstream[:, ::4] = upstream[:, :1]
    hidden.data[:8] = hidden.data[8:16]
    targets, upstream = run_on(backend, ids[:, 0], upstream)
    head = [torch.zeros_like(leaf).requires_grad_() for leaf in head] if zeros else head
    expected = linear(fused_rl, [hidden, *head], targets, upstream, support=support)
    order = torch.randperm(n, generator=generator).to(backend)
    moved = [hidden.detach()[order].requires_grad_(), *head]
    options = {"support": support.select(order)}
    found = linear(fused_rl, moved, targets[order], upstream[:, order], **options)
    assert_same_bits(found, [*(x[order] for x in expected[:4]), *expected[4:]])


@cpu_fast
@pytest.mark.parametrize("bias", [True, False])
def test_whole_rows_go_through_tiles_with_their_bits(backend, bias):
    """What they get with `support` is what they get without, as a batch of their own; the head has the sum of both."""
    support, targets = sets_of([1, 0, 2, 0, 0, 8])
    leaves = make_head(6, 33, 701, BF16, backend, bias)
    targets = targets.to(backend)
    whole = torch.tensor([1, 3, 4], device=backend)
    upstream = torch.stack(upstream_of(targets)).to(backend)
    found = linear(fused_rl, leaves, targets, upstream, support=support.to(backend))
    alone = [leaves[0].detach()[whole].requires_grad_(), *leaves[1:]]
    plain = linear(fused_rl, alone, targets[whole], upstream[:, whole])
    assert_same_bits([x[whole] for x in found[:4]], plain[:4])
    others = torch.tensor([0, 2, 5])
    kept = support.select(others).to(backend)
    others = others.to(backend)
    alone = [leaves[0].detach()[others].requires_grad_(), *leaves[1:]]
    rest = linear(fused_rl, alone, targets[others], upstream[:, others], support=kept)
    sums = [one + other for one, other in zip(plain[4:], rest[4:], strict=True)]
    torch.testing.assert_close(found[4:], sums, rtol=0.02, atol=0.02)
    none = TokenSupport.from_lists([[]] * 6).to(backend)
    expected = linear(fused_rl, leaves, targets, upstream)
    assert_same_bits(linear(fused_rl, leaves, targets, upstream, support=none), expected)


@pytest.mark.usefixtures("cpu")
def test_linear_needs_neither_logits_nor_a_gemm():
    """N V would be 160 MB and more; beside gradients there are a few MB of gathered rows."""
    n, width, vocab = 1024, 64, 40960
    hidden, weight = make_head(n, width, vocab, BF16, "cpu", bias=False)
    ids = torch.stack([torch.randperm(vocab)[:8] for _ in range(n)])
    support = TokenSupport(ids.reshape(-1), torch.arange(0, 8 * n + 1, 8))
    args = [hidden, weight], ids[:, 3], upstream_of(ids[:, 3])
    with Work() as work:
        linear(fused_rl, *args, support=support)
    assert work.flop == 0
    most = peak_bytes(lambda: linear(fused_rl, *args, support=support))
    assert most <= hidden.nbytes + weight.nbytes + 12 * 2**20
