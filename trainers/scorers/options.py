"""What `--verifiers`, `--verifier_weights` and `--solved_at` say, read but not yet loaded: three lists side by side.

    verifiers: [math, my_module:f, 'regex:answer: (\\d+)', reward_model:runs/rm/model]
    verifier_weights: [1, 0.2, 0.1, 0.5]
    solved_at: [null, 0.5, null, null]

What follows a prefix is taken whole, whatever stands in it.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import pydantic

from fused_rl.trainers.base.functions import name_of
from fused_rl.trainers.options import Finite, InputError, Needs, Options


class Kind(NamedTuple):
    """A scorer of ours: whether its name alone is one, what may follow a colon, whether it compares with the answer."""

    bare: bool = True
    after: str | None = None
    compares: bool = False


KINDS = {
    "math": Kind(compares=True),
    "reasoning_gym": Kind(after="<dataset>", compares=True),
    "reward_model": Kind(bare=False, after="<folder>"),
    "exact_match": Kind(after="ignore_case", compares=True),
    "regex": Kind(bare=False, after="<pattern>", compares=True),
    "format": Kind(after="<pattern>"),
    "length": Kind(bare=False, after="<tokens>"),
    "length_limit": Kind(bare=False, after="<tokens>"),
}
FUNCTION = "function"
COMPARING = ", ".join(name for name, kind in KINDS.items() if kind.compares)
NO_ANSWER = f"has no meaning with these verifiers, none of which compares with an answer ({COMPARING} do)"


Config = TypeVar("Config", bound="ScorerConfig")


class ScorerConfig(Options):
    """Who judges a response, and what that is worth."""

    verifiers: str | list[str] | None = None
    """One or a list: math, reasoning_gym, reasoning_gym:<dataset>, exact_match, exact_match:ignore_case,
    regex:<pattern>, format, format:<pattern>, length:<tokens>, length_limit:<tokens>, module:function,
    reward_model:<folder> (docs/verifiers.md). The reward is the sum of their scores. Those that compare with the answer
    say which responses are right; functions and patterns do (from a score of 1 on) where no other does, or where
    solved_at says so; reward models and length do with solved_at alone. Required, unless the
    rows name their reasoning_gym dataset."""
    verifier_weights: list[Finite] | None = None
    """Of each verifier's score in the reward; 0 logs a score and leaves it out. None is 1 for each."""
    solved_at: list[Finite | None] | None = None
    """Of each verifier the score from which on a response counts as solved; null, and None, is its own."""
    answer_column: str | None = None
    """Ground truth for the verifiers; None takes ground_truth or answer. Of `... #### 42` the part after the marks."""

    needs: ClassVar = (Needs("answer_column", lambda config: compares(config), NO_ANSWER),)

    @pydantic.field_validator("verifiers")
    @classmethod
    def _listed(cls, value: str | list[str] | None) -> list[str] | None:
        return [value] if isinstance(value, str) else value

    def reward_models(self) -> dict[str, str]:
        """The folders of the reward models that score, by the verifier that names them."""
        return {part.text: part.detail for part in read(self) if part.kind == "reward_model"}


def compares(options: ScorerConfig) -> bool:
    """Whether a scorer compares with the answer."""
    return options.verifiers is None or any(KINDS[one.kind].compares for one in read(options) if one.kind in KINDS)


class Spelled(NamedTuple):
    """One scorer as the options spell it."""

    text: str
    """As it stands in the list."""
    kind: str
    """One of `KINDS`, or `FUNCTION`."""
    detail: str | Callable
    """After the colon: a dataset, a folder, a pattern; a function, or the whole module:function."""
    name: str
    """In metrics: what it is, and where two are of one kind the whole of it."""
    weight: float
    solved_at: float | None


def read(options: ScorerConfig) -> list[Spelled]:
    """The scorers that the options name; refuses what they cannot mean, and one that is named twice."""
    texts = options.verifiers or []
    if options.verifiers == []:
        raise InputError("verifiers=[] is empty; name who judges")
    named = [_kind_of(text) for text in texts]
    kinds = [kind for kind, _ in named]
    for text, meant in zip(texts, named, strict=True):
        if named.count(meant) > 1:
            text = text if isinstance(text, str) else name_of(text)
            raise InputError(f"verifiers: {text!r} is named {named.count(meant)} times; for a weight: verifier_weights")
    weights = _aligned(options, "verifier_weights", 1.0)
    thresholds = _aligned(options, "solved_at", None)
    if texts and not any(weights):
        raise InputError("verifier_weights: every weight is 0, so every reward would be 0; give one scorer a weight")
    found = []
    for i, (kind, detail) in enumerate(named):
        own_name = kind not in (FUNCTION, "reasoning_gym") and kinds.count(kind) == 1
        whole = texts[i] if isinstance(texts[i], str) else name_of(texts[i])
        name = kind if own_name else detail if kind == FUNCTION and isinstance(detail, str) else whole
        found.append(Spelled(whole, kind, detail, name, weights[i], thresholds[i]))
    return found


def _aligned(options: ScorerConfig, option: str, default: float | None) -> list[float | None]:
    """The list with one number for each verifier."""
    given = getattr(options, option)
    count = len(options.verifiers or [])
    if given is None:
        return [default] * count
    if not count:
        raise InputError(f"{option}={given} has a number for each verifier: name them too, with verifiers")
    if len(given) != count:
        raise InputError(f"{option}={given} has {len(given)} numbers for {count} verifiers; give one for each")
    return given


def with_scorers(config: Config, scorers: Sequence[Callable | str] | None) -> Config:
    """The config with the scorers that Python gave: names as in `verifiers`, and functions."""
    if scorers is None:
        return config
    if config.verifiers is not None:
        raise InputError(f"verifiers={config.verifiers} and scorers={scorers} are both given; give one of them")
    return config.changed(verifiers=[scorers] if isinstance(scorers, str) or callable(scorers) else [*scorers])


def _kind_of(text: str | Callable) -> tuple[str, str | Callable]:
    """(kind, detail) of one verifier."""
    if not isinstance(text, str):
        if not callable(text):
            raise InputError(f"scorers: expected names and functions, got {text!r}")
        return FUNCTION, text
    name, colon, detail = text.partition(":")
    if name in KINDS:
        kind = KINDS[name]
        fits = bool(kind.after and (detail == kind.after or (detail and kind.after.startswith("<"))))
        if not fits and (colon or not kind.bare):
            expected = [name] * kind.bare + [f"{name}:{kind.after}"] * (kind.after is not None)
            raise InputError(f"verifier {text!r}: expected {' or '.join(expected)}")
        of_home = name == "reward_model" and detail.startswith("~/")
        return name, str(Path(detail).expanduser()) if of_home else detail
    if re.fullmatch(r".*\.py:\w+", text):
        raise InputError(f"verifier {text!r}: a module is named as in import, {text.replace('.py:', ':')!r}")
    if re.fullmatch(r"[\w.]+:\w+", text):
        return FUNCTION, text
    if re.fullmatch(r"[\w.]+\.\w+", text):
        return FUNCTION, ":".join(text.rsplit(".", 1))
    raise InputError(f"verifier {text!r}: {_unknown(name)}")


def _unknown(name: str) -> str:
    forms = [name for name, kind in KINDS.items() if kind.bare]
    forms += [f"{name}:{kind.after}" for name, kind in KINDS.items() if kind.after]
    near = difflib.get_close_matches(name, KINDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"expected {', '.join(forms)} or module:function{hint}"
