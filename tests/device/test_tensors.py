"""What tensors of the device do that CPU tensors do not."""

import pytest
import torch

from tests.device.tensors import counted, put

MIXED = {
    "add": lambda x: x + torch.ones(4),
    "cat": lambda x: torch.cat([x, torch.ones(4)]),
    "where": lambda x: torch.where(x > 0, torch.ones(4), x),
    "an index of the device into the CPU": lambda x: torch.ones(4)[x.long()],
    "values of the CPU": lambda x: x.__setitem__([0, 1], torch.ones(2)),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([1]), x[:, None]),
    "matmul": lambda x: torch.ones(2, 4) @ x,
}


@pytest.mark.parametrize("operation", MIXED.values(), ids=MIXED)
def test_mixing_devices_raises(device, operation):
    with pytest.raises(RuntimeError, match=r"tests/device/test_tensors.py:\d+.*on cuda:0"):
        operation(put(torch.zeros(4)))


READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "copy_": lambda x: torch.empty(4).copy_(x),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("operation", READS.values(), ids=READS)
def test_a_read_is_counted_with_its_line(device, operation):
    with counted() as waits:
        operation(put(torch.ones(4)))
    ((where, count),) = waits.reads.items()
    assert count == 1 and where.startswith("tests/device/test_tensors.py:")


def test_uploads_that_block_are_counted(device):
    with counted() as waits:
        torch.ones(3).to("cuda")
        torch.tensor([1.0, 2.0], device="cuda")
        torch.ones(3).to("cuda", non_blocking=True)
        put(torch.ones(3)).copy_(torch.zeros(3))
    assert sum(waits.uploads.values()) == 3
