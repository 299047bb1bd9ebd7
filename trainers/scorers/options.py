"""The options `--verifiers`, `--verifier_weights` and `--solved_at`, read but not yet loaded: three lists side by side.

verifiers: [math, my_module:f, 'regex:answer: (\\d+)', reward_model:runs/rm/model]
verifier_weights: [1, 0.2, 0.1, 0.5]
solved_at: [null, 0.5, null, null]
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import pydantic

from fused_rl.trainers.base.text import InputError, name_of
from fused_rl.trainers.options import Finite, Options

# The scorers of ours, as they are spelled; any text may stand in place of <...>.
SPELLINGS = (
    "math",
    "reasoning_gym",
    "reasoning_gym:<dataset>",
    "reward_model:<folder>",
    "exact_match",
)
SPELLINGS += ("exact_match:ignore_case", "regex:<pattern>", "format", "length:<tokens>")
KINDS = {form.partition(":")[0] for form in SPELLINGS}
FUNCTION = "function"
Config = TypeVar("Config", bound="ScorerConfig")


class ScorerConfig(Options):
    """The scorers of responses, and their weights."""

    verifiers: str | list[str] | None = None
    """One or a list: math, reasoning_gym, reasoning_gym:<dataset>, exact_match, exact_match:ignore_case,
    regex:<pattern>, format, length:<tokens>, module:function, reward_model:<folder> (docs/verifiers.md). The reward is
    the weighted sum of their scores. Required, unless the rows name their reasoning_gym dataset."""
    verifier_weights: list[Finite] | None = None
    """Weight of each verifier's score in the reward; 0 only logs the score. None is 1 for each."""
    solved_at: list[Finite | None] | None = None
    """Score from which a response counts as solved, for each verifier; null is the verifier's own."""
    answer_column: str | None = None
    """Answers for the verifiers; None takes ground_truth, answer or solution. Of `... #### 42` the part after the
    marks."""

    @pydantic.field_validator("verifiers")
    @classmethod
    def _listed(cls, value: str | list[str] | None) -> list[str] | None:
        return [value] if isinstance(value, str) else value

    def reward_models(self) -> dict[str, str]:
        """Return the folders of the reward models that score, by the verifier that names them."""
        return {
            spec.text: spec.detail for spec in parse_scorers(self) if spec.kind == "reward_model"
        }


class ScorerSpec(NamedTuple):
    """One scorer as the options spell it; `kind` is one of `KINDS`, or `FUNCTION`."""

    text: str
    kind: str
    detail: str | Callable
    """After the colon: a dataset, a folder, a pattern; a function, or the whole module:function."""
    name: str
    """In metrics: its kind, or the whole text where two are of one kind."""
    weight: float
    solved_at: float | None


def parse_scorers(options: ScorerConfig) -> list[ScorerSpec]:
    """Return the scorers that the options name; refuse what they cannot mean, and one that is named twice."""
    if options.verifiers == []:
        raise InputError("verifiers=[] is empty; name at least one scorer")
    given = options.verifiers or []
    meant = [_parse_scorer(one) for one in given]
    kinds = [kind for kind, _ in meant]
    for option in ("verifier_weights", "solved_at"):
        numbers = getattr(options, option)
        if numbers is not None and len(numbers) != len(given):
            what = f"has {len(numbers)} numbers for {len(given)} verifiers"
            raise InputError(f"{option}={numbers} {what}; give one for each")
    weights = options.verifier_weights or [1.0] * len(given)
    thresholds = options.solved_at or [None] * len(given)
    found = []
    for one, (kind, detail), weight, solved_at in zip(
        given, meant, weights, thresholds, strict=True
    ):
        text = one if isinstance(one, str) else name_of(one)
        name = text
        if kind == FUNCTION and isinstance(detail, str):
            name = detail
        elif kind not in (FUNCTION, "reasoning_gym") and kinds.count(kind) == 1:
            name = kind
        if name in [other.name for other in found]:
            raise InputError(f"verifiers names {text!r} twice; for a weight: verifier_weights")
        found.append(ScorerSpec(text, kind, detail, name, weight, solved_at))
    return found


def with_scorers(config: Config, scorers: Sequence[Callable[..., object] | str] | None) -> Config:
    """Return the config with the scorers that Python gave: names as in `verifiers`, and functions."""
    if scorers is None:
        return config
    if config.verifiers is not None:
        raise InputError(
            f"verifiers={config.verifiers} and scorers={scorers} are both given; give one of them"
        )
    return config.replace(
        verifiers=[scorers] if isinstance(scorers, str) or callable(scorers) else [*scorers]
    )


def _parse_scorer(text: str | Callable) -> tuple[str, str | Callable]:
    """Return kind and detail of one verifier."""
    if callable(text):
        return FUNCTION, text
    kind, _, detail = str(text).partition(":")
    for form in SPELLINGS:
        name, _, after = form.partition(":")
        if name == kind and (detail == after or (after.startswith("<") and detail)):
            return kind, detail
    function = re.fullmatch(r"([\w.]+)[:.](\w+)", str(text))
    if kind in KINDS or function is None:
        raise InputError(f"verifier {text!r}: expected {', '.join(SPELLINGS)} or module:function")
    return FUNCTION, f"{function[1]}:{function[2]}"
