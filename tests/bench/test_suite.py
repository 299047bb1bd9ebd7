"""The commands of the suite: each takes its own options, and wrong ones end with a line."""

import json
import subprocess
import sys

import pytest
import torch

from bench import __main__ as suite
from bench import machine, options, results, trainers


@pytest.mark.parametrize("wrong", ["--dtype bf17", "--shapes 64by1000", "--shapes 0x10", "--budget 0", "--bogus",
                                   "--peers TLR", "--device cuda"])  # fmt: skip
def test_wrong_options_end_with_a_line_that_names_them(wrong, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        options.arguments("kernels", "kernels", wrong.split())
    assert stopped.value.code == 2
    assert wrong.split()[0] in capsys.readouterr().err.splitlines()[-1]


def test_the_suite_hands_each_group_its_own_options(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(
        suite, "run_group", lambda group, options: ran.append((group, options)) or "ok"
    )
    monkeypatch.setattr(
        sys, "argv", ["bench", "--group", "kernels,linear,codegen", "--out", "there"]
    )
    assert suite.main() == 0
    assert ran == [(group, ["--out", "there"]) for group in ("kernels", "linear", "codegen")]
    ran.clear()
    monkeypatch.setattr(
        sys,
        "argv",
        ["bench", "--shapes", "64x1000,8x9", "--dtype", "bf16", "--peers", "plain torch"],
    )
    assert suite.main() == 0
    # results of chosen shapes do not replace whole ones
    assert ran == [
        ("kernels", ["--dtype", "bf16", "--peers", "plain torch", "--shapes", "64x1000,8x9"])
    ]
    assert "linear: left out" in capsys.readouterr().out
    for wrong in (["--group", "kernel"], ["--group", "linear", "--shapes", "64x1000"]):
        monkeypatch.setattr(sys, "argv", ["bench", *wrong])
        with pytest.raises(SystemExit):
            suite.main()
        assert wrong[-2] in capsys.readouterr().err


def test_what_does_not_fit_into_the_memory_is_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr(suite.machine, "free_bytes", lambda: 1e9)
    monkeypatch.setattr(sys, "argv", ["bench", "--group", "traffic"])
    assert suite.main() == 0
    assert "traffic: left out: it needs" in capsys.readouterr().out
    task = trainers.Task(None, 3, 2.0)
    ((row,),) = trainers.run_task("grpo", "large head", task, [1])
    assert "needs 2.0 GB of memory, of which 1.0 are free" in row["reason"]
    assert not results.failed([row])


@pytest.mark.slow
def test_the_curves_of_quality_are_measured_on_the_rows_that_ours_holds_out(tmp_path):
    words = "-m", "bench", "quality", "--seeds", "1", "--steps", "2", "--out", str(tmp_path)
    done = subprocess.run(
        [sys.executable, *words], cwd=machine.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "quality-cpu.json").read_text())["rows"]
    assert [(row["op"], [step for step, *_ in row["accuracy"]]) for row in rows] == [
        *[("grpo", [0, 1, 2])] * 2,
        *[("reward", [0, 1, 2])] * 2,
    ]
