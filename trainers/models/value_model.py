"""Models that tell a value per token: a reward model that is read at every token, and a head on a language model."""

import torch
from torch import nn

import fused_rl
from fused_rl.trainers.models.language_model import LanguageModel
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
    """(B, T, H) -> (B, T) fp32, zero at first; a module, so that ZeRO 3 gathers its weight where it is called."""

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

    def forward(self, input_ids, mask, temperature=1.0, *, want_values=False, **options):
        """As `LanguageModel`; with `want_values` also the values, as `Critic` returns them."""
        if want_values:
            return self._with_values(input_ids, mask, temperature, **options)
        return super().forward(input_ids, mask, temperature, **options)

    def _with_values(self, input_ids, mask, temperature, *, support=None, packed=None, token_loss=None, per_token=()):
        lm, targets = self.base, input_ids[:, 1:]
        hidden = lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        values = torch.where(mask, self.value_head(hidden), 0)
        head = lm.get_output_embeddings()
        options = {"temperature": temperature, "mask": mask, "bias": head.bias, **self.head_options}
        if token_loss is not None and support is None:
            return fused_rl.linear_token_loss(hidden, head.weight, targets, token_loss, *per_token, **options), values
        if support is not None:
            options["support"] = support.spread(mask)
        rows = fused_rl.linear_token_logprobs(hidden, head.weight, targets, **options)
        if token_loss is None:
            return rows, values
        loss = fused_rl.masked_sum(token_loss(rows.logprobs, rows.entropy, *per_token), mask)
        return fused_rl.LinearTokenLoss(loss, rows.logprobs.detach(), rows.entropy.detach()), values


def _values(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(B, T, H) and (1, H) -> (B, T) fp32; not as a matrix product, whose order of summation depends on the batch."""
    return (hidden.float() * weight.float()).sum(-1)
