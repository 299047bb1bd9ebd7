"""token_logprobs on both backends at fixed shapes, beside what tests/test_hostile.py draws: bits, offsets, extremes."""

import sys
from pathlib import Path

import pytest
import torch

import fused_rl
from fused_rl import reference, token_logprobs
from fused_rl.base import checks
from tests.logits import (
    VIEWS,
    random_rows,
    run,
    upstream_of,
)
from tests.marks import cpu_fast


@pytest.mark.usefixtures("cpu")
def test_temperature_per_row_in_any_broadcastable_shape():
    logits, targets = random_rows(12, 200, torch.float32, "cpu")
    logits, targets = logits.view(3, 4, -1), targets.view(3, 4)
    for shape in ((3, 1), (3, 4), (), (1,), (1, 4), (4,)):
        temperature = 0.5 + torch.rand(shape)
        given, expanded = (
            token_logprobs(logits, targets, temperature=t)
            for t in (temperature, temperature.expand(3, 4))
        )
        assert all(map(torch.equal, given, expanded))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_show_in_their_row_alone(backend, bad):
    logits, targets = random_rows(5, 1300, torch.float32, backend)
    clean = token_logprobs(logits, targets)
    # the first column, the last of a block, and the last
    logits[[0, 2, 4], [0, 511, 1299]] = bad
    for before, after in zip(clean, token_logprobs(logits, targets), strict=True):
        assert after[::2].isnan().all()
        assert torch.equal(after[1::2], before[1::2])


@cpu_fast
def test_bits_of_a_row_depend_on_the_row_alone(backend):
    vocab = 9001
    logits, targets = random_rows(8, vocab, torch.bfloat16, backend)
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


@pytest.mark.parametrize("length", [0, 1])
def test_shift_of_sequences_without_a_successor(backend, length):
    logits = torch.randn(2, length, 30, device=backend, requires_grad=True)
    outputs = token_logprobs(
        logits, torch.zeros(2, length, dtype=torch.long, device=backend), shift=True
    )
    assert all(o.shape == (2, 0) for o in outputs)
    sum(outputs).sum().backward()
    assert not logits.grad.any()


@pytest.mark.parametrize("several", [(), (4,)])
def test_fp64_logits_keep_their_digits(several):
    """Outputs and gradients are fp64, by the definition; every option means what it means in fp32."""
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, dtype=torch.float64, generator=made, requires_grad=True)
    targets = torch.randint(0, 11, (2, 5, *several), generator=made)
    mask = torch.rand(2, 4, generator=made) > 0.3
    temperature = torch.rand(2, 1, generator=made) + 0.5
    options = {"mask": mask, "temperature": temperature, "softcap": 2.0, "shift": True}

    def outputs(op, x):
        return tuple(op(x, targets, **options))

    found = outputs(token_logprobs, logits)
    narrow = outputs(token_logprobs, logits.detach().float())
    options["temperature"] = temperature.double()
    exact = outputs(reference.token_logprobs, logits)
    torch.testing.assert_close(found, exact, atol=1e-13, rtol=0)
    torch.testing.assert_close([x.double() for x in narrow], [*exact], atol=2e-6, rtol=0)
    for op in (token_logprobs, reference.token_logprobs):
        assert torch.autograd.gradcheck(lambda x, op=op: outputs(op, x), logits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_targets_outside_the_vocabulary_on_a_gpu(monkeypatch):
    logits, targets = random_rows(3, 50, torch.bfloat16, "cuda")
    targets[1] = 50
    outputs = token_logprobs(logits, targets)
    assert outputs.logprobs.isnan().tolist() == [False, True, False]
    monkeypatch.setattr(checks, "CHECKED", True)
    with pytest.raises(ValueError, match=r"logits\[1\] is 50"):
        token_logprobs(logits, targets)


@cpu_fast
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_other_integer_targets(backend, dtype):
    logits, targets = random_rows(4, 60, torch.float32, backend)
    assert all(
        map(torch.equal, token_logprobs(logits, targets), token_logprobs(logits, targets.to(dtype)))
    )


@pytest.mark.usefixtures("cpu")
def test_an_offset_cancels_to_the_bit_on_the_cpu_path():
    """On the kernels: tests/test_kernels.py."""
    torch.manual_seed(0)
    eighths = torch.randint(-64, 64, (5, 3001)) / 8  # so that the sums below are exact
    targets = torch.randint(3001, (5,))
    upstream = upstream_of((5,), "cpu", ["logprobs", "entropy"])
    outputs, gradient = run(token_logprobs, eighths, targets, upstream, temperature=0.7)
    for offset in (64.0, 512.0, -1024.0):
        moved, gradient_moved = run(
            token_logprobs, eighths + offset, targets, upstream, temperature=0.7
        )
        assert torch.equal(moved.logprobs, outputs.logprobs)
        assert torch.equal(moved.entropy, outputs.entropy)
        assert torch.equal(gradient_moved, gradient)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("shape", [(8, 100), (4, 8, 100)])
def test_a_small_input_waits_for_few_calls_of_python(shape):
    """A call of ours takes 0.1 us or more, the arithmetic of a few rows a few: the count is the overhead."""
    logits, targets = torch.randn(shape, requires_grad=True), torch.zeros(shape[:-1]).long()
    token_logprobs(logits, targets)  # the first call compiles and fills caches
    folder, calls = str(Path(fused_rl.__file__).parent), []

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            calls.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        token_logprobs(logits, targets)
    finally:
        sys.setprofile(None)
    assert 10 < len(calls) <= 24, calls
