"""The user's functions, named as `module:name`. What they raise keeps its traceback."""

import importlib
import os
import sys
from collections.abc import Callable

from fused_rl.trainers.base.text import InputError


def load_function(option: str, name: str) -> Callable:
    """Return what `module:name` names; an installed command also looks in the folder that it is called from."""
    module, colon, attribute = name.partition(":")
    if not colon or module.endswith(".py"):
        raise InputError(f"{option} {name!r}: expected module:function, the module named as in `import`")
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


def name_of(function: Callable) -> str:
    """Return the function's name in metrics and in config.yaml."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))
