"""A surrogate of the user's own, held to what a surrogate is: `--surrogate my_module:function` (docs/losses.md)."""

import functools
import inspect
from collections.abc import Callable

import torch

from fused_rl.trainers.base.guests import ctrl_c, load_function, own_generators, raised
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.rollouts.types import shortened

ARGUMENTS = ("log_ratio", "advantages", "logprobs", "sequences", "options")


def load_surrogate(name: str) -> Callable:
    """The function that `module:function` names, on copies; InputError where it is none, raises, or returns another
    thing than a loss for each token."""
    function = load_function(name, "surrogate")
    expected = f"expected a function of ({', '.join(ARGUMENTS)})"
    if inspect.isclass(function):
        raise InputError(f"surrogate {name!r} is a class; {expected}")
    try:
        inspect.signature(function).bind(*ARGUMENTS)
    except TypeError as error:
        raise InputError(f"surrogate {name!r} cannot be called: {error}; {expected}") from error
    except ValueError:  # a function in C that does not tell
        pass

    @functools.wraps(function)  # and what `needs_sequences` has marked
    def surrogate(log_ratio, advantages, logprobs, sequences, options):
        copies = log_ratio.clone(), advantages.clone(), logprobs.clone()
        with own_generators(), ctrl_c() as interrupted:
            try:
                loss = function(*copies, sequences, options)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and interrupted:
                    raise
                raise InputError(f"surrogate {name!r} {raised(error, __file__)}") from error
        _check(name, loss, log_ratio)
        return loss

    return surrogate


def _check(name: str, loss, log_ratio: torch.Tensor) -> None:
    shape = tuple(log_ratio.shape)
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point() or tuple(loss.shape) != shape:
        came = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else shortened(loss)
        raise InputError(
            f"surrogate {name!r} returned {came}; it must return a loss for each token, {shape}, unreduced"
        )
    if log_ratio.requires_grad and not loss.requires_grad:
        raise InputError(f"surrogate {name!r} returned a loss without a gradient, so that nothing would be learnt")
