"""Layers for Hugging Face's `kernels` library: modules without state whose forward takes the place of another's.

`make hub` builds the library as a repository from which `kernelize` loads them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fused_rl.ops.logprobs import token_logprobs

__all__ = ["FusedForCausalLMLossLayer"]


class FusedForCausalLMLossLayer(nn.Module):
    """The mean negative log-likelihood in nats of the labels, for transformers' slot `ForCausalLMLoss`."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return a scalar fp32, differentiable with respect to the logits, which are read once and never copied.

        Args:
            logits: (..., T, V) bf16, fp16 or fp32.
            labels: (..., T) int64; those at t + 1 are scored by the logits at t. `ignore_index` does not count.
            vocab_size: V.
            num_items_in_batch: the denominator; None means the labels of this call that count.
            shift_labels: (..., T) int64, shifted already, in place of `labels`.
        """
        # Position t predicts token t + 1, so the last one has no label.
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.to(logits.device).flatten()
        mask = targets != ignore_index
        total = -token_logprobs(logits.reshape(-1, vocab_size), targets, mask=mask).logprobs.sum()
        # A count over micro-batches makes their losses add up to that of the step.
        count = mask.sum() if num_items_in_batch is None else num_items_in_batch
        return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)
