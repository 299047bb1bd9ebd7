"""The first contact with a GPU, rehearsed without one: what breaks or takes too long ends nothing else."""

import json

import pytest
import torch

from bench import __main__ as suite
from bench import gpu, machine, passes, results, run, timing
from tests.bench.cases import one_case


def test_steps_fit_into_their_minutes():
    limits = {
        minutes: [step.limit for step in gpu.parse(["--minutes", str(minutes)])[1]]
        for minutes in (10, 30, 45)
    }
    assert all(sum(found) <= 60 * minutes - 15 for minutes, found in limits.items())
    groups = [step for step in gpu.STEPS if step.budget]
    assert {step.name for step in groups} <= {*suite.COMMANDS} & {*run.CASES, "trainers"}
    assert all(step.budget + 10 <= step.limit for step in groups)


@pytest.mark.parametrize(("shape", "most"), zip(passes.SHAPES[:3], (1.40, 1.20, 1.10), strict=True))
def test_the_default_head_takes_one_pass_of_few_bytes(shape, most):
    """On paper, with the tiles that the default workspace of an H100 chooses: times over those of three GEMMs."""
    found = passes.ours(shape, passes.CARDS["H100, 60 GiB free"], torch.float32)
    assert found["FLOP / logit"] == "6 H"
    assert found["/ three GEMMs"] < most + 0.005


def test_every_row_that_is_predicted_is_measured():
    """And the order of the steps is that in which their figures are missed."""
    names = [step.name for step in gpu.STEPS if step.name in gpu.PREDICTED]
    assert names == ["host", "kernels", "kl", "linear"]
    for group, rows in gpu.PREDICTED.items():
        specs = [spec for kind in run.CASES[group] for spec in kind.gpu]
        known = {results.sizes(spec.shape) for spec in specs}
        known |= {kind.op.removeprefix("host, ") for kind in run.CASES[group]}
        assert {*rows} <= known, group


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.command("gpu", ["--out", str(tmp_path)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1
    target = (machine.ROOT / "Makefile").read_text().partition("\ngpu:")[2].partition("\n\n")[0]
    assert "pip" not in target and "install" not in target


def test_steps_end_on_their_own(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    code = {
        "good": ("print('fine')", 600),
        "bad": ("raise SystemExit(3)", 600),
        "slow": ("import time; time.sleep(60)", 1),
    }

    def step(step, out):
        with (out / "groups.txt").open("a") as log:
            return gpu.run(["-c", code[step.name][0]], step.limit, log, print)

    monkeypatch.setattr(machine, "environment", lambda device: {"device": "a GPU"})
    monkeypatch.setattr(gpu, "group", step)
    monkeypatch.setattr(
        gpu, "STEPS", [gpu.Step(name, limit, 1) for name, (_, limit) in code.items()]
    )
    assert gpu.command("gpu", ["--out", str(tmp_path)]) == 1
    environment, *found = map(json.loads, (tmp_path / gpu.FACTS_FILE).read_text().splitlines())
    assert environment == {"device": "a GPU"}
    predicted, *found = found
    assert predicted == {"predicted": dict.fromkeys(code)}, "before anything runs"
    ended = [(fact["step"], fact["ended"].rsplit(",", 1)[0]) for fact in found]
    assert ended == [("good", "ok"), ("bad", "exit status 3"), ("slow", "stopped after 1 s")]
    assert (tmp_path / "groups.txt").read_text() == "fine\n"
    assert gpu.command("gpu", ["--out", str(tmp_path), "--steps", "good"]) == 0


@pytest.mark.slow
def test_on_a_gpu_each_is_timed_alone_and_one_without_memory_costs_no_other_row(monkeypatch):
    case, calls = one_case(), []
    case.device = "cpu:0"  # not "cpu": the GPU's way

    def alone(timed, ms):
        calls.append(ms)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("40 GiB")
        return {"forward": [1.0] * timing.LEAST, "both": [3.0] * timing.LEAST}

    monkeypatch.setattr(machine, "peak_extra_bytes", lambda run, device: run())
    monkeypatch.setattr(timing, "alone", alone)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows = run.run_case(case, "plain torch", 1e9, 10.0)
    assert [row["status"] for row in rows] == [results.OK] * 3
    assert ["ms" in row for row in rows] == [True, False, True] and rows[2]["time_over"] == {
        "fused_rl": 1.0
    }
    assert all(20 <= ms <= 200 for ms in calls)
    assert ["host_ms" in row for row in rows] == [True, False, True]
    assert rows[0]["host_ms"]["both"] > 0
