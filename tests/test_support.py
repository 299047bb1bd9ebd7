"""Kept sets: from logits, from hidden states, over shards; values, every gradient, bits, bytes, and a real sampler."""

import dataclasses
import os

import pytest
import torch

import fused_rl
from bench import interpreter
from fused_rl import TokenSupport, reference
from fused_rl.kernels.states import RowSupport
from tests.distributed import run_distributed
from tests.test_linear import Work, assert_as_good, in_dtype, peak_bytes

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
VOCAB = 603


def some_rows(vocab=VOCAB, longest=500, seed=0):
    """Lists of ids, and a target of each: singletons, whole rows, 2 to `longest` ids, all ids, in any order."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, 0, 2, 3, 8, 82, 128, 129, 1, 0, longest, vocab]
    lists = [torch.randperm(vocab, generator=generator)[:size] for size in sizes]
    targets = [row[len(row) // 2] if len(row) else torch.tensor(vocab // 3) for row in lists]
    return lists, torch.stack(targets)


def random_logits(n, vocab=VOCAB, seed=0, scale=3.0):
    return scale * torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed))


def upstream_of(targets, seed=2):
    return torch.randn(3, *targets.shape, generator=torch.Generator().manual_seed(seed)).unbind()


def outputs_and_gradient(module, logits, targets, upstream, inplace=False, **options):
    leaf = logits.detach().clone().requires_grad_()
    options |= {"inplace": True} if inplace else {}
    outputs = module.token_logprobs(leaf * 1 if inplace else leaf, targets, **options)
    given = [(o, u.to(o.dtype)) for o, u in zip(outputs, upstream, strict=True) if u is not None]
    outputs_used, grads = zip(*given, strict=True)
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs_used, leaf, grads)]


def assert_same_bits(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e) and not a.isnan().any()


def run_on(backend, *tensors):
    return [t.to(backend) for t in tensors]


OPTIONS = {
    "plain": {},
    "temperature, softcap": {"temperature": 0.7, "softcap": 6.0},
    "per row, mask": {"temperature": torch.linspace(0.5, 2, 12), "mask": torch.arange(12) % 5 != 3},
}

# ------------------------------------------------------------------ TokenSupport


def test_lists_and_scores_and_selections():
    support = TokenSupport.from_lists([[3, 1], None, [], [4]])
    assert support.ids.tolist() == [3, 1, 4] and support.offsets.tolist() == [0, 2, 2, 2, 3] and len(support) == 4
    chosen = support.select(torch.tensor([3, 0, 1, 0]))
    assert chosen.ids.tolist() == [4, 3, 1, 3, 1] and chosen.offsets.tolist() == [0, 1, 3, 3, 5]
    assert support.select(torch.tensor([False, True, False, True])).offsets.tolist() == [0, 0, 1]
    assert support.to("cpu") is support and support.to("meta").ids.device.type == "meta"
    with pytest.raises(dataclasses.FrozenInstanceError):
        support.ids = torch.zeros(3)
    assert len(TokenSupport.from_lists([])) == 0

    # what is finite is kept; a row of which nothing was filtered is whole; steps become rows in the targets' order
    scores = torch.full((2, 3, 5), -torch.inf)
    scores[0, 0, 2], scores[0, 1, [4, 0]], scores[1, 2, 3] = 1.0, -80.0, 0.0
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
        assert torch.equal(part.ids, same.ids) and torch.equal(part.offsets, same.offsets)
        # nothing of the others goes with it to another process
        assert part.ids.untyped_storage().nbytes() == 8 * len(part.ids)
    again = TokenSupport.cat(reversed(parts))
    assert again.ids.tolist() == [4, 0, 2, 5, 3, 1] and again.offsets.tolist() == [0, 1, 1, 4, 6, 6]
    assert len(TokenSupport.cat([])) == 0 and support.split([5])[0].offsets.tolist() == support.offsets.tolist()
    assert TokenSupport.from_lists([]).split([]) == []

    mask = torch.tensor([[False, True, True], [True, False, True], [False, True, False]])
    spread = support.spread(mask)
    assert len(spread) == 9 and torch.equal(spread.ids, support.ids)
    assert spread.offsets.diff().tolist() == [0, 2, 0, 1, 0, 0, 0, 3, 0]


X, Y = torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=torch.long)
BAD_SETS = {
    "ids: floats": (lambda: TokenSupport(torch.zeros(2), torch.tensor([0, 2])), r"ids must be \(M,\) integers, got"),
    "offsets: int32": (lambda: TokenSupport(torch.zeros(2).int(), torch.tensor([0, 2]).int()), r"\(N \+ 1,\) int64"),
    "offsets: none": (lambda: TokenSupport(torch.zeros(0).int(), torch.zeros(0).long()), "from 0 on, got none"),
    "offsets: decrease": (lambda: TokenSupport(torch.arange(3), torch.tensor([0, 2, 1, 3])), "at row 1: from 2 to 1"),
    "offsets: short": (lambda: TokenSupport(torch.arange(3), torch.tensor([0, 2])), "number of ids, 3; got 0 to 2"),
    "offsets: start": (lambda: TokenSupport(torch.arange(3), torch.tensor([1, 3])), "3; got 1 to 3"),
    "id: twice": (lambda: TokenSupport.from_lists([[1, 2], [2, 5, 7, 2]]), "row 1 keeps id 2 more than once; 1 id"),
    "id: negative": (lambda: TokenSupport.from_lists([[1], [4, -1]]), "row 1 keeps id -1; ids start at 0"),
    "devices": (lambda: TokenSupport(torch.arange(2), torch.tensor([0, 2]).to("meta")), "ids are on cpu, offsets on"),
    "scores: none kept": (lambda: TokenSupport.from_scores(torch.full((2, 4), -torch.inf)), "row 0 of scores has no"),
    "scores: a step": (lambda: TokenSupport.from_scores([X[0], X[0] / 0]), "row 0 of scores at step 1"),
    "scores: integers": (lambda: TokenSupport.from_scores(torch.zeros(2, 4).long()), "scores must be a floating-point"),
    "select: floats": (lambda: TokenSupport.from_lists([[1]]).select(torch.zeros(1)), "rows must be indices"),
    "split: sizes": (lambda: TokenSupport.from_lists([[1]] * 3).split([2, 2]), "add up to the 3 rows, got a sum of 4"),
    "split: below 0": (lambda: TokenSupport.from_lists([[1]] * 3).split([4, -1]), "sizes must be 0 or more"),
    "spread: places": (lambda: TokenSupport.from_lists([[1]]).spread(torch.ones(2) > 0), "bool with 1 True places"),
    "spread: floats": (lambda: TokenSupport.from_lists([[1]]).spread(torch.ones(1)), "mask must be bool with 1 True"),
    "select: mask": (lambda: TokenSupport.from_lists([[1]]).select(torch.ones(2) > 0), r"\(1,\), got \(2,\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SETS.values(), ids=BAD_SETS)
def test_sets_that_cannot_be(case):
    make, message = case
    with pytest.raises(ValueError, match=message):
        make()


BAD_CALLS = {
    "no support": ([[1]] * 6, {}, "support must be a TokenSupport or None, got list"),
    "rows": (TokenSupport.from_lists([[1]] * 5), {}, r"support has 5 rows, the targets \(2, 3\) have 6; rows stand in"),
    "rows, shift": (TokenSupport.from_lists([[1]] * 4), {"shift": True}, "rows of all T targets, the first of each"),
    "target outside": (TokenSupport.from_lists([[1]] * 4 + [[0, 2], [1]]), {}, r"target 1 of logits\[1, 1\] is not in "
                       r"its kept set of 2 ids; 1 of 6"),
    "target outside, shift": (TokenSupport.from_lists([[0]] * 5 + [[0, 2]]), {"shift": True}, r"of logits\[0, 0\]"),
    "id outside": (TokenSupport.from_lists([[1]] * 5 + [[1, 8]]), {}, r"logits\[1, 2\] has id 8, outside .* of 8 \(0"),
    "device": (TokenSupport.from_lists([[1]] * 6).to("meta"), {}, "support is on meta, the targets are on cpu"),
}  # fmt: skip


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
    support, targets = TokenSupport.from_lists([[1, 2]] * 3), torch.ones(3, k, dtype=torch.int64)
    for dtype in (FP32, FP64):
        with pytest.raises(ValueError, match="one target per row"):
            fused_rl.token_logprobs(random_logits(3, 8).to(dtype), targets, support=support)
    with pytest.raises(ValueError, match="one target per row"):
        fused_rl.linear_token_logprobs(torch.zeros(3, 4), torch.zeros(8, 4), targets, support=support)


def test_what_the_mask_drops_may_have_any_set(backend):
    targets, mask = torch.tensor([1, 2], device=backend), torch.tensor([True, False], device=backend)
    support = TokenSupport.from_lists([[1, 3], [99, 1]]).to(backend)
    logits = random_logits(2, 8).to(backend)
    out = fused_rl.token_logprobs(logits, targets, mask=mask, support=support)
    assert out.logprobs[1] == 0 and out.logprobs[0] < 0
    out = fused_rl.linear_token_logprobs(logits, logits.new_ones(8, 8), targets, mask=mask, support=support)
    assert out.logprobs[1] == 0 and out.logprobs[0] < 0


# ------------------------------------------------------------------ from logits


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16, pytest.param(FP16, marks=pytest.mark.slow)])
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
    assert (found[3][outside] == 0).all() and (found[0] <= 0).all() and (found[1] >= 0).all()
    in_place = outputs_and_gradient(fused_rl, logits, targets, upstream, inplace=True, **options)
    assert_same_bits(in_place, found)


@pytest.mark.parametrize("size", [999, 5000, 5003])
def test_long_sets(backend, size):
    ids = torch.randperm(5003, generator=torch.Generator().manual_seed(size))[:size]
    logits, targets = run_on(backend, random_logits(1, 5003).to(BF16), ids[7:8])
    support = TokenSupport(ids, torch.tensor([0, size])).to(backend)
    upstream = [u.to(backend) for u in upstream_of(targets)]
    found = outputs_and_gradient(fused_rl, logits, targets, upstream, support=support)
    exact = outputs_and_gradient(reference, logits.double(), targets, upstream, support=support)
    same = outputs_and_gradient(reference, logits, targets, upstream, support=support)
    assert_as_good(found, exact, same, atol=1e-6)


@pytest.mark.parametrize("used", range(3))
def test_gradient_of_one_output(backend, used):
    lists, targets = some_rows(vocab=701, longest=300)
    support = TokenSupport.from_lists(lists).to(backend)
    logits, targets = run_on(backend, random_logits(len(lists), 701), targets)
    upstream = [u.to(backend) if i == used else None for i, u in enumerate(upstream_of(targets))]
    found = outputs_and_gradient(fused_rl, logits, targets, upstream, support=support)
    exact = outputs_and_gradient(reference, logits.double(), targets, upstream, support=support)
    torch.testing.assert_close(found[3].double(), exact[3], rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("dtype", [FP32, BF16])
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
    logits, targets = random_logits(6, 2048), torch.zeros(6, dtype=torch.long)
    support = TokenSupport.from_lists([[]] * whole + [[0, 1]] * (6 - whole))
    found = outputs_and_gradient(fused_rl, logits, targets, upstream_of(targets), support=support)
    plain = outputs_and_gradient(fused_rl, logits, targets, upstream_of(targets))
    assert_same_bits([x[:whole] for x in found], [x[:whole] for x in plain])


@pytest.mark.parametrize("dtype", [FP32, BF16])
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
    assert torch.equal(gradient, shifted[3][:, :-1]) and gradient.data_ptr() == whole.data_ptr()


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
    assert [o[0].item() for o in out] == [0, 0, 0] and out.logprobs[1] == -torch.inf and out.entropy[1] > 0
    assert [o[2].item() for o in out] == [-torch.inf, 0, -torch.inf]
    (gradient,) = torch.autograd.grad(out.entropy.sum() + out.logprobs[[0, 2, 3]].sum(), logits)
    assert gradient.isfinite().all() and not gradient[0].any() and not gradient[2].any()
    assert gradient[1].nonzero()[:, 0].tolist() == [7, 8]
    with torch.no_grad():
        logits[3, 9] = torch.nan
    assert all(o[3].isnan() for o in fused_rl.token_logprobs(logits, targets, mask=mask, support=support))


@pytest.mark.parametrize("gap", [10.0, 17.0, 23.0, 29.0])
@pytest.mark.parametrize("size", [5, 1000])
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


def test_no_rows(backend):
    support = TokenSupport.from_lists([]).to(backend)
    leaf = torch.zeros(0, 9, device=backend, requires_grad=True)
    out = fused_rl.token_logprobs(leaf, torch.zeros(0, dtype=torch.long, device=backend), support=support)
    sum(o.sum() for o in out).backward()
    assert leaf.grad.shape == (0, 9)
    hidden, weight = (torch.zeros(n, 3, device=backend, requires_grad=True) for n in (0, 9))
    out = fused_rl.linear_token_logprobs(hidden, weight, leaf.new_zeros(0).long(), support=support)
    out.logprobs.sum().backward()
    assert weight.grad.shape == (9, 3) and not weight.grad.any()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 2.0}, {"shift": True}], ids=str)
def test_reference_by_finite_differences(options):
    logits = random_logits(6, 7).view(2, 3, 7).double().requires_grad_()
    lists = [[1], [2, 0, 5], None, [3, 6], [0, 1, 2, 3, 4, 5, 6], [5, 4]]
    targets, support = torch.tensor([[1, 0, 3], [6, 2, 4]]), TokenSupport.from_lists(lists)
    for output in ("logprobs", "entropy", "lse"):
        assert torch.autograd.gradcheck(
            lambda x, output=output: getattr(reference.token_logprobs(x, targets, support=support, **options), output),
            logits,
        )


def test_operators_pass_opcheck(backend):
    lists, targets = [[3], [5, 2, 9], [], [1, 0, 40]], torch.tensor([3, 9, 50, 1])
    logits, targets = run_on(backend, random_logits(len(lists), 61).to(BF16), targets)
    kept = TokenSupport.from_lists(lists).to(backend).of_rows(targets.shape, targets.device)
    per_row = torch.linspace(0.5, 2, len(lists), device=backend)
    arguments = (targets, targets >= 0, 1.0, per_row, 3.0)
    forward = torch.ops.fused_rl.token_logprobs.default
    torch.library.opcheck(forward, (logits.requires_grad_(), *arguments, *kept))
    _, entropy, _, m, rest, x = forward(logits.detach(), *arguments, *kept)
    grads = (*upstream_of(targets)[:2], None)
    saved = (logits.detach(), *arguments[:2], entropy, m, rest, *arguments[2:], x, *kept)
    torch.library.opcheck(torch.ops.fused_rl.token_logprobs_backward.default, (*grads, *saved))


@pytest.mark.parametrize("shift", [False, True])
def test_compiled_without_a_break(backend, shift):
    lists, targets = some_rows(vocab=701, longest=300)
    logits = random_logits(len(lists), 701).view(2, 6, 701).to(backend)
    targets, support = targets.view(2, 6).to(backend), TokenSupport.from_lists(lists).to(backend)
    shape = (2, 5) if shift else (2, 6)
    upstream = torch.randn(shape, device=backend)

    def run(x, targets, support):
        out = fused_rl.token_logprobs(x, targets, temperature=0.7, shift=shift, support=support)
        return out.logprobs + out.entropy

    def gradient(function):
        leaf = logits.clone().requires_grad_()
        value = function(leaf, targets, support)
        return value.detach(), *torch.autograd.grad(value, leaf, upstream)

    # a compiled temperature is a tensor, 1 / 0.7 in fp32
    for a, b in zip(gradient(torch.compile(run, fullgraph=True, backend="aot_eager")), gradient(run), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_differentiable_once(backend):
    logits = random_logits(2, 9).to(backend).requires_grad_()
    support = TokenSupport.from_lists([[1, 2], [1, 3]]).to(backend)
    out = fused_rl.token_logprobs(logits, torch.ones(2, dtype=torch.long, device=backend), support=support)
    (gradient,) = torch.autograd.grad(out.entropy.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        gradient.square().sum().backward()


# ------------------------------------------------------------------ kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a kernel does is watched in the interpreter")
def test_bytes_and_bounds():
    """K reads of the logits per row forward; V zeros and K values backward; no program in another's elements."""
    vocab, sizes = 4099, [1, 8, 120, 0]
    logits = random_logits(4, vocab).to(BF16)
    ids = torch.cat(
        [torch.randperm(vocab, generator=torch.Generator().manual_seed(i))[:n] for i, n in enumerate(sizes)]
    )
    support = TokenSupport(ids, torch.tensor([0, 1, 9, 129, 129]))
    targets, mask = ids[[0, 1, 9, 0]], torch.tensor([True, True, True, False])
    upstream = upstream_of(targets)
    with interpreter.count_traffic() as launches, interpreter.check_memory():
        outputs_and_gradient(fused_rl, logits, targets, upstream, support=support, mask=mask)
    whole_fwd, fwd, whole_bwd, bwd = launches
    assert whole_fwd.bytes("x_ptr") == (0, 0)
    assert fwd.bytes("logits_ptr") == (2 * 129, 0) and fwd.bytes("x_ptr")[1] == 4 * 129
    assert whole_bwd.bytes("x_ptr")[0] == 0 and whole_bwd.bytes("dx_ptr")[1] == 2 * 4 * vocab
    assert bwd.bytes("dx_ptr") == (0, 2 * 129) and "logits_ptr" not in bwd.read

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
    assert head.bytes("hidden_ptr")[0] == rows and head.bytes("dweight_ptr") == (0, len(ids.unique()) * width * 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launch of a GPU, in the interpreter")
def test_bad_sets_are_nan_on_a_gpu_and_touch_nothing():
    """What CPU tensors are checked for beforehand: an id outside the vocabulary, a target outside its set."""
    pytest.importorskip("triton")
    from fused_rl.kernels import support as kernels

    logits, x = random_logits(3, 40), torch.zeros(6)
    kept = RowSupport(torch.tensor([1, 40, 2, 3, 5, -(2**40)]), torch.tensor([0, 2, 4]), torch.tensor([2, 4, 6]))
    targets = torch.tensor([1, 7, 5])
    with interpreter.check_memory():
        out = kernels.kept_fwd(x, kept, targets, None, 1.0, None, logits=logits)
        assert out.logprobs.isnan().all() and out.entropy.isnan().tolist() == [True, False, True]
        hidden, weight = random_logits(3, 16), random_logits(40, 16)
        kernels.kept_dot(x, hidden, weight, None, kept)
        kernels.kept_hidden(x, weight, kept)
        entries = torch.ones(3), torch.tensor([0, 0, 1]), torch.tensor([-1, 3, 40]), torch.arange(1, 4)
        dweight, _ = kernels.kept_head(*entries, hidden, 40, None, None, (True, False))
    assert x.isnan().tolist() == [False, True, False, False, False, True]
    assert dweight.any(1).nonzero()[:, 0].tolist() == [3]


# ------------------------------------------------------------------ from hidden states


def make_head(n, width, vocab, dtype, device, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=generator) * torch.linspace(0.1, 2, n)[:, None]
    weight, offsets = torch.randn(vocab, width, generator=generator), torch.randn(vocab, generator=generator)
    leaves = [hidden, weight, offsets] if bias else [hidden, weight]
    return [leaf.to(device, dtype).requires_grad_() for leaf in leaves]


def linear(module, leaves, targets, upstream, **options):
    outputs = module.linear_token_logprobs(
        leaves[0], leaves[1], targets, bias=leaves[2] if len(leaves) > 2 else None, **options
    )
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)])
    return [*(o.detach() for o in outputs), *grads]


# sets of all sizes with whole rows among them, so that some go through tiles; none of these
MIXED, SHORT = [1, 0, 2, 3, 8, 64, 65, 700, 1, 0, 300, 701], [1, 2, 3, 8, 64, 1, 1, 5, 1, 17, 2, 9]


def sets_of(sizes, vocab=701):
    generator = torch.Generator().manual_seed(0)
    lists = [torch.randperm(vocab, generator=generator)[:size] for size in sizes]
    targets = [row[len(row) // 2] if len(row) else torch.tensor(vocab // 3) for row in lists]
    return TokenSupport.from_lists(lists), torch.stack(targets)


@pytest.mark.parametrize("sizes", [MIXED, SHORT], ids=["mixed", "short"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16, pytest.param(FP16, marks=pytest.mark.slow)])
def test_linear_values_and_gradients(backend, dtype, name, sizes):
    support, targets = sets_of(sizes)
    options = {key: o.to(backend) if isinstance(o, torch.Tensor) else o for key, o in OPTIONS[name].items()}
    options["support"] = support.to(backend)
    leaves, targets = make_head(12, 33, 701, dtype, backend), targets.to(backend)
    upstream = [u.to(backend) for u in upstream_of(targets)]
    found = linear(fused_rl, leaves, targets, upstream, workspace_mb=0.01, **options)
    exact = linear(reference, in_dtype(leaves, FP64), targets, upstream, **options)
    same = linear(reference, in_dtype(leaves, dtype), targets, upstream, **options)
    assert_as_good(found, exact, same, atol=2e-6)
    if sizes is SHORT and name == "plain":
        certain = torch.tensor(sizes, device=backend) == 1
        assert not found[0][certain].any() and not found[1][certain].any()
        outside = exact[4].abs().sum(1) == 0
        assert outside.any() and not found[4][outside].any() and not found[5][outside].any()


def test_linear_singletons_give_no_gradient(backend):
    leaves = make_head(3, 16, 97, BF16, backend)
    targets = torch.tensor([5, 96, 5], device=backend)
    support = TokenSupport(targets, torch.arange(4, device=backend))
    one = torch.ones(3, device=backend)
    found = linear(fused_rl, leaves, targets, (one, one, 0 * one), support=support)
    assert not any(found[i].any() for i in (0, 1, 3, 4, 5))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_heads_gradient_has_the_same_bits_in_any_order_of_tokens(backend, dtype):
    """Also where tokens share hidden states or gradients, or all logits are equal: a head of zeros."""
    n, vocab = 24, 97
    generator = torch.Generator().manual_seed(0)
    leaves = make_head(n, 24, vocab, dtype, backend)
    targets = torch.randint(5, (n,), generator=generator)
    lists = [torch.cat([t[None], 5 + torch.randperm(8, generator=generator)[:5]]) for t in targets]
    support = TokenSupport.from_lists(lists).to(backend)
    upstream = torch.randn(3, n, generator=generator)
    upstream[:, ::4] = upstream[:, :1]
    leaves[0].data[:8] = leaves[0].data[8:16]
    targets, upstream = run_on(backend, targets, upstream)
    for head in (leaves[1:], [torch.zeros_like(leaf).requires_grad_() for leaf in leaves[1:]]):
        expected = linear(fused_rl, [leaves[0], *head], targets, upstream, support=support)
        for seed in range(2):
            order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(backend)
            moved = [leaves[0].detach()[order].requires_grad_(), *head]
            found = linear(fused_rl, moved, targets[order], upstream[:, order], support=support.select(order))
            assert_same_bits(found, [*(x[order] for x in expected[:4]), *expected[4:]])


def test_whole_rows_go_through_tiles_with_their_bits(backend):
    """What they get with `support` is what they get without, as a batch of their own."""
    support, targets = sets_of([1, 0, 2, 0, 0, 8])
    leaves, targets = make_head(6, 33, 701, BF16, backend), targets.to(backend)
    whole = torch.tensor([1, 3, 4], device=backend)
    upstream = torch.stack(upstream_of(targets)).to(backend)
    found = linear(fused_rl, leaves, targets, upstream, support=support.to(backend))
    alone = [leaves[0].detach()[whole].requires_grad_(), *leaves[1:]]
    plain = linear(fused_rl, alone, targets[whole], upstream[:, whole])
    assert_same_bits([x[whole] for x in found[:4]], plain[:4])
    none = TokenSupport.from_lists([[]] * 6).to(backend)
    expected = linear(fused_rl, leaves, targets, upstream)
    assert_same_bits(linear(fused_rl, leaves, targets, upstream, support=none), expected)


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("frozen", range(3))
def test_frozen_leaves_and_a_retained_graph(frozen):
    support, targets = sets_of(MIXED)
    leaves = make_head(12, 33, 701, FP32, "cpu")
    every = linear(fused_rl, leaves, targets, upstream_of(targets), support=support)[3:]
    leaves[frozen].requires_grad_(False)
    some = linear(fused_rl, leaves, targets, upstream_of(targets), support=support)[3:]
    del every[frozen]
    assert_same_bits(some, every)

    out = fused_rl.linear_token_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], support=support)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    first = torch.autograd.grad(out, wanted, upstream_of(targets), retain_graph=True)
    assert_same_bits(torch.autograd.grad(out, wanted, upstream_of(targets)), first)


@pytest.mark.usefixtures("cpu")
def test_a_weight_that_is_not_contiguous_and_autocast():
    support, targets = sets_of(SHORT)
    hidden, weight = make_head(12, 33, 701, FP32, "cpu", bias=False)
    expected = linear(fused_rl, [hidden, weight], targets, upstream_of(targets), support=support)
    turned = weight.detach().t().contiguous().t().requires_grad_()
    found = linear(fused_rl, [hidden, turned], targets, upstream_of(targets), support=support)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", BF16):
        cast = linear(fused_rl, [hidden, weight], targets, upstream_of(targets), support=support)
    low = linear(fused_rl, in_dtype([hidden, weight], BF16), targets, upstream_of(targets), support=support)
    assert_same_bits(cast, [*low[:3], *(x.float() for x in low[3:])])


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_linear_needs_neither_logits_nor_a_gemm(dtype):
    """N V would be 160 MB and more; beside gradients there are a few MB of gathered rows."""
    n, width, vocab = 1024, 64, 40960
    hidden, weight = make_head(n, width, vocab, dtype, "cpu", bias=False)
    ids = torch.stack([torch.randperm(vocab)[:8] for _ in range(n)])
    support = TokenSupport(ids.reshape(-1), torch.arange(0, 8 * n + 1, 8))
    args = [hidden, weight], ids[:, 3], upstream_of(ids[:, 3])
    with Work() as work:
        linear(fused_rl, *args, support=support)
    assert work.flop == 0
    most = peak_bytes(lambda: linear(fused_rl, *args, support=support))
    assert most <= hidden.nbytes + weight.nbytes + 12 * 2**20


@pytest.mark.usefixtures("cpu")
def test_what_no_set_touches_of_a_large_gradient_is_never_written():
    """Zeros of a mapping that was not touched: an ordinary tensor to read, add to and free, without its memory."""
    from fused_rl.cpu.support import zeros_for_rows

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    zeros = zeros_for_rows(1 << 17, 256, FP32, touched=8)  # 128 MB
    zeros[[5, 1 << 16]] = 1.0
    assert resident() - before < 16 * 2**20
    assert zeros.sum() == 512 and zeros.count_nonzero() == 512
    kept = zeros.clone()
    del zeros
    assert kept.add_(1).sum() == 512 + kept.numel()
    assert not zeros_for_rows(1 << 17, 256, FP32, touched=1 << 16).any()


# ------------------------------------------------------------------ several processes


class Head(torch.nn.Module):
    """A layer and the head, with the op in the forward of the module that is sharded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = torch.nn.Embedding(131, 16), torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 131)

    def forward(self, module, tokens, advantages):
        hidden = self.layer(self.embed(tokens[:, :-1])).tanh()
        targets = tokens[:, 1:]
        near = (targets[..., None] + 17 * torch.arange(4)) % 131
        lists = [row[: len(row) if i % 3 else 0] for i, row in enumerate(near.flatten(0, 1).tolist())]
        options = {"bias": self.head.bias, "mask": targets % 3 > 0, "support": TokenSupport.from_lists(lists)}
        logprobs, entropy, _ = module.linear_token_logprobs(hidden, self.head.weight, targets, **options)
        return -(logprobs * advantages + 0.1 * entropy.square()).sum()


def batches():
    generator = torch.Generator().manual_seed(3)
    sizes = [(12, 9), (5, 8)]
    return [
        [(torch.randint(131, (2, n + 1), generator=generator), torch.randn(2, n, generator=generator)) for n in lengths]
        for lengths in sizes
    ]


def trained(model, optimizer, mine, module, world, backward):
    for _ in range(2):
        optimizer.zero_grad()
        for batch in mine:
            backward(model(module, *batch) / 20 * world)
        optimizer.step()


def sharded_training(rank, world):
    import deepspeed
    import deepspeed.ops
    from torch.distributed.fsdp import fully_shard

    os.environ["TRITON_INTERPRET"] = "0"
    deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled for collectives in shared memory
    deepspeed.init_distributed("gloo")
    model = Head()
    fully_shard(model.head)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trained(model, optimizer, batches()[rank], fused_rl, world, lambda loss: loss.backward())
    by_fsdp = {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}

    model = Head()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    assert engine.module.head.weight.numel() == 0
    for _ in range(2):
        for batch in batches()[rank]:
            engine.backward(engine(fused_rl, *batch) / 20 * world)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        by_zero = {name: p.detach().clone().numpy() for name, p in engine.module.named_parameters()}
    return by_fsdp, by_zero


@pytest.mark.usefixtures("cpu")
@pytest.mark.slow
def test_fsdp_and_zero_3():
    """Two processes train as one does on the whole batch with the reference."""
    model = Head()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    everything = [batch for rank in batches() for batch in rank]
    trained(model, optimizer, everything, reference, 1, lambda loss: loss.backward())
    for of_rank in run_distributed(sharded_training, 2):
        for found in of_rank:
            for name, p in model.named_parameters():
                torch.testing.assert_close(torch.from_numpy(found[name]), p.detach(), rtol=0, atol=3e-6, msg=name)


def check_shards(rank, world):
    """Vocabulary split unevenly, both paths: values and gradients of the reference, errors on every rank."""
    interpreter.fix_numerics()
    vocab, starts = 703, [0, 200, 703]
    lists, targets = some_rows(vocab=vocab, longest=300)
    lists[4] = torch.arange(690, 703)  # nothing of it on the first rank
    targets[4] = 699
    support, logits = TokenSupport.from_lists(lists), random_logits(len(lists), vocab)
    logits[3] += 1000.0
    logits[6, lists[6][:60]] = -torch.inf
    logits[6, targets[6]] = 0.0
    columns, upstream = slice(starts[rank], starts[rank + 1]), upstream_of(targets)
    for interpret in ("1", "0"):
        os.environ["TRITON_INTERPRET"] = interpret
        for options in list(OPTIONS.values())[1 if interpret == "1" else 0 :]:
            exact = outputs_and_gradient(reference, logits.double(), targets, upstream, support=support, **options)
            leaf = logits[:, columns].clone().requires_grad_()
            out = fused_rl.vocab_parallel_token_logprobs(leaf, targets, columns.start, support=support, **options)
            found = [*out, *torch.autograd.grad(out, leaf, upstream)]
            for a, b in zip(found, [*exact[:3], exact[3][:, columns]], strict=True):
                torch.testing.assert_close(a.double(), b, rtol=3e-6, atol=3e-6)
        assert found[0][0] == 0 and found[1][0] == 0 and not found[3][0].isnan().any()
        with pytest.raises(ValueError, match="is not in its kept set"):
            fused_rl.vocab_parallel_token_logprobs(leaf, targets + 1, columns.start, support=support)
        beyond = TokenSupport.from_lists([[1, 703], [1]])
        with pytest.raises(ValueError, match="of the 2 kept ids of row 0 the ranks hold 1; check vocab_start"):
            fused_rl.vocab_parallel_token_logprobs(leaf[:2], torch.ones(2).long(), columns.start, support=beyond)
    return True


def test_vocabulary_shards():
    assert run_distributed(check_shards, 2, timeout=240) == [True] * 2


# ------------------------------------------------------------------ a sampler


@pytest.mark.usefixtures("cpu")
def test_what_generate_sampled_is_replayed():
    """Ratio 1 on the first step with the sets that top-p, top-k and min-p left; without them it is far from it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(vocab_size=517, num_key_value_heads=2, **sizes)
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.lm_head.weight.data.normal_(0, 0.6)
    prompt = torch.randint(517, (6, 5))
    sampling = {"top_p": 0.8, "top_k": 20, "min_p": 0.05, "temperature": 0.7}
    sampled = model.generate(
        prompt, max_new_tokens=24, do_sample=True, output_scores=True, return_dict_in_generate=True, eos_token_id=None,
        pad_token_id=0, **sampling,
    )  # fmt: skip
    targets = sampled.sequences[:, 5:]
    scores = torch.stack(sampled.scores, 1)
    rollout = scores.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    support = TokenSupport.from_scores(sampled.scores)
    sizes = support.offsets.diff()
    assert 1 < sizes.float().mean() < 20 and (sizes == 1).any() and sizes.max() <= 20

    with torch.no_grad():
        hidden = model.model(sampled.sequences).last_hidden_state[:, 4:-1]
        logits = model.lm_head(hidden)
    replayed = fused_rl.token_logprobs(logits, targets, temperature=0.7, support=support).logprobs
    from_hidden = fused_rl.linear_token_logprobs(
        hidden, model.lm_head.weight, targets, temperature=0.7, support=support
    ).logprobs
    for found in (replayed, from_hidden):
        torch.testing.assert_close(found, rollout, rtol=0, atol=1e-5)
        torch.testing.assert_close((found - rollout).exp(), torch.ones_like(found), rtol=0, atol=1e-5)
    everything = fused_rl.token_logprobs(logits, targets, temperature=0.7).logprobs
    off = rollout - everything  # -ln of the mass that was kept: top-p keeps 0.8 and more, top-k and min-p less
    assert (off >= -1e-5).all() and off.mean() > 0.15 and ((-off).exp() < 0.9).float().mean() > 0.5
