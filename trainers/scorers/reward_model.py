"""A reward model as a scorer: it reads the token ids of prompt and response, as the reward trainer computes scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fused_rl.trainers.base import engine
from fused_rl.trainers.models.reward_model import RewardModel, check_finite, check_reads_policy, collate, has_score_head
from fused_rl.trainers.options import EngineConfig, InputError, ModelConfig
from fused_rl.trainers.rollouts.types import Sample
from fused_rl.trainers.scorers.builtin import Named
from fused_rl.trainers.scorers.options import Spelled


class RewardScorer:
    """Scores (prompt ids, response ids) with a reward model, batched by length: what PPO and GRPO ask for rewards."""

    def __init__(self, model: nn.Module, batch_size: int = 16):
        """model: a `RewardModel`, or the DeepSpeed engine around one (under ZeRO 3 every rank must call together)."""
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {batch_size}")
        self.model = model
        self.batch_size = batch_size

    def __call__(self, prompt_ids: list[list[int]], response_ids: list[list[int]]) -> torch.Tensor:
        """(N,) fp32 on the CPU: the scores of N prompts with their responses, EOS included; not differentiable.

        Raises:
            ValueError: lists of different lengths, or a score that is not finite; it names the rows.
        """
        scores = self.unchecked(prompt_ids, response_ids)
        check_finite(scores, [f"row {i}" for i in range(len(scores))])
        return scores

    @torch.no_grad()
    def unchecked(self, prompt_ids: list[list[int]], response_ids: list[list[int]]) -> torch.Tensor:
        """The same, NaN and Inf included."""
        if len(prompt_ids) != len(response_ids):
            raise ValueError(f"got {len(prompt_ids)} prompts and {len(response_ids)} responses; they go in pairs")
        sequences = [[*p, *r] for p, r in zip(prompt_ids, response_ids, strict=True)]
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        scores = torch.zeros(len(sequences))
        for indices in batches:
            scores[indices] = self._score([sequences[i] for i in indices])
        for _ in range(self._longest(len(batches)) - len(batches)):
            self._score([[0]])  # ZeRO 3 gathers weights in every forward, so all ranks need the same number of them
        return scores

    def _score(self, sequences: list[list[int]]) -> torch.Tensor:
        return self.model(*collate(sequences, next(self.model.parameters()).device)).cpu()

    def _longest(self, batches: int) -> int:
        if isinstance(self.model, RewardModel) or self.model.zero_optimization_stage() < 3:
            return batches
        count = torch.tensor(batches, device=next(self.model.parameters()).device)
        torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
        return int(count)


class RewardModelScorer(Named):
    """A reward model's score of the token ids of prompt and response."""

    def __init__(self, name: str, scorer: RewardScorer, **judged):
        super().__init__(name, **judged)
        self.scorer = scorer

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        prompts = [sample.prompt_ids for sample in samples]
        # NaN and Inf included: the rollout refuses them, and knows the dataset's rows.
        return self.scorer.unchecked(prompts, [sample.response.ids for sample in samples]).tolist()


@dataclass(frozen=True)
class Reader:
    """What a reward model needs to read the responses of a policy."""

    policy: str
    """Hub name or folder of the policy."""
    revision: str | None
    """The policy's."""
    tokenizer: object
    """The policy's."""
    device: torch.device
    dtype: torch.dtype
    attn_implementation: str | None
    batch_size: int
    """Responses scored together."""
    freeze: Callable[[RewardModel], nn.Module] = lambda model: model
    """Makes a model ready for forward passes alone."""

    @classmethod
    def beside(cls, policy: ModelConfig, held: EngineConfig, tokenizer, device: torch.device, batch_size: int):
        """Of a policy that is trained, and held in an engine as `held` says; so are the reward models."""
        known = (policy.model, policy.revision, tokenizer, device, engine.torch_dtype(held), policy.attn_implementation)
        return cls(*known, batch_size, lambda model: engine.initialize_frozen(model, held))


def load_reward_model(part: Spelled, reader: Reader) -> RewardModelScorer:
    """The reward model that is named; refuses one with another tokenizer than the policy's."""
    options = {"dtype": reader.dtype, "attn_implementation": reader.attn_implementation}
    model = RewardModel.from_pretrained(part.detail, **options)
    if not has_score_head(model.classifier.config):
        what = "a language model without a head for scores; train it first: fused-rl reward --model"
        raise InputError(f"{part.text}: {what}")
    check_reads_policy("reward model", part.detail, model, reader.tokenizer, reader.policy, reader.revision)
    frozen = reader.freeze(model.to(reader.device).requires_grad_(False).eval())
    scorer = RewardScorer(frozen, reader.batch_size)
    return RewardModelScorer(part.name, scorer, weight=part.weight, solved_at=part.solved_at)
