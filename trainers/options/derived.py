"""Groups of options made of a dataclass that stands elsewhere: its fields, ranges and docstrings are declared once."""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated

import docstring_parser

from fused_rl.trainers.options.config import RANGES, Options


def as_options(source: type, names: Iterable[str], prefix: str = "", said: str = "", **defaults) -> type[Options]:
    """A group of options of the fields of a dataclass, with their ranges and docstrings; None where no default is.

    What is `said` of all of them stands behind each docstring.
    """
    declared = {field.name: field.type for field in dataclasses.fields(source)}
    columns = []
    for name in names:
        kind, default = _of_a_run(declared[name]), defaults.get(name)
        columns.append((prefix + name, kind | None if default is None else kind, dataclasses.field(default=default)))
    told = {param.arg_name: param.description for param in docstring_parser.parse_from_object(source).params}
    lines = {name: " ".join(f"{told.get(name) or ''} {said}".split()) for name in names}
    doc = "\n".join(f":param {prefix}{name}: {line}" for name, line in lines.items())
    return dataclasses.make_dataclass(
        f"Of{source.__name__}", columns, bases=(Options,), namespace={"__doc__": doc}, kw_only=True
    )


def _of_a_run(kind):
    """The type of a run's option for that of a field, without None: `Annotated` tells a range in words.

    What may be a function is named by a text.
    """
    if Callable in typing.get_args(kind):
        return str
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(choice for choice in typing.get_args(kind) if choice is not type(None))
    if typing.get_origin(kind) is Annotated:
        (words,) = kind.__metadata__
        kind = next(number for number, described in RANGES.items() if described == words)
    return kind
