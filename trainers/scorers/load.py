"""Scorers by name: reward models, and the verifiers and functions of verifiers.py, in one weighted sum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fused_rl.trainers.base import engine
from fused_rl.trainers.models.reward_model import RewardModel, RewardScorer, check_reads_policy, has_score_head
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.policy.options import PolicyConfig
from fused_rl.trainers.rollouts.types import Sample, Scorer
from fused_rl.trainers.scorers import math as verifiers
from fused_rl.trainers.scorers.options import Spelled, check_weights, read, reward_of

REWARD_MODEL = "reward_model"


class RewardModelScorer:
    """A reward model's score of the token ids of prompt and response: the one that the reward trainer computes."""

    def __init__(self, name: str, scorer: RewardScorer, *, weight: float = 1.0, solved_at: float | None = None):
        self.name, self.scorer, self.weight, self.solved_at = name, scorer, weight, solved_at

    def check(self, row: dict) -> None:
        """Any row will do: it reads token ids alone."""

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        prompts = [sample.prompt_ids for sample in samples]
        # NaN and Inf included: the rollout refuses them, and knows the dataset's rows.
        return self.scorer.unchecked(prompts, [sample.response.ids for sample in samples]).tolist()


def check_scorers(config: PolicyConfig) -> str:
    """What the reward is, in a line; refuses scorers that cannot be, without loading models.

    In a dry run also what has to be imported for it: functions, and reasoning_gym where a dataset of it is named.
    """
    spelled = read(config.verifiers)
    check_weights(spelled)
    verifiers.check_loadable(spelled, imports=config.dry_run)
    return reward_of(spelled)


def load_scorers(config: PolicyConfig, tokenizer, device: torch.device) -> list[Scorer]:
    """The scorers that `config.verifiers` names: as in verifiers.py, or `[weight*]reward_model:FOLDER`.

    Raises:
        InputError: a name that is none; a scorer without a weight among weighted ones; a reward model with several
            labels or another tokenizer than the policy's.
    """
    reader = Reader(
        config.model,
        config.revision,
        tokenizer,
        device,
        engine.torch_dtype(config),
        config.attn_implementation,
        config.rollout_batch_size,
    )

    def freeze(model):
        return engine.initialize_frozen(model, config)

    return load_spelled(read(config.verifiers), config.answer_column, reader, freeze)


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


def load_spelled(
    spelled: list[Spelled], answer_column: str | None, reader: Reader, freeze: Callable = lambda model: model
) -> list[Scorer]:
    """`load_scorers` of scorers that have been read; `freeze` makes a reward model ready for forward passes alone."""
    check_weights(spelled)
    judges = [part for part in spelled if part.kind == REWARD_MODEL]
    others = [part for part in spelled if part.kind != REWARD_MODEL]
    loaded = []
    for part in judges:
        name = REWARD_MODEL if len(judges) == 1 else part.name
        loaded.append(_load_reward_model(part, name, reader, freeze))
    return loaded + (verifiers.load_scorers(others, answer_column) if others else [])


def _load_reward_model(part: Spelled, name: str, reader: Reader, freeze: Callable) -> RewardModelScorer:
    options = {"dtype": reader.dtype, "attn_implementation": reader.attn_implementation}
    model = RewardModel.from_pretrained(part.detail, **options)
    if not has_score_head(model.classifier.config):
        what = "a language model without a head for scores; train it first: fused-rl reward --model"
        raise InputError(f"{part.name}: {what}")
    check_reads_policy("reward model", part.detail, model, reader.tokenizer, reader.policy, reader.revision)
    frozen = freeze(model.to(reader.device).requires_grad_(False).eval())
    scorer = RewardScorer(frozen, reader.batch_size)
    weight = 1.0 if part.weight is None else part.weight
    return RewardModelScorer(name, scorer, weight=weight, solved_at=part.solved_at)
