"""The trainers are tested on the CPU path: the interpreter would only be slow here, and tests/ covers the kernels."""

import shutil
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
