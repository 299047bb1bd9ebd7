"""What Python hands to a config in place of a name: functions, and rows. The config keeps a name for each.

A function is `module:name`, by which it is found again; one of a notebook or a script is `__main__:name`. Rows are
known by their number and contents, and kept here while the process lives.
"""

import copy
import hashlib
import inspect
import json
import os
import sys
from types import CodeType

import torch

from fused_rl.trainers.options.errors import InputError

# The options that take them.
ROWS = ("dataset", "eval_dataset", "reference_dataset", "prompts")
FUNCTIONS = ("verifiers", "surrogate", "sampler")
PREFIX = "python: "  # of the name of rows
HERE = "__main__:"  # of the name of a function that no module holds
_KEPT: dict[str, list[dict]] = {}
_FUNCTIONS: set[str] = set()
CONSTANTS = (bool, int, float, str, bytes, tuple, list, dict, set, frozenset, type(None))


def named(option: str, given):
    """What an option was given, as its config keeps it: the name of rows or of a function, everything else as it is.

    Raises:
        InputError: rows or a function that have no name, or a model.
    """
    if isinstance(given, torch.nn.Module):
        raise InputError(
            f"{option}: got a {type(given).__name__}; a run loads its models itself, so that it can go on later: save "
            "this one and its tokenizer into a folder (save_pretrained), and give that"
        )
    if option in ROWS:
        return _name_of_rows(option, given)
    return _name_of_function(option, given) if option in FUNCTIONS else given


def _name_of_function(option: str, given):
    """`module:name`, by which it is found: no lambda, no method, none inside of another."""
    if isinstance(given, list):
        return [_name_of_function(option, one) for one in given]
    if option == "verifiers" and isinstance(given, (dict, tuple, set)):
        raise InputError(f"{option}: got a {type(given).__name__}; give a list of names and functions: ['math', f]")
    if isinstance(given, str) or not callable(given):
        return given
    shown = given.__qualname__ if inspect.isroutine(given) else f"an object of type {type(given).__name__}"
    if not inspect.isroutine(given) or getattr(sys.modules.get(given.__module__), shown, None) is not given:
        raise InputError(
            f"{option}: {shown} is not found by a name, which a run keeps to go on with it later; give a function that "
            "is defined by `def` at the top of a module, a script or a notebook"
        )
    _FUNCTIONS.add(f"{given.__module__}:{shown}")
    return f"{given.__module__}:{shown}"


def _name_of_rows(option: str, given):
    """Of a `datasets.Dataset` or a list of dictionaries; what names rows already stays."""
    if given is None or isinstance(given, (str, os.PathLike)):
        return given
    rows = _listed(option, given)
    told = json.dumps(rows, sort_keys=True, default=plain).encode()
    name = f"{PREFIX}{len(rows)} rows, {hashlib.blake2b(told, digest_size=8).hexdigest()}"
    _KEPT[name] = rows
    return name


def plain(value: object) -> object:
    """What JSON has no form for, whole: the text of a long array leaves out its middle."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _listed(option: str, given) -> list[dict]:
    import datasets

    if isinstance(given, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        first = next(iter(given))
        raise InputError(f"{option} has several splits ({', '.join(given)}); give one of them: dataset[{first!r}]")
    if isinstance(given, datasets.Dataset):
        if given.format["type"] == "custom":
            raise InputError(f"{option}: rows are read before a transform (with_transform, set_transform); map() it")
        return given.to_list()
    is_list = isinstance(given, list) and all(isinstance(row, dict) for row in given)
    if is_list and all(isinstance(key, str) for row in given for key in row):
        return copy.deepcopy(given)
    what = "a path, the name of a Hub dataset, a datasets.Dataset or a list of dictionaries whose keys are texts"
    came = "a list of other things" if isinstance(given, list) else f"{type(given).__name__}"
    ways = {"DataFrame": "datasets.Dataset.from_pandas(rows)", "tuple": "list(rows)"}
    way = (ways | {"dict": "datasets.Dataset.from_dict(rows)"}).get(type(given).__name__)
    raise InputError(f"{option}: expected {what}, got {came}{f'; give {way}' if way else ''}")


def is_function(name: str) -> bool:
    """Whether this is the name of a function that was handed in."""
    return name in _FUNCTIONS


def are_rows(name: str) -> bool:
    """Whether this is the name of rows that were handed in."""
    return name.startswith(PREFIX)


def rows_of(name: str) -> list[dict]:
    """The rows of this name.

    Raises:
        InputError: another process had them.
    """
    if name not in _KEPT:
        raise InputError(
            f"dataset={name!r}: a Python program gave these rows, and no file holds them; give them again from Python, "
            "or write them to one and name that: datasets.Dataset.to_json('rows.jsonl')"
        )
    return _KEPT[name]


def source_of(name: str) -> str:
    """Of a function of the notebook or script that runs, `module:name`: its source, and what it uses of that module."""
    module, _, function = name.partition(":")
    around, found = vars(sys.modules[module]), {}
    _add_used(around[function], function, around, found)
    return json.dumps(sorted(found.items()))


def _add_used(value: object, name: str, around: dict[str, object], found: dict[str, str]) -> None:
    """Source of functions and classes, values of constants; what was imported is known by its name alone."""
    if name in found:
        return
    found[name] = json.dumps(value, sort_keys=True, default=plain) if isinstance(value, CONSTANTS) else ""
    if not inspect.isroutine(value) and not inspect.isclass(value):
        return
    found[name] = f"{value.__module__}:{value.__qualname__}"
    if value.__module__ != around["__name__"]:
        return
    found[name] = inspect.getsource(value)
    for part in vars(value).values() if inspect.isclass(value) else [value]:
        function = inspect.unwrap(part) if inspect.isroutine(part) else None
        if hasattr(function, "__code__"):
            found[f"{name}.{function.__name__}()"] = str(function.__defaults__)
            for used in _names(function.__code__) & around.keys():
                _add_used(around[used], used, around, found)


def _names(code: CodeType) -> set[str]:
    """Those that it and the functions in it look up."""
    return set(code.co_names).union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))
