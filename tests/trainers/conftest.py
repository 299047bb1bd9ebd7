"""The trainers are tested on the CPU path: the interpreter would only be slow here, and tests/ covers the kernels."""

import pytest


@pytest.fixture(autouse=True)
def cpu_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
