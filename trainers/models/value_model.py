"""Models that tell a value per token: a reward model that is read at every token, and a head on a language model."""

import torch
from torch import nn

from fused_rl.trainers.models.language_model import LanguageModel, Scored, at_places, places_of
from fused_rl.trainers.models.reward_model import RewardModel
from fused_rl.trainers.options.config import InputError


class Critic(RewardModel):
    """A reward model that is read before every token; a new head is zero, so that nothing is expected at first."""

    @torch.no_grad()
    def reset_head(self) -> None:
        """Set the head to zero."""
        self.classifier.score.weight.zero_()

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What is expected before each token.

        Args:
            input_ids: (B, T) int64, padded on the right.
            mask: (B, T - 1) bool, True where token t + 1 is of the response.

        Returns:
            (B, T - 1) fp32, differentiable; 0 where masked, which is also the value after a response has ended.
        """
        hidden = self.classifier.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        raw = _values(hidden, self.classifier.score.weight)
        return torch.where(mask, (raw - self.score_mean) / self.score_std, 0)


class ValueHead(nn.Module):
    """(..., H) -> (...) fp32, zero at first; a module, so that ZeRO 3 gathers its weight where it is called."""

    def __init__(self, like: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, like.shape[1], dtype=like.dtype, device=like.device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _values(hidden, self.weight)


class PolicyWithValues(LanguageModel):
    """The policy with a value head on its backbone."""

    def __init__(self, policy: LanguageModel):
        super().__init__(policy.lm, policy.loss_from, lora=policy.lora, head_dtype=policy.head_dtype)
        if policy.loss_from != "linear":
            raise InputError(f"critic=shared reads hidden states: loss_from={policy.loss_from} must be linear")
        self.value_head = ValueHead(self.base.get_output_embeddings().weight)

    def forward(self, input_ids, mask, *args, want_values=False, want_hidden=False, places=None, **asked) -> Scored:
        """As `LanguageModel`; with `want_values` also the values, as `Critic` returns them."""
        places = places_of(mask) if places is None else places
        asked |= {"want_hidden": want_hidden or want_values, "places": places}
        scored = super().forward(input_ids, mask, *args, **asked)
        if not want_values:
            return scored
        values = at_places(self.value_head(scored.hidden), mask, places)
        return scored._replace(values=values, hidden=scored.hidden if want_hidden else None)


def _values(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(..., H) and (1, H) -> (...) fp32; not as a matrix product, whose order of summation depends on the batch."""
    return (hidden.float() * weight.float()).sum(-1)
