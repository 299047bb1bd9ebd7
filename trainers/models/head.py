"""What a model does to its last hidden states, as the model itself shows when it is loaded."""

from typing import Any

import torch
from torch import nn

from fused_rl.integrations.unformed import UnformedLogits
from fused_rl.ops import tiles

from ..base import engine
from ..base.rounding import relative_difference
from ..base.text import InputError, in_a_line


class WideHead(nn.Linear):
    """An LM head of 16-bit weights whose logits are fp32, for sampling and measuring: it has no gradient."""

    def __init__(self, head: nn.Linear):
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight = head.weight
        self.bias = head.bias

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V) fp32."""
        rows = hidden.reshape(-1, self.in_features)
        # Logits rounded to 16 bits would shift log-probabilities by about 1e-2 nats.
        out = rows.new_empty(len(rows), self.out_features, dtype=torch.float32)
        logits = tiles.product(rows, self.weight, out)
        logits = logits if self.bias is None else logits.add_(self.bias)
        return logits.view(*hidden.shape[:-1], self.out_features)


def trace_head(lm: Any) -> UnformedLogits | str:
    """Return the logits of a causal LM of transformers as its head, their scale and their cap; or why they are more.

    Raises:
        InputError: the model is not causal, so it predicts no next token.
    """
    head = lm.get_output_embeddings()
    if lm.base_model is lm:
        return "has no backbone apart from its head"
    if type(head) not in (nn.Linear, WideHead):
        return f"has an LM head of type {type(head).__name__}"
    states = causal_states(lm)
    with torch.no_grad(), engine.gathered_in_turn(lm):
        # Logits that are not formed note what the model does to them.
        head.forward = lambda hidden: UnformedLogits(head, hidden)
        try:
            logits = lm(input_ids=_ids(lm), use_cache=False).logits
        except Exception as error:
            logits = in_a_line(error)
        finally:
            del head.forward
    if not isinstance(logits, UnformedLogits):
        return f"does more to its logits than scale and cap them ({logits})"
    hidden = logits.hidden
    is_like = (hidden.shape, hidden.dtype) == (states.shape, states.dtype)
    if not (is_like and relative_difference(hidden, states) <= 1):
        return "has more than a product between its hidden states and its logits"
    return logits


@torch.no_grad()
def causal_states(model: Any) -> torch.Tensor:
    """Return the last hidden states (2, T, H), or without a backbone the logits, of two sequences.

    Raises:
        InputError: the states of the two tokens that both begin with differ, because what follows them does.
    """
    with engine.gathered_in_turn(model):
        states = model.base_model(input_ids=_ids(model), use_cache=False)[0]
    # The rows of one batch round almost alike, so in fp32 even a small difference is none of rounding.
    rounding = 0.02 if states.dtype == torch.float32 else 1
    if relative_difference(*states[:, :2]) > rounding:
        problem = f"{type(model).__name__} reads later tokens, as encoders do"
        raise InputError(f"{problem}; expected a causal language model")
    return states


def _ids(model: Any) -> torch.Tensor:
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 9, 10]], device=model.device)
    return ids % model.config.get_text_config().vocab_size
