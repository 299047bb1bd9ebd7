"""Kept sets from logits: what a TokenSupport is and refuses; values, every gradient, bits."""

import dataclasses

import pytest
import torch

import fused_rl
from fused_rl import TokenSupport, reference
from tests.heads import assert_as_good
from tests.kept_sets import (
    BF16,
    FP16,
    FP32,
    FP64,
    OPTIONS,
    assert_same_bits,
    outputs_and_gradient,
    random_logits,
    run_on,
    some_rows,
    upstream_of,
)
from tests.marks import cpu_fast, on_backends


def test_lists_and_scores_and_selections():
    support = TokenSupport.from_lists([[3, 1], None, [], [4]])
    assert support.ids.tolist() == [3, 1, 4]
    assert support.offsets.tolist() == [0, 2, 2, 2, 3]
    assert len(support) == 4
    chosen = support.select(torch.tensor([3, 0, 1, 0]))
    assert chosen.ids.tolist() == [4, 3, 1, 3, 1]
    assert chosen.offsets.tolist() == [0, 1, 3, 3, 5]
    assert support.select(torch.tensor([False, True, False, True])).offsets.tolist() == [0, 0, 1]
    assert support.to("cpu") is support
    assert support.to("meta").ids.device.type == "meta"
    with pytest.raises(dataclasses.FrozenInstanceError):
        support.ids = torch.zeros(3)
    assert len(TokenSupport.from_lists([])) == 0

    # what is finite is kept; a row of which nothing was filtered is whole; steps become rows in the targets' order
    scores = torch.full((2, 3, 5), -torch.inf)
    scores[0, 0, 2] = 1.0
    scores[0, 1, [4, 0]] = -80.0
    scores[1, 2, 3] = 0.0
    scores[0, 2], scores[1, 0, 1], scores[1, 1, 1:] = 7.0, 2.0, 0.0
    for given in (scores, tuple(scores.unbind(1))):
        support = TokenSupport.from_scores(given)
        assert support.offsets.tolist() == [0, 1, 3, 3, 4, 8, 9]
        assert support.ids.tolist() == [2, 0, 4, 1, 1, 2, 3, 4, 3]


def test_sets_are_joined_split_and_spread():
    lists = [[3, 1], [], [4], [], [0, 2, 5]]
    support = TokenSupport.from_lists(lists)
    parts = support.split([2, 0, 3])
    assert [len(part) for part in parts] == [2, 0, 3]
    for part, wanted in zip(parts, (lists[:2], [], lists[2:]), strict=True):
        same = TokenSupport.from_lists(wanted)
        assert torch.equal(part.ids, same.ids)
        assert torch.equal(part.offsets, same.offsets)
        # nothing of the others goes with it to another process
        assert part.ids.untyped_storage().nbytes() == 8 * len(part.ids)
    again = TokenSupport.cat(reversed(parts))
    assert again.ids.tolist() == [4, 0, 2, 5, 3, 1]
    assert again.offsets.tolist() == [0, 1, 1, 4, 6, 6]
    assert len(TokenSupport.cat([])) == 0
    assert support.split([5])[0].offsets.tolist() == support.offsets.tolist()
    assert TokenSupport.from_lists([]).split([]) == []

    mask = torch.tensor([[False, True, True], [True, False, True], [False, True, False]])
    spread = support.spread(mask)
    assert len(spread) == 9
    assert torch.equal(spread.ids, support.ids)
    assert spread.offsets.diff().tolist() == [0, 2, 0, 1, 0, 0, 0, 3, 0]


X, Y = torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=torch.long)
BAD_SETS = {
    "offsets: decrease": (
        lambda: TokenSupport(torch.arange(3), torch.tensor([0, 2, 1, 3])),
        "at row 1: from 2 to 1",
    ),
    "offsets: short": (
        lambda: TokenSupport(torch.arange(3), torch.tensor([0, 2])),
        "number of ids, 3; got 0 to 2",
    ),
    "offsets: start": (
        lambda: TokenSupport(torch.arange(3), torch.tensor([1, 3])),
        "3; got 1 to 3",
    ),
    "id: twice": (
        lambda: TokenSupport.from_lists([[1, 2], [2, 5, 7, 2]]),
        "row 1 keeps id 2 more than once; 1 id",
    ),
    "id: negative": (
        lambda: TokenSupport.from_lists([[1], [4, -1]]),
        "row 1 keeps id -1; ids start at 0",
    ),
    "scores: none kept": (
        lambda: TokenSupport.from_scores(torch.full((2, 4), -torch.inf)),
        "row 0 of scores has no",
    ),
    "scores: a step": (
        lambda: TokenSupport.from_scores([X[0], X[0] / 0]),
        "row 0 at step 1 has nan",
    ),
    "split: sizes": (
        lambda: TokenSupport.from_lists([[1]] * 3).split([2, 2]),
        "add up to the 3 rows, got a sum of 4",
    ),
    "spread: places": (
        lambda: TokenSupport.from_lists([[1]]).spread(torch.ones(2) > 0),
        "bool with 1 True places",
    ),
    "select: mask": (
        lambda: TokenSupport.from_lists([[1]]).select(torch.ones(2) > 0),
        r"\(1,\), got \(2,\)",
    ),
}


@pytest.mark.parametrize("case", BAD_SETS.values(), ids=BAD_SETS)
def test_sets_that_cannot_be(case):
    make, message = case
    with pytest.raises(ValueError, match=message):
        make()


BAD_CALLS = {
    "no support": ([[1]] * 6, {}, "support must be a TokenSupport or None, got list"),
    "rows": (
        TokenSupport.from_lists([[1]] * 5),
        {},
        r"support has 5 rows, the targets \(2, 3\) have 6; rows stand in",
    ),
    "rows, shift": (
        TokenSupport.from_lists([[1]] * 4),
        {"shift": True},
        "rows of all T targets, the first of each",
    ),
    "target outside": (
        TokenSupport.from_lists([[1]] * 4 + [[0, 2], [1]]),
        {},
        r"target 1 of logits\[1, 1\] is not in "
        r"its kept set of 2 ids; 1 of 6",
    ),
    "id outside": (
        TokenSupport.from_lists([[1]] * 5 + [[1, 8]]),
        {},
        r"logits\[1, 2\] has id 8, outside .* of 8 \(0",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS.values(), ids=BAD_CALLS)
def test_sets_that_do_not_fit(case, backend):
    support, options, message = case
    if backend != "cpu":
        pytest.skip("these are CPU tensors")
    for dtype in (FP32, FP64):
        with pytest.raises(ValueError, match=message):
            fused_rl.token_logprobs(X.to(dtype), Y, support=support, **options)
    if not options:
        with pytest.raises(ValueError, match=message):
            fused_rl.linear_token_logprobs(torch.zeros(2, 3, 4), torch.zeros(8, 4), Y, support=support)


@pytest.mark.parametrize("k", [1, 2])
def test_several_targets_have_no_set(k):
    support = TokenSupport.from_lists([[1, 2]] * 3)
    targets = torch.ones(3, k, dtype=torch.int64)
    for dtype in (FP32, FP64):
        with pytest.raises(ValueError, match="one target per row"):
            fused_rl.token_logprobs(random_logits(3, 8).to(dtype), targets, support=support)
    with pytest.raises(ValueError, match="one target per row"):
        fused_rl.linear_token_logprobs(torch.zeros(3, 4), torch.zeros(8, 4), targets, support=support)


def test_what_the_mask_drops_may_have_any_set(backend):
    targets = torch.tensor([1, 2], device=backend)
    mask = torch.tensor([True, False], device=backend)
    support = TokenSupport.from_lists([[1, 3], [99, 1]]).to(backend)
    logits = random_logits(2, 8).to(backend)
    out = fused_rl.token_logprobs(logits, targets, mask=mask, support=support)
    assert out.logprobs[1] == 0
    assert out.logprobs[0] < 0
    out = fused_rl.linear_token_logprobs(logits, logits.new_ones(8, 8), targets, mask=mask, support=support)
    assert out.logprobs[1] == 0
    assert out.logprobs[0] < 0


@on_backends("dtype, name", [FP32, BF16, FP16], OPTIONS.keys(), most=1)
def test_values_and_gradients(backend, dtype, name):
    """Against masked_fill(-inf) and a softmax in fp64."""
    lists, targets = some_rows()
    options = {key: o.to(backend) if isinstance(o, torch.Tensor) else o for key, o in OPTIONS[name].items()}
    options["support"] = TokenSupport.from_lists(lists).to(backend)
    logits, targets = run_on(backend, random_logits(len(lists)).to(dtype), targets)
    upstream = [u.to(backend) for u in upstream_of(targets)]
    found = outputs_and_gradient(fused_rl, logits, targets, upstream, **options)
    exact = outputs_and_gradient(reference, logits.double(), targets, upstream, **options)
    same = outputs_and_gradient(reference, logits, targets, upstream, **options)
    assert found[3].dtype == dtype
    assert_as_good(found, exact, same, atol=1e-6)
    outside = exact[3] == 0
    assert (found[3][outside] == 0).all()
    assert (found[0] <= 0).all()
    assert (found[1] >= 0).all()
    in_place = outputs_and_gradient(fused_rl, logits, targets, upstream, inplace=True, **options)
    assert_same_bits(in_place, found)


@on_backends("size", [999, 5000, 5003], most=0)
def test_long_sets(backend, size):
    ids = torch.randperm(5003, generator=torch.Generator().manual_seed(size))[:size]
    logits, targets = run_on(backend, random_logits(1, 5003).to(BF16), ids[7:8])
    support = TokenSupport(ids, torch.tensor([0, size])).to(backend)
    upstream = [u.to(backend) for u in upstream_of(targets)]
    found = outputs_and_gradient(fused_rl, logits, targets, upstream, support=support)
    exact = outputs_and_gradient(reference, logits.double(), targets, upstream, support=support)
    same = outputs_and_gradient(reference, logits, targets, upstream, support=support)
    assert_as_good(found, exact, same, atol=1e-6)


@on_backends("dtype", [BF16, FP32], most=0)
def test_whole_rows_keep_their_bits(backend, dtype):
    """With an empty range among sets, the outputs and the gradient that the row has without `support`."""
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


@pytest.mark.parametrize("whole", [1, 3])
@pytest.mark.parametrize("compiled_c", [True, False])
def test_few_whole_rows_have_the_bits_of_all_on_a_cpu(monkeypatch, whole, compiled_c):
    """Copied out a few at a time, by rows.c and by the eager path."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("fused_rl.cpu.support.CHUNK", 2 * 2048)
    if not compiled_c:
        monkeypatch.setattr("fused_rl.cpu.native.takes", lambda *matrices: False)
    logits = random_logits(6, 2048)
    targets = torch.zeros(6, dtype=torch.long)
    support = TokenSupport.from_lists([[]] * whole + [[0, 1]] * (6 - whole))
    found = outputs_and_gradient(fused_rl, logits, targets, upstream_of(targets), support=support)
    plain = outputs_and_gradient(fused_rl, logits, targets, upstream_of(targets))
    assert_same_bits([x[:whole] for x in found], [x[:whole] for x in plain])


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
        *_, lse, gradient = outputs_and_gradient(fused_rl, logits, targets, (one, None, one), **options)
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
        alone = outputs_and_gradient(fused_rl, logits[at], targets[at], [u[at] for u in upstream], **options)
        assert_same_bits(alone, [x[at] for x in together])


@cpu_fast
def test_shapes_strides_and_shift(backend):
    """(B, T, V), rows that do not merge, a last dimension that is not contiguous; shift drops the first target."""
    generator = torch.Generator().manual_seed(0)
    batch, length, vocab = 3, 4, 67
    logits = random_logits(batch * length, vocab).view(batch, length, vocab).to(backend)
    allowed = torch.rand(batch, length, vocab, generator=generator) < 0.1
    targets = torch.randint(vocab, (batch, length), generator=generator)
    allowed.scatter_(2, targets[..., None], True)
    allowed[0, 2] = allowed[2, 1] = True  # whole rows
    support = TokenSupport.from_scores(torch.where(allowed, 0.0, -torch.inf)).to(backend)
    targets, upstream = targets.to(backend), [u.to(backend) for u in upstream_of(targets[:, 1:])]
    later = support.select((torch.arange(batch * length) % length > 0).to(backend))
    sliced = logits[:, :-1], logits.transpose(1, 2).contiguous().transpose(1, 2)[:, :-1]
    for dtype, tolerance in ((FP32, 2e-6), (FP64, 1e-12)):
        shifted = outputs_and_gradient(fused_rl, logits.to(dtype), targets, upstream, shift=True, support=support)
        exact = outputs_and_gradient(reference, logits.double(), targets, upstream, shift=True, support=support)
        for a, b in zip(shifted, exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    shifted = outputs_and_gradient(fused_rl, logits, targets, upstream, shift=True, support=support)
    assert not shifted[3][:, -1].any()
    for x in sliced:  # not by `outputs_and_gradient`, whose copy has other strides
        leaf = x.detach().requires_grad_()
        out = fused_rl.token_logprobs(leaf, targets[:, 1:], support=later)
        assert_same_bits([*out, *torch.autograd.grad(out, leaf, upstream)], [*shifted[:3], shifted[3][:, :-1]])
    # in place of rows that do not merge
    whole = logits.clone().requires_grad_() * 1
    part = whole[:, :-1]
    out = fused_rl.token_logprobs(part, targets[:, 1:], support=later, inplace=True)
    (gradient,) = torch.autograd.grad(out, part, upstream)
    assert torch.equal(gradient, shifted[3][:, :-1])
    assert gradient.data_ptr() == whole.data_ptr()


def test_masked_and_banned_rows(backend):
    """A masked row may hold anything. -inf in a set adds nothing; a set of nothing else is a row of nothing else."""
    logits = random_logits(4, 50).to(backend)
    logits[0] = torch.nan
    logits[1, [3, 4]] = -torch.inf
    logits[2] = -torch.inf
    logits.requires_grad_()
    lists = [[1, 2], [3, 7, 8], [3, 4], [3, 9]]
    support = TokenSupport.from_lists(lists).to(backend)
    targets, mask = run_on(backend, torch.tensor([1, 3, 4, 9]), torch.tensor([False, True, True, True]))
    out = fused_rl.token_logprobs(logits, targets, mask=mask, support=support)
    assert [o[0].item() for o in out] == [0, 0, 0]
    assert out.logprobs[1] == -torch.inf
    assert out.entropy[1] > 0
    assert [o[2].item() for o in out] == [-torch.inf, 0, -torch.inf]
    (gradient,) = torch.autograd.grad(out.entropy.sum() + out.logprobs[[0, 2, 3]].sum(), logits)
    assert gradient.isfinite().all()
    assert not gradient[0].any()
    assert not gradient[2].any()
    assert gradient[1].nonzero()[:, 0].tolist() == [7, 8]
    with torch.no_grad():
        logits[3, 9] = torch.nan
    assert all(o[3].isnan() for o in fused_rl.token_logprobs(logits, targets, mask=mask, support=support))


@on_backends("gap, size", [10.0, 17.0, 23.0, 29.0], [5, 1000], most=1)
def test_one_token_with_all_the_mass(backend, gap, size):
    """The rest and the entropy where sum(exp) - 1 is far below an ulp of 1; any offset of the logits cancels."""
    generator = torch.Generator().manual_seed(int(gap))
    ids = torch.randperm(2400, generator=generator)[:size]
    row = (torch.randn(1, 2400, generator=generator) * 0.5 - gap).round(decimals=2)
    row = (row * 64).round() / 64
    row[0, ids[size // 2]] = 2.0
    s = row[0, ids].double() - 2
    p = s.exp()
    p[size // 2] = 0
    exact = p.sum().log1p() - (p * s).sum() / (1 + p.sum())
    support = TokenSupport(ids, torch.tensor([0, size])).to(backend)
    for offset in (0.0, 1024.0, -4096.0):
        logits = (row + offset).to(backend).requires_grad_()
        out = fused_rl.token_logprobs(logits, ids[size // 2, None].to(backend), support=support)
        torch.testing.assert_close(out.entropy[0].double().cpu(), exact, rtol=3e-7, atol=0)
        torch.testing.assert_close(out.logprobs[0].double().cpu(), -p.sum().log1p(), rtol=3e-7, atol=0)
        (gradient,) = torch.autograd.grad(out.logprobs, logits)
        certain = gradient[0, ids[size // 2]].double().cpu()  # 1 - p
        torch.testing.assert_close(certain, p.sum() / (1 + p.sum()), rtol=5e-6, atol=0)


def test_every_finite_logit_counts(backend):
    """Far beyond what the lanes of a whole row hold, and ties of the maximum."""
    logits = torch.zeros(1, 40)
    logits[0, [3, 5, 8]] = torch.tensor([3e38, 3e38, -3e38])
    support = TokenSupport.from_lists([[3, 5, 8, 1]]).to(backend)
    out = fused_rl.token_logprobs(logits.to(backend), torch.tensor([3], device=backend), support=support)
    torch.testing.assert_close(out.logprobs.cpu(), -torch.tensor([2.0]).log(), rtol=2e-7, atol=0)
    torch.testing.assert_close(out.entropy.cpu(), torch.tensor([2.0]).log(), rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TokenSupport.from_lists([[1], [1.7]]), "row 1 of lists must be a list of ids, whole numbers"),
        (lambda: TokenSupport.from_lists([torch.tensor([1.5])]), "row 0 of lists must be a list of ids, whole numbers"),
        (lambda: TokenSupport.from_lists([[True, False]]), "row 0 of lists .*, got list .True, False."),
        (lambda: TokenSupport.from_lists([1, 2, 3]), "row 0 of lists must be .*, got int 1"),
        (lambda: TokenSupport.from_lists([[[1, 2], [3, 4]]]), "row 0 of lists must be a list of ids"),
        (lambda: TokenSupport.from_lists("12"), "lists must be a list of ids, or None, for each row, got str '12'"),
        (lambda: TokenSupport.from_scores(None), "scores must be a tensor .B, V. for each step, got NoneType"),
        (
            lambda: TokenSupport.from_scores(torch.tensor([[0.0, torch.nan]])),
            "scores must be finite.* row 0 has nan at id 1",
        ),
        (lambda: TokenSupport.from_scores([torch.tensor([[torch.inf, 0.0]])] * 2), "row 0 at step 0 has inf at id 0"),
        (lambda: TokenSupport.from_scores(torch.zeros(2, 0)), "scores must be a floating-point tensor"),
        (lambda: TokenSupport.cat([[1]]), "support must be a TokenSupport"),
        (lambda: TokenSupport.from_lists([[1]]).split(1), "sizes must be whole numbers, got int 1"),
    ],
)
def test_what_is_no_set_is_told_and_never_made_one(make, said):
    """A float id would be cut to another one, and a logit of NaN or inf, which the sampler may draw, be left out."""
    with pytest.raises(ValueError, match=said):
        make()
