"""A reward model as a scorer: it reads the token ids of prompt and response, as the reward trainer computes scores."""

from collections.abc import Sequence
from typing import Any

import torch

from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.models.reward_model import (
    RewardModel,
    check_finite,
    check_reads_policy,
    collate,
    has_score_head,
)
from fused_rl.trainers.options import EngineConfig, ModelConfig
from fused_rl.trainers.rollouts.types import Sample
from fused_rl.trainers.scorers.builtin import BaseScorer


class RewardScorer:
    """Scores (prompt ids, response ids) with a reward model, batched by length: what PPO and GRPO ask for rewards."""

    def __init__(self, model: Any, batch_size: int = 16):
        """model: a `RewardModel`, or the DeepSpeed engine around one (under ZeRO 3 every rank must call together)."""
        self.model = model
        self.batch_size = batch_size
        self.in_step = not isinstance(model, RewardModel) and model.zero_optimization_stage() == 3

    def __call__(self, prompt_ids: list[list[int]], response_ids: list[list[int]]) -> torch.Tensor:
        """Return the scores (N,) of N prompts with their responses, EOS included, fp32 on the CPU; all are finite."""
        scores = self.unchecked(prompt_ids, response_ids)
        check_finite(scores, [f"row {i}" for i in range(len(scores))])
        return scores

    @torch.no_grad()
    def unchecked(self, prompt_ids: list[list[int]], response_ids: list[list[int]]) -> torch.Tensor:
        """Return the same, NaN and Inf included."""
        # In order of length, so that a batch has little padding.
        device = next(self.model.parameters()).device
        sequences = [[*p, *r] for p, r in zip(prompt_ids, response_ids, strict=True)]
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        scores = torch.zeros(len(sequences))
        for indices in batches:
            scores[indices] = self.model(*collate([sequences[i] for i in indices], device)).cpu()

        # ZeRO 3 gathers weights in every forward, so all ranks need the same number of them.
        if self.in_step:
            most = int(ranks.global_max(torch.tensor(float(len(batches)))))
            for _ in range(most - len(batches)):
                self.model(*collate([[0]], device))
        return scores


class RewardModelScorer(BaseScorer):
    """A reward model's score of the token ids of prompt and response."""

    def __init__(self, name: str, scorer: RewardScorer, **common):
        super().__init__(name, **common)
        self.scorer = scorer

    shares_work = True  # by processes that hold parts of the same sequences

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        mine = [samples[i] for i in ranks.part_of(len(samples))]
        # NaN and Inf included: the rollout refuses them, and knows the dataset's rows.
        scores = self.scorer.unchecked([s.prompt_ids for s in mine], [s.response.ids for s in mine])
        return ranks.of_parts(scores.tolist(), len(samples))


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
    options = {"dtype": engine.torch_dtype(held), "attn_implementation": policy.attn_implementation}
    # It reads token ids, so its tokenizer must be the policy's, and a head that was never trained has no opinion.
    check_reads_policy("reward model", folder, tokenizer, policy.model)
    model = RewardModel.from_pretrained(folder, **options)
    if not has_score_head(model.classifier.config):
        what = "a language model without a head for scores; train it first with fused-rl reward"
        raise InputError(f"reward_model:{folder}: {what}")
    frozen = engine.initialize_frozen(model.to(device).requires_grad_(False).eval(), held)
    return RewardModelScorer(scorer=RewardScorer(frozen, batch_size), **common)
