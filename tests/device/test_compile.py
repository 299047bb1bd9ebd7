"""Every op that is a part of a compiled graph, traced for tensors of a GPU, which takes other branches than a CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_rl
from tests import hostile_tokens
from tests.hostile import OPS
from tests.marks import slow
from tests.test_compile import FORMS, TOKENS, batch_of, breaks_graph, called, leaves_of

# In these the test's own selection of rows has a size that only values tell.
SELECTING = ("token_logprobs, support and shift", "policy_token_loss")
IN_GRAPH = [
    name
    for name in [*FORMS, *TOKENS]
    if not (name in OPS and breaks_graph(name)) and not name.startswith(SELECTING)
]
FAST = ("token_logprobs", "token_kl", "gae")


def fake(mode, x):
    """A tensor of the device without values; kept sets of such."""
    if isinstance(x, fused_rl.TokenSupport):
        return fused_rl.TokenSupport(fake(mode, x.ids), fake(mode, x.offsets))
    if not isinstance(x, torch.Tensor):
        return x
    with mode:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return made.requires_grad_(x.requires_grad)


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in IN_GRAPH])
def test_an_op_is_traced_for_the_device(name):
    torch._dynamo.reset()
    if name in OPS:
        batch = batch_of(5)
        leaves = leaves_of(name, batch)
        call = called(name)
    else:
        function = hostile_tokens.FUNCTIONS[name]
        batch = hostile_tokens.build(hostile_tokens.Case(1.0, (4, 5), "half", torch.float32, 0))
        leaves = [getattr(batch, function.leaf).requires_grad_()]

        def call(batch, leaf):
            return function.ours(leaf, batch)

    mode = FakeTensorMode()
    fakes = {field: fake(mode, x) for field, x in batch._asdict().items()}
    leaves = [fake(mode, leaf) for leaf in leaves]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with mode:
        outputs = compiled(batch._replace(**fakes), *leaves)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
        total = sum(output.sum() for output in outputs)
        used = [output.device.type for output in outputs]
        if total.requires_grad:
            gradients = torch.autograd.grad(total, leaves, allow_unused=True)
            used += [gradient.device.type for gradient in gradients if gradient is not None]
    assert set(used) == {"cuda"}
