"""docs/problems: each page has its parts, what it points to is there, and every command that it names exists.

The reproductions themselves are no test: `make repro` runs them.
"""

import importlib.util
import re
import shlex

import pytest

from bench import machine
from bench.repro import __main__ as repro
from fused_rl.trainers import cli

FOLDER = machine.ROOT / "docs" / "problems"
PAGES = {path.stem: path.read_text() for path in FOLDER.glob("*.md") if path.stem != "index"}
PARTS = ["What is seen", "Why", "Shown", "What to do", "Command"]


def commands_of(page):
    """The lines of its last part that stand as code."""
    part = PAGES[page].split("## Command\n")[1]
    return [line.strip() for line in part.splitlines() if line.startswith("    ")]


def exists(command):
    words = shlex.split(command)
    if words[0] == "make":
        return re.search(rf"^{words[1]}:", (machine.ROOT / "Makefile").read_text(), re.M)
    if words[0] == "fused-rl":
        return words[1] in cli.COMMANDS
    assert words[0] == "python"
    if words[1] == "-m":
        files = [word for word in words[3:] if word.endswith(".py")]
        return importlib.util.find_spec(words[2]) and all((machine.ROOT / file).exists() for file in files)
    return (machine.ROOT / words[1]).exists()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_its_parts(page):
    text = PAGES[page]
    assert re.findall("^## (.*)", text, re.M) == PARTS
    assert text.startswith("# ") and text.split("\n\n")[1].startswith("For you if")
    assert commands_of(page)
    assert all(exists(command) for command in commands_of(page)), commands_of(page)
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) <= 120


@pytest.mark.parametrize("page", [*PAGES, "index"])
def test_what_a_page_points_to_is_there(page):
    for target in re.findall(r"\]\(([^)]+)\)", (FOLDER / f"{page}.md").read_text()):
        path, _, heading = target.partition("#")
        found = FOLDER / path
        assert found.exists(), target
        if heading:
            titles = re.findall("^#+ (.*)", found.read_text(), re.M)
            assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], target


def test_the_index_has_every_page_with_its_first_command():
    rows = re.findall(r"^\| \[(.*)\]\((.*)\.md\) \| `(.*)` \|$", (FOLDER / "index.md").read_text(), re.M)
    titles = {page: text.split("\n")[0].removeprefix("# ") for page, text in PAGES.items()}
    assert {page: (title, command) for title, page, command in rows} == {
        page: (titles[page], commands_of(page)[0]) for page in PAGES
    }
    assert len(rows) == len(PAGES)


def test_what_make_repro_runs():
    """Every script of the folder, or the reason why not; each belongs to a page, which names it."""
    scripts = {path.stem for path in (machine.ROOT / "bench" / "repro").iterdir() if path.suffix != ".pyc"}
    helpers = {"__init__", "__main__", "__pycache__", "ppo_step", "pushed_weights"}
    assert {*repro.REPROS, *repro.LEFT_OUT} == scripts - helpers
    for name, shown in repro.REPROS.items():
        assert any(f"bench.repro.{name}" in command for command in commands_of(shown.page)), name


def test_a_reproduction_that_fails_is_told_and_is_the_status(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(repro, "FOLDER", tmp_path)
    monkeypatch.setattr(repro, "command_of", lambda name, shown: ["-c", {"good": "", "bad": "1 / 0"}[name]])
    monkeypatch.setattr(repro, "REPROS", {name: repro.Repro("page") for name in ("good", "bad")})
    monkeypatch.setattr(repro.sys, "argv", ["repro"])
    assert repro.main() == 1
    said = capsys.readouterr().out
    assert said.startswith("shown  good") and "FAILED bad" in said and "ZeroDivisionError" in said
    assert "1 of 2 shown" in said
