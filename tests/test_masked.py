"""Masked reductions against the same over the kept elements alone, in fp64; nothing masked reaches anything."""

from functools import partial

import pytest
import torch

from fused_rl import masked_var, whiten
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
