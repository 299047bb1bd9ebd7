"""`fused-rl doctor` alone: each thing that is missing has its hint, and only what is needed is an error."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused_rl
from fused_rl.trainers.doctor import machine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without(monkeypatch):
    """Packages that are not installed, a few bytes of memory and disk, no compiler, a kernel of another's making."""

    def absent(*names, compiler=True, free=None, kernel=None, driver=None):
        found = machine.version
        monkeypatch.setattr(machine, "version", lambda package: None if package in names else found(package))
        if not compiler:
            monkeypatch.setattr(machine.shutil, "which", lambda name: None)
        if free is not None:
            monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: (100, 100 - free, free))
        if kernel is not None:
            monkeypatch.setattr(fused_rl, "token_logprobs", kernel)
        monkeypatch.setattr(machine, "_driver", lambda: driver)

    return absent


def off_by_a_little(logits, targets):
    rows = machine.reference.token_logprobs(logits, targets)
    return rows._replace(logprobs=rows.logprobs + 1e-4)


def nan(logits, targets):
    rows = machine.reference.token_logprobs(logits, targets)
    return rows._replace(entropy=rows.entropy * float("nan"))


def broken(logits, targets):
    raise RuntimeError("ptxas died\nof something")


def test_a_whole_machine_is_told_and_nothing_is_wrong(without, capsys):
    without()
    assert machine.look() == 0
    told = capsys.readouterr().out
    assert f"fused_rl       {fused_rl.__version__}\n" in told and f"torch          {torch.__version__}" in told
    assert "token_logprobs right: the CPU path is within " in told and "GiB free" in told
    assert "transformers " in told and "math-verify " in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is needed is another there")
@pytest.mark.parametrize(
    ("missing", "status", "line", "hint"),
    [
        ({"names": ["triton", "pytorch-triton-rocm"]}, 0, "triton         missing", "for a GPU: pip install triton"),
        ({"names": ["deepspeed"]}, 0, "missing: deepspeed", "-> pip install '.[train]'"),
        ({"names": ["reasoning-gym"]}, 0, "[demo]         missing: reasoning-gym", "-> pip install '.[demo]'"),
        (
            {"compiler": False},
            0,
            "compiler       missing",
            "several times as long; on Debian and Ubuntu: apt install g++",
        ),
        ({"free": 7}, 0, "disk           0.0 of 0.0 GiB", "choose --output_dir on another disk"),
        (
            {"driver": "570.1"},
            1,
            "there (driver 570.1), but torch does not see it",
            "has no CUDA in it: https://pytorch",
        ),
        ({"kernel": off_by_a_little}, 1, "WRONG: the CPU path is within 1.0e-04", "use no figure of this machine"),
        ({"kernel": nan}, 1, "WRONG: the CPU path is within nan", "report it, with all of these lines"),
        ({"kernel": broken}, 1, "the CPU path fails: RuntimeError: ptxas died of something", "report it"),
    ],
)
def test_each_thing_missing_has_its_hint(missing, status, line, hint, without, capsys):
    without(*missing.pop("names", ()), **missing)
    assert machine.look() == status
    told = capsys.readouterr().out
    assert line in told and hint in told[told.index(line) :], told


def test_a_gpu_makes_triton_and_a_compiler_needed(without, monkeypatch):
    without("triton", "pytorch-triton-rocm", compiler=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine._triton().needed and machine._triton().hint == "GPU tensors need it: pip install triton"
    assert machine._compiler().needed and "Triton cannot launch a kernel" in machine._compiler().hint


def test_it_works_with_torch_and_triton_alone(tmp_path):
    absent = ("deepspeed", "transformers", "datasets", "peft", "jsonargparse", "rich", "yaml", "numpy", "regex")
    code = (
        f"import sys; sys.modules |= dict.fromkeys({absent})\n"
        "from fused_rl.trainers.doctor import machine\nraise SystemExit(machine.look())"
    )
    env = {
        "PYTHONPATH": str(ROOT),
        "PATH": str(Path(shutil.which("g++") or "/usr/bin/g++").parent),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, "token_logprobs right" in done.stdout) == (0, True), done.stdout + done.stderr
