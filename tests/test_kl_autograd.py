"""token_kl as autograd, torch.compile and a careless caller see it."""

import pytest
import torch

import fused_rl
from fused_rl import reference
from tests.pairs import DIRECTIONS, both_gradients, exact, pair

pytestmark = pytest.mark.usefixtures("seeded")


def test_only_what_is_needed(backend):
    """No gradient for a reference that does not require one: the kernel does not write it."""
    x, y = pair(3, 700, device=backend)
    x.requires_grad_()
    fused_rl.token_kl(x, y).sum().backward()
    assert x.grad is not None
    assert y.grad is None


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reference_gradients(direction):
    """The oracle itself, and the fixed example of the KL's gradient."""
    x, y = pair(2, 6)
    x, y = x.double().requires_grad_(), y.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: reference.token_kl(a, b, direction=direction, temperature=0.7), (x, y)
    )
    torch.testing.assert_close(
        reference.token_kl(x, y, direction=direction), exact(x, y, direction)
    )


@pytest.mark.parametrize("jsd_beta", [None, 0.3])
@pytest.mark.parametrize("masked", [False, True])
def test_operators_pass_opcheck(backend, jsd_beta, masked):
    (x, y), ops = pair(3, 40, device=backend), torch.ops.fused_rl
    mask = torch.tensor([True, False, True], device=backend) if masked else None
    options = mask, None, 0.7, jsd_beta, None
    divergence, *state = ops.token_kl(x, y, *options)
    given = (divergence.sin(), divergence, x, y, mask, None, *state, *options[2:], True, True)
    torch.library.opcheck(ops.token_kl_backward.default, given)
    torch.library.opcheck(ops.token_kl.default, (x.requires_grad_(), y.requires_grad_(), *options))


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7), (7,)])
def test_no_rows_and_one_row(backend, shape):
    x, y = pair(*shape, device=backend)
    value, dx, dy = both_gradients(fused_rl.token_kl, x, y, torch.ones(shape[:-1], device=backend))
    assert value.shape == shape[:-1]
    assert dx.shape == dy.shape == shape
