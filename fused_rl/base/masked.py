"""Masked reductions: the only place where a mask meets a reduction, so that no fill value ever reaches a mean."""

import torch
from torch import Tensor

from fused_rl.base.checks import (
    check_flag,
    check_floating,
    check_mask,
    check_process_group,
    check_range,
)


def at_least_fp32(values: Tensor, mask: Tensor) -> Tensor:
    """The values in the dtype of a reduction, checked against their mask."""
    check_floating("values", values)
    check_mask(mask, "values", values.shape, values.device)
    return values if values.dtype == torch.float64 else values.float()


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is True; other values, NaN and inf included, have no effect.

    Args:
        values: (...) floating point.
        mask: same shape, bool, True where an element counts.
        dim: the dimension to sum over; None sums everything.

    Returns:
        The sum in at least fp32, differentiable; 0 where nothing counts. The gradient is exactly 0 at masked elements.

    Raises:
        ValueError: mask not bool or not of the shape of `values`.
    """
    values = at_least_fp32(values, mask)
    return sum_where(mask, values, dim)


def sum_where(
    mask: Tensor,
    values: Tensor,
    dim: int | tuple[int, ...] | None = None,
    zero: Tensor | int = 0,
) -> Tensor:
    """Return `masked_sum` of values that are known to have the mask's shape and at least fp32."""
    # No product with the mask: 0 * NaN is NaN.
    values = torch.where(mask, values, zero)
    return values.sum() if dim is None else values.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is True, in at least fp32; 0 where nothing counts. Arguments as `masked_sum`."""
    total = masked_sum(values, mask, dim)
    count = mask.sum() if dim is None else mask.sum(dim)
    # Where nothing counts, 0 / 1 is 0 and 0 / 0 would be NaN.
    return total / count.clamp(min=1)


def masked_var(
    values: Tensor, mask: Tensor, dim: int | None = None, *, unbiased: bool = True
) -> Tensor:
    """Variance of `values` where `mask` is True, in at least fp32; 0 where fewer than two elements count.

    Args:
        values, mask, dim: as `masked_sum`.
        unbiased: divide by n - 1 (as `torch.var`) instead of n.
    """
    check_flag("unbiased", unbiased)
    mean = masked_mean(values, mask, dim)
    about = mean if dim is None else mean.unsqueeze(dim)
    centred = torch.where(mask, values, 0).to(mean.dtype) - about
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(centred.square(), mask, dim) / (count - int(unbiased)).clamp(min=1)


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    std_floor: float = 0.0,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor:
    """Scale `values` to variance 1, and to mean 0 unless `shift_mean=False`, over the elements where `mask` is True.

    The variance is unbiased (divided by n - 1), as in `torch.var`, and 0 where fewer than two elements count.

    Args:
        values: (...) floating point.
        mask: same shape, bool.
        shift_mean: False keeps the mean (as for rewards).
        eps: added to the variance.
        std_floor: a standard deviation below this value is replaced by it, so that small differences stay small.
        process_group: if given, the moments are those over all its ranks.

    Returns:
        Same shape, at least fp32, 0 where `mask` is False. The moments are constants to autograd.
    """
    check_flag("shift_mean", shift_mean)
    check_range("eps", eps, "a finite number, 0 or more")
    check_range("std_floor", std_floor, "a finite number, 0 or more")
    check_process_group(process_group)
    values = at_least_fp32(values, mask)
    # A NaN at a masked place would otherwise reach the moments.
    kept = torch.where(mask, values, 0)

    mean, variance = global_moments(kept, mask, process_group)
    scale = torch.rsqrt(variance.clamp(min=std_floor**2) + eps).to(values.dtype)
    mean = mean.to(values.dtype)
    whitened = (kept - mean) * scale
    if not shift_mean:
        whitened = whitened + mean
    # The shift has moved the masked places away from 0.
    return torch.where(mask, whitened, 0)


@torch.no_grad()
def global_moments(
    values: Tensor, mask: Tensor, process_group: torch.distributed.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of `values` (0 where masked) over the ranks of `process_group`; fp64."""
    # The mean first, then squares about it: E[x^2] - E[x]^2 would cancel.
    count = mask.sum().to(torch.float64)
    # In one tensor, so that one reduction serves both.
    moments = torch.stack([count, values.double().sum()])
    if process_group is not None:
        torch.distributed.all_reduce(moments, group=process_group)
    count, total = moments
    mean = total / count.clamp(min=1)
    # Masked places, which hold 0, would add the square of the mean each.
    squares = masked_sum((values.double() - mean).square(), mask)
    if process_group is not None:
        torch.distributed.all_reduce(squares, group=process_group)
    return mean, squares / (count - 1).clamp(min=1)
