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
from fused_rl.trainers.scorers.options import (
    SPELLINGS,
    Config,
    ScorerConfig,
    ScorerSpec,
    parse_scorers,
)
from fused_rl.trainers.scorers.reward_model import load_reward_model


def check_scorers(options: ScorerConfig) -> str:
    """Return the reward in a line; refuse scorers that cannot be loaded, without loading models."""
    if options.verifiers is None:
        return "reasoning_gym, of rows that name their dataset; others need --verifiers"
    specs = parse_scorers(options)
    for spec in specs:
        if spec.kind not in ("math", "reward_model"):
            _load(spec, None)
    return " + ".join(f"{spec.weight:g}*{spec.name}" for spec in specs)


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
    split = next(split for split in rows if len(split))
    if (split.rows[0].get("metadata") or {}).get("source_dataset"):
        return ["reasoning_gym"]
    raise InputError(
        f"{split.where(0)}: --verifiers is missing; give one of {', '.join(SPELLINGS)}, or module:function"
    )


def load_scorers(options: ScorerConfig, **reading) -> list[Scorer]:
    """Return the scorers that the options name; all ranks call it together. `reading` is what reward models take.

    Scorers that compare with an answer say which samples are solved; if there are none, functions and patterns do, from
    a score of 1 on.
    """
    specs = parse_scorers(options)
    scorers = [load_reward_model(spec, **reading) for spec in specs if spec.kind == "reward_model"]
    verifiers = [
        _load(spec, options.answer_column) for spec in specs if spec.kind != "reward_model"
    ]
    if all(scorer.solved_at is None for scorer in verifiers):
        for scorer in verifiers:
            if not isinstance(scorer, builtin.Length):
                scorer.solved_at = 1.0
    return scorers + verifiers


def _load(spec: ScorerSpec, answer_column: str | None) -> Scorer:
    common = {
        "name": spec.name,
        "weight": spec.weight,
        "solved_at": spec.solved_at,
        "answer_column": answer_column,
    }
    match spec.kind:
        case "math":
            return MathVerifier(**common)
        case "reasoning_gym":
            return builtin.ReasoningGymVerifier(spec.detail, **common)
        case "exact_match":
            return builtin.ExactMatch(ignore_case=spec.detail == "ignore_case", **common)
        case "regex":
            return builtin.Pattern(spec.detail, **common)
        case "format":
            return builtin.Pattern(builtin.THINK_THEN_ANSWER, **common)
        case "length":
            if not spec.detail.isdecimal() or int(spec.detail) == 0:
                raise InputError(
                    f"verifier {spec.text!r}: expected a whole number of tokens above 0 after the colon"
                )
            return builtin.Length(int(spec.detail), **common)
    function = spec.detail if callable(spec.detail) else load_function("verifier", spec.detail)
    return FunctionScorer(function=function, **common)
