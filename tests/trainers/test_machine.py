"""`fused-rl doctor` alone: what is missing has its hint, a wrong kernel is found, and torch alone is enough."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fused_rl
from fused_rl import reference
from fused_rl.trainers.commands import machine

ROOT = Path(__file__).parents[2]


def test_what_is_missing_is_named(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name)
    )
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.report() == 0
    output = capsys.readouterr().out
    assert ", deepspeed not installed, " in output and "apt install g++" in output
    assert f"fused_rl {fused_rl.__version__}, " in output and ": right: within " in output


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rows: rows._replace(logprobs=rows.logprobs + 1e-4),
        lambda rows: rows._replace(logprobs=rows.logprobs + float("nan")),
        lambda rows: rows._replace(entropy=rows.entropy.detach()),
    ],
)
def test_a_wrong_kernel_is_found(wrong, monkeypatch, capsys):
    op = reference.token_logprobs
    monkeypatch.setattr(fused_rl, "token_logprobs", lambda *given: wrong(op(*given)))
    assert machine.report() == 1
    assert ": WRONG, please report it: within " in capsys.readouterr().out


@pytest.mark.slow
def test_it_works_with_torch_alone(tmp_path):
    absent = (
        "deepspeed",
        "transformers",
        "datasets",
        "peft",
        "pydantic",
        "rich",
        "yaml",
        "numpy",
        "regex",
    )
    code = f"import sys; sys.modules |= dict.fromkeys({absent})\nfrom fused_rl.trainers.commands import doctor\n"
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code + "doctor.main([])"], cwd=tmp_path, env=env, capture_output=True
    )
    assert done.returncode == 0 and b"right" in done.stdout, done.stdout + done.stderr
