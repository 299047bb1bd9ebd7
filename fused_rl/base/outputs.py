"""The results of the ops, as named tuples, and how a gradient reads one of them."""

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


class SampledTokens(NamedTuple):
    """Outputs of `sample_token`, (B,) each: tokens int64, logprobs fp32 in nats, broken bool."""

    tokens: Tensor
    logprobs: Tensor
    broken: Tensor


def unless_modified(output: Tensor, version: int) -> Tensor | None:
    """Return a detached output that the backward pass reads, or None if the caller has modified it since `version`.

    Outputs may be modified, and a copy of one would be one more kernel at each call.
    """
    return output if output._version == version else None
