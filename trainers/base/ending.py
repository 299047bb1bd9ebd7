"""Whether a run has come to its end, for threads that work beside it: what they do then, nobody waits for."""

import threading

_ended = threading.Event()


def begin() -> None:
    """A run begins."""
    _ended.clear()


def end() -> None:
    """It has come to its end, by an error or a signal too."""
    _ended.set()


def has_ended() -> bool:
    """Whether the last run has."""
    return _ended.is_set()
