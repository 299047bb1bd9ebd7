"""Without a GPU the Triton kernels run in the interpreter, which must be chosen before triton is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

from bench import interpreter

interpreter.fix_numerics()
torch.set_num_threads(1)  # test tensors are tiny, and the interpreter is one thread


@pytest.fixture(params=["kernel", "cpu"])
def backend(request, monkeypatch):
    """Runs a test once on the Triton kernels (interpreted where there is no GPU) and once on the CPU path.

    Returns the device to put tensors on.
    """
    if request.param == "kernel":
        return "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # read at each call of a public op; the kernels stay interpreted
    return "cpu"


@pytest.fixture
def cpu(request, monkeypatch):
    """The CPU path alone, but for tests that ask for a backend: what is tested lies above the kernels."""
    if "backend" not in request.fixturenames:
        monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture
def seeded():
    torch.manual_seed(0)
