"""Kept sets from logits: what a TokenSupport is; values, every gradient, bits."""

import pytest
import torch

import fused_rl
from fused_rl import TokenSupport
from tests.heads import upstream_of
from tests.kept_sets import (
    BF16,
    FP32,
    assert_same_bits,
    outputs_and_gradient,
    random_logits,
    run_on,
    some_rows,
)
from tests.marks import cpu_fast, on_backends


def assert_is(support, lists):
    """Rows of a support as lists of ids."""
    assert [part.ids.tolist() for part in support.split([1] * len(support))] == lists
    same = TokenSupport.from_lists(lists)
    assert torch.equal(support.ids, same.ids) and torch.equal(support.offsets, same.offsets)


def test_lists_scores_and_selections():
    support = TokenSupport.from_lists([[3, 1], None, [], [4]])
    assert support.ids.tolist() == [3, 1, 4] and support.offsets.tolist() == [0, 2, 2, 2, 3]
    assert_is(support.select(torch.tensor([3, 0, 1, 0])), [[4], [3, 1], [], [3, 1]])
    assert_is(support.select(torch.tensor([False, True, False, True])), [[], [4]])
    assert support.to("cpu") is support
    assert support.to("meta").ids.device.type == "meta"
    assert len(TokenSupport.from_lists([])) == len(TokenSupport.cat([])) == 0

    # what is finite is kept; a row of which nothing was filtered is whole; steps become rows in the targets' order
    scores = torch.full((2, 3, 5), -torch.inf)
    for at in ((0, 0, 2), (0, 1, [4, 0]), (0, 2), (1, 0, 1), (1, 1, [1, 2, 3, 4]), (1, 2, 3)):
        scores[at] = -80.0
    for given in (scores, tuple(scores.unbind(1))):
        assert_is(TokenSupport.from_scores(given), [[2], [0, 4], [], [1], [1, 2, 3, 4], [3]])


def test_sets_are_joined_split_and_spread():
    lists = [[3, 1], [], [4], [], [0, 2, 5]]
    support = TokenSupport.from_lists(lists)
    parts = support.split([2, 0, 3])
    for part, wanted in zip(parts, (lists[:2], [], lists[2:]), strict=True):
        assert_is(part, wanted)
        # nothing of the others goes with it to another process
        assert part.ids.untyped_storage().nbytes() == 8 * len(part.ids)
    assert_is(TokenSupport.cat(reversed(parts)), [*lists[2:], *lists[:2]])
    assert TokenSupport.from_lists([]).split([]) == []
    mask = torch.tensor([[False, True, True], [True, False, True], [False, True, False]])
    assert_is(support.spread(mask), [[], [3, 1], [], [4], [], [], [], [0, 2, 5], []])


def test_what_the_mask_drops_may_have_any_set(backend):
    targets = torch.tensor([1, 2], device=backend)
    mask = torch.tensor([True, False], device=backend)
    support = TokenSupport.from_lists([[1, 3], [99, 1]]).to(backend)
    logits = random_logits(2, 8).to(backend)
    out = fused_rl.token_logprobs(logits, targets, mask=mask, support=support)
    assert out.logprobs[1] == 0
    assert out.logprobs[0] < 0


@on_backends("dtype, eager", [BF16, FP32], [False, True], most=0)
def test_whole_rows_keep_their_bits(backend, dtype, eager, monkeypatch):
    """With an empty range among sets, the outputs and the gradient that the row has without `support`."""
    monkeypatch.setattr("fused_rl.cpu.support.CHUNK", 1)  # a CPU copies them out one at a time
    if eager:
        monkeypatch.setattr("fused_rl.cpu.native.takes", lambda *matrices: False)
    lists, targets = some_rows()
    logits, targets = run_on(backend, random_logits(len(lists)).to(dtype), targets)
    upstream = [u.to(backend) for u in upstream_of(targets)]
    support = TokenSupport.from_lists(lists).to(backend)
    found = outputs_and_gradient(fused_rl, logits, targets, upstream, support=support)
    plain = outputs_and_gradient(fused_rl, logits, targets, upstream)
    whole = torch.tensor([len(row) == 0 for row in lists], device=backend)
    assert whole.sum() == 2
    assert_same_bits([x[whole] for x in found], [x[whole] for x in plain])
    none = TokenSupport.from_lists([[]] * len(lists)).to(backend)
    assert_same_bits(outputs_and_gradient(fused_rl, logits, targets, upstream, support=none), plain)
    # all ids listed: the same set, by another way
    torch.testing.assert_close(found[0][-1], plain[0][-1], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1][-1], plain[1][-1], rtol=1e-6, atol=0)


@on_backends("dtype", [BF16, FP32], most=0)
def test_singletons_are_certain(backend, dtype):
    """logprob and entropy exactly 0 and no gradient from them; lse is the logit, with a gradient of 1."""
    logits = random_logits(4, 300).to(backend, dtype)
    targets = torch.tensor([3, 0, 299, 7], device=backend)
    support = TokenSupport(targets, torch.arange(5, device=backend))
    one = torch.ones(4, device=backend)
    for temperature in (1.0, 0.7):
        options = {"support": support, "temperature": temperature}
        found = outputs_and_gradient(fused_rl, logits, targets, (one, 3 * one, None), **options)
        assert not any(found[i].any() for i in (0, 1, 3))
        *_, lse, gradient = outputs_and_gradient(
            fused_rl, logits, targets, (one, None, one), **options
        )
        chosen = logits.float().gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(lse, chosen / temperature, rtol=2e-7, atol=0)
        assert gradient.count_nonzero() == 4
        torch.testing.assert_close(gradient.sum(1), (one / temperature).to(dtype))


@cpu_fast
def test_a_row_has_the_same_bits_alone_and_in_any_batch(backend):
    lists, targets = some_rows(vocab=1201, longest=1000)
    logits, targets = run_on(backend, random_logits(len(lists), 1201).to(BF16), targets)
    upstream = [u.to(backend) for u in upstream_of(targets)]
    support = TokenSupport.from_lists(lists).to(backend)
    together = outputs_and_gradient(fused_rl, logits, targets, upstream, support=support)
    for i in (0, 2, 5, 7, 10):
        at = slice(i, i + 1)
        options = {"support": support.select(torch.tensor([i]))}
        alone = outputs_and_gradient(
            fused_rl, logits[at], targets[at], [u[at] for u in upstream], **options
        )
        assert_same_bits(alone, [x[at] for x in together])


@on_backends("gap, size", [10.0, 29.0], [5, 1000, None], most=1)
def test_one_token_with_all_the_mass(backend, gap, size):
    """Where sum(exp) - 1 is far below an ulp of 1, with a set and without; any offset of the logits cancels."""
    generator = torch.Generator().manual_seed(int(gap))
    ids = torch.randperm(2400, generator=generator)[:size]
    row = (32 * torch.randn(1, 2400, generator=generator) - 64 * gap).round() / 64
    row[0, ids[0]] = 2.0
    s = row[0, ids].double() - 2
    p = s.exp().index_fill(0, torch.tensor(0), 0)
    rest = p.sum()
    gradient = -p.index_fill(0, torch.tensor(0), -rest.item()) / (1 + rest)
    support = size and TokenSupport(ids, torch.tensor([0, size])).to(backend)
    for offset in (0.0, -4096.0):
        logits = (row + offset).to(backend).requires_grad_()
        out = fused_rl.token_logprobs(logits, ids[:1].to(backend), support=support)
        found = torch.stack([out.entropy[0], -out.logprobs[0]]).double().cpu()
        entropy = rest.log1p() - (p * s).sum() / (1 + rest)
        torch.testing.assert_close(found, torch.stack([entropy, rest.log1p()]), rtol=3e-7, atol=0)
        (d,) = torch.autograd.grad(out.logprobs, logits)
        torch.testing.assert_close(d[0, ids].double().cpu(), gradient, rtol=5e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_no_number_shows_in_its_own_row(backend, bad):
    """Once and twice in a set; beside one nobody reads it. A set of -inf has no entropy; every finite logit counts."""
    logits = random_logits(5, 40)
    logits[0, 4] = logits[1, 4] = logits[1, 30] = logits[2, 5] = bad
    logits[3, [3, 4, 30]] = -torch.inf
    logits[4, [3, 4, 30]] = torch.tensor([3e38, 3e38, -3e38])
    support = TokenSupport.from_lists([[3, 4, 30]] * 5).to(backend)
    logits, targets = run_on(backend, logits, torch.full((5,), 3))
    found = fused_rl.token_logprobs(logits, targets, support=support)
    for output in found:
        assert output.isnan().tolist() == [True, True, False, False, False]
    assert (found.logprobs[3], found.entropy[3]) == (-torch.inf, 0.0)
    two = torch.tensor([2.0, 0.5], device=backend).log()
    torch.testing.assert_close(torch.stack([found.entropy[4], found.logprobs[4]]), two)
