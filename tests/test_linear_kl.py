"""linear_token_kl: its work, and what it makes of a reference and of a mask without a token."""

import pytest
import torch

import fused_rl
from tests.heads import FP32, MORE_TOKENS, Work, make, reference_head


@pytest.mark.usefixtures("cpu")
def test_frozen_and_empty():
    (shape, workspace_mb), ref = MORE_TOKENS, reference_head(MORE_TOKENS[0], FP32)
    (hidden, weight, bias), _, mask = make(shape, FP32)
    options = {"bias": bias, "workspace_mb": workspace_mb}
    # Policy, reference, both again, the hidden states' gradient; none of the weight's.
    with Work() as work:
        fused_rl.linear_token_kl(hidden, weight.detach(), **ref, **options).sum().backward()
    assert work.flop == 2 * 22 * 131 * (3 * 16 + 2 * 24)
    empty = torch.zeros_like(mask)
    none = fused_rl.linear_token_kl(hidden, weight, **ref, **options, mask=empty)
    assert (none == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(none.sum(), (hidden, weight, bias)))
    # the reference is a constant, whatever it requires: a teacher's head that nobody froze
    live = {name: x.clone().requires_grad_() for name, x in ref.items()}
    fused_rl.linear_token_kl(hidden, weight, **live, **options).sum().backward()
    assert all(x.grad is None for x in live.values())
    assert not fused_rl.linear_token_kl(hidden.detach(), weight.detach(), **live).requires_grad
