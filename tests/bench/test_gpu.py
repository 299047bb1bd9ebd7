"""The first contact with a GPU, rehearsed without one: every fact at a tiny size, and what breaks ends nothing else."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as suite
from bench import apart, gpu, gpu_facts, results, run, timing
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


ASKER = """
from bench import worker

worker.end_in_order()
with worker.Worker() as asked:
    asked.start()
    print(asked.process.pid, flush=True)
    asked.ask("time:sleep", 600, limit=600)
"""


@pytest.mark.slow
def test_a_worker_that_hangs_ends_with_who_asked_it(tmp_path):
    with (tmp_path / "log").open("w") as log:
        assert gpu.run(["-c", ASKER], 10, log, print) == "stopped after 10 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "log").read_text()), 0)


def test_no_question_is_waited_for_beyond_the_end():
    with Worker(end=gpu.time.monotonic() - 1) as asked:
        assert asked.ask("time:sleep", 600, limit=600).reason == "no answer within 0 s"


def test_a_file_of_tests_is_counted_case_by_case(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "PYTEST", ["-c", PRINTED])
    with (tmp_path / "tests.txt").open("w") as log:
        assert gpu.test_file("tests/test_it.py", gpu.time.monotonic() + 60, tmp_path, log) == "stopped after 59 s"
    found = [json.loads(line) for line in (tmp_path / gpu.FACTS_FILE).read_text().splitlines()]
    assert found[0] == {"test": "tests/test_it.py::test_b[tie of two-1]", "outcome": "failed"}
    assert (found[1]["passed"], found[1]["failed"], found[1]["skipped"]) == (1, 1, 1)


PRINTED = """
print("tests/test_it.py::test_a PASSED   [ 33%]")
print("tests/test_it.py::test_b[tie of two-1] FAILED [ 66%]")
print("tests/test_it.py::test_c SKIPPED (needs TRL)", flush=True)
raise SystemExit(124)
"""


def args_of(tmp_path, **more):
    return SimpleNamespace(device=DEVICE, peers="plain torch", group="kernels", out=str(tmp_path), **more)


def test_a_group_is_measured_apart_and_a_broken_peer_loses_its_own_row(tmp_path, monkeypatch, capsys):
    """The rows are those of a run in this process; what a worker was asked is written case by case."""
    asked = []

    class Here:
        """A worker that asks itself, but for a peer that breaks."""

        def __init__(self, end):
            pass

        def ask(self, function, *args, limit, **options):
            asked.append((function, options.get("name")))
            if options.get("name") == "plain torch" and args[1][0] == (9, 500):
                return apart.Answer(status="out of memory", reason="OutOfMemoryError: 3 GB")
            module = {"bench.apart": apart, "bench.machine": run.machine}[function.split(":")[0]]
            value = getattr(module, function.split(":")[1])(*json.loads(json.dumps(args)), **options)
            return apart.Answer(json.loads(json.dumps(value)))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(apart, "Worker", Here)
    monkeypatch.setattr(run.machine, "copy_bandwidth", lambda device: 1e10)
    specs = [Spec((6, 500), "bf16"), Spec((9, 500), "bf16")]
    assert apart.main(args_of(tmp_path), {LogprobsCase: specs}, 60) == 0
    rows = results.load(tmp_path / "kernels-cpu.json")["rows"]
    names = [(row["implementation"], row["status"]) for row in rows]
    ours = [("fused_rl", "ok"), ("fused_rl inplace", "ok")]
    assert names == [*ours, ("plain torch", "ok"), *ours, ("plain torch", "out of memory")]
    assert rows[2]["time_over"]["fused_rl"] > 0
    assert rows[2]["error"]["logprob"] < 1e-4
    printed = capsys.readouterr().out
    assert "not run: plain torch at 9 x 500 bf16 rows: OutOfMemoryError: 3 GB" in printed
    assert "token_logprobs 6 x 500 bf16" in printed
    assert asked[0][0] == "bench.machine:copy_bandwidth"


@pytest.mark.slow
def test_a_group_is_measured_by_a_worker(tmp_path, capsys):
    assert apart.main(args_of(tmp_path), {LogprobsCase: [Spec((6, 500), "bf16")]}, 60) == 0
    rows = results.load(tmp_path / "kernels-cpu.json")["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert "time / ours" in capsys.readouterr().out


def test_a_second_lack_of_memory_is_the_rows_own(monkeypatch):
    """One input set in place of two; then the row says what happened."""
    sets = []

    def phases(run, ms):
        sets.append(len(run.inputs))
        raise torch.OutOfMemoryError("2 GB")

    monkeypatch.setattr(timing, "phases_gpu", phases)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        timing.alone(timing.Run(None, None, [1, 2], True), "cuda", 20.0)
    assert sets == [2, 1]
