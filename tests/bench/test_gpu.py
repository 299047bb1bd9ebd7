"""The first contact with a GPU, rehearsed without one: every fact at a tiny size, and what breaks ends nothing else."""

import json
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as suite
from bench import apart, gpu, gpu_facts, results, run
from bench.cases.case import Spec
from bench.cases.logprobs import LogprobsCase
from bench.worker import ROOT, Worker

ASKED = "tests.bench.asked"
DEVICE = "cpu"


@pytest.mark.parametrize(
    ("question", "status", "reason"),
    [
        (("breaks",), "out of memory", "OutOfMemoryError: tried to allocate 2.32 GiB"),
        (("is_wrong",), "failed", "ValueError: device-side assert"),
        (("exits", 3), "failed", "its process ended: exit status 3"),
        (("dies",), "failed", "its process ended: signal 9"),
        (("hangs",), "failed", "no answer within 1 s"),
        (("is_not_there",), "failed", "AttributeError: module 'tests.bench.asked' has no attribute 'is_not_there'"),
    ],
)
def test_what_ends_a_worker_is_an_answer_and_ends_nothing_else(question, status, reason):
    with Worker() as worker:
        *words, first = worker.ask(f"{ASKED}:echo", "a", 1, limit=30).value
        assert words == ["a", 1]
        assert worker.ask(f"{ASKED}:echo", limit=30).value == [first], "one process for all questions"
        name, *args = question
        answer = worker.ask(f"{ASKED}:{name}", *args, limit=1 if name == "hangs" else 30)
        assert (answer.value, answer.status, answer.reason) == (None, status, reason)
        again = worker.ask(f"{ASKED}:echo", limit=30)
        assert again.status is None
        assert again.value != [first]


CHEAP = ("environment", "right: rows", "right: in place", "right: gae", "bits", "graph: token_logprobs")
FACTS = [pytest.param(name, marks=() if name in CHEAP else pytest.mark.slow) for name in gpu_facts.FACTS]


@pytest.mark.parametrize("name", FACTS)
def test_every_fact_is_one_at_a_tiny_size(name, tmp_path):
    """Nothing wrong, and a line of JSON for each."""
    path = tmp_path / "facts.jsonl"
    assert gpu_facts.tell(name, DEVICE, str(path)) == 0
    lines = path.read_text().splitlines()
    assert lines
    assert all(json.loads(line)["fact"] == name for line in lines)


def test_a_wrong_op_is_a_fact(monkeypatch, tmp_path):
    right = gpu_facts.fused_rl.token_logprobs

    def wrong(x, targets, **options):
        out = right(x, targets, **options)
        return out._replace(entropy=out.entropy + 1e-3) if options.get("softcap") else out

    monkeypatch.setattr(gpu_facts.fused_rl, "token_logprobs", wrong)
    path = tmp_path / "facts.jsonl"
    assert gpu_facts.tell("right: rows", DEVICE, str(path)) == 4
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert {fact["wrong"].split()[0] for fact in found if "wrong" in fact} == {"softcap"}


@pytest.mark.slow
def test_facts_go_on_after_one_that_ends_its_process(tmp_path, monkeypatch, capfd):
    """And what was known stays written."""
    rows = {
        "right: gae": gpu_facts.FACTS["right: gae"]._replace(limit=300),
        "no such fact": gpu_facts.Fact(None, 300),
        "bits": gpu_facts.FACTS["bits"]._replace(limit=300),
    }
    monkeypatch.setattr(gpu_facts, "FACTS", rows)
    assert gpu.facts(gpu.Step("facts", 900), tmp_path, DEVICE) == "1 broken or left out, 0 wrong"
    found = [json.loads(line) for line in (tmp_path / gpu.FACTS_FILE).read_text().splitlines()]
    assert [fact["fact"] for fact in found] == ["right: gae", "no such fact", "bits", "bits"]
    assert found[1]["ended"] == "KeyError: 'no such fact'"
    assert gpu.facts(gpu.Step("facts", 1), tmp_path, DEVICE) == "3 broken or left out, 0 wrong"


def test_steps_fit_into_ten_minutes_and_first_facts_come_first():
    assert sum(step.limit for step in gpu.STEPS) <= 600 - 15
    assert gpu.STEPS[0].name == "facts"
    first = [*gpu_facts.FACTS.values()][:2]
    assert sum(fact.limit for fact in first) <= 120
    groups = [step for step in gpu.STEPS if step.budget]
    assert {step.name for step in groups} <= {*suite.COMMANDS} & {*run.CASES}
    assert all(step.budget + 10 <= step.limit for step in groups)


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.command("gpu", ["--out", str(tmp_path)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1
    target = (ROOT / "Makefile").read_text().partition("\ngpu:")[2].partition("\n\n")[0]
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

    monkeypatch.setattr(gpu, "group", step)
    monkeypatch.setattr(gpu, "STEPS", [gpu.Step(name, limit, 1) for name, (_, limit) in code.items()])
    assert gpu.command("gpu", ["--out", str(tmp_path)]) == 1
    found = [json.loads(line) for line in (tmp_path / gpu.FACTS_FILE).read_text().splitlines()]
    ended = [(fact["step"], fact["ended"].rsplit(",", 1)[0]) for fact in found]
    assert ended == [("good", "ok"), ("bad", "exit status 3"), ("slow", "stopped after 1 s")]
    assert (tmp_path / "groups.txt").read_text() == "fine\n"
    assert gpu.command("gpu", ["--out", str(tmp_path), "--steps", "good"]) == 0


def args_of(tmp_path, **more):
    return SimpleNamespace(device=DEVICE, peers="plain torch", group="kernels", out=str(tmp_path), **more)


@pytest.mark.slow
def test_a_group_is_measured_by_a_worker(tmp_path, capsys):
    assert apart.main(args_of(tmp_path), {LogprobsCase: [Spec((6, 500), "bf16")]}, 60) == 0
    rows = results.load(tmp_path / "kernels-cpu.json")["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert "time / ours" in capsys.readouterr().out
