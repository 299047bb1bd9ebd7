"""The trainers are tested on the CPU path: the interpreter would only be slow here, and tests/ covers the kernels."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.trainers import tiny
from tests.trainers.fixtures import cpu_path, no_figures  # noqa: F401


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A model folder and a gsm8k-like file; who changes them puts back what was there."""
    folder = tmp_path_factory.mktemp("files")
    return tiny.model_folder(folder / "model"), tiny.jsonl(folder / "rows.jsonl", tiny.sums(20))


@pytest.fixture(scope="session")
def folder(files):
    """The model alone."""
    return files[0]


@pytest.fixture(scope="session")
def folders(folder, tmp_path_factory):
    """A policy and a reward model, which is also where the critic starts: a head of zeros would hide its backbone."""
    return folder, tiny.reward_folder(tmp_path_factory.mktemp("reward") / "reward", folder)


@pytest.fixture(scope="session")
def whole(files, tmp_path_factory):
    """A run of sft of four steps, with a checkpoint of each."""
    from fused_rl.trainers import sft
    from tests.trainers import figures
    from tests.trainers.runs import run_config

    folder = tmp_path_factory.mktemp("whole") / "run"
    with figures.drawn(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")  # as conftest.py does for a test
        sft.train(run_config(files, folder))
    return folder


@pytest.fixture(params=["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def fake(request, folder):
    """A server of each kind."""
    from tests.trainers import fake_server

    with fake_server.serving(request.param, folder) as served:
        yield served


@pytest.fixture
def server(fake):
    from tests.trainers.served import connected

    return connected(fake)


@pytest.fixture
def run(whole, tmp_path):
    """A copy of it, for a test to change."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def tally(request):
    """`tally(kind, outcome)` counts a fault that was tried, for the table at the end of the session."""

    def count(kind: str, outcome: str) -> None:
        request.node.user_properties.append(("fault", (kind, outcome)))

    return count


def pytest_terminal_summary(terminalreporter):
    """How many faults of each kind were tried, and what came of them."""
    reports = sum(terminalreporter.stats.values(), [])
    called = [report for report in reports if getattr(report, "when", None) == "call"]
    properties = sum((report.user_properties for report in called), [])
    outcomes = Counter(tuple(value) for name, value in properties if name == "fault")
    kinds = dict.fromkeys(kind for kind, _ in outcomes)
    for kind in kinds:
        of_kind = {outcome: count for (k, outcome), count in sorted(outcomes.items()) if k == kind}
        said = ", ".join(f"{count} {outcome}" for outcome, count in of_kind.items())
        terminalreporter.write_line(f"{kind}: {sum(of_kind.values())} tried: {said}")
