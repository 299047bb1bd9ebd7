"""The scorers that `--verifiers` names: the dictionary of names, and how they are parsed and loaded."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ..base.text import InputError, load_function, name_of
from ..rollouts.types import Scorer
from . import builtin
from .options import REWARD_MODEL, ScorerConfig


def _math(**common: Any) -> Scorer:
    """Return the scorer that compares answers by math-verify, which brings a pool of processes."""
    from .math import MathVerifier

    return MathVerifier(**common)


def _reward_model(*folder: Any, **common: Any) -> Scorer:
    """Return a reward model as a scorer."""
    from .reward_model import load_reward_model

    return load_reward_model(*folder, **common)


def _function(function: str | Callable, **common: Any) -> Scorer:
    """Return a function of the user's own, or the one of this name, as a scorer."""
    from .functions import FunctionScorer

    if isinstance(function, str):
        function = load_function("verifier", function)
    return FunctionScorer(function=function, **common)


# How a scorer is spelled -> what makes it, called with the text in place of <...> and the common arguments by name.
SCORERS: dict[str, Callable[..., Scorer]] = {
    "math": _math,
    "exact_match": builtin.ExactMatch,
    "exact_match:ignore_case": functools.partial(builtin.ExactMatch, ignore_case=True),
    "regex:<pattern>": builtin.Pattern,
    "format": functools.partial(builtin.Pattern, builtin.THINK_THEN_ANSWER),
    "length:<tokens>": builtin.Length,
    f"{REWARD_MODEL}:<folder>": _reward_model,
}
# Names that no function can have, so that a misspelt detail is not taken for one.
KINDS = {spelling.partition(":")[0] for spelling in SCORERS}
FUNCTION = "function"
EXPECTED = f"{', '.join(SCORERS)} or module:function"


class ScorerSpec(NamedTuple):
    """One scorer as the options spell it, not yet loaded."""

    text: str
    kind: str
    """The name before the colon, one of `KINDS`; or `FUNCTION`."""
    make: Callable[..., Scorer]
    """Called with the common arguments, and for a reward model with what it reads."""
    name: str
    """In metrics: its kind, or the whole text where two are of one kind."""
    weight: float
    solved_at: float | None

    def load(self, answer_column: str | None, **reading) -> Scorer:
        """Return the scorer itself."""
        common = {"name": self.name, "weight": self.weight, "solved_at": self.solved_at}
        return self.make(**common, answer_column=answer_column, **reading)


def parse_scorers(options: ScorerConfig) -> list[ScorerSpec]:
    """Return the scorers that the options name; refuse what they cannot mean, and one that is named twice."""
    verifiers = options.verifiers
    if verifiers is None:
        raise InputError(f"verifiers is missing; give one of {EXPECTED}")
    if not verifiers:
        raise InputError("verifiers=[] is empty; name at least one scorer")
    for option, numbers in (
        ("verifier_weights", options.verifier_weights),
        ("solved_at", options.solved_at),
    ):
        if numbers is not None and len(numbers) != len(verifiers):
            problem = f"has {len(numbers)} numbers for {len(verifiers)} verifiers"
            raise InputError(f"{option}={numbers} {problem}; give one for each")

    # The three lists stand side by side, so that each verifier has its weight and its threshold.
    parsed = [_parse_scorer(one) for one in verifiers]
    kinds = [kind for kind, _, _ in parsed]
    weights = options.verifier_weights or [1.0] * len(verifiers)
    thresholds = options.solved_at or [None] * len(verifiers)
    specs: dict[str, ScorerSpec] = {}
    rows = zip(verifiers, parsed, weights, thresholds, strict=True)
    for one, (kind, text, make), weight, solved_at in rows:
        # Two patterns are told apart in metrics by all of their text, a single one is called by its kind.
        name = kind if kind != FUNCTION and kinds.count(kind) == 1 else text
        if verifiers.count(one) > 1 or (name in specs and not callable(one)):
            raise InputError(f"verifiers names {text!r} twice; for a weight: verifier_weights")
        # Two functions of one name, such as lambdas, get a number.
        while name in specs:
            name = f"{text}_{len(specs) + 1}"
        specs[name] = ScorerSpec(text, kind, make, name, weight, solved_at)
    return list(specs.values())


def _parse_scorer(one: str | Callable) -> tuple[str, str, Callable[..., Scorer]]:
    """Return the kind of one verifier, its text, and what makes it."""
    if callable(one):
        return FUNCTION, name_of(one), functools.partial(_function, one)
    # Whatever follows the first colon belongs to the scorer, as a pattern may have colons of its own.
    kind, _, detail = one.partition(":")
    for spelling, make in SCORERS.items():
        name, _, after = spelling.partition(":")
        if spelling == one:
            return kind, one, make
        if name == kind and after.startswith("<") and detail:
            return kind, one, functools.partial(make, detail)

    # A function by its module, with a colon or a dot before its name.
    function = re.fullmatch(r"([\w.]+)[:.](\w+)", one)
    if kind in KINDS or function is None:
        raise InputError(f"verifier {one!r}: expected {EXPECTED}")
    where = f"{function[1]}:{function[2]}"
    return FUNCTION, where, functools.partial(_function, where)


def check_scorers(options: ScorerConfig) -> str:
    """Return the reward in a line; refuse scorers that cannot be loaded, without loading models."""
    specs = parse_scorers(options)
    for spec in specs:
        # Not these two: the one starts a pool of processes, and the other loads a model.
        if spec.kind not in ("math", REWARD_MODEL):
            spec.load(None)
    return " + ".join(f"{spec.weight:g}*{spec.name}" for spec in specs)


def load_scorers(options: ScorerConfig, **reading) -> list[Scorer]:
    """Return the scorers that the options name; all ranks call it together. `reading` is what reward models take.

    Scorers that compare with an answer say which samples are solved; if there are none, functions and patterns do, from
    a score of 1 on.
    """
    models, verifiers = [], []
    for spec in parse_scorers(options):
        if spec.kind == REWARD_MODEL:
            models.append(spec.load(options.answer_column, **reading))
        else:
            verifiers.append(spec.load(options.answer_column))

    # A length or a reward model's score has no value that means "solved".
    if all(scorer.solved_at is None for scorer in verifiers):
        for scorer in verifiers:
            if not isinstance(scorer, builtin.Length):
                scorer.solved_at = 1.0
    return models + verifiers
