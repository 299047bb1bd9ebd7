"""Scorers by name, loaded: those of builtin.py and math.py, reward models, and functions of users.

Each is a `Scorer` (rollouts/types.py): it knows its weight, and from which score on a sample counts as solved. What
each may do to a run, and what the limits are: docs/verifiers.md.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.functions import load_function
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options import InputError
from fused_rl.trainers.rollouts.types import Scorer
from fused_rl.trainers.scorers.builtin import (
    THINK_THEN_ANSWER,
    ExactMatch,
    Length,
    Pattern,
    ReasoningGymVerifier,
)
from fused_rl.trainers.scorers.functions import FunctionScorer
from fused_rl.trainers.scorers.math import MathVerifier
from fused_rl.trainers.scorers.options import KINDS, ScorerConfig, Spelled, read
from fused_rl.trainers.scorers.reward_model import Reader, load_reward_model

Config = TypeVar("Config", bound=ScorerConfig)


def check_scorers(options: ScorerConfig) -> str:
    """Return the reward in a line; refuse scorers that cannot be, as far as it can be known without models."""
    if options.verifiers is None:
        return "reasoning_gym, of rows that name their dataset; others need --verifiers"
    spelled = read(options)
    for part in spelled:
        if part.kind not in ("math", "reward_model"):
            _load(part, None)
    return " + ".join(f"{part.weight:g}*{part.name}" for part in spelled)


def load_chosen(
    config: Config, rows: Sequence[Rows], reader: Reader, recorded: Mapping[str, object]
) -> tuple[Config, list[Scorer]]:
    """Return the config with its scorers, and these, loaded.

    Args:
        config: names them, unless the rows name their reasoning_gym dataset.
        rows: to train and to evaluate on.
        reader: what reward models need.
        recorded: the options of the run that is resumed, whose scorers go on.
    """
    if config.verifiers is None:
        verifiers = recorded.get("verifiers") or named_by(rows)
        config = config.changed(verifiers=verifiers)
        if ranks.rank() == 0:
            tell(f"verifiers: {verifiers}, as the rows or the resumed run name them")
    return config, load_scorers(config, reader)


def load_for_policy(config: Config, rows, tokenizer, device, recorded) -> tuple[Config, list[Scorer]]:
    """Return what `load_chosen` does, for a policy that is trained with this config."""
    reader = Reader.beside(config, config, tokenizer, device, config.rollout_batch_size)
    return load_chosen(config, rows, reader, recorded)


def named_by(rows: Sequence[Rows]) -> list[str]:
    """Return reasoning_gym, if the first row names its dataset; else raise an error that lists the scorers."""
    part = next(part for part in rows if len(part))
    if (part.rows[0].get("metadata") or {}).get("source_dataset"):
        return ["reasoning_gym"]
    ours = ", ".join(f"{name}:{kind.after}" if not kind.bare else name for name, kind in KINDS.items())
    problem = "--verifiers is missing; it names what scores a response"
    raise InputError(f"{part.where(0)}: {problem}: {ours} or module:function")


def load_scorers(options: ScorerConfig, reader: Reader | None = None) -> list[Scorer]:
    """Return the scorers that the options name; all ranks call it together.

    A sample is solved when those say so that compare with an answer (`math`, `reasoning_gym`, `exact_match`, a `regex`
    with a group: a score of 1), whatever else is among the scorers; where there is none, functions and patterns decide
    by 1 too.

    Args:
        options: name them.
        reader: what reward models need, where there are any.

    Raises:
        InputError: a name that is none; a reward model with several labels or another tokenizer than the policy's.
    """
    spelled = read(options)
    scorers = [load_reward_model(part, reader) for part in spelled if part.kind == "reward_model"]
    verifiers = [_load(part, options.answer_column) for part in spelled if part.kind != "reward_model"]
    if all(scorer.solved_at is None for scorer in verifiers):
        for scorer in verifiers:
            if not isinstance(scorer, Length):
                scorer.solved_at = 1.0
    return scorers + verifiers


def _load(part: Spelled, answer_column: str | None) -> Scorer:
    judged = {"weight": part.weight} | ({} if part.solved_at is None else {"solved_at": part.solved_at})
    named = {"name": part.name, **judged}
    match part.kind:
        case "math":
            return MathVerifier(answer_column, **judged)
        case "reasoning_gym":
            return ReasoningGymVerifier(part.detail, answer_column, **judged)
        case "exact_match":
            return ExactMatch(answer_column, ignore_case=part.detail == "ignore_case", **named)
        case "regex":
            return Pattern(part.detail, answer_column, **named)
        case "format":
            return Pattern(part.detail or THINK_THEN_ANSWER, whole=True, **named)
        case "length" | "length_limit":
            if not part.detail.isdecimal() or int(part.detail) == 0:
                raise InputError(f"verifier {part.text!r}: expected a whole number of tokens above 0 after the colon")
            return Length(**{"target" if part.kind == "length" else "limit": int(part.detail)}, **named)
    function = part.detail if callable(part.detail) else load_function("verifier", part.detail)
    return FunctionScorer(function=function, **named)
