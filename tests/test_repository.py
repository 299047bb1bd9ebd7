"""What contributors run and read on the way to a pull request: the Makefile, the workflows and the size of the code."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import fused_rl

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILES = "\n".join((ROOT / name).read_text() for name in ("Makefile", "tests/environments.mk"))
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILES, re.MULTILINE))
PYTHONS = re.findall(r'Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())


def test_the_makefile_lists_its_targets_on_one_screen():
    make = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = make.stdout.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    assert TARGETS - {"help"} <= set(make.stdout.split())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_that_exist_on_supported_pythons(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    for name, job in jobs.items():
        steps = job["steps"]
        commands = "\n".join(step.get("run", "") for step in steps)
        called = re.findall(r"^make (.*)$", commands, re.MULTILINE)
        assert set(" ".join(called).split()) <= TARGETS, name
        chosen = [step.get("with", {}).get("python-version") for step in steps]
        versions = job.get("strategy", {}).get("matrix", {}).get("python-version", [])
        assert {v for v in chosen if v and "matrix" not in v} | set(versions) <= set(PYTHONS), name
        assert set(job.get("needs", "").split()) <= set(jobs), name


def test_pull_requests_and_nights_run_the_suites_on_every_python():
    for file, target in (("checks", "test"), ("nightly", "slow")):
        workflow = yaml.safe_load((ROOT / f".github/workflows/{file}.yml").read_text())
        assert workflow["jobs"][target]["strategy"]["matrix"]["python-version"] == PYTHONS
    oldest = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    assert oldest and oldest[1] == PYTHONS[0]


def test_a_release_has_one_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    changes = re.findall(r"^## (\d\S*?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert fused_rl.__version__ == cited == changes[0]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "tests/README.md"])
def test_the_files_that_a_page_for_contributors_names_exist(page):
    folders = (
        [ROOT] if page == "CONTRIBUTING.md" else [ROOT / "tests", ROOT / "tests/trainers/data"]
    )
    named = re.findall(r"`(\w[\w.]*/[\w./]+\.\w+|test_\w+\.py)`", (ROOT / page).read_text())
    files = [path for path in named for folder in folders if (folder / path).exists()]
    assert named and {*named} == {*files}
