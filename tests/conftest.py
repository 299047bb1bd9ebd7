"""Without a GPU the Triton kernels run in the interpreter, which must be chosen before triton is first imported."""

import os
import time
from pathlib import Path
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

from tests.paths import DEVICE
from tests.tools import interpreter

interpreter.fix_numerics()
torch.set_num_threads(1)  # test tensors are tiny, and the interpreter is one thread


def pytest_configure():
    """Remove locks of torch's compiled extensions that a killed process has left: whoever loads one waits for ever."""
    cache = Path(
        os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions")
    )
    for lock in cache.glob("**/lock"):
        if time.time() - lock.stat().st_mtime > 120:
            lock.unlink(missing_ok=True)


def pytest_addoption(parser):
    parser.addoption(
        "--on-device", action="store_true", help="leave out tests of the CPU path (`make gpu`)"
    )
    parser.addoption("--part", default="0/1", help="2/5 with --on-device: the third part of five")


def pytest_itemcollected(item):
    """What has a target of its own is not in the fast suite either."""
    if item.get_closest_marker("release") or item.get_closest_marker("compiled"):
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--on-device"):
        return
    chosen = {True: [], False: []}
    for item in items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        chosen["cpu" not in (values.get("backend"), values.get("path"))].append(item)
    part, parts = map(int, config.getoption("--part").split("/"))
    items[:] = chosen[True][part::parts]
    config.hook.pytest_deselected(items=chosen[False])


@pytest.fixture(scope="module", autouse=True)
def environment_of_the_file():
    """Keeps what a run leaves in the environment, such as a launcher's LOCAL_RANK, from the tests of other files."""
    with mock.patch.dict(os.environ):
        os.environ.pop("LOCAL_RANK", None)  # of a run in a fixture of the session
        yield


@pytest.fixture(params=["kernel", "cpu"])
def backend(request, monkeypatch):
    """Runs a test once on the Triton kernels (interpreted where there is no GPU) and once on the CPU path.

    Returns the device to put tensors on.
    """
    if request.param == "kernel":
        request.getfixturevalue("poisoned")
        return DEVICE
    # Read at each call of a public op; the kernels stay interpreted.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    return "cpu"


@pytest.fixture
def poisoned():
    """Fills what torch.empty returns with NaN, so that an element which no kernel writes is seen."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def cpu(request, monkeypatch):
    """The CPU path alone, but for tests that ask for a backend: what is tested lies above the kernels."""
    if "backend" not in request.fixturenames:
        monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture
def seeded():
    torch.manual_seed(0)
