"""Options that are declared once: a field of a dataclass is an option's name, type, range, default and documentation.

The public functions take these options as keywords, and the trainers make options of a run from the same fields.
"""

import functools
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ParamSpec, TypeVar, get_args

from fused_rl.base.checks import RANGES, check_choice, check_range

P = ParamSpec("P")
R = TypeVar("R")


def arguments_of(
    declaration: Callable[P, object],
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorator: type checkers see the fields of a dataclass as a function's arguments, behind its `**options` too."""

    def declared(function: Callable[..., R]) -> Callable[P, R]:
        return typing.cast("Callable[P, R]", function)

    return declared


@functools.cache
def ranges_of(options_class: type) -> dict[str, str]:
    """Return the ranges of the options that are numbers, in the words of `checks.RANGES`."""
    ranges = {}
    for name, hint in typing.get_type_hints(options_class, include_extras=True).items():
        for kind in (hint, *get_args(hint)):  # X, or one of X | None
            if typing.get_origin(kind) is Annotated:
                ranges[name] = kind.__metadata__[0]
    return ranges


def check_ranges(options: Any) -> None:
    """Check every option of a dataclass that is a number and not its default, which may be None."""
    defaults = type(options)
    for name, words in ranges_of(defaults).items():
        value = getattr(options, name)
        if value is getattr(defaults, name):
            continue
        # Every call of a loss checks twenty numbers, so those that fit cost no call.
        low, high, ends = RANGES[words]
        if type(value) not in (int, float) or not (low < value < high or value in ends):
            check_range(name, value, words)


def check_names(names: Iterable[str], options_class: Any) -> None:
    """Refuse a name that is no option of the dataclass."""
    # A name that fits costs no call; check_choice says which name is meant.
    fields = options_class.__dataclass_fields__
    for name in names:
        if name not in fields:
            check_choice("option", name, fields)
