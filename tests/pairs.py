"""Two tensors of logits, their divergence in fp64, and how far an op may be from it."""

import torch

DIRECTIONS = ("reverse", "forward", "jensen-shannon")


def pair(*shape, dtype=torch.float32, spread=3.0, distance=0.5, seed=0, device="cpu"):
    """Logits and reference logits that differ by noise of the given standard deviation, before rounding."""
    generator = torch.Generator().manual_seed(seed)
    x = spread * torch.randn(*shape, generator=generator)
    y = x + distance * torch.randn(*shape, generator=generator)
    return x.to(device, dtype), y.to(device, dtype)


def exact(x, y, direction, temperature=1.0, jsd_beta=0.5):
    """fp64, by sums whose terms are >= 0, so that close distributions keep their digits."""
    logp, logq = (torch.log_softmax(z.double() / temperature, -1) for z in (x, y))
    none = logp.isinf() & logq.isinf()
    logp, logq = logp.masked_fill(none, -1e4), logq.masked_fill(none, -1e4)
    if direction == "forward":
        logp, logq = logq, logp
    if direction == "jensen-shannon":
        d = (logp - logq).clamp(-700, 700)
        sides = ((1 - jsd_beta, logp, jsd_beta, -d), (jsd_beta, logq, 1 - jsd_beta, d))
        terms = [share * z.exp() * _excess_log(other * d.expm1()) for share, z, other, d in sides]
        return sum(terms).sum(-1)
    d = logp - logq
    excess = torch.expm1(-d) + d
    excess = torch.where(d.abs() < 1e-3, d**2 / 2 - d**3 / 6 + d**4 / 24, excess)
    return (logp.exp() * excess).sum(-1)


def _excess_log(t):
    series = t**2 / 2 - t**3 / 3 + t**4 / 4 - t**5 / 5 + t**6 / 6
    return torch.where(t.abs() < 1e-2, series, t - torch.log1p(t))


def both_gradients(op, x, y, upstream, **options):
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    value = op(x, y, **options)
    return value.detach(), *torch.autograd.grad(value, (x, y), upstream.to(value.dtype))
