"""token_logprobs on the kernels and on the CPU path, against the reference in fp64 of the same rounded logits."""

import itertools

import pytest
import torch

from fused_rl import reference, token_logprobs
from tests.drawn import given, settings, st
from tests.logits import (
    FLOATS,
    OUTPUTS,
    VIEWS,
    assert_gradient_close,
    assert_outputs_close,
    exact,
    random_rows,
    run,
    upstream_of,
)
from tests.marks import cpu_fast, diagonal, first_fast, on_backends, slow

# one column; less than one block; one block of the CPU path and a tail; several tiles of the kernel and an odd tail
VOCABULARIES = [1, 7, 1000, 9001]


@on_backends("dtype, vocab", FLOATS, VOCABULARIES, most=3)
def test_values_and_every_gradient(backend, dtype, vocab):
    logits, targets = random_rows(4, vocab, dtype, backend)
    for names in itertools.chain(*(itertools.combinations(OUTPUTS, n) for n in (1, 2, 3))):
        upstream = upstream_of(targets.shape, backend, names)
        outputs, gradient = run(token_logprobs, logits, targets, upstream)
        expected, expected_gradient = exact(logits, targets, upstream)
        _, naive = run(reference.token_logprobs, logits, targets, upstream)
        assert_outputs_close(outputs, expected)
        assert_gradient_close(gradient, expected_gradient, naive)


OPTIONS = {"temperature": {"temperature": 0.7}, "softcap": {"softcap": 5.0}}
OPTIONS["both"] = {"temperature": 1.3, "softcap": 20.0}


@on_backends("dtype, options", FLOATS, OPTIONS, most=1)
def test_temperature_and_softcap(backend, dtype, options):
    logits, targets = random_rows(5, 1500, dtype, backend)
    upstream = upstream_of(targets.shape, backend)
    outputs, gradient = run(token_logprobs, logits, targets, upstream, **options)
    expected, expected_gradient = exact(logits, targets, upstream, **options)
    _, naive = run(reference.token_logprobs, logits, targets, upstream, **options)
    assert_outputs_close(outputs, expected)
    assert_gradient_close(gradient, expected_gradient, naive)


@on_backends("shape", [(3, 1), (3, 4), (), (1,), (1, 4), (4,)], most=1)
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


@pytest.mark.parametrize(
    "backend, dtype, vocab, flat",
    [
        *diagonal(
            ["kernel"],
            FLOATS,
            [32, 1000, 50304, 151936],
            {"flat rest": True, "random rest": False},
            most=2,
        ),
        *diagonal(
            ["cpu"],
            FLOATS,
            [32, 1000, 50304, 151936],
            {"flat rest": True, "random rest": False},
            most=3,
        ),
    ],
    indirect=["backend"],
)
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
    assert (actual.entropy >= 0).all()
    assert (actual.logprobs <= 0).all()
    small = expected.entropy < 1e-7  # there fp64's own log_softmax has few digits left
    assert (actual.entropy.double() - expected.entropy)[small].abs().le(1e-12).all()
    keep = expected._replace(entropy=torch.where(small, actual.entropy.double(), expected.entropy))
    assert_outputs_close(actual, keep)


@cpu_fast
def test_entropy_has_six_digits_from_1e_minus_7_to_log_v(backend):
    vocab = 5000
    gaps = torch.linspace(0, 24, 40)
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(0))
    logits[:, 77] = gaps + 4
    logits = torch.cat([logits, torch.full((1, vocab), 12.5)]).to(backend)
    targets = torch.full((41,), 77, device=backend)
    expected = reference.token_logprobs(logits.double(), targets)
    assert 1e-7 < expected.entropy.min() < 1e-6
    assert expected.entropy.max() > 8.5
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
    assert outputs.logprobs[4] == -torch.inf
    assert outputs.logprobs[1] == 0
    assert outputs.entropy[1] == 0
    logits[4, targets[4]] = 0  # log p of the target is -inf there, but its slope is 1
    assert (gradient[2] == 0).all()
    assert (gradient[logits == -torch.inf] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_show_in_their_row_alone(backend, bad):
    logits, targets = random_rows(3, 1100, torch.float32, backend)
    clean = token_logprobs(logits, targets)
    logits[1, 600] = bad
    for before, after in zip(clean, token_logprobs(logits, targets), strict=True):
        assert after[1].isnan()
        assert torch.equal(after[::2], before[::2])


@on_backends("dtype, poison", FLOATS, [torch.nan, torch.inf, -torch.inf], most=1)
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
    assert not any(o.any() for o in outputs)
    assert not gradient.any()


@on_backends("dtype, vocab", [torch.bfloat16, torch.float32], [600, 9001], most=0)
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


@cpu_fast
def test_four_leading_dimensions_that_do_not_merge(backend):
    logits, targets = random_rows(2 * 3 * 4, 77, torch.float32, backend)
    logits = logits.view(2, 3, 4, 77)[:, :2, 1:]
    targets = targets.view(2, 3, 4)[:, :2, 1:]
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
    assert all(map(torch.equal, outputs, expected))
    assert torch.equal(gradient, expected_gradient)


@on_backends("temperature, with_mask", ["row", 0.8], [True, False], most=0)
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
    assert torch.equal(gradient[:, :-1], sliced)
    assert not gradient[:, -1].any()


@pytest.mark.parametrize("length", [0, 1])
def test_shift_of_sequences_without_a_successor(backend, length):
    logits = torch.randn(2, length, 30, device=backend, requires_grad=True)
    outputs = token_logprobs(logits, torch.zeros(2, length, dtype=torch.long, device=backend), shift=True)
    assert all(o.shape == (2, 0) for o in outputs)
    sum(outputs).sum().backward()
    assert not logits.grad.any()


def test_fp64_logits_keep_their_digits():
    """Outputs and gradients are fp64, by the definition; every option means what it means in fp32."""
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, dtype=torch.float64, generator=made, requires_grad=True)
    targets = torch.randint(0, 11, (2, 5), generator=made)
    mask = torch.rand(2, 4, generator=made) > 0.3
    temperature = torch.rand(2, 1, generator=made) + 0.5
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
    "logits: complex": (
        X.cfloat(),
        Y,
        {},
        r"bf16, fp16 or fp32 tensor, got torch.complex64 \(2, 3, 8\); convert",
    ),
    "logits: no dimension": (torch.tensor(1.0), Y, {}, r"\(\.\.\., V\) with V >= 1, got \(\)"),
    "logits: no vocabulary": (torch.zeros(2, 3, 0), Y, {}, r"V >= 1, got \(2, 3, 0\)"),
    "targets: other shape": (
        X,
        Y[:, 1:],
        {},
        r"shape of the rows of logits \(2, 3, 8\), \(2, 3\), got \(2, 2\)",
    ),
    "targets: shifted already": (
        X,
        Y[:, 1:],
        {"shift": True},
        r"shift=True takes the targets of all T positions",
    ),
    "targets: too large": (
        X,
        Y.clone().index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(8)),
        {},
        r"target of logits\[1, 2\] is 8, outside the vocabulary of 8 \(0 to 7\); 1 of 6",
    ),
    "targets: ignore index": (X, Y - 100, {}, r"logits\[0, 0\] is -100, outside .* mask"),
    "targets: in shift": (
        X,
        Y - 1,
        {"shift": True, "mask": torch.tensor([[False, False], [False, True]])},
        r"logits\[1, 1\] is -1",
    ),
    "mask: other shape": (
        X,
        Y,
        {"mask": torch.ones(2, 2, dtype=torch.bool)},
        r"outputs, \(2, 3\), got \(2, 2\)",
    ),
    "mask: all T": (
        X,
        Y,
        {"mask": Y == 0, "shift": True},
        r"\(2, 2\), got \(2, 3\); shift=True takes mask\[:, 1:\]",
    ),
    "shift: no batch": (X[0], Y[0], {"shift": True}, r"\(B, T, V\) or \(B, T, H\), got \(3, 8\)"),
    "softcap: 0": (
        X,
        Y,
        {"softcap": 0.0},
        "softcap must be a finite number above 0, got 0.0; pass None",
    ),
    "temperature: per row, one bad": (
        X,
        Y,
        {"temperature": torch.tensor([[1.0, 2, 0], [1, 1, 1]])},
        r"from 1e-06 to 1e\+06 .*, got 0.0 for logits\[0, 2\]",
    ),
    "temperature: other shape": (
        X,
        Y,
        {"temperature": torch.ones(3, 3)},
        r"broadcastable .* \(2, 3\), .* \(3, 3\)",
    ),
    "temperature: with gradient": (
        X,
        Y,
        {"temperature": torch.ones(3, requires_grad=True)},
        r"temperature.detach\(\)",
    ),
    "inplace: leaf": (LEAF, Y, {"inplace": True}, "overwrite a leaf"),
    "inplace: shared rows": (
        (LEAF * 1)[:, :1].expand(2, 3, 8),
        Y,
        {"inplace": True},
        "do not overlap, got strides",
    ),
}
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


@on_backends("dtype", [torch.int32, torch.int16, torch.uint8], most=0)
def test_other_integer_targets(backend, dtype):
    logits, targets = random_rows(4, 60, torch.float32, backend)
    for a, b in zip(token_logprobs(logits, targets), token_logprobs(logits, targets.to(dtype)), strict=True):
        assert torch.equal(a, b)


DRAWN = {
    "shape": st.sampled_from([(), (1,), (5,), (2, 3), (3, 1), (2, 1, 3)]),
    "vocab": st.one_of(st.integers(1, 40), st.integers(500, 700)),
    "dtype": st.sampled_from(FLOATS),
    "layout": st.sampled_from(["contiguous", "padded", "transposed", "columns apart"]),
    "banned": st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    "masked": st.sampled_from([None, 0.5]),
    "offset": st.sampled_from([0.0, 300.0]),
    "seed": st.integers(0, 99),
}


def check_any_shape_stride_mask_dtype_and_ban(backend, shape, vocab, dtype, layout, banned, masked, offset, seed):
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
    targets = targets.to(backend)
    mask = None if mask is None else mask.to(backend)
    upstream = upstream_of(shape, backend, seed=seed)
    outputs, gradient = run(token_logprobs, logits, targets, upstream, mask=mask)
    expected, expected_gradient = exact(logits, targets, upstream, mask=mask)
    _, naive = run(reference.token_logprobs, logits, targets, upstream, mask=mask)
    assert_outputs_close(outputs, expected)
    assert_gradient_close(gradient, expected_gradient, naive)
    if mask is not None:
        assert not gradient[~mask].any()
        assert not any(o[~mask].any() for o in outputs)


@pytest.mark.parametrize("backend, examples", [("cpu", 12), slow("cpu", 60), slow("kernel", 20)], indirect=["backend"])
def test_any_shape_stride_mask_dtype_and_ban(backend, examples):
    settings(max_examples=examples)(given(**DRAWN)(check_any_shape_stride_mask_dtype_and_ban))(backend)


# the CPU path; the kernels
@pytest.mark.parametrize("seed", first_fast(range(3)))
@pytest.mark.parametrize("backend, ulps", [("cpu", 0), slow("kernel", 4)], indirect=["backend"])
def test_an_offset_cancels(backend, ulps, seed):
    torch.manual_seed(seed)
    eighths = (torch.randint(-64, 64, (5, 3001)) / 8).to(backend)  # so that the sums below are exact
    targets = torch.randint(3001, (5,)).to(backend)

    def results(x):
        x = x.clone().requires_grad_()
        out = token_logprobs(x, targets, temperature=0.7)
        return (
            out.logprobs,
            out.entropy,
            *torch.autograd.grad((out.logprobs + out.entropy).sum(), x),
        )

    for offset in (64.0, 512.0, -1024.0):
        for ours, moved in zip(results(eighths), results(eighths + offset), strict=True):
            atol = ulps * 2**-24 * ours.abs().max().item()
            torch.testing.assert_close(moved, ours, rtol=ulps * 2**-24, atol=atol)
    assert not torch.equal(results(eighths)[2], results(eighths * 1.125)[2])
