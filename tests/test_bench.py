"""The benchmark suite tells right from wrong, and its reproductions say what they are there to show."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fused_rl.reference
from bench import __main__ as suite
from bench import gpu, growth, kernels, linear, measure, numerics, peers, prototypes, report
from bench.case import Case
from bench.repro import entropy, kl_table

ROOT = Path(__file__).resolve().parents[1]
ARGS = SimpleNamespace(device="cpu", peers="none", out=None, group="kernels")


@pytest.fixture(autouse=True)
def _cpu_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # timing and checks as `python -m bench` runs them


def one_case(op="token_logprobs", layout="rows", shape=(6, 500), fraction=0.0):
    return Case(op, layout, shape, "bf16", fraction, "cpu")


@pytest.mark.parametrize(("layout", "shape", "fraction"), [("rows", (6, 500), 0.0), ("rows", (6, 500), 0.5),
                                                           ("shift", (2, 4, 500), 0.0)])  # fmt: skip
def test_a_right_op_passes_the_check(layout, shape, fraction):
    case = one_case(layout=layout, shape=shape, fraction=fraction)
    errors = case.errors(*case.run_once(peers.Peer("fused_rl", None, case.ours))[:2])
    assert set(errors) == {"logprob", "entropy", "gradient"}
    assert not case.failure(errors)


def broken_value(case, x):
    logprobs, entropy_ = case.ours(x)
    return logprobs + 1e-3, entropy_


def broken_gradient(case, x):
    logprobs, entropy_ = case.ours(x)
    return logprobs, entropy_.detach() + 0.5 * (entropy_ - entropy_.detach())


def broken_nan(case, x):
    logprobs, entropy_ = case.ours(x)
    return logprobs, entropy_ * float("nan")


@pytest.mark.parametrize("broken", [broken_value, broken_gradient, broken_nan])
def test_an_op_that_fails_the_check_is_not_timed(broken, monkeypatch):
    # A peer that is wrong is timed, and its row says by how much.
    case = one_case()
    run = lambda x: broken(case, x)  # noqa: E731
    found = [peers.Peer("fused_rl", "0", run), peers.Peer("wrong peer", "0", run)]
    monkeypatch.setattr(kernels, "contenders", lambda *_: (found, {}))
    ours, peer = kernels.run_case(case, peers.LOGPROBS, ARGS, 1e9, 1.0)[0]
    assert "FAILED, not timed" in ours["note"]
    assert "ms" not in ours
    assert peer["ms"]["both"] > 0
    if broken is not broken_value:  # off by exactly the limit from which a peer is called wrong
        assert "WRONG" in peer["note"]


def test_what_has_no_time_is_left_out_and_says_so(monkeypatch):
    case = one_case()
    found = [peers.Peer("fused_rl", "0", case.ours), peers.Peer("a peer", "0", case.ours)]
    monkeypatch.setattr(kernels, "contenders", lambda *_: (found, {}))
    rows, missing = kernels.run_case(case, peers.LOGPROBS, ARGS, 1e9, 0.0)
    assert [r["implementation"] for r in rows] == ["fused_rl"]
    assert measure.repeats(rows[0]) == 3, "ours is what others are compared to"
    assert missing == {"a peer at token_logprobs 6 x 500 bf16": "left out for time; --budget gives more"}


def test_turns_share_the_time_and_a_slow_run_keeps_its_first_sample():
    calls = []

    def run(name, seconds):
        return lambda: calls.append(name) or {"forward": seconds, "both": 2 * seconds}

    costs = {"ours": 4.0, "fast": 0.01, "medium": 0.25, "slow": 5.0}
    runs = {name: run(name, cost) for name, cost in costs.items()}
    first = {name: {"forward": 9 * cost, "both": cost} for name, cost in costs.items()}
    samples = measure.interleaved(runs, 4.0, first, keep=("ours",))
    assert {n: len(s["both"]) for n, s in samples.items()} == {"ours": 3, "fast": 40, "medium": 4, "slow": 1}
    assert samples["slow"] == {"forward": [45e3], "both": [5e3]}, "that of before"
    assert samples["fast"]["both"][0] == 20, "that of now"
    assert calls.index("ours") < 30 < len(calls) - calls[::-1].index("medium"), "spread over the rounds"


def test_a_budget_hands_on_what_is_left_over(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    budget = measure.Budget(30, 3)
    assert budget.share() == 10
    now[0] += 2
    assert budget.share() == 14
    now[0] += 40
    assert budget.share() == 0


def test_a_peer_that_cannot_run_is_listed_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)  # as where it is not installed
    running, missing = peers.find(peers.LOGPROBS, "cpu")
    assert "plain torch" in [p.name for p in running]
    assert missing["Liger GRPO loss"] == "its Triton kernels need a GPU"
    assert "TRL" in missing


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
    errors = case.errors(*case.run_once(peer._replace(call=case.peer(peer.call, name)))[:2])
    assert errors["logprob"] < 1e-5
    assert errors["gradient"] < 2**-7  # bf16 logits


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [("cut-cross-entropy", "cut_cross_entropy", _cce), ("verl", "verl.utils.kernel.linear_cross_entropy", _verl_head)],
)
def test_heads_that_need_a_gpu_are_called_as_their_packages_ask(name, module, function, monkeypatch):
    _stand_in(monkeypatch, module, linear_cross_entropy=function)
    (peer,), _ = peers.find(linear.KNOWN, "cuda", name)
    case = linear.inputs((256, 16, 300), "fp32", "cpu")
    outputs, _, _ = linear.run_once(peer, case, "cpu")
    assert not linear.wrong(linear.Truth(case).errors(*outputs, likelihood=False), "fp32")


def test_linear_truth_is_autograd_in_fp64_and_finds_a_wrong_gradient():
    case = linear.inputs((1152, 16, 300), "fp32", "cpu")  # two pieces of 512 rows and a tail
    hidden, weight, targets, advantages = (t.detach().double() if t.is_floating_point() else t for t in case)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear.plain(hidden, weight, targets, advantages)
    exact = (loss, *torch.autograd.grad(loss, (hidden, weight)))
    truth = linear.Truth(case)
    # `plain` makes fp32 logits, whatever it is given
    assert all(e < 1e-6 for e in truth.errors(*exact, likelihood=False).values())
    for broken in range(3):
        changed = [t * (1.001 if i == broken else 1) for i, t in enumerate(exact)]
        assert linear.wrong(truth.errors(*changed, likelihood=False), "fp32").count("off by") == 1
    likelihood = torch.nn.functional.cross_entropy(hidden @ weight.t(), targets)
    errors = truth.errors(likelihood, *torch.autograd.grad(likelihood, (hidden, weight)), likelihood=True)
    assert all(e < 1e-12 for e in errors.values())


def test_linear_rows_hold_every_column(capsys):
    rows, missing = linear.run_case((256, 64, 500), "bf16", "cpu", "plain torch,verl", 1e10, 1.0)
    assert [r["implementation"] for r in rows] == [linear.FLOOR, *linear.OURS, "plain torch"]
    assert missing == {"verl": "its Triton kernels need a GPU"}
    for row in rows:
        assert row["bytes"] == {"forward": 2 * 64 * 756, "both": 6 * 64 * 756}
        assert row["gb_per_s"]["both"] == pytest.approx(row["bytes"]["both"] / row["ms"]["both"] / 1e6)
        assert row["copy_fraction"]["both"] == pytest.approx(row["gb_per_s"]["both"] / 10)
        assert "WRONG" not in row["note"]
    linear.show(rows, missing, 1e10)
    assert "hidden states and weight read forward" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--dtype bf17", "--shapes 64by1000", "--shapes 0x10", "--budget 0", "--bogus",
                                   "--peers TLR", "--device cuda"])  # fmt: skip
def test_wrong_options_end_with_a_line_that_names_them(wrong, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench/kernels.py", *wrong.split()])
    with pytest.raises(SystemExit) as stopped:
        measure.arguments("kernels", "kernels")
    assert stopped.value.code == 2
    assert wrong.split()[0] in capsys.readouterr().err.splitlines()[-1]


def test_the_suite_hands_each_group_its_own_options(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(suite, "run_group", lambda group, options: ran.append((group, options)) or "ok")
    monkeypatch.setattr(suite, "run_codegen", lambda out: ran.append(("codegen", out)) or "ok")
    monkeypatch.setattr(sys, "argv", ["bench", "--group", "kernels,linear,codegen", "--out", "there"])
    assert suite.main() == 0
    assert ran == [("kernels", ["--out", "there"]), ("linear", ["--out", "there"]), ("codegen", "there")]
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
    samples = measure.phases_gpu(case.ours, case.backward, case.inputs(peers.Peer("fused_rl", None, case.ours)))
    assert {phase: measure.median(s) for phase, s in samples.items()} == {"forward": 2, "backward": 2, "both": 2}
    first, second, third = calls[1]
    assert torch.equal(first, third), "input sets take turns"
    assert not torch.equal(first, second)
    inplace = peers.Peer("fused_rl inplace", None, lambda x: case.ours(x, inplace=True), overwrites=True)
    once = measure.phases_gpu(inplace.call, case.backward, case.inputs(inplace), twice=False)
    assert set(once) == {"forward", "both"}


def test_peak_memory_counts_what_is_held_at_once():
    size = 32 << 20
    x = torch.zeros(size, dtype=torch.uint8)
    assert measure.peak_extra_bytes(lambda: x + 1, "cpu") == pytest.approx(size, rel=0.1)
    assert measure.peak_extra_bytes(lambda: (x + 1).float(), "cpu") == pytest.approx(5 * size, rel=0.1)
    assert measure.peak_extra_bytes(lambda: [x[: size // 8] + 1 for _ in range(8)][0].sum(), "cpu") < 1.5 * size


def test_slope_of_a_power():
    assert growth.slope([1, 10, 100], [3, 30 * 10**0.5, 300 * 10]) == pytest.approx(1.5)


def test_results_survive_the_round_trip_and_the_report(tmp_path, monkeypatch):
    rows, _ = kernels.run_case(one_case(), peers.LOGPROBS, ARGS, 1e9, 1.0)
    args = SimpleNamespace(device="cpu", out=str(tmp_path), group="kernels")
    path = measure.save(args, rows, copy_bytes_per_s=1e9, not_run={"token_logprobs: TRL": "not installed"})
    found = json.loads(path.read_text())
    assert {"command", "commit", "device", "versions", "load"} <= set(found["environment"])
    assert str(ROOT) not in path.read_text()
    assert len(found["rows"][0]["samples_ms"]["both"]) >= 3
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    pytest.importorskip("matplotlib")
    report.main()
    page = (tmp_path / "benchmarks.md").read_text()
    assert report.number(found["rows"][0]["ms"]["both"]) in page
    assert "TRL (not installed)" in page
    assert (tmp_path / "benchmarks-cpu.png").stat().st_size > 5000


def test_the_report_leaves_out_what_it_cannot_read_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    pytest.importorskip("matplotlib")
    assert report.main() == 1
    assert "no results" in capsys.readouterr().out
    assert not (tmp_path / "benchmarks.md").exists(), "what was there stays"
    rows, _ = linear.run_case((256, 64, 500), "bf16", "cpu", "none", 1e10, 1.0)
    whole = measure.save(SimpleNamespace(device="cpu", out=str(tmp_path), group="linear"), rows, copy_bytes_per_s=1e10)
    (tmp_path / "kernels-cpu.json").write_text(whole.read_text()[:-200])
    assert report.main() == 1
    assert "left out: kernels-cpu.json: JSONDecodeError" in capsys.readouterr().out
    assert "fused_rl one pass" in (tmp_path / "benchmarks.md").read_text()
    assert (tmp_path / "benchmarks-linear-cpu.png").stat().st_size > 5000


def test_gpu_steps_end_on_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    steps = {
        "good": ("print('fine')", 20),
        "bad": ("raise SystemExit(3)", 20),
        "slow": ("import time; time.sleep(60)", 1),
    }
    monkeypatch.setattr(gpu, "STEPS", [(n, ["-c", code], limit, 7) for n, (code, limit) in steps.items()])
    assert gpu.main(["--out", str(tmp_path)]) == 1
    summary = capsys.readouterr().out.splitlines()[-3:]
    assert [line.rsplit(",", 1)[0] for line in summary] == ["good: ok", "bad: exit status 3", "slow: stopped after 1 s"]
    assert (tmp_path / "good.txt").read_text() == "fine\n"
    assert gpu.main(["--out", str(tmp_path), "--steps", "good"]) == 0


def test_gpu_steps_fit_into_nine_minutes_and_take_their_options():
    assert sum(limit for _, _, limit, _ in gpu.STEPS) <= 9 * 60 - 30
    assert all((ROOT / command[0]).exists() or command[0] == "-m" for _, command, _, _ in gpu.STEPS)


def test_prototypes_stand_beside_their_prediction(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("triton.testing.do_bench", lambda run, rep, return_mode: [run() and 1.0 or 1.0, 2.0, 3.0])
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e9)
    args = SimpleNamespace(device="cpu", shapes=[(4, 9000)], out=str(tmp_path), group="prototypes")
    assert not prototypes.main(args)
    assert "predicted %" in capsys.readouterr().out
    rows = json.loads((tmp_path / "prototypes-cpu.json").read_text())["rows"]
    assert [r["op"] for r in rows] == [*prototypes.COUNTED, "fused_rl forward", "fused_rl backward"]
    assert all(r["copy_percent"] == pytest.approx(100 * r["bytes"] / 2e-3 / 1e9, rel=1e-3) for r in rows)
    monkeypatch.setattr(prototypes, "error", lambda *_: float("nan"))
    assert prototypes.main(args)
    assert "ms" not in json.loads((tmp_path / "prototypes-cpu.json").read_text())["rows"][0], "wrong: not timed"


def test_traffic_runs_as_a_plain_script():
    # From the repository's root, without the package on the path; bench/kernels.py must not shadow another "kernels".
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
