"""Masked reductions: what is masked, NaN and inf included, reaches neither a value nor a gradient."""

import pytest
import torch

import fused_rl
from tests.distributed import run_distributed

F64 = torch.float64
VALUES = torch.tensor([[1.0, torch.nan, 3.0, 5.0], [torch.inf, -torch.inf, torch.nan, 2.0], [torch.nan] * 4])
MASK = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()


def test_reductions_see_only_what_counts():
    kept = VALUES[MASK]
    for reduce, want, per_row in (
        (fused_rl.masked_sum, kept.sum(), [9.0, 2.0, 0.0]),
        (fused_rl.masked_mean, kept.mean(), [3.0, 2.0, 0.0]),
        (fused_rl.masked_var, kept.var(), [4.0, 0.0, 0.0]),
    ):
        torch.testing.assert_close(reduce(VALUES, MASK), want)
        torch.testing.assert_close(reduce(VALUES, MASK, 1), torch.tensor(per_row))
    biased = fused_rl.masked_var(VALUES, MASK, unbiased=False)
    torch.testing.assert_close(biased, kept.var(unbiased=False))


@pytest.mark.parametrize("reduce", [fused_rl.masked_sum, fused_rl.masked_mean, fused_rl.masked_var])
def test_gradients_are_those_of_the_kept_and_exactly_zero_elsewhere(reduce):
    values = VALUES.double().requires_grad_()
    (grad,) = torch.autograd.grad(reduce(values, MASK, 1).sum(), values)
    assert (grad[~MASK] == 0).all()
    row = torch.tensor([1.0, 3.0, 5.0], dtype=F64, requires_grad=True)
    plain = {fused_rl.masked_sum: row.sum, fused_rl.masked_mean: row.mean, fused_rl.masked_var: row.var}[reduce]
    torch.testing.assert_close(grad[0, MASK[0]], torch.autograd.grad(plain(), row)[0])


def test_low_precision_is_summed_in_fp32():
    values = torch.full((4096,), 0.1, dtype=torch.bfloat16)
    total = fused_rl.masked_sum(values, torch.ones(4096, dtype=torch.bool))
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.item(), 4096 * values[0].item(), rtol=1e-5, atol=0)


def test_whiten():
    torch.manual_seed(0)
    values = 3 + 2 * torch.randn(5, 7, dtype=F64)
    mask = torch.rand(5, 7) < 0.6
    values[~mask] = torch.nan
    kept = values[mask]
    want = (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()
    white = fused_rl.whiten(values, mask)
    torch.testing.assert_close(white[mask], want)
    assert (white[~mask] == 0).all()
    torch.testing.assert_close(fused_rl.whiten(values, mask, shift_mean=False)[mask], want + kept.mean())
    nothing = fused_rl.whiten(values, torch.zeros_like(mask))
    assert (nothing == 0).all()


def whiten_part(rank, world):
    """Rank r has the r-th of three parts of 12 values, of unequal counts under the mask."""
    torch.manual_seed(0)
    values, mask = torch.randn(3, 4, dtype=F64), torch.rand(3, 4) < 0.7
    rows = slice(0, 1) if rank == 0 else slice(1, 3)
    return fused_rl.whiten(values[rows], mask[rows], group=torch.distributed.group.WORLD).tolist()


def test_whiten_over_ranks_has_the_moments_of_the_whole():
    torch.manual_seed(0)
    values, mask = torch.randn(3, 4, dtype=F64), torch.rand(3, 4) < 0.7
    parts = run_distributed(whiten_part, 2)
    torch.testing.assert_close(torch.tensor(parts[0] + parts[1], dtype=F64), fused_rl.whiten(values, mask))


def test_bad_arguments_say_what_came_and_what_is_expected():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"mask must be bool .*got torch.float32; use mask.bool\(\)"):
        fused_rl.masked_mean(x, x)
    with pytest.raises(ValueError, match=r"mask must have the shape of values \(2, 3\), got \(3,\)"):
        fused_rl.masked_sum(x, x[0] == 0)
    with pytest.raises(ValueError, match=r"values must be floating point, got torch.int64; use values.float\(\)"):
        fused_rl.masked_var(x.long(), x == 0)
