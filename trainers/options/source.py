"""What an option names that is read: a model, rows, a function.

A group of options says it by `reads`; `data/sources.py` finds where it lies, and what it leads to in turn.
"""

from typing import NamedTuple


class Source(NamedTuple):
    """Something that a run reads."""

    kind: str
    """model, adapters, critic, reward_model, rows, scorer, surrogate or sampler."""
    said: str
    """`option=value`, and by way of what, for errors."""
    name: str
    """A path, the name of something on the Hub, or `module:function`."""
    revision: str | None = None
