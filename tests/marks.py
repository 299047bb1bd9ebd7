"""Which cells of a grid of cases stay in the fast suite."""

import itertools
from collections.abc import Iterable

import pytest

FAST, SLOW = (), pytest.mark.slow


def slow(*values):
    return pytest.param(*values, marks=SLOW)


def release(*values):
    """Return a cell that `make test-release` runs."""
    return pytest.param(*values, marks=pytest.mark.release)


# For a test that asks nothing of the kernels that other tests do not ask: interpreted, they are slow here.
cpu_fast = pytest.mark.parametrize("backend", [slow("kernel"), "cpu"], indirect=True)


def diagonal(*axes: Iterable, most: int | None = None) -> list:
    """Every combination of the axes; in the fast suite only a diagonal: each value of the longest axis once.

    The diagonal ends after `most` cells. The keys of an axis that is a dict stand in the tests' names.
    """
    labels = [[getattr(key, "__name__", str(key)) for key in axis] for axis in axes]
    values = [list(axis.values()) if isinstance(axis, dict) else list(axis) for axis in axes]
    sizes = [len(axis) for axis in values]
    fast = {tuple(i % size for size in sizes) for i in range(max(sizes) if most is None else most)}
    cells = []
    for at in itertools.product(*map(range, sizes)):
        cell = [axis[i] for axis, i in zip(values, at, strict=True)]
        name = "-".join(axis[i] for axis, i in zip(labels, at, strict=True))
        cells.append(pytest.param(*cell, id=name, marks=FAST if at in fast else SLOW))
    return cells


def grid(names: str, *axes: Iterable, most: int | None = None):
    """Runs a test in every cell of a grid, in the fast suite on its diagonal."""
    return pytest.mark.parametrize(names, diagonal(*axes, most=most))


def on_backends(names: str, *axes: Iterable, most: int | None = None):
    """Runs a test of the fixture `backend` in every cell; fast are all on the CPU path, a diagonal on the kernels.

    Their interpreter takes a hundred times as long.
    """
    cells = []
    for cell in diagonal(*axes, most=most):
        cells.append(pytest.param("kernel", *cell.values, id=f"kernel-{cell.id}", marks=cell.marks))
        cells.append(pytest.param("cpu", *cell.values, id=f"cpu-{cell.id}"))
    return pytest.mark.parametrize(f"backend, {names}", cells, indirect=["backend"])
