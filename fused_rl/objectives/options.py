"""Options that are declared once: a field of a dataclass is an option's name, type, range, default and documentation.

The public functions take these options as keywords, and the trainers make options of a run from the same fields.
"""

import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, ParamSpec, TypeVar, get_args

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


def functions_named(names: Any, namespace: dict) -> dict:
    """Return the function of each name of a Literal: in the module with this namespace "geo-mean" is `_geo_mean`."""
    return {name: namespace["_" + name.replace("-", "_")] for name in get_args(names)}


class RangedOptions:
    """Base of a dataclass of options that knows their ranges."""

    ranges: ClassVar[dict[str, str]] = {}
    """Option that is a number -> its range, in the words of `checks.RANGES`."""

    def __init_subclass__(cls) -> None:
        # Here, once, and not in a call of a loss: torch.compile could not trace the reading of type hints.
        cls.ranges = {}
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            for kind in (hint, *get_args(hint)):  # X, or one of X | None
                if typing.get_origin(kind) is Annotated:
                    cls.ranges[name] = kind.__metadata__[0]


def check_ranges(options: RangedOptions) -> None:
    """Check every option of a dataclass that is a number and not its default, which may be None."""
    defaults = type(options)
    for name, words in options.ranges.items():
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
