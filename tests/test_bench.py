"""The benchmark suite tells right from wrong, and its reproductions say what they are there to show."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fused_rl.reference
from bench import __main__ as suite
from bench import (
    gpu,
    growth,
    machine,
    numerics,
    options,
    peers,
    plots,
    prototypes,
    report,
    results,
    run,
    timing,
)
from bench.cases import linear
from bench.cases.case import Spec
from bench.cases.gae import LONGEST_LOOP, GAECase
from bench.cases.kl import KLCase
from bench.cases.linear import LinearCase
from bench.cases.logprobs import LogprobsCase
from bench.repro import entropy, head_precision, kl_table

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _cpu_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # timing and checks as `python -m bench` runs them


class Clock:
    """A clock that moves by `step` seconds whenever somebody looks at it: nothing depends on how fast a machine is."""

    def __init__(self):
        self.now, self.step = 100.0, 1e-3

    def perf_counter(self):
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("time.perf_counter", made.perf_counter)
    return made


def one_case(layout="rows", shape=(6, 500), fraction=0.0):
    return LogprobsCase(Spec(shape, "bf16", fraction, layout), "cpu")


def checked(case, peer):
    """Errors of one pass."""
    once = run.run_once(case, peer)
    return case.errors(peer, once.outputs, once.gradient)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (LogprobsCase(Spec((6, 500), "bf16"), "cpu"), {"logprob", "entropy", "gradient"}),
        (LogprobsCase(Spec((6, 500), "bf16", 0.5), "cpu"), {"logprob", "entropy", "gradient"}),
        (LogprobsCase(Spec((2, 4, 500), "bf16", layout="shift"), "cpu"), {"logprob", "entropy", "gradient"}),
        (KLCase(Spec((6, 500), "fp32", 0.5), "cpu"), {"kl", "gradient"}),
        (GAECase(Spec((3, 50)), "cpu"), {"advantages"}),
        (LinearCase(Spec((256, 16, 300), "fp32"), "cpu"), {"loss", "dhidden", "dweight"}),
    ],
    ids=lambda value: value.label() if hasattr(value, "label") else "",
)
def test_a_right_op_passes_the_check(case, names):
    mine = [peer for peer in case.ours() if peer.role == "ours"]
    assert mine
    for peer in mine:
        errors = checked(case, peer)
        assert set(errors) == names
        assert run.judged(case, peer, errors) == {"status": results.OK}


def broken_value(case, x):
    logprobs, entropy_ = case.call(x)
    return logprobs + 2e-3, entropy_


def broken_gradient(case, x):
    logprobs, entropy_ = case.call(x)
    return logprobs, entropy_.detach() + 0.5 * (entropy_ - entropy_.detach())


def broken_nan(case, x):
    logprobs, entropy_ = case.call(x)
    return logprobs, entropy_ * float("nan")


def contend(monkeypatch, case, *found):
    monkeypatch.setattr(case, "contenders", lambda wanted: (list(found), []))


@pytest.mark.parametrize(
    ("broken", "what"), [(broken_value, "logprob"), (broken_gradient, "gradient"), (broken_nan, "entropy")]
)
def test_an_op_that_fails_the_check_is_not_timed(broken, what, clock, monkeypatch):
    # A peer that is wrong is timed, and its row says by how much.
    case = one_case()
    made = peers.Peer("fused_rl", "0", lambda x: broken(case, x), role="ours")
    contend(monkeypatch, case, made, made._replace(name="wrong peer", role="peer"))
    ours, peer = run.run_case(case, "none", 1e9, 1.0)
    assert ours["status"] == "failed check"
    assert ours["reason"].startswith(what)
    assert "ms" not in ours
    assert peer["status"] == "wrong"
    assert peer["reason"].startswith(what)
    assert len(peer["samples_ms"]["both"]) == 40
    assert results.remarks(peer).startswith("WRONG: ")


def test_what_raises_is_a_row_with_its_status(clock, monkeypatch):
    case = one_case()

    def raising(error):
        def call(x):
            raise error

        return call

    ours = peers.Peer("fused_rl", "0", raising(RuntimeError("no kernel\nfor this")), role="ours")
    large = peers.Peer("large", "0", raising(torch.OutOfMemoryError("40 GiB")))
    contend(monkeypatch, case, ours, large)
    rows = run.run_case(case, "none", 1e9, 1.0)
    assert [row["status"] for row in rows] == ["failed", "out of memory"]
    assert [row["reason"] for row in rows] == ["RuntimeError: no kernel", "OutOfMemoryError: 40 GiB"]
    assert results.measured(rows) == []
    run.show(case, rows, 1e9)


@pytest.mark.parametrize(("failing", "status"), [(None, 0), ("fused_rl", 1), ("another peer", 0)])
def test_a_group_fails_where_ours_does(failing, status, tmp_path, monkeypatch):
    def run_case(case, wanted, copy_bytes_per_s, seconds):
        rows = [results.not_run("a peer", results.CANNOT_RUN, "no GPU", case.op)]
        if failing:
            rows.append(results.not_run(failing, results.FAILED, "RuntimeError: no kernel", case.op))
        return rows

    monkeypatch.setattr(run, "run_case", run_case)
    monkeypatch.setattr(machine, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(run, "warm_up", lambda kinds, args: None)
    words = ["--device", "cpu", "--shapes", "6x500,4x300", "--dtype", "bf16", "--out", str(tmp_path)]
    assert run.command("kernels", words) == status
    rows = json.loads((tmp_path / "kernels-cpu.json").read_text())["rows"]
    of_peer = [row["op"] for row in rows if row["implementation"] == "a peer"]
    assert of_peer == ["token_logprobs", "token_kl"], "what cannot run at any case is told once"


def test_what_has_no_time_is_left_out_and_says_so(clock, monkeypatch):
    case = one_case()

    def slow(x):
        clock.now += 2
        return case.call(x)

    ours = peers.Peer("fused_rl", "0", slow, role="ours")
    contend(monkeypatch, case, ours, peers.Peer("a peer", "0", case.call))
    rows = run.run_case(case, "none", 1e9, 1.0)
    assert [row["status"] for row in rows] == ["ok", "skipped: budget"]
    assert results.repeats(rows[0]) == 3, "ours is what others are compared to"
    assert results.name_of(rows[1]) == "a peer at token_logprobs 6 x 500 bf16"
    assert rows[1]["reason"] == "left out for time; --budget gives more"


def test_every_case_gives_rows_of_one_form(clock):
    cases = [one_case(), KLCase(Spec((6, 500), "bf16"), "cpu"), GAECase(Spec((3, 50)), "cpu")]
    cases.append(LinearCase(Spec((256, 16, 300), "bf16"), "cpu"))
    for case in cases:
        rows = results.measured(run.run_case(case, "plain torch,loop over T", 1e10, 1e9))
        assert rows[-1]["implementation"] in ("plain torch", "loop over T")
        for row in rows:
            assert row["status"] == results.OK
            assert set(row["time_over"]) == set(case.baselines)
            figures = set(results.figures(row))
            missing = set(case.columns.values()) - figures
            assert not {name for name in missing if not name.endswith("error") and name != "backward"}, missing


def test_a_loop_of_seconds_is_left_out():
    found, missing = GAECase(Spec((1, LONGEST_LOOP + 1)), "cpu").contenders("all")
    assert [peer.name for peer in found] == ["fused_rl"]
    assert [(row["status"], row["where"]) for row in missing] == [("skipped: slow", "T = 16385")]


def test_turns_share_the_time_and_a_slow_run_keeps_its_first_sample():
    calls = []

    def run(name, seconds):
        return lambda: calls.append(name) or {"forward": seconds, "both": 2 * seconds}

    costs = {"ours": 4.0, "fast": 0.01, "medium": 0.25, "slow": 5.0}
    runs = {name: run(name, cost) for name, cost in costs.items()}
    first = {name: {"forward": 9 * cost, "both": cost} for name, cost in costs.items()}
    samples = timing.interleaved(runs, 4.0, first, keep=("ours",))
    assert {n: len(s["both"]) for n, s in samples.items()} == {"ours": 3, "fast": 40, "medium": 4, "slow": 1}
    assert samples["slow"] == {"forward": [45e3], "both": [5e3]}, "that of before"
    assert samples["fast"]["both"][0] == 20, "that of now"
    assert calls.index("ours") < 30 < len(calls) - calls[::-1].index("medium"), "spread over the rounds"


def test_three_of_each_come_first_where_there_is_time():
    costs = {"fast": 0.1, "slow": 2.0}
    runs = {name: (lambda cost=cost: {"forward": cost}) for name, cost in costs.items()}
    first = {name: {"forward": cost} for name, cost in costs.items()}
    samples = timing.interleaved(runs, 7.0, first)
    assert {name: len(found["forward"]) for name, found in samples.items()} == {"fast": 6, "slow": 3}


def test_all_shapes_are_an_option(monkeypatch):
    few, all_of_them = (options.arguments("", "linear", ["--device", "cpu", *more]) for more in ([], ["--all-shapes"]))
    for case in (LogprobsCase, LinearCase):
        assert case.specs(few) == case.cpu
        assert case.specs(all_of_them) == case.cpu + case.cpu_more
    ran = []
    monkeypatch.setattr(suite, "run_group", lambda group, options: ran.append(options) or "ok")
    monkeypatch.setattr(sys, "argv", ["bench", "--group", "kernels", "--all-shapes", "--out", "there"])
    assert suite.main() == 0
    assert ran == [["--all-shapes", "--out", "there"]]


def test_late_turns_are_those_of_what_is_kept(clock):
    def run_of(seconds):
        def one():
            clock.now += seconds
            return {"forward": seconds}

        return one

    clock.step = 0
    # Each took 0.1 s before; now 10 times as long.
    runs = {"ours": run_of(1.0), "peer": run_of(1.0)}
    first = dict.fromkeys(runs, {"forward": 0.1})
    samples = timing.interleaved(runs, 2.0, first, keep=("ours",))
    assert {name: len(found["forward"]) for name, found in samples.items()} == {"ours": 10, "peer": 2}


def test_a_budget_hands_on_what_is_left_over(clock):
    clock.step = 0
    budget = timing.Budget(30, 3)
    assert budget.share() == 10
    clock.now += 2
    assert budget.share() == 14
    clock.now += 40
    assert budget.share() == 0


def test_a_peer_that_cannot_run_is_listed_with_the_reason(monkeypatch):
    imported = [name for name in sys.modules if name.partition(".")[0] == "trl"]
    for name in {"trl", *imported}:
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    monkeypatch.setattr(peers.importlib, "import_module", importing_nothing(peers.importlib.import_module))
    running, missing = peers.find(peers.LOGPROBS, "cpu", op="token_logprobs")
    assert "plain torch" in [p.name for p in running]
    found = {row["implementation"]: (row["op"], row["status"], row["reason"]) for row in missing}
    assert found["Liger GRPO loss"] == ("token_logprobs", "cannot run", "its Triton kernels need a GPU")
    assert "TRL" in found
    assert found["verl"] == ("token_logprobs", "not installed", "not installed")


def importing_nothing(import_module):
    def wrapped(name):
        if name.startswith("verl"):
            raise ModuleNotFoundError("No module named 'verl'", name="verl")
        return import_module(name)

    return wrapped


def test_a_peer_of_whole_sequences_takes_no_rows(monkeypatch):
    seen = []
    peer = peers.Peer(
        "whole", "0", lambda logits, targets, mask: seen.append((logits.shape, targets.shape)), whole=True
    )
    shifted = one_case(layout="shift", shape=(2, 4, 500))
    shifted.adapted(peer)(shifted.logits[0])
    assert seen == [((2, 4, 500), (2, 3))]
    case = one_case()
    monkeypatch.setattr(peers, "find", lambda *_, **__: ([peer], []))
    found, (missing,) = case.contenders("all")
    assert peer.name not in [other.name for other in found]
    assert (missing["status"], missing["reason"]) == ("cannot run", "takes whole (B, T, V) logits alone")


def _cross_entropy(logits, targets, ignore_index=-100):
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none", ignore_index=ignore_index)


def _flash(logits, labels, precomputed_lse=None, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0,
           ignore_index=-100, inplace_backward=False, process_group=None):  # fmt: skip
    assert logits.dim() == 2
    return _cross_entropy(logits, labels, ignore_index), torch.zeros(len(labels))


def _quack(x, target, lse_partial=None, weight=None, ignore_index=-100, reduction="mean", inplace_backward=False):
    assert (x.dim(), target.dim(), reduction) == (2, 1, "none")
    return _cross_entropy(x, target, ignore_index)


def _verl_logprobs(logits, labels, inplace_backward=True):
    assert not inplace_backward, "it would overwrite logits that the entropy's gradient needs"
    return torch.log_softmax(logits.float(), -1).gather(-1, labels[..., None])[..., 0]


def _verl_entropy(logits):
    return torch.distributions.Categorical(logits=logits.float()).entropy()


def _cce(e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="high", impl="cce"):
    assert (reduction, impl) == ("none", "cce")
    return _cross_entropy(e @ c.t(), targets, ignore_index)


def _verl_head(hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
    logits = hidden @ weight.t()
    return -_cross_entropy(logits, labels), _verl_entropy(logits)


def _stand_in(monkeypatch, module, **functions):
    """A module of this name with these functions: their packages' signatures, as released, with plain arithmetic."""
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), SimpleNamespace(**functions))


@pytest.mark.parametrize(
    ("name", "module", "functions"),
    [
        ("flash-attn cross-entropy", "flash_attn.ops.triton.cross_entropy", {"cross_entropy_loss": _flash}),
        ("quack cross-entropy", "quack.cross_entropy", {"cross_entropy": _quack}),
        ("verl", "verl.utils.torch_functional",
         {"logprobs_from_logits": _verl_logprobs, "entropy_from_logits": _verl_entropy}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["rows", "shift"])
def test_peers_that_need_a_gpu_are_called_as_their_packages_ask(name, module, functions, layout, monkeypatch):
    _stand_in(monkeypatch, module, **functions)
    case = one_case(layout=layout, shape=(2, 4, 500) if layout == "shift" else (6, 500), fraction=0.5)
    (peer,), _ = peers.find(peers.LOGPROBS, "cuda", name)
    errors = checked(case, peer._replace(call=case.adapted(peer)))
    assert errors["logprob"] < 1e-5
    assert errors["gradient"] < 2**-7  # bf16 logits


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [("cut-cross-entropy", "cut_cross_entropy", _cce), ("verl", "verl.utils.kernel.linear_cross_entropy", _verl_head)],
)
def test_heads_that_need_a_gpu_are_called_as_their_packages_ask(name, module, function, monkeypatch):
    _stand_in(monkeypatch, module, linear_cross_entropy=function)
    (peer,), _ = peers.find(peers.LINEAR, "cuda", name)
    case = LinearCase(Spec((256, 16, 300), "fp32"), "cpu")
    peer = peer._replace(call=case.adapted(peer))
    assert run.judged(case, peer, checked(case, peer)) == {"status": results.OK}


def test_linear_truth_is_autograd_in_fp64_and_finds_a_wrong_gradient():
    case = LinearCase(Spec((1152, 16, 300), "fp32"), "cpu")  # two pieces of 512 rows and a tail
    hidden, weight = (t.detach().double().requires_grad_() for t in (case.hidden, case.weight))
    loss = peers.plain_head(hidden, weight, case.targets, case.advantages.double())
    exact = (loss, *torch.autograd.grad(loss, (hidden, weight)))
    truth = linear.Truth(case)
    # `plain_head` makes fp32 logits, whatever it is given
    assert all(e < 1e-6 for e in truth.errors(*exact, unweighted=False).values())
    peer = peers.Peer("a peer", None, None)
    for broken, name in enumerate(("loss", "dhidden", "dweight")):
        changed = [t * (1.002 if i == broken else 1) for i, t in enumerate(exact)]
        found = run.judged(case, peer, truth.errors(*changed, unweighted=False))
        assert found["status"] == results.WRONG
        assert found["reason"].split(" off by")[0] == name
        assert found["reason"].count("off by") == 1
    likelihood = torch.nn.functional.cross_entropy(hidden @ weight.t(), case.targets)
    errors = truth.errors(likelihood, *torch.autograd.grad(likelihood, (hidden, weight)), unweighted=True)
    assert all(e < 1e-12 for e in errors.values())


def test_linear_rows_hold_every_column(clock, monkeypatch, capsys):
    case = LinearCase(Spec((256, 64, 500), "bf16"), "cpu")
    rows = run.run_case(case, "plain torch,verl", 1e10, 1e9)
    measured = results.measured(rows)
    assert [r["implementation"] for r in measured] == [linear.FLOOR, *linear.OURS, "plain torch"]
    (missing,) = results.missing(rows)
    assert (missing["implementation"], missing["reason"]) == ("verl", "its Triton kernels need a GPU")
    for row in measured:
        assert row["bytes"] == {"forward": 2 * 64 * 756, "both": 6 * 64 * 756}
        assert row["gb_per_s"]["both"] == pytest.approx(row["bytes"]["both"] / row["ms"]["both"] / 1e6)
        assert row["copy_fraction"]["both"] == pytest.approx(row["gb_per_s"]["both"] / 10)
        assert row["status"] == results.OK
    run.show(case, rows, 1e10)
    printed = capsys.readouterr().out
    assert "hidden states and weight read forward" in printed
    assert "not run: verl: its Triton kernels need a GPU" in printed


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
    monkeypatch.setattr(suite, "run_group", lambda group, options: ran.append((group, options)) or "ok")
    monkeypatch.setattr(sys, "argv", ["bench", "--group", "kernels,linear,codegen", "--out", "there"])
    assert suite.main() == 0
    assert ran == [(group, ["--out", "there"]) for group in ("kernels", "linear", "codegen")]
    ran.clear()
    monkeypatch.setattr(sys, "argv", ["bench", "--shapes", "64x1000,8x9", "--dtype", "bf16", "--peers", "plain torch"])
    assert suite.main() == 0
    # results of chosen shapes do not replace whole ones
    assert ran == [("kernels", ["--dtype", "bf16", "--peers", "plain torch", "--shapes", "64x1000,8x9"])]
    assert "linear: left out" in capsys.readouterr().out
    for wrong in (["--group", "kernel"], ["--group", "linear", "--shapes", "64x1000"]):
        monkeypatch.setattr(sys, "argv", ["bench", *wrong])
        with pytest.raises(SystemExit):
            suite.main()
        assert wrong[-2] in capsys.readouterr().err


def test_gpu_timing_repeats_the_backward_pass_on_saved_forwards(monkeypatch):
    # do_bench calls a function again and again: gradients of one forward must survive that, in place excepted.
    case, calls = one_case(), []

    def do_bench(run, rep, return_mode):
        calls.append([run() for _ in range(3)])
        return [1.0, 2.0, 6.0]

    pytest.importorskip("triton")
    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    case.device = "a GPU"  # only read to keep the graph for the next call
    ours, inplace = case.ours()
    timed = timing.Run(ours.call, case.backward, case.inputs(ours), True)
    samples = timing.phases_gpu(timed)
    assert {phase: timing.median(s) for phase, s in samples.items()} == {"forward": 2, "backward": 2, "both": 2}
    first, second, third = calls[1]
    assert torch.equal(first, third), "input sets take turns"
    assert not torch.equal(first, second)
    once = timing.phases_gpu(timing.Run(inplace.call, case.backward, case.inputs(inplace), False))
    assert set(once) == {"forward", "both"}


def test_peak_memory_counts_what_is_held_at_once():
    size = 32 << 20
    x = torch.ones(size, dtype=torch.uint8)
    assert machine.peak_extra_bytes(lambda: x + 1, "cpu") == pytest.approx(size, rel=0.1)
    assert machine.peak_extra_bytes(lambda: (x + 1).float(), "cpu") == pytest.approx(5 * size, rel=0.1)
    assert machine.peak_extra_bytes(lambda: [x[: size // 8] + 1 for _ in range(8)][0].max(), "cpu") < 1.5 * size


def test_slope_of_a_power():
    assert growth.slope([1, 10, 100], [3, 30 * 10**0.5, 300 * 10]) == pytest.approx(1.5)


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Results and docs of a folder of its own."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(plots, "DOCS", tmp_path)
    return tmp_path


def test_results_survive_the_round_trip_and_the_report(pages, clock, monkeypatch):
    rows = run.run_case(one_case(), "plain torch", 1e9, 1e9)
    wrong = rows[-1] | {"implementation": "a peer", "status": results.WRONG, "reason": "entropy off by 2 nats"}
    rows += [wrong, results.not_run("TRL", results.NOT_INSTALLED, "not installed", "token_logprobs")]
    args = SimpleNamespace(device="cpu", out=str(pages), group="kernels")
    path = results.save(args, rows, copy_bytes_per_s=1e9)
    found = results.load(path)
    assert {"command", "commit", "device", "versions", "load"} <= set(found["environment"])
    assert str(ROOT) not in path.read_text()
    assert len(found["rows"][0]["samples_ms"]["both"]) >= 3
    assert report.command("report", []) == 0
    page = (pages / "benchmarks.md").read_text()
    assert report.number(found["rows"][0]["ms"]["both"]) in page
    assert "WRONG: entropy off by 2 nats" in page
    assert "Not run: TRL (not installed)." in page
    assert (pages / "benchmarks-cpu.png").stat().st_size > 5000


def test_the_report_leaves_out_what_it_cannot_read_and_says_so(pages, clock, monkeypatch, capsys):
    assert report.command("report", []) == 1
    assert "no results" in capsys.readouterr().out
    assert not (pages / "benchmarks.md").exists(), "what was there stays"
    rows = run.run_case(LinearCase(Spec((256, 64, 500), "bf16"), "cpu"), "none", 1e10, 1e9)
    args = SimpleNamespace(device="cpu", out=str(pages), group="linear")
    whole = results.save(args, rows, copy_bytes_per_s=1e10).read_text()
    (pages / "kernels-cpu.json").write_text(whole[:-200])
    (pages / "growth-cpu.json").write_text(whole.replace('"status"', '"state"'))
    assert report.command("report", []) == 1
    printed = capsys.readouterr().out
    assert "left out: kernels-cpu.json: JSONDecodeError" in printed
    assert "left out: growth-cpu.json: KeyError: 'status'" in printed
    assert "fused_rl one pass" in (pages / "benchmarks.md").read_text()
    assert (pages / "benchmarks-linear-cpu.png").stat().st_size > 5000


def test_the_page_that_stands_here_is_that_of_its_results(pages, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", results.RESULTS)
    shutil.copy(ROOT / "docs" / "numerics.md", pages)
    assert report.command("report", []) == 0
    for name in ("benchmarks.md", "numerics.md"):
        assert (pages / name).read_text() == (ROOT / "docs" / name).read_text()


def test_gpu_steps_end_on_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    steps = {
        "good": ("print('fine')", 600),
        "bad": ("raise SystemExit(3)", 600),
        "slow": ("import time; time.sleep(60)", 1),
    }
    made = [gpu.Step(name, ["-c", code], limit, 7) for name, (code, limit) in steps.items()]
    monkeypatch.setattr(gpu, "STEPS", made)
    assert gpu.command("gpu", ["--out", str(tmp_path)]) == 1
    summary = capsys.readouterr().out.splitlines()[-3:]
    assert [line.rsplit(",", 1)[0] for line in summary] == ["good: ok", "bad: exit status 3", "slow: stopped after 1 s"]
    assert (tmp_path / "good.txt").read_text() == "fine\n"
    assert gpu.command("gpu", ["--out", str(tmp_path), "--steps", "good"]) == 0


def test_gpu_steps_fit_into_nine_minutes_and_take_their_options():
    assert sum(step.limit for step in gpu.STEPS) <= 9 * 60 - 30
    groups = [step.command[2] for step in gpu.STEPS if step.command[:2] == ["-m", "bench"]]
    assert groups == ["prototypes", "kernels", "linear"]
    assert {*groups, *suite.GROUPS} <= set(suite.COMMANDS)


@pytest.mark.parametrize("word", suite.COMMANDS)
def test_every_word_stands_for_a_command(word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", word, "--bogus"])
    with pytest.raises(SystemExit) as stopped:
        suite.main()
    assert stopped.value.code == 2
    assert "unrecognized arguments: --bogus" in capsys.readouterr().err


def test_prototypes_stand_beside_their_prediction(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("triton.testing.do_bench", lambda run, rep, return_mode: [run() and 1.0 or 1.0, 2.0, 3.0])
    monkeypatch.setattr(machine, "copy_bandwidth", lambda device: 1e9)
    args = SimpleNamespace(device="cpu", shapes=[(4, 9000)], out=str(tmp_path), group="prototypes")
    assert not prototypes.main(args)
    assert "predicted %" in capsys.readouterr().out
    rows = json.loads((tmp_path / "prototypes-cpu.json").read_text())["rows"]
    assert [r["op"] for r in rows] == [*prototypes.COUNTED, "fused_rl forward", "fused_rl backward"]
    assert all(r["copy_percent"] == pytest.approx(100 * r["bytes"] / 2e-3 / 1e9, rel=1e-3) for r in rows)
    monkeypatch.setattr(prototypes, "error", lambda *_: float("nan"))
    assert prototypes.main(args)
    row = json.loads((tmp_path / "prototypes-cpu.json").read_text())["rows"][0]
    assert "ms" not in row, "wrong: not timed"
    assert row["status"] == results.FAILED_CHECK


def test_traffic_runs_as_a_plain_script():
    # From the repository's root, without the package on the path; bench's own files must not shadow other packages.
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "bench/traffic.py", "--peers", "plain torch", "--shapes", "1x4x20001"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64.00" in done.stdout
    assert "token_kl" in done.stdout


@pytest.mark.parametrize("vocab", [1000, 8192, 10001])  # a tail alone, whole tiles alone, both
@pytest.mark.parametrize("name", list(prototypes.COUNTED))
def test_prototypes_are_right(name, vocab, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)).mul_(3).to(torch.bfloat16)
    logits[0, : vocab // 2] = -torch.inf
    targets = torch.tensor([vocab - 1, 0, 5])
    outputs = [torch.full((3,), float("nan")) for _ in range(2)]
    prototypes.launch(name, logits, targets, *outputs)
    logp = torch.log_softmax(logits.double(), -1)
    entropy_ = -(logp.exp() * torch.where(logp.isinf(), 0, logp)).sum(-1)
    torch.testing.assert_close(outputs[0].double(), logp.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(outputs[1].double(), entropy_, rtol=1e-6, atol=5e-6)


def test_entropy_stays_right_where_common_forms_do_not():
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    rows = list(entropy.sweep(dtypes, gaps=(0, 10, 40), offsets=(0, 1000, -1000)))
    ours = [r for r in rows if r["form"] == "fused_rl"]
    assert all(r["smallest"] >= 0 for r in ours)
    assert max(r["error"] / max(1e-4, 1e-5 * r["exact"]) for r in ours) < 1
    worst = {f: max(r["error"] for r in rows if r["form"] == f) for f in entropy.FORMS}
    assert min(r["smallest"] for r in rows if r["form"] == "lse - sum(p x), logits' dtype") <= -0.5
    assert worst["lse - sum(p x), logits' dtype"] > 1
    assert worst["lse - sum(p x), fp32"] > 1e-3


def test_an_exact_head_beside_others(monkeypatch):
    """3e-6 with fp32 logits, thousandths without; what is not installed says so."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    rows = {name: (values, reason) for name, *values, reason in head_precision.measured((16, 64, 2000))}
    assert rows.keys() == head_precision.FORMS.keys()
    assert max(rows["fused_rl, logits_dtype=float32"][0]) <= 3e-6
    assert max(rows["fp32 head, log_softmax"][0]) >= 1e-5 and rows["fp32 head, log_softmax"][0][0] <= 1e-5
    for name in ("fused_rl, logits_dtype=bfloat16", "TRL chunked head"):
        assert rows[name][0][0] >= 1e-3
    for values, reason in rows.values():
        assert (values[0] is None) == bool(reason)
    (row,) = head_precision.costs(((16, 64, 4096),), turns=1)
    assert row[0] == "16x64x4096" and len(row) == 6


def test_kl_table_is_the_enumeration():
    found = {row[0]: row[1:] for row in kl_table.rows()}
    assert found["k1"] == ["0.306993", "all zero", "0.146296", "cosine with the KL's -0.953"]
    assert found["k2"] == ["0.283445", "the KL's", "0.320773", "cosine with the KL's +0.983"]
    assert found["k3"] == ["0.306993", "that of KL(ref||policy)", "0.387491", "cosine with the KL's +0.896"]
    assert found["k4"] == found["rk3"] == ["0.306993", "the KL's", "0.306993", "the KL's"]


def test_exact_numerics_agree_with_autograd_and_keep_what_it_loses():
    x, targets = numerics.logits("normal", 0, torch.float32, "cpu")
    up = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    logprobs, h, gradient = numerics.exact(x, targets, *up)
    leaf = x.double().requires_grad_()
    expected = fused_rl.reference.token_logprobs(leaf, targets)
    (given,) = torch.autograd.grad(expected[:2], leaf, up)
    torch.testing.assert_close(logprobs, expected.logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(h, expected.entropy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, given, rtol=1e-9, atol=1e-14)
    # One token 60 above the other: 1 - p = e^-60 of which plain fp64 keeps nothing.
    certain = torch.tensor([[60.0, 0.0]])
    _, h, gradient = numerics.exact(certain, torch.tensor([0]), torch.ones(1), None)
    rest = torch.exp(torch.tensor(-60.0, dtype=torch.float64))
    torch.testing.assert_close(h[0], rest * 61, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient[0], torch.stack([rest, -rest]), rtol=1e-12, atol=0)


def test_kl_keeps_its_digits_where_plain_torch_loses_them():
    rows = numerics.kl_rows("cpu")
    ours = [r for r in rows if r["implementation"] == "fused_rl"]
    plain = [r for r in rows if r["implementation"] != "fused_rl"]
    assert ours[0]["exact"] > 0.4
    assert ours[-1]["exact"] < 1e-12
    assert max(r["relative"] for r in ours) < 1e-6
    assert min(r["smallest"] for r in ours) > 0
    assert plain[0]["relative"] < 1e-5
    assert plain[-1]["relative"] > 1
    assert plain[-1]["smallest"] < 0
    # p = (3/4, 1/4), q = (1/2, 1/2): ln 2 - H(p); and d -> 0, where KL -> sum p d^2 / 2
    p = torch.tensor([[0.75, 0.25]], dtype=torch.float64).log()
    expected = torch.tensor([0.75 * torch.tensor(1.5).double().log() + 0.25 * torch.tensor(0.5).double().log()])
    torch.testing.assert_close(numerics.exact_kl(p, torch.zeros(1, 2)), expected.double(), rtol=1e-14, atol=0)
    close = numerics.exact_kl(torch.zeros(1, 2), torch.tensor([[1e-9, -1e-9]], dtype=torch.float64))
    torch.testing.assert_close(close, torch.tensor([5e-19], dtype=torch.float64), rtol=1e-7, atol=0)
