"""Rows with finite masks in place of -inf, and what their divergence is by definition."""

import math

import torch

from fused_rl import token_kl

VOCAB = 2100  # several elements in every lane of a kernel, several blocks of the CPU path, and a tail


# A finite mask in place of -inf: which columns of a row, (VOCAB,) bool.
COLUMNS = torch.arange(VOCAB)
SOME = torch.rand(VOCAB, generator=torch.Generator().manual_seed(7))
PLACES = {
    "a column": COLUMNS == 900,
    "the first column": COLUMNS == 0,
    "whole lanes of the kernels": COLUMNS % 128 < 40,
    "the first 512 columns": COLUMNS < 512,
    "the last 60 %": COLUMNS > 0.4 * VOCAB,
    "99 % of the columns": SOME < 0.99,
    "all but five": SOME.argsort() >= 5,
}
LOWEST = "the dtype's lowest"


def masked_pairs(dtype, fill, seed=0):
    """(rows, VOCAB) twice: each place masked in x, in y, in both, and x there while y is masked everywhere else."""
    fill = torch.finfo(dtype).min if fill == LOWEST else fill
    x = 3 * torch.randn(4 * len(PLACES), VOCAB, generator=torch.Generator().manual_seed(seed))
    y = x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1))
    x[1::3] += 100.0  # an offset
    x[::5, 1500] += 60.0  # a peak
    x, y = x.to(dtype), y.to(dtype)
    for i, place in enumerate(PLACES.values()):
        x[4 * i, place] = fill
        y[4 * i + 1, place] = fill
        x[4 * i + 2, place], y[4 * i + 2, place] = fill, fill
        x[4 * i + 3, place], y[4 * i + 3, ~place] = fill, fill
    return x, y


def by_definition(x, y, direction):
    """Value, dx and dy of the sum in fp64; -1e20 and below is -inf."""
    logp, logq = (torch.log_softmax(z.double().masked_fill(z <= -1e20, -torch.inf), -1) for z in (x, y))
    if direction == "forward":
        value, dy, dx = by_definition(y, x, "reverse")
        return value, dx, dy
    p, q = logp.exp(), logq.exp()
    if direction == "reverse":
        delta = torch.where(p == 0, 0.0, logp - logq)
        value = (p * delta).sum(-1, True)
        value[((logp > -torch.inf) & (logq == -torch.inf)).any(-1)] = torch.inf
        dx = torch.where(p == 0, 0.0, p * (delta - value))
        still = value.isinf()
        return value[:, 0], dx.masked_fill(still, 0), (q - p).masked_fill(still, 0)
    log_mean = torch.logaddexp(logp, logq).masked_fill(logp.isinf() & logq.isinf(), 0.0) - math.log(2)
    a, b = (torch.where(z.exp() == 0, 0.0, z - log_mean) for z in (logp, logq))
    p_a, q_b = (p * a).sum(-1, True), (q * b).sum(-1, True)
    return (p_a + q_b)[:, 0] / 2, p * (a - p_a) / 2, q * (b - q_b) / 2


def assert_divergence(x, y, direction, device="cpu"):
    leaves = [z.to(device).requires_grad_() for z in (x, y)]
    value = token_kl(*leaves, direction=direction)
    gradients = torch.autograd.grad(value.sum(), leaves)
    exact, *exact_gradients = by_definition(x, y, direction)
    got, finite = value.detach().cpu().double(), exact.isfinite()
    distance = (x.double().amax(-1) - y.double().amax(-1)).abs()
    kl = exact if direction != "jensen-shannon" else by_definition(x, y, "reverse")[0]
    known = (distance <= 1e7) | (kl >= 0.01 * distance)
    assert torch.equal(got.isinf(), ~finite)
    assert torch.equal(got.isnan(), ~known)
    error = ((got - exact) / (3e-6 * exact + 1e-7 * distance + 1e-12))[finite & known].abs()
    assert (error <= 1).all(), (error, got, exact)
    # delta = log(p / q) is known to some ulps of the KL, p and q of their logits' distance
    digits = 1e-6 + 2e-7 * (exact.where(finite & (direction != "jensen-shannon"), 0.0) + distance)
    for gradient, best in zip(gradients, exact_gradients, strict=True):
        rounding = torch.finfo(x.dtype).eps * best.abs() if x.dtype != torch.float32 else 0.0
        allowed = rounding + (5e-6 * best.abs().amax(-1) + digits)[:, None]
        assert ((gradient.cpu().double() - best).abs() <= allowed)[known].all()
