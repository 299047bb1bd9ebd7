"""A reward model as a scorer: it reads the token ids of prompt and response, as the reward trainer computes scores."""

from collections.abc import Sequence
from typing import Any

import torch

from ..base import engine, ranks
from ..base.engine import EngineConfig
from ..base.text import InputError
from ..models.reward_model import (
    RewardModel,
    RewardScorer,
    check_reads_policy,
    has_score_head,
)
from ..options import ModelConfig
from ..rollouts.types import Sample
from .builtin import BaseScorer


class RewardModelScorer(BaseScorer):
    """A reward model's score of the token ids of prompt and response."""

    def __init__(self, name: str, scorer: RewardScorer, **common):
        super().__init__(name, **common)
        self.scorer = scorer

    shares_work = True  # by processes that hold parts of the same sequences

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        mine = [samples[i] for i in ranks.my_items(len(samples))]
        # NaN and Inf included: the rollout refuses them, and knows the dataset's rows.
        scores = self.scorer.unchecked([s.prompt_ids for s in mine], [s.response.ids for s in mine])
        return ranks.gather_items(scores.tolist(), len(samples))


def load_reward_model(
    folder: str,
    *,
    policy: ModelConfig,
    held: EngineConfig,
    tokenizer: Any,
    device: torch.device,
    batch_size: int,
    **common,
) -> RewardModelScorer:
    """Return the reward model in a folder, which reads the responses of a policy; refuse one of other tokens."""
    options = {"attn_implementation": policy.attn_implementation, "held": held}
    # It reads token ids, so its tokenizer must be the policy's, and a head that was never trained has no opinion.
    check_reads_policy("reward model", folder, tokenizer, policy.model)
    model = RewardModel.from_pretrained(
        folder, device=device, dtype=engine.torch_dtype(held), **options
    )
    if not has_score_head(model.classifier.config):
        problem = "a language model without a head for scores; train it first with fused-rl reward"
        raise InputError(f"reward_model:{folder}: {problem}")
    frozen = engine.initialize_frozen(model.to(device).requires_grad_(False).eval(), held)
    return RewardModelScorer(scorer=RewardScorer(frozen, batch_size), **common)
