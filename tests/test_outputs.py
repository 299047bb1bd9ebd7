"""What a caller may do with an op: modify its outputs in place, as in plain PyTorch; go back through a graph twice."""

import functools

import pytest
import torch

from tests.hostile import OPS, build, placed
from tests.marks import slow
from tests.test_hostile import SMALL

# The ranks of a split vocabulary begin again at each reduction; the last is a chain of two ops.
NAMES = [name for name in OPS if not name.startswith(("vocab_parallel", "topk_kl"))]
CELLS = [(where, name) for where in ("cpu", "kernel") for name in NAMES]


@pytest.mark.parametrize(
    ("backend", "name"),
    [slow(*cell) if cell[0] == "kernel" else cell for cell in CELLS],
    indirect=["backend"],
)
def test_outputs_may_be_modified_and_a_graph_used_again(backend, name):
    """What was kept for the backward pass is no output; a head is cut into tiles, whose loss recomputes gradients."""
    op, tiles = OPS[name], {}
    if name.startswith("linear") and "support" not in name:
        tiles = {"workspace_mb": 1e-3}
    # With a mask a head's outputs are copies.
    batch = op.prepare(placed(build(SMALL[0]._replace(masked=0.0)), backend))
    leaves = [leaf.requires_grad_() for leaf in op.leaves(batch)]

    def outputs():
        found = [*op.call(functools.partial(op.ours, **tiles), batch, *leaves)]
        return found, [torch.linspace(0.5, 1, o.numel()).view(o.shape).to(o) for o in found]

    def gradients(outputs, upstream):
        total = sum((o * g).sum() for o, g in zip(outputs, upstream, strict=True))
        options = {"allow_unused": True, "retain_graph": True, "materialize_grads": True}
        return torch.autograd.grad(total, leaves, **options)

    plain, upstream = outputs()
    expected = gradients([2 * output for output in plain], upstream)
    modified, _ = outputs()
    found = gradients([output.mul_(2) for output in modified], upstream)
    assert all(map(torch.equal, found, expected))
    if "inplace" not in name:
        kept = [gradient.clone() for gradient in found]
        for again in (gradients(modified, upstream), gradients(modified, upstream)):
            for gradient, same in zip(kept, again, strict=True):
                assert (gradient - same).abs().max() <= 1e-5 * gradient.abs().max()
        assert all(map(torch.equal, found, kept))
