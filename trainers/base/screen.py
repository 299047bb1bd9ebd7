"""What is told on the terminal: it can end no run, and text that a model or a dataset wrote cannot steer it.

with screen.kept_up():     # around a command
    tell("a line")
    console.print(shown(response, keep="\\n"))
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from fused_rl.trainers.options.text import shown


def tell(*lines: str, to_errors: bool = False, as_is: bool = False) -> None:
    """Print lines at once; control characters in them are shown and not obeyed, but for line ends.

    Args:
        lines: to print.
        to_errors: on stderr.
        as_is: leave every character as it is: of text that a program reads.
    """
    text = "\n".join(lines if as_is else (shown(line, keep="\n") for line in lines))
    print(text, file=sys.stderr if to_errors else sys.stdout, flush=True)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Inside, nothing reaches stderr, by its descriptor: C++ code writes there what the caller says in a line."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


@contextlib.contextmanager
def kept_up() -> Iterator[None]:
    """Inside, a screen that has gone (a closed pipe, a full disk) or cannot show a character raises nothing."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Screen(sys.stdout, 1), _Screen(sys.stderr, 2)
    try:
        yield
    finally:
        for screen in (sys.stdout, sys.stderr):
            if isinstance(screen, _Screen):
                screen.flush()
        sys.stdout, sys.stderr = before


class _Screen:
    """A text stream whose writes end in silence where the stream has gone, once and for all."""

    def __init__(self, stream: TextIO | None, number: int):
        self._number = number
        if stream is None:  # the descriptor was closed when the process began: no file may take its number
            stream = open(os.devnull, "w")  # noqa: SIM115
            os.dup2(stream.fileno(), number)
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As of any stream."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError):  # ValueError: somebody has closed it
            self._give_up()
            return len(text)

    def writelines(self, lines) -> None:
        """As of any stream."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """As of any stream."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        """Have what is written from now on, and what is left in buffers at the end of the process, go nowhere."""
        with contextlib.suppress(OSError, ValueError):
            if self._stream.fileno() == self._number:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._number)
                os.close(null)
