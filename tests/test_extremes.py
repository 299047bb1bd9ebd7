"""Logits as large as fp32 holds, fills in place of -inf, temperatures at the ends of their range, rows far apart."""

import pytest
import torch

from fused_rl import reference, token_kl, token_logprobs
from tests.marks import on_backends, slow
from tests.pairs import DIRECTIONS

MOST, LEAST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
VOCAB = (
    2100  # several elements in every lane of a kernel, several blocks of the CPU path, and a tail
)


def filled(value, **at):
    """A row of one value, but for others at the columns that the names say: c5=1.0."""
    row = torch.full((VOCAB,), value)
    for column, other in at.items():
        row[int(column[1:])] = other
    return row


def noise(deviation=1.0, seed=0):
    return deviation * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


ROWS = {
    "a greedy temperature": (noise(3.0), 1e-6),
    "ties at a greedy temperature": (filled(1.0, c3=5.0, c600=5.0), 1e-6),
    "filled with -1e9": (filled(-1e9), 0.6),
    "filled with -1e30": (filled(-1e30), 1e-6),
    "filled with finfo.min": (filled(LEAST), 1.0),
    "finfo.min, else -inf": (filled(-torch.inf, c3=LEAST), 1.0),
    "all but two filled with finfo.min": (filled(LEAST, c3=1.0, c600=2.0), 1.0),
    "forced by finfo.max": (torch.where(filled(0.0, c3=1.0) > 0, MOST, noise()), 1.0),
    "two near 3e38": (filled(1.0, c3=3e38, c600=3e38), 1.0),
    "from -3e38 to 3e38": (filled(-3e38, c3=3e38), 1.0),
    "spread over 1e36": (noise(1e36), 1.0),
    "two values next to each other at 7e8": (filled(7.4e8, c3=7.4e8 - 64), 1.0),
}


def logprobs_and_gradient(op, logits, temperature):
    logits = logits.detach()[None].requires_grad_()
    outputs = op(logits, torch.tensor([3], device=logits.device), temperature=temperature)
    (gradient,) = torch.autograd.grad(outputs.logprobs.sum() + 0.3 * outputs.entropy.sum(), logits)
    return *(o.detach() for o in outputs), gradient


def assert_right(actual, exact):
    """Log-probability and lse to an ulp of the largest, as fp32 rounds them; entropy and gradient as everywhere."""
    logprobs, entropy, lse, gradient = (x.cpu() for x in actual)
    scale = exact[2].abs().clamp(min=1)
    for a, e in ((logprobs, exact[0]), (lse, exact[2])):
        rounded = e.float().double()  # inf where fp32 ends
        assert torch.equal(a.double(), rounded) or (a.double() - e).abs() <= 1e-6 * scale.maximum(
            exact[0].abs()
        )
    assert (entropy.double() - exact[1]).abs() <= 2e-6 * exact[1] + 1e-12
    assert (gradient.double() - exact[3]).abs().max() <= 2e-6 * exact[3].abs().max() + 1e-30


@pytest.mark.parametrize("case", ROWS)
def test_every_finite_logit_counts_as_what_it_is(backend, case):
    row, temperature = ROWS[case]
    exact = logprobs_and_gradient(reference.token_logprobs, row.double(), temperature)
    assert_right(logprobs_and_gradient(token_logprobs, row.to(backend), temperature), exact)


# A segment, and two.
@pytest.mark.parametrize(("count", "vocab"), [(8, VOCAB), slow(64, VOCAB), slow(8, 20000)])
def test_rows_of_one_large_value(backend, count, vocab):
    """Of values between 0.5e9 and 1.5e9 the rounding of m log2(e) / T is anything up to 64."""
    values = torch.linspace(0.5e9, 1.5e9, count).to(backend)
    logits = values[:, None].expand(count, vocab)
    outputs = token_logprobs(logits, torch.arange(count, device=backend))
    uniform = torch.full((count,), vocab, dtype=torch.float64, device=backend).log()
    assert (outputs.entropy - uniform).abs().max() <= 2e-6 * uniform[0]
    assert (outputs.logprobs + uniform).abs().max() <= 2e-6 * uniform[0]


@on_backends("direction, temperature", DIRECTIONS, [1e-6, 1e-4, 1e-2, 1e6], most=1)
def test_divergence_at_the_ends_of_the_temperatures(backend, direction, temperature):
    """5e-6 of the value, or less than 1e-7 nats; Jensen-Shannon knows x - y to an fp32 ulp, over T."""
    x = torch.stack([noise(3.0, seed) for seed in range(4)])
    y = x + torch.stack([noise(0.5, 10 + seed) for seed in range(4)])
    y[0, x[0].argmax()] = 15.0
    options = {"direction": direction, "temperature": temperature}
    exact = reference.token_kl(x.double(), y.double(), **options)
    value = token_kl(x.to(backend), y.to(backend), **options).cpu().double()
    blurred = (
        min((2**-23 * 15 / temperature) ** 2 / 8, 0.1) if direction == "jensen-shannon" else 0.0
    )
    assert ((value - exact).abs() <= 5e-6 * exact + 1e-7 + blurred).all(), (value, exact)
    assert (value >= 0).all()


def test_divergence_of_logits_beyond_its_bound_is_nan(backend):
    x = torch.stack([filled(0.0, c3=3e38), filled(0.0, c3=2e19)]).to(backend)
    assert token_kl(x, torch.zeros_like(x)).isnan().all()


@on_backends("column", [3, 900], most=1)
def test_a_forced_token_is_right_or_nan(backend, column):
    """KL(forced || other) = -log q(forced), to 5e-8 of the distance between the rows; NaN where that says nothing."""
    other = noise(seed=1)
    exact = -torch.log_softmax(other.double(), -1)[column]
    for height in (30, 100, 300, 600, 1000, 1e4, 1e6, 1e8, 1e12, 1e18):
        x = noise()
        x[column] = height
        value = token_kl(x[None].to(backend), other[None].to(backend)).cpu().double()
        known = (value - exact).abs() <= 1e-6 * exact + 5e-8 * height
        assert value.isnan() if height > 1e7 else known, (height, value)
