"""Somebody else's training loop, one step at a time, so that others can have their turn between."""

import threading
from collections.abc import Callable

import torch


class Stepwise:
    """A loop that calls back between its steps, run a step at a time in a thread: either it or the caller waits.

    Args:
        loop: is called with a function that it calls after each step, and ends where that returns False.
    """

    def __init__(self, loop: Callable[[Callable[[], bool]], None]):
        self._mine, self._its = threading.Semaphore(0), threading.Semaphore(0)
        self._loop, self._goes_on, self._ended, self._error = loop, True, False, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._its.acquire()
        torch.set_num_threads(1)
        try:
            self._loop(self._between)
        except BaseException as error:  # noqa: BLE001 - raised again by `step`
            self._error = error
        self._ended = True
        self._mine.release()

    def _between(self) -> bool:
        self._mine.release()
        self._its.acquire()
        return self._goes_on

    def step(self) -> None:
        """The next step; raises what it raises."""
        self._its.release()
        self._mine.acquire()
        if self._error is not None:
            raise self._error
        if self._ended:
            raise RuntimeError("the loop has ended")

    def close(self) -> None:
        """End the loop after the step that it stands behind."""
        self._goes_on = False
        while not self._ended:
            self._its.release()
            self._mine.acquire()
        self._thread.join()
