"""Masked reductions: the only place where a mask meets a reduction, so that no fill value ever reaches a mean."""

import torch

__all__ = ["masked_mean", "masked_sum", "masked_var", "whiten"]


def _check(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool (True where a token counts), got {mask.dtype}; use mask.bool()")
    if mask.shape != values.shape:
        raise ValueError(f"mask must have the shape of values {tuple(values.shape)}, got {tuple(mask.shape)}")
    if not values.is_floating_point():
        raise ValueError(f"values must be floating point, got {values.dtype}; use values.float()")
    return values if values.dtype == torch.float64 else values.float()


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of `values` where `mask` is True; what stands elsewhere, NaN and inf included, has no effect.

    Args:
        values: (...) floating point.
        mask: same shape, bool, True where an element counts.
        dim: the dimension to sum over; None sums everything.

    Returns:
        The sum in at least fp32, differentiable; 0 where nothing counts. The gradient is exactly 0 at masked elements.

    Raises:
        ValueError: mask not bool or not of the shape of `values`.
    """
    values = _check(values, mask)
    values = torch.where(mask, values, 0)  # not a product: 0 * nan is nan
    return values.sum() if dim is None else values.sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of `values` where `mask` is True, in at least fp32; 0 where nothing counts. Arguments as `masked_sum`."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None, *, unbiased: bool = True):
    """Variance of `values` where `mask` is True, in at least fp32; 0 where fewer than two elements count.

    Args:
        values, mask, dim: as `masked_sum`.
        unbiased: divide by n - 1 (as `torch.var`) instead of n.
    """
    mean = masked_mean(values, mask, dim)
    centred = torch.where(mask, values, 0).to(mean.dtype) - (mean if dim is None else mean.unsqueeze(dim))
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(centred.square(), mask, dim) / (count - int(unbiased)).clamp(min=1)


def whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True, eps: float = 1e-8, group=None):
    """Scale `values` to variance 1, and to mean 0 unless `shift_mean=False`, over the elements where `mask` is True.

    Args:
        values: (...) floating point.
        mask: same shape, bool.
        shift_mean: False keeps the mean (as for rewards).
        eps: added to the variance.
        group: a torch.distributed process group; the moments are then those over all its ranks.

    Returns:
        Same shape, at least fp32, 0 where `mask` is False. The moments are constants to autograd.
    """
    values = _check(values, mask)
    with torch.no_grad():
        moments = torch.stack([mask.sum().to(torch.float64), masked_sum(values.double(), mask)])
        if group is not None:
            torch.distributed.all_reduce(moments, group=group)
        count, mean = moments[0], moments[1] / moments[0].clamp(min=1)
        squares = masked_sum((torch.where(mask, values, 0).double() - mean).square(), mask)
        if group is not None:
            torch.distributed.all_reduce(squares, group=group)
        scale = torch.rsqrt(squares / (count - 1).clamp(min=1) + eps)
        mean, scale = mean.to(values.dtype), scale.to(values.dtype)
    whitened = (torch.where(mask, values, 0) - mean) * scale
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0)


class Sequences:
    """Which tokens of (B, T) form a sequence: a row, or in packed rows those that share an id >= 0; and sums over each.

    S is B for rows, B * T (an upper bound that costs no synchronisation) for packed rows.
    """

    def __init__(self, mask: torch.Tensor, sequence_ids: torch.Tensor | None = None):
        self.mask = mask if sequence_ids is None else mask & (sequence_ids >= 0)  # (B, T) bool
        self.ids = None if sequence_ids is None else sequence_ids.clamp(min=0)
        if sequence_ids is None:
            self.count = mask.shape[0]
        else:
            present = mask.new_zeros(mask.numel() + 1)
            self.count = present.index_fill(0, sequence_ids.flatten() + 1, True)[1:].sum()
        counts = self.mask.long()
        self.lengths = counts.sum(1)  # (S,) int64, tokens that count
        if self.ids is not None:
            self.lengths = counts.new_zeros(mask.numel()).index_add(0, self.ids.flatten(), counts.flatten())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (S,): the sum over each sequence's tokens that count."""
        if self.ids is None:
            return masked_sum(values, self.mask, 1)
        values = torch.where(self.mask, _check(values, self.mask), 0)
        return values.new_zeros(self.mask.numel()).index_add(0, self.ids.flatten(), values.flatten())

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (S,): the mean over each sequence's tokens that count; 0 where none does."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def expand(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """(S,) -> (B, T): every token's sequence's value."""
        return per_sequence[:, None].expand(self.mask.shape) if self.ids is None else per_sequence[self.ids]


class Batch:
    """Mask, sequences, denominators and dtype of one call of a loss; checks every shape that it is given."""

    def __init__(
        self, like, mask, truncated=None, sequence_ids=None, num_tokens=None, num_sequences=None, max_length=None
    ):
        if like.dim() != 2 or not like.is_floating_point():
            raise ValueError(f"losses take (B, T) floating point tensors, got {tuple(like.shape)} {like.dtype}")
        if mask.shape != like.shape or mask.dtype != torch.bool:
            shape = tuple(like.shape)
            raise ValueError(
                f"mask must be (B, T) = {shape} bool, got {tuple(mask.shape)} {mask.dtype}; use mask.bool()"
            )
        if sequence_ids is not None and (sequence_ids.shape != like.shape or sequence_ids.dtype != torch.int64):
            got = f"{tuple(sequence_ids.shape)} {sequence_ids.dtype}"
            raise ValueError(f"sequence_ids must be (B, T) = {tuple(like.shape)} int64, got {got}")
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self.sequences = Sequences(mask, sequence_ids)
        if truncated is not None:
            self.sequences = Sequences(mask & ~self._spread("truncated", truncated).bool(), sequence_ids)
        self.mask = self.sequences.mask
        self.num_tokens = self.mask.sum() if num_tokens is None else num_tokens
        self.num_sequences = self.sequences.count if num_sequences is None else num_sequences
        self.max_length = mask.shape[1] if max_length is None else max_length

    def _spread(self, name, tensor):  # (B, T), or (B,), (S,) per sequence -> (B, T)
        rows = self.sequences.mask.shape
        if tensor.dim() == 1 and (self.sequences.ids is not None or len(tensor) == rows[0]):
            tensor = self.sequences.expand(tensor)
        if tensor.shape != rows:
            raise ValueError(f"{name} must have the shape of the mask, {tuple(rows)}, got {tuple(tensor.shape)}")
        return tensor

    def tokens(self, name, tensor):
        """(B, T), or one value per sequence, -> (B, T) in the working dtype, 0 where nothing counts; None stays."""
        return None if tensor is None else torch.where(self.mask, self._spread(name, tensor).to(self.dtype), 0)

    def constants(self, **tensors):
        return (self.tokens(name, None if tensor is None else tensor.detach()) for name, tensor in tensors.items())

    def shares(self, loss_agg):
        """(B, T): every aggregation is a weighted sum over tokens, divided by `denominator`; these are the weights."""
        share = torch.ones(self.sequences.lengths.shape, dtype=self.dtype, device=self.mask.device)
        if loss_agg == "seq-mean-token-mean":
            share = share / self.sequences.lengths.clamp(min=1)
        return self.sequences.expand(share)

    def denominator(self, loss_agg):
        count = self.num_tokens if loss_agg == "token-mean" else self.num_sequences
        # at least 1: an empty batch is 0 and not nan
        count = count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
        return count * self.max_length if loss_agg == "seq-mean-token-sum-norm" else count

    def aggregate(self, losses, loss_agg):
        """(B, T) -> (): reduced once."""
        return masked_sum(losses * self.shares(loss_agg), self.mask) / self.denominator(loss_agg)
