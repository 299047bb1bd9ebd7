"""What all tests of whole runs begin with: the CPU path, because the interpreter would be slow, and no figures."""

import pytest


@pytest.fixture(autouse=True)
def cpu_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture(scope="session", autouse=True)
def no_figures():
    """Tests that look at a run's figures make it inside `figures.drawn()`."""
    from tests.trainers import figures

    figures.leave_out()
