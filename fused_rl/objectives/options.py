"""Options that are declared once: a field of a dataclass is an option's name, type, range, default and documentation.

The public functions take these options as keywords, and the trainers make options of a run from the same fields.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar, get_args

from fused_rl.base.checks import check_choice, check_range

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
    """Check every option of a dataclass that is a number; None passes where it is the default."""
    defaults = type(options)
    for name, words in ranges_of(defaults).items():
        value = getattr(options, name)
        if value is not None or getattr(defaults, name) is not None:
            check_range(name, value, words)


def check_names(names: typing.Iterable[str], options_class: type) -> None:
    """Refuse a name that is no option of the dataclass."""
    for name in names:
        check_choice("option", name, [field.name for field in dataclasses.fields(options_class)])
