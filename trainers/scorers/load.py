"""Scorers by name, loaded: those of builtin.py and math.py, reward models, and functions of users."""

from collections.abc import Mapping, Sequence

from fused_rl.trainers.base.screen import print_rank0
from fused_rl.trainers.base.text import InputError, load_function
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.rollouts.options import ROLLOUT_BATCH_SIZE
from fused_rl.trainers.rollouts.types import Scorer
from fused_rl.trainers.scorers import builtin
from fused_rl.trainers.scorers.functions import FunctionScorer
from fused_rl.trainers.scorers.math import MathVerifier
from fused_rl.trainers.scorers.options import FORMS, Config, ScorerConfig, Spelled, read
from fused_rl.trainers.scorers.reward_model import load_reward_model


def check_scorers(options: ScorerConfig) -> str:
    """Return the reward in a line; refuse scorers that cannot be loaded, without loading models."""
    if options.verifiers is None:
        return "reasoning_gym, of rows that name their dataset; others need --verifiers"
    spelled = read(options)
    for part in spelled:
        if part.kind not in ("math", "reward_model"):
            _load(part, None)
    return " + ".join(f"{part.weight:g}*{part.name}" for part in spelled)


def load_chosen(
    config: Config, rows: Sequence[Rows], recorded: Mapping[str, object], **reading
) -> tuple[Config, list[Scorer]]:
    """Return the config with its scorers, loaded; without any, those that were `recorded` or that the rows name."""
    if config.verifiers is None:
        verifiers = recorded.get("verifiers") or named_by(rows)
        config = config.replace(verifiers=verifiers)
        print_rank0(f"verifiers: {verifiers}, as the rows or the resumed run name them")
    return config, load_scorers(config, **reading)


def load_for_policy(
    config: Config, rows, tokenizer, device, recorded
) -> tuple[Config, list[Scorer]]:
    """Return what `load_chosen` does, for a policy that is trained with this config."""
    reading = {
        "tokenizer": tokenizer,
        "device": device,
        "batch_size": config.rollout_batch_size or ROLLOUT_BATCH_SIZE,
    }
    return load_chosen(config, rows, recorded, policy=config, held=config, **reading)


def named_by(rows: Sequence[Rows]) -> list[str]:
    """Return reasoning_gym, if the first row names its dataset; else raise an error that lists the scorers."""
    part = next(part for part in rows if len(part))
    if (part.rows[0].get("metadata") or {}).get("source_dataset"):
        return ["reasoning_gym"]
    raise InputError(
        f"{part.where(0)}: --verifiers is missing; give one of {', '.join(FORMS)}, or module:function"
    )


def load_scorers(options: ScorerConfig, **reading) -> list[Scorer]:
    """Return the scorers that the options name; all ranks call it together. `reading` is what reward models take.

    Scorers that compare with an answer say which samples are solved; if there are none, functions and patterns do, from
    a score of 1 on.
    """
    spelled = read(options)
    scorers = [
        load_reward_model(part, **reading) for part in spelled if part.kind == "reward_model"
    ]
    verifiers = [
        _load(part, options.answer_column) for part in spelled if part.kind != "reward_model"
    ]
    if all(scorer.solved_at is None for scorer in verifiers):
        for scorer in verifiers:
            if not isinstance(scorer, builtin.Length):
                scorer.solved_at = 1.0
    return scorers + verifiers


def _load(part: Spelled, answer_column: str | None) -> Scorer:
    judged = {
        "name": part.name,
        "weight": part.weight,
        "solved_at": part.solved_at,
        "answer_column": answer_column,
    }
    match part.kind:
        case "math":
            return MathVerifier(**judged)
        case "reasoning_gym":
            return builtin.ReasoningGymVerifier(part.detail, **judged)
        case "exact_match":
            return builtin.ExactMatch(ignore_case=part.detail == "ignore_case", **judged)
        case "regex":
            return builtin.Pattern(part.detail, **judged)
        case "format":
            return builtin.Pattern(builtin.THINK_THEN_ANSWER, **judged)
        case "length":
            if not part.detail.isdecimal() or int(part.detail) == 0:
                raise InputError(
                    f"verifier {part.text!r}: expected a whole number of tokens above 0 after the colon"
                )
            return builtin.Length(int(part.detail), **judged)
    function = part.detail if callable(part.detail) else load_function("verifier", part.detail)
    return FunctionScorer(function=function, **judged)
