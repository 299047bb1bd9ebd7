"""What the ops return, by name."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["LinearTokenLoss", "TokenLogprobs"]


class TokenLogprobs(NamedTuple):
    """Per-row outputs of `token_logprobs`, in nats, of the targets' shape, 0 where masked; fp32, of fp64 fp64."""

    logprobs: Tensor
    entropy: Tensor
    lse: Tensor


class LinearTokenLoss(NamedTuple):
    """Outputs of `linear_token_loss`: the loss () fp32, and detached, of the targets' shape, fp32, 0 where masked."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
