"""Kept sets from logits in autograd: the reference itself, the registered operators, torch.compile."""

import torch

import fused_rl
from fused_rl import TokenSupport, reference
from tests.kept_sets import (
    BF16,
    outputs_and_gradient,
    random_logits,
    run_on,
    some_rows,
    upstream_of,
)
from tests.marks import cpu_fast, on_backends


@on_backends("used", range(3), most=0)
def test_gradient_of_one_output(backend, used):
    lists, targets = some_rows(vocab=701, longest=300)
    support = TokenSupport.from_lists(lists).to(backend)
    logits, targets = run_on(backend, random_logits(len(lists), 701), targets)
    upstream = [u.to(backend) if i == used else None for i, u in enumerate(upstream_of(targets))]
    found = outputs_and_gradient(fused_rl, logits, targets, upstream, support=support)
    exact = outputs_and_gradient(reference, logits.double(), targets, upstream, support=support)
    torch.testing.assert_close(found[3].double(), exact[3], rtol=2e-6, atol=2e-7)


@cpu_fast
def test_operators_pass_opcheck(backend):
    lists = [[3], [5, 2, 9], [], [1, 0, 40]]
    targets = torch.tensor([3, 9, 50, 1])
    logits, targets = run_on(backend, random_logits(len(lists), 61).to(BF16), targets)
    kept = TokenSupport.from_lists(lists).to(backend).of_rows(targets.shape, targets.device)
    per_row = torch.linspace(0.5, 2, len(lists), device=backend)
    tensors, options = (targets, targets >= 0, per_row, *kept), (1.0, 3.0, False)
    forward = torch.ops.fused_rl.token_logprobs.default
    torch.library.opcheck(forward, (logits.requires_grad_(), *tensors, *options))
    _, entropy, _, *state = forward(logits.detach(), *tensors, *options)
    grads = (*upstream_of(targets)[:2], None)
    saved = (entropy, logits.detach(), *tensors, *state, *options)
    torch.library.opcheck(torch.ops.fused_rl.token_logprobs_backward.default, (*grads, *saved))
