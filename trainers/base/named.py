"""A function of the user's, by its name."""

import importlib
import sys
from pathlib import Path

from fused_rl.trainers.base.guests import ctrl_c, own_generators
from fused_rl.trainers.options.config import InputError, in_a_line
from fused_rl.trainers.scorers.limits import Expired


def load_function(name: str, what: str):
    """The function that `module:function` names; `what` it is for stands in the error."""
    module, _, function = name.partition(":")
    if not function:
        raise InputError(f"{what} {name!r}: expected module:function")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # an installed command does not see the folder that it is called from
    with own_generators(), ctrl_c() as interrupted:
        try:
            found = getattr(importlib.import_module(module), function)
        except Expired:
            raise
        except BaseException as error:  # whatever the user's module raises while it is imported
            if isinstance(error, KeyboardInterrupt) and interrupted:
                raise
            raise InputError(f"{what} {name!r}: {in_a_line(error)}") from error
    if not callable(found):
        raise InputError(f"{what} {name!r}: {type(found).__name__} is not a function")
    return found
