"""docs/problems.md: every command that it names exists.

The reproductions themselves are no test: `make repro` runs them.
"""

import importlib.util
import re
import shlex

import pytest

from bench import machine, results
from bench.repro import __main__ as repro
from bench.repro import kl_estimators
from fused_rl.trainers import cli

PAGE = (machine.ROOT / "docs" / "problems.md").read_text()
COMMANDS = re.findall(r"`((?:python|make|fused-rl) [^`…]+)", PAGE)


def exists(command):
    words = shlex.split(command)
    if words[0] == "make":
        makefiles = [machine.ROOT / "Makefile", machine.ROOT / "tests" / "environments.mk"]
        rules = "".join(path.read_text() for path in makefiles)
        return re.search(rf"^{words[1]}:", rules, re.M)
    if words[0] == "fused-rl":
        return words[1] in cli.COMMANDS
    assert words[0] == "python"
    if words[1] == "-m":
        files = [word for word in words[3:] if word.endswith(".py")]
        return importlib.util.find_spec(words[2]) and all(
            (machine.ROOT / file).exists() for file in files
        )
    return (machine.ROOT / words[1]).exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_exists(command):
    assert exists(command)


def test_what_make_repro_runs():
    """Every script of the folder, or the reason why not; the page names each."""
    scripts = {
        path.stem for path in (machine.ROOT / "bench" / "repro").iterdir() if path.suffix != ".pyc"
    }
    helpers = {"__init__", "__main__", "__pycache__", "ppo_step"}
    assert {*repro.REPROS, *repro.LEFT_OUT} == scripts - helpers
    for name in repro.REPROS:
        assert any(f"bench.repro.{name}" in command for command in COMMANDS), name


def test_the_losses_page_has_the_table_of_the_kl_estimators():
    rows = results.load(kl_estimators.RESULTS)["rows"]
    kl_estimators.check(rows)
    assert kl_estimators.table(rows) in (machine.ROOT / "docs" / "losses.md").read_text()


def test_a_reproduction_that_fails_is_printed_and_is_the_status(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(repro, "FOLDER", tmp_path)
    monkeypatch.setattr(
        repro, "command_of", lambda name, shown: ["-c", {"good": "", "bad": "1 / 0"}[name]]
    )
    monkeypatch.setattr(repro, "REPROS", {name: repro.Repro() for name in ("good", "bad")})
    monkeypatch.setattr(repro.sys, "argv", ["repro"])
    assert repro.main() == 1
    said = capsys.readouterr().out
    assert said.startswith("shown  good") and "FAILED bad" in said and "ZeroDivisionError" in said
    assert "1 of 2 shown" in said
