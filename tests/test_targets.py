"""token_logprobs of several targets per row, beside what tests/test_hostile.py draws: equal ids, ties, bits, tiles."""

import os

import pytest
import torch

from fused_rl import reference, token_logprobs
from fused_rl.kernels import targets as kernels
from tests.logits import OUTPUTS, assert_gradient_close, exact, run
from tests.marks import cpu_fast
from tests.tools import interpreter


def random_rows(n, vocab, count, dtype, device, seed=0):
    """Logits, and ids with repetitions: the first row holds one id, the second the likeliest among others."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(n, vocab, generator=generator)).to(device, dtype)
    targets = torch.randint(vocab, (n, count), generator=generator).to(device)
    targets[0] = vocab // 2
    targets[1, count // 2 :] = logits[1].argmax()
    return logits, targets


def upstream_of(targets, names=OUTPUTS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"logprobs": targets.shape, "entropy": targets.shape[:-1], "lse": targets.shape[:-1]}
    return {
        name: torch.randn(shapes[name], generator=generator).to(targets.device) for name in names
    }


@cpu_fast
def test_one_target_in_two_shapes_has_the_same_bits(backend):
    """On the kernels; the CPU path rounds one sum to fp32 in between, which may show in the last bit."""
    logits, targets = random_rows(6, 1100, 1, torch.float32, backend)
    upstream = upstream_of(targets)
    outputs, gradient = run(token_logprobs, logits, targets, upstream)
    flat = upstream | {"logprobs": upstream["logprobs"][:, 0]}
    single, single_gradient = run(token_logprobs, logits, targets[:, 0], flat)
    ulp = 0 if backend == "cuda" or os.environ["TRITON_INTERPRET"] == "1" else 2**-23
    torch.testing.assert_close(outputs.logprobs[:, 0], single.logprobs, rtol=ulp, atol=0)
    assert torch.equal(outputs.entropy, single.entropy)
    assert torch.equal(outputs.lse, single.lse)
    assert torch.equal(gradient, single_gradient)


def test_thousands_of_equal_ids(backend):
    """The walk over equal ids crosses the kernel's blocks."""
    logits, _ = random_rows(2, 50, 1, torch.float32, backend)
    targets = torch.full((2, 3 * kernels.BLOCK + 5), 4, device=backend)
    targets[1, ::7] = 11
    given = logits, targets, upstream_of(targets, ["logprobs"])
    (found, gradient), (wanted, expected) = run(token_logprobs, *given), exact(*given)
    size = wanted.lse[:, None].maximum(wanted.logprobs.abs())
    assert ((found.logprobs - wanted.logprobs).abs() <= 1e-6 * size).all()
    assert_gradient_close(gradient, expected, run(reference.token_logprobs, *given)[1])


# a cap below every logit, so that the largest capped one is below the others before the cap
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_gradient_keeps_its_digits_next_to_certainty(backend, softcap):
    """The others' share of the upstream gradient is not lost beside that of a token with nearly all the mass."""
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(0)).to(backend)
    # 1 - p of the token down to 1e-12.
    gaps = torch.arange(5.0, 35, 5, device=backend)
    options = {}
    logits[:, 77] = 4 + gaps
    if softcap is not None:
        logits = 8 + 0.1 * logits
        logits[:, 77] = 12
        options = {"softcap": softcap, "temperature": 0.3 / gaps}
    targets = torch.tensor([5, 77, 300, 399], device=backend).expand(6, 4)
    upstream = upstream_of(targets, ["logprobs"])
    upstream["logprobs"].abs_()[:, [0, 2, 3]] *= -1e-12
    _, gradient = run(token_logprobs, logits, targets, upstream, **options)
    wide = {name: torch.as_tensor(x).double() for name, x in options.items()}
    _, expected = exact(logits, targets, upstream, **wide)
    # where autograd's own sum over the targets cancels in fp64
    d, x, slope = upstream["logprobs"].double(), logits.double(), 1.0
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
        slope = (1 - (x[:, 77] / softcap).square()) / wide["temperature"]
        x = x / wide["temperature"][:, None]
    s = x - x[:, 77:78]
    rest = s.exp().index_fill(1, torch.tensor(77, device=backend), 0).sum(1)
    expected[:, 77] = slope * (d[:, 1] * rest - d[:, [0, 2, 3]].sum(1)) / (1 + rest)
    # of a capped logit next to its cap few digits are known
    rtol = 5e-6 if softcap is None else 1e-3
    torch.testing.assert_close(gradient.double(), expected, rtol=rtol, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU the kernels run interpreted")
def test_the_kernels_give_a_target_outside_the_vocabulary_nan_and_no_gradient(monkeypatch):
    """As for one target: what a GPU does, where values are not looked at."""
    monkeypatch.setattr("fused_rl.ops.logprobs.values_are_checked", lambda device: False)
    logits, targets = random_rows(3, 90, 4, torch.float32, "cpu")
    targets[2] = torch.tensor([3, -100, 90, 2**40])
    upstream = upstream_of(targets)
    with interpreter.check_memory():
        outputs, gradient = run(token_logprobs, logits, targets, upstream)
    assert outputs.logprobs.isnan().nonzero().tolist() == [[2, 1], [2, 2], [2, 3]]
    assert gradient.isfinite().all()
