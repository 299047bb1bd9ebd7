"""Rows of logits, an op's outputs and gradient of them, and how far both may be from fp64."""

import torch

from fused_rl import reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
OUTPUTS = ("logprobs", "entropy", "lse")


def random_rows(n, vocab, dtype, device, seed=0):
    """Logits as a language model's: most of the mass on few tokens, the target anywhere."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, vocab, generator=generator)
    return logits.to(device, dtype), torch.randint(vocab, (n,), generator=generator).to(device)


def run(op, logits, targets, upstream, **options):
    """The three outputs, and the logits' gradient for upstream gradients {output: tensor}."""
    logits = logits.detach().requires_grad_()
    outputs = op(logits, targets, **options)
    loss = sum(
        (getattr(outputs, name) * g.to(outputs.lse.dtype)).sum() for name, g in upstream.items()
    )
    return outputs, torch.autograd.grad(loss, logits)[0]


def upstream_of(shape, device, names=OUTPUTS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(device) for name in names}


def exact(logits, targets, upstream, **options):
    return run(reference.token_logprobs, logits.double(), targets, upstream, **options)


def assert_gradient_close(actual, expected, naive):
    """At most twice the error of the reference in the logits' dtype; 16-bit ones within an ulp in 99.9 %, 2 in all.

    Where terms cancel (log p + H changes its sign; a vocabulary of one) two fp32 ulps of the row's largest are allowed.
    """
    error = (actual.double() - expected).abs()
    allowed = (naive.double() - expected).abs().max()
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


VIEWS = {  # logits of (2, 3) rows whose strides differ, over one vocabulary
    "contiguous": lambda x: x[:, :3].contiguous(),
    "sequence cut off": lambda x: x[:, :3],
    "odd row stride": lambda x: torch.cat([x[:, :3], x[:, :3, :1]], -1)[..., :-1],
    "sequence first": lambda x: x[:, :3].transpose(0, 1).contiguous().transpose(0, 1),
    "every second row": lambda x: x[:, :3].repeat_interleave(2, 1)[:, ::2],
    "offset storage": lambda x: (
        torch.cat([x[:, :3].flatten(), x[0, 0, :1]]).roll(1)[1:].view(2, 3, -1)
    ),
    "columns apart": lambda x: x[:, :3].repeat_interleave(2, -1)[..., ::2],
}
