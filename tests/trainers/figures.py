"""Runs without their figures: three quarters of a run this small would go into drawing them."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OF_RUNS = ("curves", "scores")


@functools.cache
def _drawing():
    """The class of figures, and its own way to save one."""
    from matplotlib.figure import Figure

    return Figure, Figure.savefig


def draw(figure, path, **options) -> None:
    _, save = _drawing()
    save(figure, path, **options)


def _name(figure, path, **options) -> None:
    """An empty file in place of a run's figure."""
    if Path(path).name.startswith(OF_RUNS):
        Path(path).touch()
    else:
        draw(figure, path, **options)


def leave_out() -> None:
    """For the rest of this process."""
    figures, _ = _drawing()
    figures.savefig = _name


@contextmanager
def drawn() -> Iterator[None]:
    """Inside, figures are drawn."""
    figures, save = _drawing()
    before, figures.savefig = figures.savefig, save
    try:
        yield
    finally:
        figures.savefig = before
