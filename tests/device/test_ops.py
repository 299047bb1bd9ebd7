"""Every public op on the device: the values and gradients of the CPU, and how often the host waits."""

import inspect

import pytest
import torch

import fused_rl
from tests.device import tensors
from tests.device.cases import CASES
from tests.device.steps import process_group
from tests.device.test_launches import of_device
from tests.hostile import OPS
from tests.test_hostile import WHOLE, check


def run(case, put):
    """Outputs and gradients of a case for random upstream gradients."""
    outputs, leaves = case.call(put)
    outputs = list(outputs)
    made = torch.Generator().manual_seed(9)
    upstream = [put(torch.randn(o.shape, generator=made).to(o.dtype)) for o in outputs]
    used = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
    if used and leaves:
        torch.autograd.backward([o for o, _ in used], [g for _, g in used])
    return [o.detach() for o in outputs], [leaf.grad for leaf in leaves]


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_that_of_the_cpu(device, name):
    """On the CPU twins; compiled kernels are compared in test_launches.py."""
    case = CASES[name]
    with process_group():
        cpu = run(case, on_cpu)
        with tensors.counted() as waits:
            found = run(case, tensors.put)
    for ours, theirs in zip(sum(found, []), sum(cpu, []), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.device == tensors.DEVICE and ours.dtype == theirs.dtype
            torch.testing.assert_close(ours.inner, theirs, rtol=1e-4, atol=2e-6)
    assert waits.reads.total() == case.reads, waits.reads
    assert not waits.uploads


# Forward and backward together: of a mask how many rows count; of kept sets how many rows are gathered, and in the
# backward pass how many different ids.
READS = {name: 3 if "support" in name else 1 for name in OPS if name.startswith("linear")}


@pytest.mark.parametrize("name", OPS)
def test_an_op_on_logits_is_its_definition(device, name):
    with process_group(), tensors.counted() as waits:
        check(of_device(OPS[name]), WHOLE[1])
    assert waits.reads.total() == READS.get(name, 0), waits.reads
    assert not waits.uploads


def test_every_public_op_has_a_case():
    functions = {name for name in fused_rl.__all__ if inspect.isfunction(getattr(fused_rl, name))}
    listed = {case.op for case in CASES.values()} | {name.partition(",")[0] for name in OPS}
    assert functions == listed - {"reference"}
