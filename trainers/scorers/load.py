"""Scorers by name, loaded: `math`, reasoning-gym's own, reward models, those of builtin.py, and functions of users.

Each is a `Scorer` (rollouts/types.py): it knows its weight, and from which score on a sample counts as solved. What
each may do to a run, and what the limits are: docs/verifiers.md.
"""

import difflib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.functions import load_function
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.options import InputError
from fused_rl.trainers.rollouts.types import Scorer
from fused_rl.trainers.scorers.answers import ANSWER_COLUMNS, answer_of
from fused_rl.trainers.scorers.builtin import THINK_THEN_ANSWER, ExactMatch, Length, Pattern
from fused_rl.trainers.scorers.functions import FunctionScorer
from fused_rl.trainers.scorers.gym import ReasoningGymVerifier
from fused_rl.trainers.scorers.math import MathVerifier, math_fits
from fused_rl.trainers.scorers.options import FUNCTION, KINDS, ScorerConfig, Spelled, read
from fused_rl.trainers.scorers.reward_model import Reader, load_reward_model

Config = TypeVar("Config", bound=ScorerConfig)


def check_scorers(options: ScorerConfig, *, imports: bool) -> str:
    """What the reward is, in a line; refuses scorers that cannot be, as far as it can be known without models.

    Args:
        options: name them.
        imports: also import the modules of functions, and reasoning_gym where a dataset of it is named.
    """
    if options.verifiers is None:
        return "reasoning_gym, of rows that name their dataset; others need --verifiers"
    spelled = read(options)
    for part in spelled:
        if part.kind == "math" and importlib.util.find_spec("math_verify") is None:
            raise InputError("verifier 'math': math-verify is not installed; pip install 'math-verify>=0.9'")
        lasting = part.kind in ("math", "reward_model") or (part.kind == "reasoning_gym" and not part.detail)
        needs_imports = part.kind in (FUNCTION, "reasoning_gym")
        if not lasting and (imports or not needs_imports):
            _load(part, None)
    return " + ".join(f"{part.weight:g}*{part.name}" for part in spelled)


def load_chosen(
    config: Config, rows: Sequence[Rows], reader: Reader, recorded: Mapping[str, object]
) -> tuple[Config, list[Scorer]]:
    """The config with its scorers, and these, loaded; rows of reasoning_gym name theirs.

    Args:
        config: names them, unless the rows do.
        rows: to train and to evaluate on.
        reader: what reward models need.
        recorded: the options of the run that is resumed: who judged there goes on.
    """
    if config.verifiers is None:
        verifiers = recorded.get("verifiers")
        why = "as in the run that is resumed"
        if verifiers is None:
            verifiers = named_by(rows, config.answer_column)
            why = "since the rows name their dataset"
        config = config.changed(verifiers=[verifiers] if isinstance(verifiers, str) else verifiers)
        if ranks.rank() == 0:
            tell(f"verifiers: {', '.join(config.verifiers)}, {why}")
    return config, load_scorers(config, reader)


def named_by(rows: Sequence[Rows], answer_column: str | None) -> str:
    """reasoning_gym, if the first row names its dataset; else an error that suggests a scorer for the row's answer."""
    part = next(part for part in rows if len(part))
    first = part.rows[0]
    metadata = first.get("metadata")
    if isinstance(metadata, dict) and metadata.get("source_dataset"):
        return "reasoning_gym"
    ours = ", ".join(f"{name}:{kind.after}" if not kind.bare else name for name, kind in KINDS.items())
    problem = f"{part.where(0)}: --verifiers is missing; it names what scores a response: {ours} or module:function"
    columns = ANSWER_COLUMNS if answer_column is None else (answer_column,)
    if all(first.get(column) is None for column in columns):
        raise InputError(f"{problem}; the row has {sorted(first)}, and no answer: name its column with --answer_column")
    answer = answer_of(first, answer_column)
    fits = "math" if math_fits(answer) else "exact_match"
    raise InputError(f"{problem}; for the answer {answer!r:.40}: --verifiers {fits}")


def load_scorers(options: ScorerConfig, reader: Reader | None = None) -> list[Scorer]:
    """The scorers that the options name.

    A sample is solved when those say so that compare with an answer (`math`, `reasoning_gym`, `exact_match`, a `regex`
    with a group: a score of 1), whatever else is among the scorers; where there is none, functions and patterns decide
    by 1 too. All ranks call it together: where one cannot load its scorers, all raise.

    Args:
        options: name them.
        reader: what reward models need, where there are any.

    Raises:
        InputError: a name that is none; a reward model with several labels or another tokenizer than the policy's.
    """
    spelled = read(options)
    judges = [part for part in spelled if part.kind == "reward_model"]
    others = [part for part in spelled if part.kind != "reward_model"]
    scorers = [load_reward_model(part, reader) for part in judges]
    verifiers = [_load(part, options.answer_column) for part in others]
    if all(scorer.solved_at is None for scorer in verifiers):
        for scorer in verifiers:
            if not isinstance(scorer, Length):
                scorer.solved_at = 1.0
    return scorers + verifiers


def _load(part: Spelled, answer_column: str | None) -> Scorer:
    judged = {"weight": part.weight}
    if part.solved_at is not None:
        judged["solved_at"] = part.solved_at
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
        case "length":
            return Length(target=_tokens(part), **named)
        case "length_limit":
            return Length(limit=_tokens(part), **named)
    return FunctionScorer(part.name, _function(part), **judged)


def _tokens(part: Spelled) -> int:
    if not part.detail.isdecimal() or int(part.detail) == 0:
        raise InputError(f"verifier {part.text!r}: expected a whole number above 0 after the colon, in tokens")
    return int(part.detail)


def _function(part: Spelled) -> Callable:
    try:
        return part.detail if callable(part.detail) else load_function("verifier", part.detail)
    except InputError as error:
        near = difflib.get_close_matches(part.name.partition(":")[0], KINDS, n=1)
        raise InputError(f"{error}; did you mean {near[0]!r}?" if near else str(error)) from error
