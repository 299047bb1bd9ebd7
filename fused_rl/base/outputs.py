"""The results of the ops, as named tuples."""

from typing import NamedTuple

from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Outputs of `token_logprobs`, in nats, 0 where masked: logprobs as the targets, (...) or (..., K), the others per
    row, (...); fp32, of fp64 logits fp64.
    """

    logprobs: Tensor
    entropy: Tensor
    lse: Tensor


class LinearTokenLoss(NamedTuple):
    """Outputs of `linear_token_loss`: the loss () fp32; detached, fp32 and 0 where masked, logprobs as the targets, and
    entropy per row.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
