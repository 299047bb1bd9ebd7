"""Rows with kept sets of all sizes, and the outputs and gradients of an op on them."""

import torch

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
VOCAB = 603


def some_rows(vocab=VOCAB, longest=500, seed=0):
    """Lists of ids, and a target of each: singletons, whole rows, 2 to `longest` ids, all ids, in any order."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, 0, 2, 3, 8, 82, 128, 129, 1, 0, longest, vocab]
    lists = [torch.randperm(vocab, generator=generator)[:size] for size in sizes]
    targets = [row[len(row) // 2] if len(row) else torch.tensor(vocab // 3) for row in lists]
    return lists, torch.stack(targets)


def random_logits(n, vocab=VOCAB, seed=0, scale=3.0):
    return scale * torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed))


def outputs_and_gradient(module, logits, targets, upstream, inplace=False, **options):
    leaf = logits.detach().clone().requires_grad_()
    options |= {"inplace": True} if inplace else {}
    outputs = module.token_logprobs(leaf * 1 if inplace else leaf, targets, **options)
    given = [(o, u.to(o.dtype)) for o, u in zip(outputs, upstream, strict=True) if u is not None]
    outputs_used, grads = zip(*given, strict=True)
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs_used, leaf, grads)]


def assert_same_bits(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
        assert not a.isnan().any()


def run_on(backend, *tensors):
    return [t.to(backend) for t in tensors]
