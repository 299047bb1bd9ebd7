"""The list of files that `make gpu` runs names every file whose tests run kernels; they are there without much else."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import NOT_ON_DEVICE, ON_DEVICE

ROOT = Path(__file__).parents[1]
KERNELS = ("backend", "DEVICE", "on_backends", "fused_rl.kernels")


def words(tree):
    """Names, arguments and imports of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_every_file_that_runs_kernels_is_listed():
    found = set()
    for path in sorted(ROOT.glob("tests/test_*.py")):
        if {*words(ast.parse(path.read_text()))} & {*KERNELS}:
            found.add(str(path.relative_to(ROOT)))
    assert found - {*NOT_ON_DEVICE} == {*ON_DEVICE}
    assert len(ON_DEVICE) == len({*ON_DEVICE})


WITHOUT = (
    "import sys, pytest; sys.modules |= dict.fromkeys({missing}); sys.exit(pytest.main({words}))"
)
# As on a machine that has torch, triton, transformers, numpy and pytest.
MISSING = {"deepspeed", "datasets", "pydantic", "trl", "rich", "peft", "xdist", "matplotlib"}
MISSING |= {"accelerate", "liger_kernel", "math_verify"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--collect-only", "-q"], pytest.param(["-q", "-x"], marks=pytest.mark.slow)]
)
def test_they_run_where_little_is_installed(more):
    """Torch, triton, transformers, numpy and pytest: no error at collection, and drawn inputs are drawn."""
    if "-x" in more:  # a few of each, the drawn ones among them
        more = [*more, "-k", "never_negative or masks_of_most or exact_sum", "-m", "not slow"]
    words = ["-p", "no:cacheprovider", "--on-device", *more, *ON_DEVICE]
    code = WITHOUT.format(missing=MISSING, words=words)
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert "error" not in ran.stdout.splitlines()[-1]
