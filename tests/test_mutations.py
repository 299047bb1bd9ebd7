"""Whether the tests see what they are there for: `make test-mutations` changes the code, and they must fail."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache", "*.egg-info")
PASSED, FAILED = 0, 1  # of pytest; every other status says that the tests did not run


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The checkout again, to be changed."""
    return shutil.copytree(
        ROOT, tmp_path_factory.mktemp("mutations") / "copy", symlinks=True, ignore=LEFT_OUT
    )


def pytest_in(folder: Path, arguments: str) -> subprocess.CompletedProcess:
    """pytest on the code of a folder; compiled Python of another moment would hide a change."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *shlex.split(arguments),
    ]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_one_change_of_the_code_that_stands_here(name):
    mutation = MUTATIONS[name]
    assert mutation.old != mutation.new
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1


@pytest.mark.mutations
@pytest.mark.parametrize("arguments", sorted({mutation.tests for mutation in MUTATIONS.values()}))
def test_the_tests_pass_on_the_code_as_it_is(copy, arguments):
    ran = pytest_in(copy, arguments)
    assert ran.returncode == PASSED, ran.stdout[-3000:]


@pytest.mark.mutations
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_seen(copy, name):
    ran = mutated(copy, MUTATIONS[name])
    assert ran.returncode != PASSED, f"survived {MUTATIONS[name].tests}: {name}"
    assert ran.returncode == FAILED, f"no test ran: {ran.stdout[-3000:]}"


def mutated(copy: Path, mutation: Mutation) -> subprocess.CompletedProcess:
    path = copy / mutation.file
    code = path.read_text()
    path.write_text(code.replace(mutation.old, mutation.new))
    try:
        return pytest_in(copy, mutation.tests)
    finally:
        path.write_text(code)
