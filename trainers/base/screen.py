"""Lines on the terminal; control characters in the text of a model or a dataset are escaped."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from fused_rl.trainers.base.ranks import rank
from fused_rl.trainers.base.text import escaped


def print_line(*lines: str, to_errors: bool = False, as_is: bool = False) -> None:
    """Print lines at once; control characters are escaped, unless a program reads the text `as_is`."""
    text = "\n".join(lines if as_is else (escaped(line, keep="\n") for line in lines))
    print(text, file=sys.stderr if to_errors else sys.stdout, flush=True)


@contextmanager
def phase(what: str) -> Iterator[dict[str, float]]:
    """Print what was done and how long it took, with the metrics that the caller puts into the dictionary."""
    began = time.monotonic()
    found = {}
    yield found
    values = "".join(f"; {key.removeprefix('eval/')} {value:.4g}" for key, value in found.items())
    seconds = time.monotonic() - began
    if values or seconds >= 0.1:
        print_rank0(f"{what} ({seconds:.1f} s){values}")


def print_rank0(*lines: str) -> None:
    """Print lines on rank 0."""
    if rank() == 0:
        print_line(*lines)


def bar(parts: Sequence, what: str) -> Iterable:
    """Iterate over parts of a work; from its third second on rank 0 shows a bar, which goes when the work is done."""
    from tqdm import tqdm

    slow = (
        {} if sys.stderr.isatty() else {"mininterval": 10}
    )  # in a file each state of it is a line
    return tqdm(parts, what, delay=2, leave=False, disable=rank() > 0 or len(parts) == 1, **slow)
