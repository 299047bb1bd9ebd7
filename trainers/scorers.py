"""Scorers by name: reward models, and the verifiers and functions of verifiers.py, in one weighted sum."""

from collections.abc import Sequence

import torch

from fused_rl.trainers import engine, verifiers
from fused_rl.trainers.config import InputError
from fused_rl.trainers.policy_config import PolicyConfig
from fused_rl.trainers.reward_model import RewardModel, RewardScorer, check_reads_policy, has_score_head
from fused_rl.trainers.rollout import Sample, Scorer

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


def load_scorers(config: PolicyConfig, tokenizer, device: torch.device) -> list[Scorer]:
    """The scorers that `config.verifiers` names: as in verifiers.py, or `[weight*]reward_model:FOLDER`.

    Raises:
        InputError: a name that is none; a reward model with several labels or another tokenizer than the policy's.
    """
    parts = [part.strip() for part in config.verifiers.split(",")]
    spelled = [part for part in parts if f"{REWARD_MODEL}:" in part]
    others = ", ".join(part for part in parts if part not in spelled)
    loaded = []
    for part in spelled:
        scorer = _load_reward_model(part, config, tokenizer, device)
        scorer.name = REWARD_MODEL if len(spelled) == 1 else scorer.name
        loaded.append(scorer)
    if len({scorer.name for scorer in loaded}) < len(loaded):
        raise InputError(f"verifiers: {config.verifiers!r} names a reward model twice; for a weight: 2*reward_model:…")
    if loaded and not others:
        return loaded
    return loaded + verifiers.load_scorers(others, config.answer_column)


def _load_reward_model(spelled: str, config: PolicyConfig, tokenizer, device) -> RewardModelScorer:
    found = verifiers.SPELLING.fullmatch(spelled)
    if found is None or not found["name"].strip().startswith(f"{REWARD_MODEL}:"):
        raise InputError(f"verifier {spelled!r}: expected [weight*]{REWARD_MODEL}:FOLDER[>=threshold]")
    try:
        weight = 1.0 if found["weight"] is None else float(found["weight"])
        solved_at = None if found["solved_at"] is None else float(found["solved_at"])
    except ValueError as error:
        raise InputError(f"verifier {spelled!r}: weight and threshold must be numbers: {error}") from error
    name = found["name"].strip()
    folder = name.partition(":")[2]
    options = {"dtype": engine.torch_dtype(config), "attn_implementation": config.attn_implementation}
    model = RewardModel.from_pretrained(folder, **options)
    if not has_score_head(model.classifier.config):
        raise InputError(f"{name}: a language model without a head for scores; train it first: fused-rl reward --model")
    check_reads_policy("reward model", folder, model, tokenizer, config.model, config.revision)
    frozen = engine.initialize_frozen(model.to(device).requires_grad_(False).eval(), config)
    scorer = RewardScorer(frozen, config.rollout_batch_size)
    return RewardModelScorer(name, scorer, weight=weight, solved_at=solved_at)
