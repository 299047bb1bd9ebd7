"""token_kl as autograd, torch.compile and a careless caller see it."""

import pytest
import torch

from fused_rl import reference
from tests.pairs import DIRECTIONS, exact, pair

pytestmark = pytest.mark.usefixtures("seeded")


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
