"""What a caller may do with an output: modify it in place while it carries a gradient, as in plain PyTorch."""

import torch

import fused_rl
from fused_rl import reference
from tests.marks import cpu_fast, on_backends

LEADING, VOCAB, WIDTH = (2, 5), 60, 8


def leaves(device, seed=0):
    """logits, hidden, weight, and the targets and a mask."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (*LEADING, VOCAB), (*LEADING, WIDTH), (VOCAB, WIDTH)
    inputs = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    targets = torch.randint(VOCAB, LEADING, generator=generator).to(device)
    return inputs, targets, (torch.rand(LEADING, generator=generator) < 0.6).to(device)


def logprobs(module, logits, hidden, weight, targets, **options):
    return module.token_logprobs(logits, targets, **options)


def inplace_logprobs(module, logits, hidden, weight, targets):
    return module.token_logprobs(logits * 1, targets, inplace=True)


def linear_logprobs(module, logits, hidden, weight, targets, **options):
    return module.linear_token_logprobs(hidden, weight, targets, **options)


def kept_sets(targets):
    """Each target and its neighbours, and the whole vocabulary for every third row."""
    ids = [
        None if i % 3 == 2 else [*{t, t // 2, 7}] for i, t in enumerate(targets.flatten().tolist())
    ]
    return fused_rl.TokenSupport.from_lists(ids).to(targets.device)


def supported(module, logits, hidden, weight, targets):
    return module.token_logprobs(logits, targets, support=kept_sets(targets))


def supported_head(module, logits, hidden, weight, targets):
    return module.linear_token_logprobs(hidden, weight, targets, support=kept_sets(targets))


def divergence(module, logits, hidden, weight, targets, **options):
    return [module.token_kl(logits, (logits + logits.sin()).detach(), **options)]


def linear_divergence(module, logits, hidden, weight, targets, **options):
    return [
        module.linear_token_kl(
            hidden, weight, hidden.sin().detach(), weight.sin().detach(), **options
        )
    ]


OPS = {
    "token_logprobs": (logprobs, {"shift": True}),
    "token_logprobs inplace": (inplace_logprobs, {}),
    "token_logprobs support": (supported, {}),
    "linear_token_logprobs": (linear_logprobs, {}),
    "linear_token_logprobs support": (supported_head, {}),
    "token_kl": (divergence, {}),
    "token_kl jensen-shannon": (divergence, {"direction": "jensen-shannon"}),
    "linear_token_kl": (linear_divergence, {}),
    "linear_token_kl jensen-shannon": (linear_divergence, {"direction": "jensen-shannon"}),
}


@on_backends("op", OPS, most=0)
def test_a_modified_output_has_the_gradient_of_plain_torch(backend, op):
    """Every output, one after the other, in one graph: what was kept for the backward pass is none of them."""
    function, options = op
    inputs, targets, mask = leaves(backend)

    def gradients(module, dtype):
        xs = [x.to(dtype).requires_grad_() for x in inputs]
        outputs = function(module, *xs, targets, **options)
        for output in outputs:
            output[~mask[:, 1:] if "shift" in options else ~mask] = 0.0
            output.mul_(3.0).clamp_(-8.5, 8.5)
        loss = sum((output * (i + 1)).sum() for i, output in enumerate(outputs))
        return [d for d in torch.autograd.grad(loss, xs, allow_unused=True) if d is not None]

    actual = gradients(fused_rl, torch.float32)
    expected = gradients(reference, torch.float64)
    for d, exact in zip(actual, expected, strict=True):
        assert (d.double() - exact).abs().max() <= 2e-6 * exact.abs().max()


@cpu_fast
def test_a_modified_output_of_a_token_loss(backend):
    """The first backward pass has its gradients already; the second one recomputes them from what was kept."""
    (_, hidden, weight), targets, mask = leaves(backend)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    tiles = (512, 1e-3)  # one, and a row at a time
    for workspace_mb in tiles:
        loss, logprobs, entropy = fused_rl.linear_token_loss(
            hidden, weight, targets, lambda lp, h: -lp - 0.1 * h.square(), workspace_mb=workspace_mb
        )
        entropy[mask] = 0.0
        logprobs.add_(1.0)
        first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        second = torch.autograd.grad(loss, (hidden, weight))
        for a, b in zip(first, second, strict=True):
            assert (a - b).abs().max() <= 2e-6 * b.abs().max()
