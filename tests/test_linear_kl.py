"""linear_token_kl: values, every gradient, work and memory."""

import pytest
import torch

import fused_rl
from fused_rl.ops.linear_jsd import ROWS, linear_token_jsd
from tests.heads import (
    CUTS,
    FP32,
    MORE_TOKENS,
    Work,
    compare,
    kl_and_gradients,
    make,
    reference_head,
)
from tests.pairs import DIRECTIONS


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("workspace", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kl(direction, workspace):
    """In fp32 with a temperature per row; what is masked is not read, and has a gradient of exactly 0."""
    shape, workspace_mb = workspace
    leaves, targets, mask = make(shape, FP32)
    ref = reference_head(shape, FP32)
    options = {
        "direction": direction,
        "temperature": torch.linspace(0.5, 2, shape[0]),
        "mask": mask,
    }
    # logits of 20 are rounded by 1e-6, and a KL of 20 nats multiplies that: whose rounding is luckier is chance
    atol = 1e-6 if direction == "jensen-shannon" else 1e-5
    clean = compare(
        kl_and_gradients, leaves, targets, ref, atol=atol, **options, workspace_mb=workspace_mb
    )
    spoilt = ref | {"ref_hidden": ref["ref_hidden"].masked_fill(~mask[:, None], torch.nan)}
    again = kl_and_gradients(
        fused_rl, leaves, targets, spoilt, **options, workspace_mb=workspace_mb
    )
    assert all(map(torch.equal, again, clean))
    assert (clean[0][~mask] == 0).all()
    assert (clean[1][~mask] == 0).all()


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
    with (
        Work() as work
    ):  # policy, reference, both again, the hidden states' gradient; none of the weight's
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


@pytest.mark.parametrize("beta", [0.5, 0.1])
def test_any_mixture_of_jensen_shannon(beta):
    """Against plain softmax in fp64, with biases, a softcap and random upstream gradients; two blocks of rows."""
    leaves, _, _ = make((ROWS + 3, 37, 16), FP32)
    ref = reference_head((ROWS + 3, 37, 16), FP32)
    upstream = torch.rand(ROWS + 3)
    options = {"temperature": 0.7, "softcap": 5.0}
    found = linear_token_jsd(*leaves[:2], **ref, bias=leaves[2], beta=beta, **options)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    heads = (wide, [ref[name].double() for name in ("ref_hidden", "ref_weight", "ref_bias")])
    p, q = (torch.softmax(5 * torch.tanh((h @ w.T + b) / 5) / 0.7, -1) for h, w, b in heads)
    m = beta * q + (1 - beta) * p
    wanted = (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(found, leaves, upstream)
    for ours, theirs in zip(
        gradients, torch.autograd.grad(wanted, wide, upstream.double()), strict=True
    ):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item()
        )
    same = {
        "ref_hidden": leaves[0].detach(),
        "ref_weight": leaves[1].detach(),
        "ref_bias": leaves[2].detach(),
    }
    none = linear_token_jsd(*leaves[:2], **same, bias=leaves[2], beta=beta, **options)
    assert none.eq(0).all() and torch.autograd.grad(none.sum(), leaves[1])[0].eq(0).all()
    low = [leaf.detach().bfloat16() for leaf in leaves[:2]]
    narrow = linear_token_jsd(
        *low, low[0].roll(1, 0), low[1], beta=beta, logits_dtype=torch.float32
    )
    wide = linear_token_jsd(*(x.float() for x in (*low, low[0].roll(1, 0), low[1])), beta=beta)
    torch.testing.assert_close(narrow, wide)
    if beta == 0.5:
        plain = fused_rl.linear_token_kl(
            *leaves[:2], **ref, bias=leaves[2], direction="jensen-shannon", **options
        )
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-6)
