"""A real model, out of a package: `make test-real` names its folder, and prints what each run took."""

import gc
import os
import shutil
import time
from types import SimpleNamespace

import pytest

from tests.trainers.fixtures import cpu_path, no_figures  # noqa: F401

MODEL = "FUSED_RL_REAL_MODEL"
OUT = "runs/real"


@pytest.fixture
def model() -> str:
    """The folder of SmolLM2-135M-Instruct."""
    return os.environ[MODEL]


@pytest.fixture
def folder(tmp_path):
    """A folder for runs, of 0.5 GB for each model in it, which does not outlive its test."""
    yield tmp_path
    shutil.rmtree(tmp_path)
    gc.collect()


def spent() -> tuple[float, float]:
    """CPU seconds of this process and of those that it has waited for, and seconds of the wall."""
    return sum(os.times()[:4]), time.monotonic()


@pytest.fixture
def figures(request) -> dict:
    """A row of the benchmarks page: what a test adds, beside what it took in CPU seconds and in seconds."""
    found = {}
    cpu, wall = spent()
    yield found
    cpu, wall = (after - before for after, before in zip(spent(), (cpu, wall), strict=True))
    row = {"op": request.node.name.removeprefix("test_"), "implementation": "fused_rl"}
    row |= {"status": "ok", "cpu_s": cpu, "wall_s": wall, **found}
    request.node.user_properties.append(("real", row))


def pytest_terminal_summary(terminalreporter):
    """What each run took, and how far its first figures are from TRL's."""
    from bench import report, results

    reports = sum(terminalreporter.stats.values(), [])
    ended = [report for report in reports if getattr(report, "when", None) == "teardown"]
    properties = sum((report.user_properties for report in ended), [])
    rows = [value for name, value in properties if name == "real"]
    if rows:
        rows.sort(key=lambda row: row["op"])
        args = SimpleNamespace(device="cpu", out=OUT, group="real")
        path = results.save(args, rows)
        terminalreporter.write_line(report.real({"rows": rows}))
        terminalreporter.write_line(f"wrote {path}")
