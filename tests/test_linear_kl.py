"""linear_token_kl: values, every gradient, work and memory."""

import pytest
import torch

import fused_rl
from tests.heads import (
    FP32,
    MORE_TOKENS,
    Work,
    make,
    reference_head,
)


@pytest.mark.usefixtures("cpu")
def test_kl_retained_frozen_and_empty():
    shape, workspace_mb = MORE_TOKENS
    leaves, targets, mask = make(shape, FP32)
    ref = reference_head(shape, FP32)
    options = {"bias": leaves[2], "workspace_mb": workspace_mb, **ref}
    kl = fused_rl.linear_token_kl(*leaves[:2], **options)
    assert torch.equal(
        *(
            torch.autograd.grad(kl.square().sum(), leaves[1], retain_graph=keep)[0]
            for keep in (True, False)
        )
    )
    # Policy, reference, both again, the hidden states' gradient; none of the weight's.
    with Work() as work:
        fused_rl.linear_token_kl(
            leaves[0], leaves[1].detach(), **ref, workspace_mb=workspace_mb
        ).sum().backward()
    assert work.flop == 2 * 22 * 131 * (3 * 16 + 2 * 24)
    none = fused_rl.linear_token_kl(*leaves[:2], **options, mask=torch.zeros_like(mask))
    assert (none == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(none.sum(), leaves))
    # the reference is a constant, whatever it requires: a teacher's head that nobody froze
    live = {name: x.clone().requires_grad_() for name, x in ref.items()}
    trained = fused_rl.linear_token_kl(*leaves[:2], **(options | live))
    trained.sum().backward()
    assert torch.equal(trained, kl)
    assert all(x.grad is None for x in live.values())
    assert not fused_rl.linear_token_kl(*(x.detach() for x in leaves[:2]), **live).requires_grad
