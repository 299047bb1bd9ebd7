"""token_logprobs in autograd, in place, under torch.compile and torch.func, and as a registered operator."""

import pytest
import torch

from fused_rl import TokenSupport, token_logprobs
from tests.logits import FLOATS, random_rows, run, upstream_of
from tests.marks import cpu_fast, on_backends


def test_saved_state_is_linear_in_the_rows(backend):
    logits, targets = random_rows(6, 5000, torch.bfloat16, backend)
    logits.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        token_logprobs(logits, targets, mask=targets > 100)
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    kept.pop(logits.untyped_storage().data_ptr())
    assert sum(kept.values()) <= 6 * 40


CUTS = {"whole": lambda x: x, "cut": lambda x: x[:, :-1], "turned": lambda x: x.transpose(0, 1)}


@on_backends("dtype, cut", FLOATS, CUTS, most=1)
def test_inplace_gradient_takes_the_storage_of_the_logits(backend, dtype, cut):
    leaf, targets = random_rows(12, 300, dtype, backend)
    leaf, targets = leaf.view(3, 4, 300), cut(targets.view(3, 4))
    upstream = upstream_of(targets.shape, backend)
    options = {"mask": targets > 100}
    expected, expected_gradient = run(
        lambda x, y, **more: token_logprobs(cut(x), y, **more), leaf, targets, upstream, **options
    )
    leaf.requires_grad_()
    logits, seen = cut(leaf * 1), []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    outputs = token_logprobs(logits, targets, inplace=True, **options)
    assert all(map(torch.equal, outputs, expected))
    sum((getattr(outputs, name) * g).sum() for name, g in upstream.items()).backward()
    assert torch.equal(leaf.grad, expected_gradient)
    assert seen == [logits.data_ptr()]
    assert torch.equal(logits.detach(), cut(expected_gradient))


def test_inplace_makes_every_later_use_raise(backend):
    leaf, targets = random_rows(4, 60, torch.float32, backend)
    leaf.requires_grad_()
    logits = leaf * 1
    first = token_logprobs(logits, targets, inplace=True).entropy.sum()
    second = token_logprobs(logits, targets).entropy.sum()
    square = logits.square().sum()
    first.backward(retain_graph=True)
    for loss in (first, second, square):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(retain_graph=True)


def test_inplace_without_a_gradient_leaves_the_logits_alone(backend):
    logits, targets = random_rows(4, 60, torch.float32, backend)
    before = logits.clone()
    token_logprobs(logits, targets, inplace=True)  # nothing requires a gradient: a leaf may come
    with torch.no_grad():
        token_logprobs(logits.requires_grad_(), targets, inplace=True)
    assert torch.equal(logits.detach(), before)


@cpu_fast
def test_operators_pass_opcheck(backend):
    logits, targets = random_rows(6, 40, torch.float32, backend)
    logits = logits.view(2, 3, 40).requires_grad_()
    targets = targets.view(2, 3)
    per_row = 0.5 + torch.rand(2, 3, device=backend)
    forward = torch.ops.fused_rl.token_logprobs.default
    given = logits[:, :-1], targets[:, :-1], targets[:, 1:] > 20, per_row[:, :-1], *[None] * 3
    torch.library.opcheck(forward, (*given, 1.0, 3.0, False))
    support = TokenSupport.from_lists([[*range(i, 40, 7)] if i % 2 else [] for i in range(6)])
    kept = support.to(backend).of_rows((6,), targets.device)
    rows, chosen = logits.detach().view(6, 40), torch.tensor([39, 8, 5, 38, 4, 19], device=backend)
    tensors, options = (rows, chosen, None, None, *kept), (0.7, None, False)
    torch.library.opcheck(forward, (rows.clone().requires_grad_(), *tensors[1:], *options))
    logprobs, entropy, lse, *state = forward(*tensors, *options)
    arguments = logprobs, None, lse, entropy, *tensors, *state, *options
    torch.library.opcheck(torch.ops.fused_rl.token_logprobs_backward.default, arguments)


def test_inplace_under_compile_raises(backend):
    logits, targets = random_rows(4, 60, torch.float32, backend)
    compiled = torch.compile(
        lambda x: token_logprobs(x, targets, inplace=True).lse, backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"inplace=True is not supported under torch\.compile"):
        compiled(logits)


def test_autocast_changes_nothing(backend):
    logits, targets = random_rows(4, 60, torch.float32, backend)
    expected = token_logprobs(logits, targets)
    with torch.autocast(backend, dtype=torch.bfloat16):
        assert all(map(torch.equal, token_logprobs(logits, targets), expected))


def test_inplace_leaves_nothing_to_differentiate_again(backend):
    logits, targets = random_rows(4, 60, torch.float32, backend)
    x = logits.requires_grad_() * 1
    outputs = token_logprobs(x, targets, inplace=True)
    with pytest.raises(RuntimeError, match="leave out create_graph"):
        torch.autograd.grad(outputs.logprobs.sum(), x, create_graph=True)
    assert torch.equal(x, logits)
