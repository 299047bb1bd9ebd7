"""The critic: a reward model that is read at every token."""

import torch

from fused_rl.trainers.models.reward_model import RewardModel


class Critic(RewardModel):
    """A reward model that is read before every token; a new head is zero, so that its values are 0 at first."""

    @torch.no_grad()
    def reset_head(self) -> None:
        """Set the head to zero."""
        self.classifier.score.weight.zero_()

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the expected return before each token.

        Args:
            input_ids: (B, T) int64, padded on the right.
            mask: (B, T - 1) bool, True where token t + 1 is of the response.

        Returns:
            (B, T - 1) fp32, differentiable; 0 where masked, which is also the value after a response has ended.
        """
        hidden = self.classifier.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        # Not as a matrix product, whose order of summation depends on the batch.
        raw = (hidden.float() * self.classifier.score.weight.float()).sum(-1)
        return torch.where(mask, (raw - self.score_mean) / self.score_std, 0)
