"""linear_token_kl: values, every gradient, work and memory."""

import pytest
import torch

import fused_rl
from tests.heads import (
    FP32,
    MORE_TOKENS,
    Work,
    kl_and_gradients,
    make,
    reference_head,
)
from tests.pairs import DIRECTIONS

OPTIONS = [{"direction": direction} for direction in DIRECTIONS]
OPTIONS += [{"direction": "jensen-shannon", "jsd_beta": beta} for beta in (0.1, 0.7)]


def names_of(options):
    return "-".join(map(str, options.values()))


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


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("options", OPTIONS, ids=names_of)
def test_columns_banned_in_both_heads_are_as_if_they_were_not_there(options):
    """A bias of -inf, as of a padded vocabulary: values, and gradients that are exactly 0 in those rows."""
    leaves, targets, _ = make((22, 16, 131), FP32)
    ref = reference_head((22, 16, 131), FP32)
    banned = torch.arange(131) >= 120
    hidden, weight, bias = (x.detach() for x in leaves)
    padded = [hidden, weight, bias.masked_fill(banned, -torch.inf)]
    padded = [x.requires_grad_() for x in padded]
    bans = ref | {"ref_bias": ref["ref_bias"].masked_fill(banned, -torch.inf)}
    found = kl_and_gradients(fused_rl, padded, targets, bans, **options, workspace_mb=0.008)
    narrow = [hidden, weight[:120], bias[:120]]
    narrow = [x.clone().requires_grad_() for x in narrow]
    kept = {name: x if name == "ref_hidden" else x[:120] for name, x in ref.items()}
    wanted = kl_and_gradients(fused_rl, narrow, targets, kept, **options)
    assert all((gradient[120:] == 0).all() for gradient in found[2:])
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours[: len(exact)], exact, rtol=1e-5, atol=1e-6)
