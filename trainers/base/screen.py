"""Lines on the terminal; control characters in the text of a model or a dataset are escaped."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from .ranks import process_index
from .text import escaped


def print_line(*lines: str, to_errors: bool = False) -> None:
    """Print lines at once, with control characters escaped."""
    text = "\n".join(escaped(line, keep="\n") for line in lines)
    # Flushed, so that lines of several processes and of a redirected stdout keep their order.
    print(text, file=sys.stderr if to_errors else sys.stdout, flush=True)


@contextmanager
def phase(work: str) -> Iterator[dict[str, float]]:
    """Print what was done and how long it took, with the metrics that the caller puts into the dictionary."""
    began = time.monotonic()
    metrics = {}
    yield metrics
    seconds = time.monotonic() - began
    values = ""
    for key, value in metrics.items():
        values += f"; {key.removeprefix('eval/')} {value:.4g}"
    # What took no time and measured nothing is not worth a line.
    if values or seconds >= 0.1:
        print_rank0(f"{work} ({seconds:.1f} s){values}")


def print_rank0(*lines: str) -> None:
    """Print lines on process 0."""
    if process_index() == 0:
        print_line(*lines)


def bar(items: Sequence, label: str) -> Iterable:
    """Iterate over the items of a work; from its third second on rank 0 shows a bar, which goes when it is done."""
    from tqdm import tqdm

    # In a file each state of the bar is a line.
    interval = 0.1 if sys.stderr.isatty() else 10
    hidden = process_index() > 0 or len(items) == 1
    return tqdm(items, label, delay=2, leave=False, disable=hidden, mininterval=interval)
