"""Public ops on the device: compiled for sm_90, every launch checked, its PTX executed and compared with fp64."""

import itertools

import pytest
import torch

import fused_rl
from fused_rl import reference
from tests.device.on_device import on_device
from tests.device.tensors import put
from tests.hostile import OPS
from tests.test_hostile import WHOLE, check


def of_device(op):
    ours = tuple(map(on_device, op.ours)) if isinstance(op.ours, tuple) else on_device(op.ours)
    return op._replace(ours=ours)


def names(launches):
    return [launch.name for launch in launches]


def test_one_kernel_is_compiled_checked_and_executed(kernels):
    rewards, values = torch.randn(2, 2, 300)
    mask = torch.rand(2, 300) < 0.8
    options = {"gamma": 0.99, "gae_lambda": 0.95}
    ours = fused_rl.gae(put(rewards), put(values), put(mask), **options)
    wanted = reference.gae(rewards.double(), values.double(), mask, **options)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a.inner, b.float(), rtol=1e-5, atol=1e-5)
    assert names(kernels.launches) == kernels.compiled == ["gae_kernel"]
    assert kernels.launches[0].grid == (2, 1, 1)


# of fp32 at an odd stride with a mask and temperatures per row; bf16 with columns apart; fp32, transposed
BATCHES = range(len(WHOLE))
TOO_LARGE = {("topk_kl, of token_logprobs", 0)}  # its log-probabilities of logits at -3e38 are beyond fp32


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), sorted({*itertools.product(OPS, BATCHES)} - TOO_LARGE))
def test_ops(kernels, name, batch):
    check(of_device(OPS[name]), WHOLE[batch])
    assert kernels.launches


# Whole tiles and a tail; the last of several segments almost empty; rows that begin anywhere, two bytes per load.
LONG = {
    "aligned": {"vocab": 16384, "view": "contiguous"},
    "tail": {"vocab": 9001, "view": "contiguous"},
    "segments": {"vocab": 33000, "view": "odd stride"},
}
ON_LOGITS = ["token_logprobs", "token_logprobs, K targets", "token_logprobs, support", "token_kl"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("form", LONG)
@pytest.mark.parametrize("name", ON_LOGITS)
@pytest.mark.parametrize("split", [True, False])
def test_long_rows(kernels, monkeypatch, name, form, dtype, split):
    pass
