"""How options are declared: a field, its range and its docstring are the option, the YAML key, the flag, the help.

A room declares the options that it reads as a group, such as `OptimConfig` in optim.py.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import pydantic
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict
from pydantic.types import AllowInfNan
from typing_extensions import Self

from fused_rl.base import checks

from .text import InputError, import_name_of

# Numbers with a range; NaN is in none of them.
IsFinite = AllowInfNan(allow_inf_nan=False)
Finite = Annotated[float, IsFinite]
Positive = Annotated[float, Gt(0), IsFinite]
NonNegative = Annotated[float, Ge(0), IsFinite]
Unit = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
Fraction = Annotated[float, Gt(0), Lt(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
Smoothing = Annotated[float, Ge(0), Lt(0.5)]
Temperature = Annotated[float, Ge(checks.LEAST_TEMPERATURE), Le(checks.MOST_TEMPERATURE)]
PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Le(2**31 - 1)]


# A URL with what may be a secret, also of a scorer.
SECRET = re.compile(r"(reward_model:)?[A-Za-z][A-Za-z0-9+.-]*://\S*[@?]\S*")


class Requirement(NamedTuple):
    """An option that means something only beside another one."""

    option: str
    is_met: Callable[[Any], bool]
    """Return True if the config gives the option a meaning."""
    message: str
    """The message after `option=value` if it does not: why, and what to do."""


MAY_CHANGE: Any = {"may_change": True}


def may_change(default: Any) -> Any:
    """Return the field of an option that may have another value in a resumed run, from the next step on."""
    return pydantic.Field(default, json_schema_extra=MAY_CHANGE)


def refusal(option: str, message: str) -> Requirement:
    """Return the requirement of an option that has no meaning for a trainer which inherits it."""
    return Requirement(option, lambda config: False, message)


def without(condition: str) -> str:
    """Return the usual message of an unmet requirement."""
    return f"has no meaning without {condition}; give it, or leave the option out"


class Options(pydantic.BaseModel):
    """A group of options; their types and ranges are checked whenever they are set."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,  # "8" is no number, and True none either
        validate_assignment=True,
        use_attribute_docstrings=True,
    )
    command: ClassVar[str | None] = None
    """`fused-rl <command>`, of a config that is whole."""
    main: ClassVar[tuple[str, ...]] = ()
    """The options that --help lists; none is all of them."""
    needs: ClassVar[tuple[Requirement, ...]] = ()
    """The requirements of this group's options."""
    replaces: ClassVar[dict[str, str]] = {}
    """Options that, given on the command line, take the place of another one in a file."""

    if not typing.TYPE_CHECKING:  # a type checker has the fields

        def __init__(self, **options):
            try:
                super().__init__(**options)
            # pydantic's own message has several lines, and a link to its pages.
            except pydantic.ValidationError as error:
                raise options_error(error, type(self), options) from None
            self.check()

        def __setattr__(self, name: str, value):
            try:
                super().__setattr__(name, value)
            except pydantic.ValidationError as error:
                raise options_error(error, type(self), {name: value}) from None

    @classmethod
    def all_needs(cls) -> list[Requirement]:
        """Return the requirements of all groups of options in this one."""
        return [need for group in cls.__mro__ for need in vars(group).get("needs", ())]

    def check(self) -> None:
        """Check that each option that was given has a meaning; at construction, and again when a run begins."""
        for need in self.all_needs():
            value = getattr(self, need.option)  # null, false and 0 request nothing
            if value and need.option in self.model_fields_set and not need.is_met(self):
                raise InputError(f"{need.option}={value} {need.message}")

    @classmethod
    def unknown(cls, names: Collection[str], where: str = "") -> InputError:
        """Return the error for names that are no options, all of them at once; `where` says where they stand."""
        return InputError(f"{where}unknown options {', '.join(names)}")

    def has_meaning(self, name: str) -> bool:
        """Return True if the other options give an option a meaning, such as a server to the server's timeout."""
        return all(need.is_met(self) for need in self.all_needs() if need.option == name)

    def replace(self, **options: Any) -> Self:
        """Return a copy with other values, which are not checked."""
        return self.model_copy(update=options)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """Turn a path into text, and expand ~/, which no shell expands in YAML or in --option=~/..."""
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        # A text with spaces, such as a system prompt, is no path.
        is_home = isinstance(value, str) and re.fullmatch(r"~/\S*", value)
        return os.path.expanduser(value) if is_home else value

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _holds_no_secret(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Refuse URLs with a user, password or query: options are printed, and saved in several places."""
        values = [*value.values()] if isinstance(value, dict) else value
        for text in values if isinstance(values, list) else [values]:
            if isinstance(text, str) and SECRET.fullmatch(text):
                expected = "expected a URL without a user, password or query, as options are saved"
                raise InputError(f"{info.field_name}: {expected}; see --server_api_key_env")
        return value

    def to_dict(self) -> dict[str, Any]:
        """Return the options as YAML and metrics have them, a function by its name."""
        return {name: _as_yaml_value(value) for name, value in self}


def changeable(config_class: type[Options]) -> set[str]:
    """Return the names of the options that may change when a run resumes."""
    fields = config_class.model_fields.items()
    return {name for name, field in fields if field.json_schema_extra == MAY_CHANGE}


@functools.cache
def kinds_of(config_class: type) -> dict[str, Any]:
    """Return the types of a class's fields by name, with their ranges."""
    return typing.get_type_hints(config_class, include_extras=True)


def _as_yaml_value(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_as_yaml_value, value)]
    return import_name_of(value) if callable(value) else value


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Return the types X and Y of X | Y | None."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    choices = typing.get_args(kind) if is_union else (kind,)
    return tuple(choice for choice in choices if choice is not type(None))


SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def in_words(kind: Any) -> str:
    """Return the type of an option and its range, as --help prints them; None, which most take, goes without saying."""
    names = []
    for choice in choices_of(kind):
        origin, arguments = typing.get_origin(choice), typing.get_args(choice)
        if origin is Literal:
            names += map(str, arguments)
        elif origin is Annotated:
            limits = [item for limit in arguments[1:] for item in dataclasses.asdict(limit).items()]
            signs = [f"{SIGNS[name]} {end}" for name, end in limits if name in SIGNS]
            names.append(" ".join([arguments[0].__name__, *signs]))
        elif origin in (list, dict):
            names.append(f"{origin.__name__} of {in_words(arguments[-1])}")
        elif origin is None:  # a function, which a command line cannot give, has one
            names.append(choice.__name__)
    return " or ".join(names)


def _constrained(kind: Any) -> Any:
    """Return a type of the library, whose numbers say their ranges in words, with pydantic's constraints."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(_constrained, typing.get_args(kind)))
    if typing.get_origin(kind) is not Annotated:
        return kind
    base, words = typing.get_args(kind)
    low, high, ends = checks.RANGES[words]
    constraints: list[Any] = []
    if low > -math.inf:
        constraints.append(Ge(low) if low in ends else Gt(low))
    if high < math.inf:
        constraints.append(Le(high) if high in ends else Lt(high))
    elif high not in ends:
        constraints.append(IsFinite)
    return Annotated[(base, *constraints)]


def options_error(
    error: pydantic.ValidationError, config_class: type[Options], options: dict[str, Any]
) -> InputError:
    """Return all names that are no options, or the first error: the option, its value, and what pydantic says of it."""
    errors = error.errors()
    # No such options when a config is made, or when an attribute is set: all of them at once.
    nameless = ("extra_forbidden", "no_such_attribute")
    unknown = [str(each["loc"][0]) for each in errors if each["type"] in nameless]
    if unknown:
        return config_class.unknown(unknown)
    first = errors[0]
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return InputError(f"{name} is missing; give --{name}, or {name}: … in the file of --config")
    # A validator of the option has said it better.
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, InputError):
        return raised
    # Of X | Y there is a message for each.
    messages = [each["msg"] for each in errors if each["loc"][0] == name]
    wanted = dict.fromkeys(text.removeprefix("Input should be ") for text in messages)
    return InputError(f"{name}={options[name]!r} should be {', or '.join(wanted)}")


def options_from(source: type, left_out: Collection[str] = (), **defaults: Any) -> type[Options]:
    """Return the group of options that a dataclass declares, less some; without a default an option is None."""
    # The docstring of each field, which Python does not keep: it is read from the source.
    docs = {}
    kinds = kinds_of(source)
    for group in reversed(source.__mro__[:-1]):
        (declaration,) = ast.parse(inspect.getsource(group)).body
        assert isinstance(declaration, ast.ClassDef)
        for field, under in itertools.pairwise(declaration.body):
            match field, under:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = inspect.cleandoc(text)

    # The fields, as pydantic takes them.
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(source):
        if field.name in left_out:
            continue
        name, kind = field.name, _constrained(kinds[field.name])
        described = pydantic.Field(default=defaults.get(name), description=docs[name])
        fields[name] = (kind if name in defaults else kind | None, described)
    return pydantic.create_model(
        f"Of{source.__name__}", __base__=Options, __doc__=source.__doc__, **fields
    )
