"""Heads for TRL's primitives, what fp64 makes of them, and how far a replacement may be off beside TRL's own."""

import torch

from tests.integrations import formulas

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
NAMES = (*ALL, "dhidden", "dweight", "dbias")
SHAPE = (23, 16, 131)  # N, H, V: V is neither a multiple of a block nor less than one


def leaves_of(tensors, dtype):
    return [None if x is None else x.detach().to(dtype).requires_grad_() for x in tensors]


def gradients(leaves):
    return [None if x is None else x.grad for x in leaves]


def make_head(dtype, bias=True, banned=False, seed=0, width=SHAPE[1], n=SHAPE[0]):
    """hidden, weight, bias: rows from nearly flat to nearly certain; two banned tokens at most."""
    generator = torch.Generator().manual_seed(seed)
    vocab = SHAPE[2]
    hidden = torch.randn(n, width, generator=generator) * torch.linspace(0.1, 2, n)[:, None]
    weight = torch.randn(vocab, width, generator=generator)
    head_bias = torch.randn(vocab, generator=generator)
    head_bias[[3, 77]] = -torch.inf if banned else 0.5
    return [x.to(dtype) for x in (hidden, weight)] + [head_bias.to(dtype) if bias else None]


def make_targets(head, options):
    """Every other one the likeliest token, none of them banned."""
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(4, 77, head[0].shape[:1], generator=generator)
    likeliest = formulas.scores(*leaves_of(head, FP64), *options).argmax(-1)
    targets[::2] = likeliest[::2]
    return targets


def run_head(function, head, targets, options, outputs=ALL):
    """The outputs and the gradients of a loss that uses what has one, each upstream gradient at random."""
    temperature, softcap, scale = options
    found = function(*head, targets, temperature, 64, softcap, scale, outputs)
    backward_of(found[:2])
    return [*found, *gradients(head)]


def exact_head(head, targets, options):
    leaves = leaves_of(head, FP64)
    found = formulas.row_outputs(formulas.scores(*leaves, *options), targets)
    backward_of(found[:2])
    return [*found, *gradients(leaves)]


def upstream_of(outputs):
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in outputs]


def backward_of(outputs):
    outputs = [x for x in outputs if x is not None]
    torch.autograd.backward(outputs, upstream_of(outputs))


def error(found, exact):
    """Root of the mean square; a NaN or an inf where the truth has none counts as infinite."""
    same = found.double() == exact.double()  # infinite ones too
    difference = torch.where(same, 0, found.double() - exact.double())
    return (
        difference.square().mean().sqrt().nan_to_num(nan=torch.inf).item()
        if difference.numel()
        else 0.0
    )


def assert_close(name, ours, theirs, exact, slack=1.0):
    """At most the host's error against fp64, but for `slack` of luck."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
    if name == "is_top1":  # rounding to 16 bits makes ties: a row or two may fall either way
        assert (ours != exact).sum() <= (theirs != exact).sum() + (2 if slack < 2 else 0)
        return
    finite = exact[exact.isfinite()].double()
    size = finite.abs().max().item() if finite.numel() else 0.0
    allowed = slack * error(theirs, exact) + 2**-22 * size
    assert error(ours, exact) <= allowed, f"{name}: {error(ours, exact):.3g} > {allowed:.3g}"


def luck(name):
    """Of roundings to bf16 in 1500 rows: 2 % of a per-token error; a sum over them is one draw per entry.

    Over ten seeds, ours by TRL's: every per-token output 0.90 to 0.99, the gradient of hidden 0.97 to 1.00, of the
    weight 0.88 to 1.16, of the bias 0.63 to 1.44.
    """
    return {"dweight": 1.25, "dbias": 1.6}.get(name, 1.02)


def assert_near_the_host(name, ours, theirs, exact):
    """In fp32: 1e-5, and twice what the host itself is off."""
    off = (theirs.double() - exact.double()).abs()
    off = off[off.isfinite()]
    atol = 1e-5 + (2 * off.max().item() if off.numel() else 0)
    torch.testing.assert_close(
        ours, theirs, rtol=1e-5, atol=atol, msg=lambda text: f"{name}: {text}"
    )


def same_bits(one, other):
    if one is None or other is None:
        return one is other
    return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(
        one.isnan(), other.isnan()
    )
