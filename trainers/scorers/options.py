"""What `--verifiers` says, read but not yet loaded: which scorers, with which weights, arguments and thresholds.

    1*math, 0.2*my_module:f>=0.5, 0.1*regex('answer: (\\d+)', name=last)

Text stands in quotes, as it is: no backslash means anything to this file, and no comma inside parentheses separates.
"""

import difflib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.options.source import Source

# The arguments of each scorer that takes some, and of which type; the first may stand without its name.
ARGUMENTS = {
    "exact_match": {"ignore_case": bool},
    "regex": {"pattern": str},
    "format": {"pattern": str},
    "length": {"target": int, "limit": int},
}
WITH_ANSWER = ("math", "reasoning_gym", "exact_match", "regex")  # compare a response with the row's answer
NO_ANSWER = f"has no meaning with these verifiers, none of which compares with an answer ({', '.join(WITH_ANSWER)} do)"
WITH_DETAIL = ("reasoning_gym", "reward_model")
KINDS = ("math", *WITH_DETAIL, *ARGUMENTS)
FUNCTION = "function"
FORMS = (
    "math, reasoning_gym, reasoning_gym:<dataset>, reward_model:<folder>, exact_match, regex('…'), format, length(…) "
    "or module:function"
)

QUOTED = r"""'[^']*'|"[^"]*\""""
COMMA = re.compile(rf"""\((?:{QUOTED}|[^'")])*\)|,""")
SCORER = re.compile(
    r"(?:(?P<weight>[^*(]+)\*)?\s*(?:(?P<called>\w+)\s*\((?P<arguments>.*)\)|(?P<name>[^*>]+?))\s*(?:>=(?P<solved_at>.+))?",
    re.DOTALL,
)
ARGUMENT = re.compile(rf"""\s*(?:(?P<key>\w+)\s*=\s*)?(?P<value>{QUOTED}|[^'",=\s]+)\s*(?:,|$)""")
TYPES = {str: "text in quotes", int: "a whole number above 0", bool: "true or false"}


@dataclass(frozen=True)
class Spelled:
    """One scorer as the option spells it."""

    text: str
    """The whole of it, for errors."""
    kind: str
    """One of `KINDS`, or `FUNCTION`."""
    name: str
    """In metrics: what the argument `name` says, else the spelling without weight, arguments and threshold."""
    detail: str = ""
    """After the colon: a dataset, a folder; of a function the whole module:function."""
    arguments: dict[str, str | int | bool] = field(default_factory=dict)
    """Those that are given."""
    weight: float | None = None
    solved_at: float | None = None


def read(verifiers: str) -> list[Spelled]:
    """The scorers that the option names; refuses what it cannot mean, and two of one name."""
    pieces, start = [], 0
    for found in COMMA.finditer(verifiers):
        if found[0] == ",":
            pieces.append(verifiers[start : found.start()])
            start = found.end()
    spelled = [_read_one(piece.strip()) for piece in [*pieces, verifiers[start:]]]
    names = [one.name for one in spelled]
    for one in spelled:
        if names.count(one.name) > 1:
            raise InputError(_twice(one, names.count(one.name), verifiers))
    return spelled


def _twice(one: Spelled, times: int, verifiers: str) -> str:
    if one.kind == "reward_model":
        return f"verifiers: {verifiers!r} names a reward model twice; for a weight: 2*reward_model:…"
    remedy = f"{one.kind}(…, name=other)" if one.kind in ARGUMENTS else f"for a weight: 2*{one.name}"
    return f"verifiers: {one.name!r} is named {times} times; {remedy}"


def _read_one(text: str) -> Spelled:
    found = SCORER.fullmatch(text)
    if found is None:
        raise InputError(f"verifier {text!r}: expected [weight*]name[>=threshold], as in 0.5*math")
    name = (found["called"] or found["name"]).strip()
    kind, _, detail = name.partition(":")
    if detail and kind not in WITH_DETAIL:
        kind, detail = FUNCTION, name
    elif "." in name and not detail:  # after a colon a dot is the folder's or the dataset's
        kind, detail = FUNCTION, ":".join(name.rsplit(".", 1))
    if kind not in (*KINDS, FUNCTION) or name.endswith(":") or (kind == "reward_model" and not detail):
        raise InputError(_unknown(name))
    if found["arguments"] is not None and kind not in ARGUMENTS:
        raise InputError(f"verifier {text!r}: {name} takes no arguments")
    arguments = _arguments(text, kind, found["arguments"] or "")
    weight, solved_at = _number(text, found["weight"]), _number(text, found["solved_at"])
    if kind == "reward_model" and detail.startswith("~/"):
        detail = str(Path(detail).expanduser())
    return Spelled(text, kind, arguments.pop("name", name), detail, arguments, weight, solved_at)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, KINDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near and near[0] != name.rstrip(":") else ""
    if name.split("(")[0] in ARGUMENTS:
        hint = "; its parentheses or quotes do not close"
    return f"verifier {name!r}: expected {FORMS}{hint}"


def _arguments(text: str, kind: str, written: str) -> dict[str, str | int | bool]:
    """The arguments by name, each of its type."""
    types = ARGUMENTS.get(kind, {}) | {"name": str}
    arguments, at = {}, 0
    while written[at:].strip():
        found = ARGUMENT.match(written, at)
        if found is None:
            raise InputError(f"verifier {text!r}: cannot read {written[at:].strip()!r}; text stands in quotes")
        key = found["key"] or next(iter(types))
        if key not in types or key in arguments:
            what = "takes no" if key not in types else "has two"
            raise InputError(f"verifier {text!r}: {kind} {what} {key!r}; its arguments are {', '.join(types)}")
        arguments[key] = _value(text, key, found["value"], types[key])
        at = found.end()
    return arguments


def _value(text: str, key: str, written: str, kind: type) -> str | int | bool:
    if written[0] in "'\"" and kind is str:
        return written[1:-1]
    if key == "name" and re.fullmatch(r"\w+", written):
        return written
    if kind is bool and written.lower() in ("true", "false"):
        return written.lower() == "true"
    if kind is int and written.isdecimal() and int(written) > 0:
        return int(written)
    raise InputError(f"verifier {text!r}: {key} is {written}; expected {TYPES[kind]}")


def _number(text: str, written: str | None) -> float | None:
    if written is None:
        return None
    try:
        number = float(written)
    except ValueError as error:
        what = f"{written.strip()!r} is not a number; weight and threshold must be numbers"
        raise InputError(f"verifier {text!r}: {what}") from error
    if not math.isfinite(number):
        raise InputError(f"verifier {text!r}: {written.strip()!r} is not a finite number")
    return number


def sources_of(verifiers: str) -> list[Source]:
    """What the option names that is read: reward models and functions."""
    kinds = {"reward_model": "reward_model", FUNCTION: "scorer"}
    named = [one for one in read(verifiers) if one.kind in kinds]
    return [Source(kinds[one.kind], f"verifiers: {one.name}", one.detail) for one in named]


def reward_of(spelled: list[Spelled]) -> str:
    """What the reward is, in a line."""
    return " + ".join(f"{1 if one.weight is None else one.weight:g}*{one.name}" for one in spelled)


def check_weights(spelled: list[Spelled]) -> None:
    """Refuse a scorer without a weight among weighted ones: whoever weighs has to say how much each counts.

    `0*` does not weigh, it leaves a scorer out of the reward.
    """
    if all(one.weight == 0 for one in spelled):
        raise InputError("verifiers: every weight is 0, so every reward would be 0; give one scorer a weight")
    weighted = [one for one in spelled if one.weight]
    plain = [one for one in spelled if one.weight is None]
    if weighted and plain:
        without, other = plain[0].text, weighted[0].text
        remedy = f"give each a weight: 1*{without}"
        raise InputError(f"verifiers: {without!r} has no weight, and {other!r} has one; {remedy}")
