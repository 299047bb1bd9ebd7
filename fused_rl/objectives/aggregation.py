"""From losses per token to a scalar: which tokens form a sequence, what counts, and the table of aggregations."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fused_rl.base.checks import (
    FLOATING,
    check_choice,
    check_count,
    check_device,
    check_finite,
    check_floating,
    check_like,
    check_mask,
    check_tensor,
    described,
    values_are_checked,
)
from fused_rl.base.masked import at_least_fp32, sum_where
from fused_rl.base.shards import is_dtensor


class Aggregation(NamedTuple):
    """The sum over the tokens that count, each divided by the length of something or not, over one denominator."""

    over: Literal["sequence", "prompt"] | None
    """Each token is divided by its sequence's length, or by the mean length of the responses to its prompt."""
    denominator: Literal["num_tokens", "num_sequences"] | None
    """What the sum is divided by; None is 1."""
    times_max_length: bool = False


LossAgg = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean",
    "token-sum",
]
LOSS_AGGS: dict[LossAgg, Aggregation] = {
    "token-mean": Aggregation(over=None, denominator="num_tokens"),
    "seq-mean-token-mean": Aggregation(over="sequence", denominator="num_sequences"),
    "seq-mean-token-sum": Aggregation(over=None, denominator="num_sequences"),
    "seq-mean-token-sum-norm": Aggregation(
        over=None, denominator="num_sequences", times_max_length=True
    ),
    # ScaleRL (arXiv:2510.13786, section 3.2).
    "prompt-mean": Aggregation(over="prompt", denominator="num_sequences"),
    "token-sum": Aggregation(over=None, denominator=None),
}


class Sequences:
    """The sequences of (B, T) tokens, and sums over each: rows, or in packed rows the tokens that share an id >= 0.

    S is B for rows, B * T (an upper bound that costs no synchronisation) for packed rows.
    """

    def __init__(self, mask: Tensor, sequence_ids: Tensor | None = None):
        # Rows: a sequence counts in the denominators even if none of its tokens does.
        if sequence_ids is None:
            self.mask = mask  # (B, T) bool
            self.ids = None
            self.count = mask.shape[0]
            self.lengths = mask.sum(1)  # (S,) int64, tokens that count
            return
        self.mask = mask & (sequence_ids >= 0)
        self.ids = sequence_ids.clamp(min=0)
        # Packed rows: the ids that occur, whatever the mask. Index 0 takes the negative ones, which
        # are no sequence.
        present = mask.new_zeros(mask.numel() + 1)
        self.count = present.index_fill(0, sequence_ids.flatten() + 1, True)[1:].sum()
        counts = self.mask.long().flatten()
        self.lengths = counts.new_zeros(len(counts)).index_add(0, self.ids.flatten(), counts)

    def sum(self, values: Tensor) -> Tensor:
        """(B, T) -> (S,): the sum over each sequence's tokens that count."""
        if self.ids is None:
            return sum_where(self.mask, values, 1)
        # where() before the sum: NaN at a masked token would reach its whole sequence.
        values = torch.where(self.mask, at_least_fp32(values, self.mask), 0)
        return values.new_zeros(self.mask.numel()).index_add(
            0, self.ids.flatten(), values.flatten()
        )

    def mean(self, values: Tensor) -> Tensor:
        """(B, T) -> (S,): the mean over each sequence's tokens that count; 0 where none does."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """(S,) -> (B, T): every token's sequence's value."""
        return (
            per_sequence[:, None].expand(self.mask.shape)
            if self.ids is None
            else per_sequence[self.ids]
        )


class TokenBatch:
    """Mask, sequences, denominators and dtype of one call of a loss; checks each tensor that it is given, once."""

    def __init__(
        self,
        name: str,
        like: Tensor,
        mask: Tensor,
        truncated: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        num_tokens: int | Tensor | None = None,
        num_sequences: int | Tensor | None = None,
        max_length: int | None = None,
        group_lengths: Tensor | None = None,
    ):
        check_floating(name, like)
        if like.dim() != 2:
            raise ValueError(f"{name} must be (B, T), got {tuple(like.shape)}")
        check_mask(mask, name, like.shape, like.device)
        _check_sequence_ids(sequence_ids, mask)
        check_count("num_tokens", num_tokens, mask)
        check_count("num_sequences", num_sequences, mask)
        check_count("max_length", max_length, mask)
        # Sums of thousands of 16-bit losses would lose their last ones.
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        # where() would fill a number of its own at each call.
        self.zero = mask.new_zeros((), dtype=self.dtype)
        self._shares = {}
        self.like = like
        self.sequences = Sequences(mask, sequence_ids)
        # A truncated response leaves the tokens that count but stays a sequence: num_sequences is
        # what it was.
        if truncated is not None:
            truncated = self._spread("truncated", truncated)
            if truncated.dtype != torch.bool:
                raise ValueError(
                    f"truncated must be bool, True for what was cut, got {described(truncated)}"
                )
            self.sequences = Sequences(mask & ~truncated, sequence_ids)
        self.mask = self.sequences.mask
        # Without the whole step's denominators, those of this batch.
        self.num_tokens = self.mask.sum() if num_tokens is None else num_tokens
        self.num_sequences = self.sequences.count if num_sequences is None else num_sequences
        self.max_length = mask.shape[1] if max_length is None else max_length
        self.group_lengths = None
        if group_lengths is not None:
            self.group_lengths = self._constant_of_sequences("group_lengths", group_lengths)

    def _spread(self, name, tensor):
        """(B, T), or one value per sequence, (B,) or (S,) -> (B, T), checked."""
        check_tensor(name, tensor)
        check_device(name, tensor, self.sequences.mask.device, "the mask")
        rows, ids = self.sequences.mask.shape, self.sequences.ids
        if tensor.dim() == 1 and (ids is not None or len(tensor) == rows[0]):
            # Beyond its end an index would read other memory on a GPU, and raise without a name on
            # a CPU.
            if ids is not None and _is_read(ids) and ids.max() >= len(tensor):
                raise ValueError(
                    f"{name} has {len(tensor)} sequences, but sequence_ids go to {int(ids.max())}"
                )
            tensor = self.sequences.expand(tensor)
        if tensor.shape != rows:
            raise ValueError(
                f"{name} must have the shape of the mask, {tuple(rows)}, or one value per sequence, got "
                f"{tuple(tensor.shape)}"
            )
        return tensor

    def tokens(self, name: str, tensor: Tensor) -> Tensor:
        """(B, T) -> (B, T) in the working dtype, 0 where nothing counts."""
        # The first tensor was checked when the batch was made.
        if tensor is not self.like:
            check_like(name, tensor, "the mask", self.mask)
        # where() and no product: 0 * NaN is NaN, in the value and in the gradient.
        return torch.where(self.mask, tensor.to(self.dtype), self.zero)

    def constant(self, name: str, tensor: Tensor) -> Tensor:
        """The same, without gradient."""
        return self.tokens(name, tensor).detach()

    def optional(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """As `constant`; None stays."""
        return None if tensor is None else self.tokens(name, tensor).detach()

    def _constant_of_sequences(self, name, tensor):
        """(B, T), or one value per sequence -> as `constant`."""
        spread = self._spread(name, tensor)
        if spread.dtype not in FLOATING:
            check_floating(name, spread)
        return torch.where(self.mask, spread.to(self.dtype), self.zero).detach()

    def advantages(self, tensor: Tensor) -> Tensor:
        """(B, T), or one value per sequence -> as `constant`."""
        advantages = self._constant_of_sequences("advantages", tensor)
        check_finite("advantages", advantages, "mask the token, or correct its reward")
        return advantages

    def shares(self, loss_agg: LossAgg) -> Tensor:
        """(B, T): every aggregation is a weighted sum over tokens, divided by `denominator`; these are the weights."""
        share = torch.ones(self.sequences.lengths.shape, dtype=self.dtype, device=self.mask.device)
        over = LOSS_AGGS[loss_agg].over
        if over == "prompt":
            if self.group_lengths is None:
                raise ValueError(
                    f"loss_agg={loss_agg} needs group_lengths, (B,): mean lengths of a prompt's responses"
                )
            # A prompt whose responses are all masked has length 0, and shares of nothing.
            return self.sequences.expand(share) / divisor(self.group_lengths)
        # A sequence that is masked throughout has no token to share.
        if over == "sequence":
            share = share / self.sequences.lengths.clamp(min=1)
        return self.sequences.expand(share)

    def denominator(self, loss_agg: LossAgg) -> float | Tensor:
        # token-sum divides by nothing.
        rule = LOSS_AGGS[loss_agg]
        count = 1 if rule.denominator is None else getattr(self, rule.denominator)
        return divisor(count * self.max_length if rule.times_max_length else count)

    def aggregate(self, losses: Tensor, loss_agg: LossAgg) -> Tensor:
        """(B, T) -> (): reduced once."""
        # Elsewhere every share is 1, and a product by it would be one more pass over the tokens.
        if LOSS_AGGS[loss_agg].over is not None:
            if loss_agg not in self._shares:
                self._shares[loss_agg] = self.shares(loss_agg)
            losses = losses * self._shares[loss_agg]
        return sum_where(self.mask, losses, zero=self.zero) / self.denominator(loss_agg)

    def sums(self, metrics: dict[str, Tensor], loss_agg: LossAgg) -> dict[str, Tensor]:
        """(B, T) -> () of each: their sums over the denominator."""
        denominator = self.denominator(loss_agg)
        by_dtype = {}
        for name, values in metrics.items():
            by_dtype.setdefault(values.dtype, []).append(name)
        sums = {}
        for names in by_dtype.values():
            values = torch.stack([metrics[name].expand(self.mask.shape) for name in names])
            totals = sum_where(self.mask, values, (1, 2), self.zero) / denominator
            sums |= zip(names, totals.unbind(), strict=True)
        return {name: sums[name] for name in metrics}


def divisor(count: float | Tensor) -> float | Tensor:
    """1 for 0: an empty batch is 0 and not NaN."""
    if not isinstance(count, Tensor):
        return count or 1
    return count + (count == 0) if count.is_floating_point() else count.clamp(min=1)


def _is_read(values):
    """Return True if a look at the values costs nothing: a wait for a GPU would cost more than the loss."""
    return (
        values.numel() > 0
        and values_are_checked(values.device)
        and not torch.compiler.is_compiling()
    )


def _check_sequence_ids(ids, mask):
    if ids is None:
        return
    check_tensor("sequence_ids", ids, " or None")
    if ids.shape != mask.shape or ids.dtype != torch.int64:
        raise ValueError(
            f"sequence_ids must be (B, T) = {tuple(mask.shape)} int64, got {described(ids)}"
        )
    check_device("sequence_ids", ids, mask.device, "the mask")
    if _is_read(ids) and ids.max() >= ids.numel():
        raise ValueError(
            f"sequence_ids must lie below B T = {ids.numel()}, got {int(ids.max())}; number them from 0"
        )


def without_impossible(mask, *policies):
    """The mask without the tokens that one of these policies gives no probability; (B, T) each, or None."""
    # What is no tensor, or not of the mask's kind, is left to the batch, which says what is wrong
    # with it.
    if not isinstance(mask, Tensor) or is_dtensor(mask) or mask.dtype != torch.bool:
        return mask
    kind = mask.shape, mask.device, mask.layout
    for logprobs in policies:
        if not isinstance(logprobs, Tensor) or is_dtensor(logprobs):
            continue
        if (logprobs.shape, logprobs.device, logprobs.layout) == kind:
            mask = mask & (logprobs.detach() != -torch.inf)
    return mask


def aggregate(
    losses: Tensor,
    mask: Tensor,
    loss_agg: LossAgg,
    *,
    num_tokens: int | Tensor | None = None,
    num_sequences: int | Tensor | None = None,
    max_length: int | None = None,
    sequence_ids: Tensor | None = None,
    group_lengths: Tensor | None = None,
) -> Tensor:
    """Reduce per-token losses to a scalar, once; denominators as in `policy_loss`.

    Args:
        losses: (B, T) floating point.
        mask: (B, T) bool.
        loss_agg: token-mean is sum / num_tokens; seq-mean-token-mean is the sum over sequences of their means /
            num_sequences; seq-mean-token-sum is sum / num_sequences; seq-mean-token-sum-norm is the same / max_length;
            prompt-mean is the sum of each token over its `group_lengths` / num_sequences; token-sum is the sum alone.

    Returns:
        A scalar, differentiable; 0, still attached to the graph, where nothing counts.

    Raises:
        ValueError: shapes or options that do not fit.
    """
    check_choice("loss_agg", loss_agg, LOSS_AGGS)
    counts = num_tokens, num_sequences, max_length
    batch = TokenBatch("losses", losses, mask, None, sequence_ids, *counts, group_lengths)
    return batch.aggregate(batch.tokens("losses", losses), loss_agg)
