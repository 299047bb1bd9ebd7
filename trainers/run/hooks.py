"""`on_step`, a function of the user's that a run calls after each step: what it gets, and what it may return.

    def on_step(step: Step) -> dict[str, float] | None: ...

It is called on process 0 alone, once for the evaluation before training and once after each step. docs/hooks.md has
examples.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..base.text import InputError


@dataclass(frozen=True)
class Step:
    """What `on_step` gets: the state of the run after one of its steps."""

    number: int
    """The number of the step; 0 is the evaluation before training."""
    metrics: Mapping[str, float]
    """The metrics of the step; those of held-out rows are among them only if the step evaluates."""
    samples: Sequence[Mapping[str, object]]
    """The responses that the step shows, as in samples.jsonl; empty if it does not evaluate."""
    history: Sequence[Mapping[str, float]]
    """The metrics of all steps so far, each with its `step`; this step comes last. In a resumed run they include the
    steps before it was resumed."""
    tokenizer: Any
    """The tokenizer of the model."""
    stop: Callable[[], None]
    """Ends the run after this step on all processes, with a checkpoint and the saved model."""
    get_model: Callable[[], Any]
    """Returns `model`."""

    @property
    def model(self) -> Any:
        """The transformers model that is trained, to be read and not changed.

        Raises:
            InputError: the model is divided over processes (ZeRO-3 or sequence parallelism).
        """
        return self.get_model()


OnStep: TypeAlias = Callable[[Step], Mapping[str, float] | None]
"""Takes a `Step` and returns further metrics of it by name, or None."""


@contextlib.contextmanager
def kept_as_it_is(model: torch.nn.Module) -> Iterator[None]:
    """Restore the random generators and the model's mode at the end of the block.

    A hook that samples, or that calls `model.eval()`, must not change what the run computes next.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    state = random.getstate()
    was_training = model.training
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(state)
            if model.training != was_training:
                model.train(was_training)


def call(on_step: OnStep, step: Step) -> dict[str, float]:
    """Call the hook and return its metrics as floats by name; raise `InputError` for any other return value."""
    returned = on_step(step)
    if returned is None:
        return {}
    expected = "expected None, or a mapping from names to numbers"
    if not isinstance(returned, Mapping):
        raise InputError(f"on_step returned {type(returned).__name__}: {expected}")
    metrics: dict[str, float] = {}
    for name, value in returned.items():
        if name in step.metrics or name == "step":
            raise InputError(
                f"on_step returned {name!r}, which is a metric of the run; choose another name"
            )
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"on_step returned {name}={value!r}: {expected}") from error
    return metrics
