"""Masked reductions against the same over the kept elements alone, in fp64; nothing masked reaches anything."""

from functools import partial

import pytest
import torch

from fused_rl import masked_mean, masked_sum, masked_var, whiten
from tests.one_process import GROUP, together

F64 = torch.float64


def example(*shape, keep=0.6, seed=0, dtype=torch.float32):
    """Values with NaN and inf wherever the mask is False."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 3 + 5
    mask = torch.rand(shape, generator=generator) < keep
    rubbish = torch.where(torch.rand(shape, generator=generator) < 0.5, torch.nan, -torch.inf)
    return torch.where(mask, values, rubbish).to(dtype), mask


def test_variance_does_not_cancel():
    """A large mean: E[x^2] - E[x]^2 in fp32 would be off by more than the variance."""
    values = 1e4 + torch.randn(1000, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1000, dtype=torch.bool)
    want = values.double().var().item()
    assert masked_var(values, mask).item() == pytest.approx(want, rel=1e-4)
    assert whiten(values, mask).double().var().item() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_at_least_fp32(dtype):
    values, mask = example(3, 300, dtype=dtype)
    for op in (masked_sum, masked_mean, masked_var, whiten):
        assert op(values, mask).dtype == (F64 if dtype == F64 else torch.float32)
    torch.testing.assert_close(
        masked_mean(values, mask).double(), values[mask].double().mean(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten(shift_mean):
    values, mask = example(7, 11)
    values.requires_grad_()
    got = whiten(values, mask, shift_mean=shift_mean)
    x = values.detach()[mask].double()
    want = (x - x.mean()) / (x.var() + 1e-8).sqrt() + (0 if shift_mean else x.mean())
    torch.testing.assert_close(got[mask].double(), want, rtol=1e-6, atol=1e-6)
    assert (got[~mask] == 0).all()
    (gradient,) = torch.autograd.grad(got.sum(), values)  # the moments are constants
    torch.testing.assert_close(gradient, torch.where(mask, (x.var() + 1e-8).rsqrt().float(), 0))


def test_whiten_over_a_process_group():
    """As over the union of all ranks' elements, also where the last rank keeps nothing."""
    values, mask = example(2, 40, seed=5)
    for kept in (mask, mask & torch.tensor([[True], [False]])):
        for shift_mean in (True, False):
            whitened = partial(whiten, shift_mean=shift_mean)
            ranks = [
                partial(whitened, *rows, process_group=GROUP)
                for rows in zip(values, kept, strict=True)
            ]
            found = torch.stack(together(ranks))
            torch.testing.assert_close(found, whitened(values, kept), rtol=0, atol=1e-6)
