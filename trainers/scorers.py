"""Scorers by name: reward models, and the verifiers and functions of verifiers.py, in one weighted sum."""

from collections.abc import Sequence

import torch

from fused_rl.trainers import engine, verifiers
from fused_rl.trainers.config import InputError
from fused_rl.trainers.policy_config import PolicyConfig
from fused_rl.trainers.reward_model import RewardModel, RewardScorer, check_reads_policy, has_score_head
from fused_rl.trainers.rollout import Sample, Scorer
from fused_rl.trainers.spelling import Spelled, leaves_weights_out, read, reward_of

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
    verifiers.check_loadable(spelled, imports=config.dry_run)
    return reward_of(spelled)


def load_scorers(config: PolicyConfig, tokenizer, device: torch.device) -> list[Scorer]:
    """The scorers that `config.verifiers` names: as in verifiers.py, or `[weight*]reward_model:FOLDER`.

    Raises:
        InputError: a name that is none; a reward model with several labels or another tokenizer than the policy's.
    """
    spelled = read(config.verifiers)
    if leaves_weights_out(spelled) and engine.rank() == 0:
        print(f"reward: {reward_of(spelled)}", flush=True)
    judges = [part for part in spelled if part.kind == REWARD_MODEL]
    others = [part for part in spelled if part.kind != REWARD_MODEL]
    loaded = []
    for part in judges:
        name = REWARD_MODEL if len(judges) == 1 else part.name
        loaded.append(_load_reward_model(part, name, config, tokenizer, device))
    return loaded + (verifiers.load_scorers(others, config.answer_column) if others else [])


def _load_reward_model(part: Spelled, name: str, config: PolicyConfig, tokenizer, device) -> RewardModelScorer:
    options = {"dtype": engine.torch_dtype(config), "attn_implementation": config.attn_implementation}
    model = RewardModel.from_pretrained(part.detail, **options)
    if not has_score_head(model.classifier.config):
        what = "a language model without a head for scores; train it first: fused-rl reward --model"
        raise InputError(f"{part.name}: {what}")
    check_reads_policy("reward model", part.detail, model, tokenizer, config.model, config.revision)
    frozen = engine.initialize_frozen(model.to(device).requires_grad_(False).eval(), config)
    scorer = RewardScorer(frozen, config.rollout_batch_size)
    weight = 1.0 if part.weight is None else part.weight
    return RewardModelScorer(name, scorer, weight=weight, solved_at=part.solved_at)
