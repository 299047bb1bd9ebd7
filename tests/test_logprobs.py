"""token_logprobs on the kernels and on the CPU path, against the reference in fp64 of the same rounded logits."""

import itertools
import logging
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from fused_rl import reference, token_logprobs
from fused_rl.cpu import compiled
from fused_rl.cpu import logprob as cpu

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
OUTPUTS = ("logprobs", "entropy", "lse")
# one column; less than one block; one block of the CPU path and a tail; several tiles of the kernel and an odd tail
VOCABULARIES = [1, 7, 1000, 9001]


def random_rows(n, vocab, dtype, device, seed=0):
    """Logits as a language model's: most of the mass on few tokens, the target anywhere."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, vocab, generator=generator)
    return logits.to(device, dtype), torch.randint(vocab, (n,), generator=generator).to(device)


def run(op, logits, targets, upstream, **options):
    """The three outputs, and the logits' gradient for upstream gradients {output: tensor}."""
    logits = logits.detach().requires_grad_()
    outputs = op(logits, targets, **options)
    loss = sum((getattr(outputs, name) * g.to(outputs.lse.dtype)).sum() for name, g in upstream.items())
    return outputs, torch.autograd.grad(loss, logits)[0]


def upstream_of(shape, device, names=OUTPUTS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(device) for name in names}


def exact(logits, targets, upstream, **options):
    return run(reference.token_logprobs, logits.double(), targets, upstream, **options)


def assert_outputs_close(actual, expected):
    """1e-6 of the log-sum-exp, which also is what fp32 holds of a log-probability; 2e-6 of the entropy."""
    scale = expected.lse.abs().clamp(min=1).maximum(expected.logprobs.abs())
    for name, allowed in (("logprobs", 1e-6 * scale), ("lse", 1e-6 * scale), ("entropy", 2e-6 * expected.entropy)):
        a, e = getattr(actual, name).double(), getattr(expected, name)
        same = (a == e) | ((a - e).abs() <= allowed)  # == holds for infinities
        assert same.all(), f"{name}: {a[~same][:5].tolist()} for {e[~same][:5].tolist()}"
    assert (actual.entropy >= 0).all() and (actual.logprobs <= 0).all()


def assert_gradient_close(actual, expected, naive):
    """At most twice the error of the reference in the logits' dtype; 16-bit ones within an ulp in 99.9 %, 2 in all.

    Where terms cancel (log p + H changes its sign; a vocabulary of one) two fp32 ulps of the row's largest are allowed.
    """
    error, allowed = (actual.double() - expected).abs(), (naive.double() - expected).abs().max()
    cancelled = 2**-22 * expected.abs().amax(-1, keepdim=True) + 1e-12
    assert (error <= 2 * allowed + cancelled).all(), (error.max(), allowed)
    if actual.dtype != torch.float32:
        ulps = (ordinal(actual) - ordinal(expected.to(actual.dtype))).abs()
        ulps[error <= cancelled] = 0
        assert (ulps <= 1).float().mean() >= 0.999 and ulps.max() <= 2, ulps.max()


def ordinal(x):
    """Consecutive integers for consecutive 16-bit floats, 0 for both zeros."""
    bits = x.view(torch.int16).long()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_and_every_gradient(backend, dtype, vocab):
    logits, targets = random_rows(4, vocab, dtype, backend)
    for names in (s for n in (1, 2, 3) for s in itertools.combinations(OUTPUTS, n)):
        upstream = upstream_of(targets.shape, backend, names)
        outputs, gradient = run(token_logprobs, logits, targets, upstream)
        expected, expected_gradient = exact(logits, targets, upstream)
        _, naive = run(reference.token_logprobs, logits, targets, upstream)
        assert_outputs_close(outputs, expected)
        assert_gradient_close(gradient, expected_gradient, naive)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7}, {"softcap": 5.0}, {"temperature": 1.3, "softcap": 20.0}], ids=str
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_temperature_and_softcap(backend, dtype, options):
    logits, targets = random_rows(5, 1500, dtype, backend)
    upstream = upstream_of(targets.shape, backend)
    outputs, gradient = run(token_logprobs, logits, targets, upstream, **options)
    expected, expected_gradient = exact(logits, targets, upstream, **options)
    _, naive = run(reference.token_logprobs, logits, targets, upstream, **options)
    assert_outputs_close(outputs, expected)
    assert_gradient_close(gradient, expected_gradient, naive)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (1, 4), (4,), (3, 4)], ids=str)
def test_temperature_per_row_in_any_broadcastable_shape(backend, shape):
    logits, targets = random_rows(12, 200, torch.float32, backend)
    logits, targets = logits.view(3, 4, -1), targets.view(3, 4)
    temperature = 0.5 + torch.rand(shape, device=backend)
    upstream = upstream_of((3, 4), backend)
    outputs, gradient = run(token_logprobs, logits, targets, upstream, temperature=temperature)
    expected, expected_gradient = exact(logits, targets, upstream, temperature=temperature.double())
    _, naive = run(reference.token_logprobs, logits, targets, upstream, temperature=temperature)
    assert_outputs_close(outputs, expected)
    assert_gradient_close(gradient, expected_gradient, naive)


@pytest.mark.parametrize("flat", [True, False], ids=["flat rest", "random rest"])
@pytest.mark.parametrize("vocab", [32, 1000, 50304, 151936])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_entropy_never_negative(backend, dtype, vocab, flat, request):
    few = "kernel" in request.node.callspec.id  # the interpreter takes up to 0.1 s a row
    gaps, offsets = (0, 10, 20, 30, 40, 60), (0, 20, 1000, -1000)
    cases = list(itertools.product(gaps, offsets, (False, True)))[:: 5 if few else 1]
    rest = torch.zeros(vocab) if flat else torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    rows = []
    for gap, offset, banned in cases:
        row = rest + offset
        row[vocab // 3] = rest.max() + offset + gap
        if banned:
            row[: vocab // 4] = -torch.inf
            row[-1] = -torch.inf
        rows.append(row)
    logits = torch.stack(rows).to(backend, dtype)
    targets = torch.arange(len(cases), device=backend) % vocab
    targets[::2] = vocab // 3
    expected = reference.token_logprobs(logits.double(), targets)
    actual = token_logprobs(logits, targets)
    assert (actual.entropy >= 0).all() and (actual.logprobs <= 0).all()
    small = expected.entropy < 1e-7  # there fp64's own log_softmax has few digits left
    assert (actual.entropy.double() - expected.entropy)[small].abs().le(1e-12).all()
    keep = expected._replace(entropy=torch.where(small, actual.entropy.double(), expected.entropy))
    assert_outputs_close(actual, keep)


def test_entropy_has_six_digits_from_1e_minus_7_to_log_v(backend):
    vocab = 5000
    gaps = torch.linspace(0, 24, 40)
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(0))
    logits[:, 77] = gaps + 4
    logits = torch.cat([logits, torch.full((1, vocab), 12.5)]).to(backend)
    targets = torch.full((41,), 77, device=backend)
    expected = reference.token_logprobs(logits.double(), targets)
    assert 1e-7 < expected.entropy.min() < 1e-6 and expected.entropy.max() > 8.5
    assert_outputs_close(token_logprobs(logits, targets), expected)


def test_gradient_keeps_its_digits_next_to_certainty(backend):
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(0)).to(backend)
    targets = torch.full((6,), 77, device=backend)
    logits[:, 77] = 4 + torch.arange(5, 35, 5, device=backend)  # 1 - p of the target down to 1e-12
    upstream = upstream_of((6,), backend, ["logprobs"])
    _, gradient = run(token_logprobs, logits, targets, upstream)
    _, expected = exact(logits, targets, upstream)
    torch.testing.assert_close(gradient.double(), expected, rtol=5e-6, atol=0)


def test_banned_tokens_anywhere(backend):
    vocab = 20001
    logits, targets = random_rows(6, vocab, torch.float32, backend)
    logits[0, :17000] = -torch.inf  # whole blocks first
    logits[1] = -torch.inf  # all but one
    logits[1, 12345] = -3.0
    logits[2] = -torch.inf  # throughout
    logits[3, 1::2] = -torch.inf
    logits[4, targets[4]] = -torch.inf  # the target itself
    logits[5, 9000:] = -torch.inf
    targets[1], targets[0] = 12345, 20000
    upstream = upstream_of(targets.shape, backend)
    outputs, gradient = run(token_logprobs, logits, targets, upstream)
    expected, expected_gradient = exact(logits, targets, upstream)
    _, naive = run(reference.token_logprobs, logits, targets, upstream)
    assert_outputs_close(outputs, expected)
    assert_gradient_close(gradient, expected_gradient, naive)
    assert [o[2].item() for o in outputs] == [-torch.inf, 0, -torch.inf]
    assert outputs.logprobs[4] == -torch.inf and outputs.logprobs[1] == 0 and outputs.entropy[1] == 0
    logits[4, targets[4]] = 0  # log p of the target is -inf there, but its slope is 1
    assert (gradient[2] == 0).all() and (gradient[logits == -torch.inf] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_show_in_their_row_alone(backend, bad):
    logits, targets = random_rows(3, 1100, torch.float32, backend)
    clean = token_logprobs(logits, targets)
    logits[1, 600] = bad
    for before, after in zip(clean, token_logprobs(logits, targets), strict=True):
        assert after[1].isnan() and torch.equal(after[::2], before[::2])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_masked_rows_reach_nothing(backend, poison, dtype):
    logits, targets = random_rows(8, 1100, dtype, backend)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0], dtype=torch.bool, device=backend)
    upstream = upstream_of(targets.shape, backend)
    clean, clean_gradient = run(token_logprobs, logits, targets, upstream)
    logits[~mask], targets[~mask] = poison, -100
    outputs, gradient = run(token_logprobs, logits, targets, upstream, mask=mask)
    for before, after in zip(clean, outputs, strict=True):
        assert torch.equal(after, torch.where(mask, before, 0))
    assert torch.equal(gradient, torch.where(mask[:, None], clean_gradient, 0))


def test_nothing_to_score(backend):
    for shape in ((0,), (2, 0), (0, 3)):
        logits = torch.randn(*shape, 9, device=backend, requires_grad=True)
        outputs = token_logprobs(logits, torch.zeros(shape, dtype=torch.long, device=backend))
        assert all(o.shape == shape and o.dtype == torch.float32 for o in outputs)
        sum(outputs).sum().backward()
        assert logits.grad.shape == (*shape, 9)
    logits, targets = random_rows(3, 50, torch.float32, backend)
    mask = torch.zeros(3, dtype=torch.bool, device=backend)
    outputs, gradient = run(token_logprobs, logits, targets, upstream_of((3,), backend), mask=mask)
    assert not any(o.any() for o in outputs) and not gradient.any()


VIEWS = {  # logits of (2, 3) rows whose strides differ, over one vocabulary
    "contiguous": lambda x: x[:, :3].contiguous(),
    "sequence cut off": lambda x: x[:, :3],
    "odd row stride": lambda x: torch.cat([x[:, :3], x[:, :3, :1]], -1)[..., :-1],
    "sequence first": lambda x: x[:, :3].transpose(0, 1).contiguous().transpose(0, 1),
    "every second row": lambda x: x[:, :3].repeat_interleave(2, 1)[:, ::2],
    "offset storage": lambda x: torch.cat([x[:, :3].flatten(), x[0, 0, :1]]).roll(1)[1:].view(2, 3, -1),
    "columns apart": lambda x: x[:, :3].repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("vocab", [600, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_row_depend_on_the_row_alone(backend, dtype, vocab):
    logits, targets = random_rows(8, vocab, dtype, backend)
    logits, targets = logits.view(2, 4, vocab), targets.view(2, 4)[:, :3]
    upstream = upstream_of((2, 3), backend)
    outputs, gradient = run(token_logprobs, VIEWS["contiguous"](logits), targets, upstream)
    for name, view in VIEWS.items():
        x = view(logits)
        assert torch.equal(x, logits[:, :3])
        again, gradient_again = run(token_logprobs, x, targets, upstream)
        assert all(map(torch.equal, outputs, again)) and torch.equal(gradient, gradient_again), name
    for b, t in ((0, 0), (1, 2)):  # alone
        g = {name: u[b, t] for name, u in upstream.items()}
        alone, gradient_alone = run(token_logprobs, logits[b, t], targets[b, t], g)
        assert all(torch.equal(a, o[b, t]) for a, o in zip(alone, outputs, strict=True))
        assert torch.equal(gradient_alone, gradient[b, t])


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "columns apart"])
def test_strided_rows_are_not_copied(monkeypatch, name):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    logits, targets = random_rows(8, 600, torch.float32, "cpu")
    logits = VIEWS[name](logits.view(2, 4, 600))
    seen, forward, backward = [], cpu.logprob_fwd, cpu.logprob_bwd
    monkeypatch.setattr(cpu, "logprob_fwd", lambda x, *a: seen.append(x) or forward(x, *a))
    monkeypatch.setattr(cpu, "logprob_bwd", lambda *a, out: seen.append(a[3]) or backward(*a, out=out))
    run(token_logprobs, logits, targets.view(2, 4)[:, :3], upstream_of((2, 3), "cpu"))
    assert {x.untyped_storage().data_ptr() for x in seen} == {logits.untyped_storage().data_ptr()}


def test_bits_do_not_depend_on_chunks_or_threads(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    logits, targets = random_rows(40, 40000, torch.float32, "cpu")
    upstream = upstream_of(targets.shape, "cpu")
    expected = run(token_logprobs, logits, targets, upstream)
    threads = torch.get_num_threads()
    try:
        for chunk, count in ((1, 1), (1 << 17, 2), (1 << 20, 2)):
            monkeypatch.setattr(compiled, "CHUNK", chunk)
            torch.set_num_threads(count)
            outputs, gradient = run(token_logprobs, logits, targets, upstream)
            assert all(map(torch.equal, outputs, expected[0])) and torch.equal(gradient, expected[1])
    finally:
        torch.set_num_threads(threads)


def test_four_leading_dimensions_that_do_not_merge(backend):
    logits, targets = random_rows(2 * 3 * 4, 77, torch.float32, backend)
    logits, targets = logits.view(2, 3, 4, 77)[:, :2, 1:], targets.view(2, 3, 4)[:, :2, 1:]
    upstream = upstream_of((2, 2, 3), backend)
    outputs, gradient = run(token_logprobs, logits, targets, upstream)
    expected, expected_gradient = exact(logits, targets, upstream)
    assert_outputs_close(outputs, expected)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)


def test_row_offsets_past_2_to_the_31():
    # only the pages of the two rows are ever touched
    vocab, stride = 1000, 2**31 + 4096
    logits = torch.empty(stride + vocab, dtype=torch.bfloat16).as_strided((2, vocab), (stride, 1))
    rows, targets = random_rows(2, vocab, torch.bfloat16, "cpu")
    upstream = upstream_of((2,), "cpu")
    logits.copy_(rows)
    expected, expected_gradient = run(token_logprobs, rows, targets, upstream)
    outputs, gradient = run(token_logprobs, logits, targets, upstream)
    assert all(map(torch.equal, outputs, expected)) and torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("temperature", [0.8, "row"])
def test_shift_equals_slicing(backend, with_mask, temperature):
    logits, targets = random_rows(3 * 6, 800, torch.bfloat16, backend)
    logits, targets = logits.view(3, 6, 800), targets.view(3, 6)
    temperature = 0.5 + torch.rand(3, 5, device=backend) if temperature == "row" else temperature
    mask = torch.rand(3, 5, device=backend) > 0.4 if with_mask else None
    logits[:, -1] = torch.nan  # scores nothing
    upstream = upstream_of((3, 5), backend)
    options = {"temperature": temperature, "mask": mask}
    outputs, gradient = run(token_logprobs, logits, targets, upstream, shift=True, **options)
    expected, sliced = run(token_logprobs, logits[:, :-1], targets[:, 1:], upstream, **options)
    assert all(map(torch.equal, outputs, expected))
    assert torch.equal(gradient[:, :-1], sliced) and not gradient[:, -1].any()


@pytest.mark.parametrize("length", [0, 1])
def test_shift_of_sequences_without_a_successor(backend, length):
    logits = torch.randn(2, length, 30, device=backend, requires_grad=True)
    outputs = token_logprobs(logits, torch.zeros(2, length, dtype=torch.long, device=backend), shift=True)
    assert all(o.shape == (2, 0) for o in outputs)
    sum(outputs).sum().backward()
    assert not logits.grad.any()


def test_stride_0_and_missing_upstream_gradients(backend):
    logits, targets = random_rows(5, 300, torch.float32, backend)
    for name in OUTPUTS:
        x = logits.clone().requires_grad_()
        getattr(token_logprobs(x, targets), name).sum().backward()  # expands a single 1
        _, expected = exact(logits, targets, {name: torch.ones(5, device=backend)})
        torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_retained_graph_yields_the_same_gradient_twice(backend):
    logits, targets = random_rows(5, 300, torch.float32, backend)
    logits.requires_grad_()
    loss = token_logprobs(logits, targets).entropy.sum()
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.any()


def test_saved_state_is_linear_in_the_rows(backend):
    logits, targets = random_rows(6, 5000, torch.bfloat16, backend)
    logits.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        token_logprobs(logits, targets, mask=targets > 100)
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    kept.pop(logits.untyped_storage().data_ptr())
    assert sum(kept.values()) <= 6 * 40


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_inplace_gradient_takes_the_storage_of_the_logits(backend, dtype):
    leaf, targets = random_rows(6, 1100, dtype, backend)
    mask = torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool, device=backend)
    upstream = upstream_of((6,), backend)
    expected, expected_gradient = run(token_logprobs, leaf, targets, upstream, mask=mask)
    leaf.requires_grad_()
    logits = leaf * 1
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    seen = []
    outputs = token_logprobs(logits, targets, mask=mask, inplace=True)
    assert all(map(torch.equal, outputs, expected))
    sum((getattr(outputs, name) * g).sum() for name, g in upstream.items()).backward()
    assert torch.equal(leaf.grad, expected_gradient) and seen == [logits.data_ptr()]
    assert torch.equal(logits.detach(), expected_gradient)


@pytest.mark.parametrize("cut", [lambda x: x[:, :-1], lambda x: x.transpose(0, 1)], ids=["cut off", "transposed"])
def test_inplace_over_rows_that_do_not_merge(backend, cut):
    leaf, targets = random_rows(12, 130, torch.float32, backend)
    leaf, targets = leaf.view(3, 4, 130), cut(targets.view(3, 4))
    upstream = upstream_of(targets.shape, backend)
    _, expected = run(lambda x, y: token_logprobs(cut(x), y), leaf, targets, upstream)
    _, gradient = run(lambda x, y: token_logprobs(cut(x * 1), y, inplace=True), leaf, targets, upstream)
    assert torch.equal(gradient, expected)


def test_inplace_shift(backend):
    leaf, targets = random_rows(12, 130, torch.float32, backend)
    leaf, targets = leaf.view(3, 4, 130), targets.view(3, 4)
    upstream = upstream_of((3, 3), backend)
    _, expected = run(token_logprobs, leaf, targets, upstream, shift=True)
    _, gradient = run(lambda x, y: token_logprobs(x * 1, y, shift=True, inplace=True), leaf, targets, upstream)
    assert torch.equal(gradient, expected)


def test_inplace_makes_every_later_use_raise(backend):
    leaf, targets = random_rows(4, 60, torch.float32, backend)
    leaf.requires_grad_()
    logits = leaf * 1
    first, second, square = (
        token_logprobs(logits, targets, inplace=True).entropy.sum(),
        token_logprobs(logits, targets).entropy.sum(),
        logits.square().sum(),
    )
    first.backward(retain_graph=True)
    for loss in (first, second, square):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(retain_graph=True)


def test_inplace_without_a_gradient_leaves_the_logits_alone(backend):
    logits, targets = random_rows(4, 60, torch.float32, backend)
    before = logits.clone()
    token_logprobs(logits, targets, inplace=True)  # nothing requires a gradient: a leaf may come
    with torch.no_grad():
        token_logprobs(logits.requires_grad_(), targets, inplace=True)
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_second_derivative_raises(backend, inplace):
    logits, targets = random_rows(4, 60, torch.float32, backend)
    logits.requires_grad_()
    loss = token_logprobs(logits * 1, targets, inplace=inplace).entropy.sum()
    with pytest.raises(RuntimeError, match="second derivatives|create_graph"):
        torch.autograd.grad(loss, logits, create_graph=True)[0].square().sum().backward()


def test_function_transforms_raise(backend):
    logits, targets = random_rows(4, 60, torch.float32, backend)

    def entropy(x):
        return token_logprobs(x, targets).entropy.sum()

    for transformed in (
        lambda: torch.func.grad(entropy)(logits),
        lambda: torch.func.jacrev(entropy)(logits),
        lambda: torch.func.jvp(entropy, (logits,), (logits,)),
        lambda: torch.func.vmap(lambda x, y: token_logprobs(x, y).entropy)(logits, targets),
    ):
        with pytest.raises(RuntimeError, match=r"torch\.func"):
            transformed()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        entropy(torch.autograd.forward_ad.make_dual(logits, logits))


def test_fp64_logits_keep_their_digits():
    """Outputs and gradients are fp64, by the definition; every option means what it means in fp32."""
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, dtype=torch.float64, generator=made, requires_grad=True)
    targets = torch.randint(0, 11, (2, 5), generator=made)
    mask, temperature = torch.rand(2, 4, generator=made) > 0.3, torch.rand(2, 1, generator=made) + 0.5
    options = {"mask": mask, "temperature": temperature, "softcap": 2.0, "shift": True}

    def outputs(x):
        return torch.stack(token_logprobs(x, targets, **options))

    found = outputs(logits)
    x = 2 * torch.tanh(logits[:, :-1] / 2) / temperature.double()[..., None]
    logp = x.log_softmax(-1)
    chosen = logp.gather(-1, targets[:, 1:, None])[..., 0]
    exact = torch.stack([chosen, -(logp.exp() * logp).sum(-1), x.logsumexp(-1)]) * mask
    torch.testing.assert_close(found, exact, atol=1e-13, rtol=0)
    assert torch.autograd.gradcheck(outputs, logits)
    narrow = torch.stack(token_logprobs(logits.detach().float(), targets, **options))
    torch.testing.assert_close(narrow.double(), exact, atol=2e-6, rtol=0)


X, Y = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.long)
LEAF = torch.zeros(2, 3, 8, requires_grad=True)
BAD = {
    "logits: not a tensor": ([[0.0]], Y, {}, r"bf16, fp16 or fp32 tensor, got list"),
    "logits: complex": (X.cfloat(), Y, {}, r"bf16, fp16 or fp32 tensor, got torch.complex64 \(2, 3, 8\); convert"),
    "fp64: targets outside": (X.double(), Y + 8, {}, r"outside the vocabulary of 8"),
    "fp64: temperature": (X.double(), Y, {"temperature": torch.zeros(2, 3)}, r"got 0.0 for logits\[0, 0\]"),
    "logits: integers": (X.long(), Y, {}, "got torch.int64"),
    "logits: no dimension": (torch.tensor(1.0), Y, {}, r"\(\.\.\., V\) with V >= 1, got \(\)"),
    "logits: no vocabulary": (torch.zeros(2, 3, 0), Y, {}, r"V >= 1, got \(2, 3, 0\)"),
    "targets: floats": (X, Y.float(), {}, "integer tensor .* got torch.float32"),
    "targets: bool": (X, Y.bool(), {}, "integer tensor .* got torch.bool"),
    "targets: a number": (X, 3, {}, "integer tensor .* got int 3"),
    "targets: other shape": (X, Y[:, 1:], {}, r"shape of the rows of logits \(2, 3, 8\), \(2, 3\), got \(2, 2\)"),
    "targets: shifted already": (X, Y[:, 1:], {"shift": True}, r"shift=True takes the targets of all T positions"),
    "targets: other device": (X, Y.to("meta"), {}, "targets is on meta, the logits are on cpu"),
    "targets: too large": (X, Y.clone().index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(8)), {},
                           r"target of logits\[1, 2\] is 8, outside the vocabulary of 8 \(0 to 7\); 1 of 6"),
    "targets: ignore index": (X, Y - 100, {}, r"logits\[0, 0\] is -100, outside .* mask"),
    "targets: in shift": (X, Y - 1, {"shift": True, "mask": torch.tensor([[False, False], [False, True]])},
                          r"logits\[1, 1\] is -1"),
    "mask: other shape": (X, Y, {"mask": torch.ones(2, 2, dtype=torch.bool)}, r"outputs, \(2, 3\), got \(2, 2\)"),
    "mask: all T": (X, Y, {"mask": Y == 0, "shift": True}, r"\(2, 2\), got \(2, 3\); shift=True takes mask\[:, 1:\]"),
    "mask: integers": (X, Y, {"mask": Y}, r"bool tensor, .* got torch.int64 .* mask.bool\(\)"),
    "shift: no batch": (X[0], Y[0], {"shift": True}, r"\(B, T, V\), got \(3, 8\)"),
    "softcap: 0": (X, Y, {"softcap": 0.0}, "softcap must be a finite number > 0, got 0.0; pass None"),
    "softcap: NaN": (X, Y, {"softcap": torch.nan}, "softcap must be a finite number > 0, got nan"),
    "temperature: per row, one bad": (X, Y, {"temperature": torch.tensor([[1.0, 2, 0], [1, 1, 1]])},
                                      r"from 1e-06 to 1e\+06 .*, got 0.0 for logits\[0, 2\]"),
    "temperature: other shape": (X, Y, {"temperature": torch.ones(3, 3)}, r"broadcastable .* \(2, 3\), .* \(3, 3\)"),
    "temperature: other device": (X, Y, {"temperature": torch.ones(2, 3, device="meta")}, "temperature is on meta"),
    "temperature: with gradient": (X, Y, {"temperature": torch.ones(3, requires_grad=True)}, r"temperature.detach\(\)"),
    "inplace: leaf": (LEAF, Y, {"inplace": True}, "overwrite a leaf"),
    "inplace: shared rows": ((LEAF * 1)[:, :1].expand(2, 3, 8), Y, {"inplace": True}, "do not overlap, got strides"),
}  # fmt: skip
BAD |= {f"temperature: {t}": (X, Y, {"temperature": t}, f"got {t}") for t in (0, -1.0, torch.nan, torch.inf)}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_says_what_came_and_what_was_expected(backend, case):
    logits, targets, options, message = case
    if backend != "cpu":
        pytest.skip("these are CPU tensors")
    with pytest.raises(ValueError, match=message):
        token_logprobs(logits, targets, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_targets_outside_the_vocabulary_on_a_gpu(monkeypatch):
    logits, targets = random_rows(3, 50, torch.bfloat16, "cuda")
    targets[1] = 50
    outputs = token_logprobs(logits, targets)
    assert outputs.logprobs.isnan().tolist() == [False, True, False]
    monkeypatch.setenv("FUSED_RL_CHECKED", "1")
    with pytest.raises(ValueError, match=r"logits\[1\] is 50"):
        token_logprobs(logits, targets)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_other_integer_targets(backend, dtype):
    logits, targets = random_rows(4, 60, torch.float32, backend)
    for a, b in zip(token_logprobs(logits, targets), token_logprobs(logits, targets.to(dtype)), strict=True):
        assert torch.equal(a, b)


def test_operators_pass_opcheck(backend):
    logits, targets = random_rows(6, 40, torch.float32, backend)
    logits, targets = logits.view(2, 3, 40).requires_grad_(), targets.view(2, 3)
    per_row = 0.5 + torch.rand(2, 3, device=backend)
    forward = torch.ops.fused_rl.token_logprobs.default
    torch.library.opcheck(forward, (logits[:, :-1], targets[:, :-1], targets[:, 1:] > 20, 1.0, per_row[:, :-1], 3.0))
    logprobs, entropy, lse, m, rest, _ = (o.detach() for o in forward(logits, targets, None, 0.7, None, None))
    arguments = (logprobs, None, lse, logits.detach(), targets, None, entropy, m, rest, 0.7, None, None)
    torch.library.opcheck(torch.ops.fused_rl.token_logprobs_backward.default, arguments)


def test_one_graph_for_all_lengths_and_temperatures(backend, request):
    counter = CompileCounterWithBackend("aot_eager")

    def loss(logits, targets, mask, temperature):
        outputs = token_logprobs(logits, targets, mask=mask, temperature=temperature, shift=True)
        return (outputs.logprobs - 0.1 * outputs.entropy).sum()

    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    lengths = range(3, 7) if request.node.callspec.id == "kernel" else range(3, 23)  # the interpreter is slow
    for i, length in enumerate(lengths):
        logits, targets = random_rows(2 * length, 64, torch.float32, backend)
        logits, targets = logits.view(2, length, 64).requires_grad_(), targets.view(2, length)
        arguments = (logits, targets, targets[:, 1:] > 5, 0.5 + 0.2 * (i % 5))
        (gradient,) = torch.autograd.grad(compiled(*arguments), logits)
        (expected,) = torch.autograd.grad(loss(*arguments), logits)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)
    assert counter.frame_count <= 2  # the first length, and all others


def test_inplace_under_compile_raises(backend):
    logits, targets = random_rows(4, 60, torch.float32, backend)
    compiled = torch.compile(lambda x: token_logprobs(x, targets, inplace=True).lse, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"inplace=True is not supported under torch\.compile"):
        compiled(logits)


def test_autocast_changes_nothing(backend):
    logits, targets = random_rows(4, 60, torch.float32, backend)
    expected = token_logprobs(logits, targets)
    with torch.autocast(backend, dtype=torch.bfloat16):
        assert all(map(torch.equal, token_logprobs(logits, targets), expected))


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.sampled_from([(), (1,), (5,), (2, 3), (3, 1), (2, 1, 3)]),
    vocab=st.one_of(st.integers(1, 40), st.integers(500, 700)),
    dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(["contiguous", "padded", "transposed", "columns apart"]),
    banned=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    masked=st.sampled_from([None, 0.5]),
    offset=st.sampled_from([0.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_any_shape_stride_mask_dtype_and_ban(backend, shape, vocab, dtype, layout, banned, masked, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(*shape, vocab, generator=generator) + offset).to(dtype)
    logits[torch.rand(*shape, vocab, generator=generator) < banned] = -torch.inf
    targets = torch.randint(vocab, shape, generator=generator)
    mask = None if masked is None else torch.rand(shape, generator=generator) < masked
    logits = logits.to(backend)
    if layout == "padded":
        logits = torch.nn.functional.pad(logits, (1, 2))[..., 1:-2]
    elif layout == "columns apart":
        logits = logits.repeat_interleave(2, -1)[..., ::2]
    elif layout == "transposed" and len(shape) > 1:
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    targets, mask = targets.to(backend), None if mask is None else mask.to(backend)
    upstream = upstream_of(shape, backend, seed=seed)
    outputs, gradient = run(token_logprobs, logits, targets, upstream, mask=mask)
    expected, expected_gradient = exact(logits, targets, upstream, mask=mask)
    _, naive = run(reference.token_logprobs, logits, targets, upstream, mask=mask)
    assert_outputs_close(outputs, expected)
    assert_gradient_close(gradient, expected_gradient, naive)
    if mask is not None:
        assert not gradient[~mask].any() and not any(o[~mask].any() for o in outputs)


def test_small_inputs_never_compile(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(compiled, "by_inductor", lambda function: pytest.fail("compiled"))
    logits, targets = random_rows(100, 10000, torch.bfloat16, "cpu")
    run(token_logprobs, logits, targets, upstream_of((100,), "cpu"))


def test_without_a_compiler_large_inputs_stay_eager(monkeypatch, caplog):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(compiled, "WORTH_COMPILING", 0)
    monkeypatch.setattr(compiled, "by_inductor", lambda function: pytest.fail("compiled"))
    compiled.compiler_found.cache_clear()
    logits, targets = random_rows(10, 2000, torch.bfloat16, "cpu")
    with caplog.at_level(logging.INFO, "fused_rl.cpu"):
        for _ in range(2):
            token_logprobs(logits, targets)
    compiled.compiler_found.cache_clear()
    assert [r.message for r in caplog.records] == ["large logits on the CPU: eager: no C++ compiler 'no-such-compiler'"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_compiled_cpu_path(monkeypatch, dtype):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(compiled, "WORTH_COMPILING", 0)
    if not compiled.compiler_found():
        pytest.skip("no C++ compiler")
    logits, targets = random_rows(9, 20001, dtype, "cpu")
    logits[2], logits[3, :9000], logits[4, 77] = -torch.inf, -torch.inf, torch.nan
    mask = torch.arange(9) % 4 != 0
    upstream = upstream_of((9,), "cpu")
    options = {"mask": mask, "temperature": 0.7}
    outputs, gradient = run(token_logprobs, logits, targets, upstream, **options)
    expected, expected_gradient = exact(logits, targets, upstream, **options)
    _, naive = run(reference.token_logprobs, logits, targets, upstream, **options)
    assert_outputs_close(outputs, expected)
    assert_gradient_close(gradient, expected_gradient, naive)
    part = slice(1, 8)
    again, gradient_again = run(
        token_logprobs, logits[part], targets[part], {k: u[part] for k, u in upstream.items()}, temperature=0.7
    )
    kept = mask[part]
    assert all(torch.equal(a[kept], o[part][kept]) for a, o in zip(again, outputs, strict=True))
    assert torch.equal(gradient_again[kept], gradient[part][kept])
    _, inplace = run(
        lambda x, y, **k: token_logprobs(x * 1, y, inplace=True, **k), logits, targets, upstream, **options
    )
    assert torch.equal(inplace, gradient)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux without huge pages")
def test_large_gradients_ask_for_huge_pages():
    """The kernel's flags of the mapping that holds them; small ones share theirs with everything else."""

    def flags(tensor):
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                middle = tensor.data_ptr() + tensor.nbytes // 2
                inside = int(span[1], 16) <= middle < int(span[2], 16)
            elif inside and line.startswith("VmFlags"):
                return line.split()[1:]
        raise AssertionError("no mapping")

    large, small = torch.empty(1 << 24), torch.empty(1 << 10)
    assert "hg" not in flags(large)
    assert compiled.in_huge_pages(large) is large and "hg" in flags(large)
    assert "hg" not in flags(compiled.in_huge_pages(small))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("interpret", "ulps"), [("0", 0), ("1", 4)])  # the CPU path; the kernels
def test_an_offset_cancels(interpret, ulps, seed, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    torch.manual_seed(seed)
    eighths = torch.randint(-64, 64, (5, 3001)) / 8  # so that the sums below are exact
    targets = torch.randint(3001, (5,))

    def results(x):
        x = x.clone().requires_grad_()
        out = token_logprobs(x, targets, temperature=0.7)
        return out.logprobs, out.entropy, *torch.autograd.grad((out.logprobs + out.entropy).sum(), x)

    for offset in (64.0, 512.0, -1024.0):
        for ours, moved in zip(results(eighths), results(eighths + offset), strict=True):
            atol = ulps * 2**-24 * ours.abs().max().item()
            torch.testing.assert_close(moved, ours, rtol=ulps * 2**-24, atol=atol)
    assert not torch.equal(results(eighths)[2], results(eighths * 1.125)[2])
