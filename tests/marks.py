"""Which cells of a grid of cases stay in the fast suite."""

import itertools
from collections.abc import Iterable

import pytest

BACKENDS = ("kernel", "cpu")  # of the fixture `backend`, with indirect=["backend"]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def first_fast(cases: Iterable) -> list:
    """The cases, all but the first marked slow."""
    first, *others = cases
    return [first, *map(slow, others)]


def diagonal(*axes: Iterable) -> list:
    """Every combination of the axes; in the fast suite only as many as the longest has values, each value in one.

    The keys of an axis that is a dict stand in the tests' names.
    """
    labels = [[getattr(key, "__name__", str(key)) for key in axis] for axis in axes]
    values = [list(axis.values()) if isinstance(axis, dict) else list(axis) for axis in axes]
    sizes = [len(axis) for axis in values]
    fast = {tuple(i % size for size in sizes) for i in range(max(sizes))}
    cells = []
    for at in itertools.product(*map(range, sizes)):
        cell = [axis[i] for axis, i in zip(values, at, strict=True)]
        name = "-".join(axis[i] for axis, i in zip(labels, at, strict=True))
        cells.append(pytest.param(*cell, id=name, marks=() if at in fast else pytest.mark.slow))
    return cells
