"""Text from users and libraries: errors in one line, no control characters, functions by their names."""

import functools
import importlib
import inspect
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

# How a URL begins, also one that was taken for a path.
SCHEME = r"((?:https?:/|://)/*)"


class InputError(ValueError):
    """The user's options, data or disk cannot be used; the message says what came, what was expected and the remedy.

    URLs in it are without user, password and query, which may be secrets.
    """

    def __init__(self, message: object):
        without_user = re.sub(rf"{SCHEME}\S*@", r"\1", str(message))
        super().__init__(re.sub(rf"{SCHEME}([^\s?]*)\?[^\s'\")\]]*", r"\1\2", without_user))


def in_a_line(error: BaseException) -> str:
    """Return an exception's type and message in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {text[:300]}"


def escaped(text: object, keep: str = "") -> str:
    """Return the text with control characters escaped, ESC as \\x1b, but for those in `keep`."""
    characters = []
    for character in str(text):
        is_space = unicodedata.category(character) == "Zs"
        harmless = is_space or character.isprintable() or character in keep
        characters.append(character if harmless else character.encode("unicode_escape").decode())
    return "".join(characters)


def load_function(option: str, name: str) -> Callable:
    """Return what `module:name` names; an installed command also looks in the folder that it is called from."""
    module, _, attribute = name.partition(":")
    if not (module and attribute) or module.endswith(".py"):
        raise InputError(
            f"{option} {name!r}: expected module:function, the module named as in `import`"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module imports what is not there
        where = f"{os.getcwd()}, the current folder, and among what is installed (PYTHONPATH)"
        raise InputError(f"{option} {name!r}: there is no module {module!r} in {where}") from error
    if not callable(vars(imported).get(attribute)):
        raise InputError(f"{option} {name!r}: {imported.__file__} has no function {attribute!r}")
    return vars(imported)[attribute]


def users_function(option: str, name: str | None, passed: Callable | None, *parameters: str) -> Any:
    """Return the function of `parameters` that an option names or Python has passed; None without one."""
    if name is not None and passed is not None:
        raise InputError(f"{option}={name} and another from Python: give one of them")
    function = passed if name is None else load_function(option, name)
    if function is None:
        return None
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        expected = f"expected a function of ({', '.join(parameters)})"
        raise InputError(f"{option} {name_of(function)!r}: {expected}: {error}") from error
    return function


def check_installed(option: str, module: str, install: str) -> None:
    """Refuse an option whose package is not installed; a module that is imported stays, whatever becomes of it."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        package = error.name or module
        problem = f"{option} needs {package}, which is not installed"
        raise InputError(f"{problem}: pip install {install}") from error


def name_of(function: Callable) -> str:
    """Return the function's name in metrics; of functools.partial it is the function inside."""
    inner = function.func if isinstance(function, functools.partial) else type(function)
    names = [getattr(function, name, None) for name in ("__qualname__", "__name__")]
    return names[0] or names[1] or name_of(inner)


def import_name_of(function: Callable) -> str:
    """Return the function's name in config.yaml, as `load_function` takes it."""
    return f"{function.__module__}:{name_of(function)}"


class InputErrors(InputError):
    """Several of them; the message is a block of lines, whose parts are escaped."""
