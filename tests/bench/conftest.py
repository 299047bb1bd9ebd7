"""The CPU path, and a clock that does not run by itself."""

import pytest


@pytest.fixture(autouse=True)
def _cpu_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # timing and checks as `python -m bench` runs them


class Clock:
    """A clock that moves by `step` seconds whenever somebody looks at it: nothing depends on how fast a machine is."""

    def __init__(self):
        self.now, self.step = 100.0, 1e-3

    def perf_counter(self):
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("time.perf_counter", made.perf_counter)
    return made
