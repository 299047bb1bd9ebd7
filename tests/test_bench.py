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
from bench import growth, kernels, measure, numerics, peers, prototypes, report
from bench.repro import entropy, kl_table

ROOT = Path(__file__).resolve().parents[1]
ARGS = SimpleNamespace(device="cpu", peers="none", out=None, group="kernels")


@pytest.fixture(autouse=True)
def _cpu_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # timing and checks as `python -m bench` runs them


def one_case(op="token_logprobs", layout="rows", shape=(6, 500), fraction=0.0):
    return kernels.Case(op, layout, shape, "bf16", fraction, "cpu")


@pytest.mark.parametrize(("layout", "shape", "fraction"), [("rows", (6, 500), 0.0), ("rows", (6, 500), 0.5),
                                                           ("shift", (2, 4, 500), 0.0)])  # fmt: skip
def test_a_right_op_passes_the_check(layout, shape, fraction):
    case = one_case(layout=layout, shape=shape, fraction=fraction)
    errors = case.errors(peers.Peer("fused_rl", None, case.ours))
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
    ours, peer = kernels.run_case(case, peers.LOGPROBS, ARGS, 1e9, 0.0)[0]
    assert "FAILED, not timed" in ours["note"]
    assert "ms" not in ours
    assert peer["ms"]["both"] > 0
    if broken is not broken_value:  # off by exactly the limit from which a peer is called wrong
        assert "WRONG" in peer["note"]


def test_a_peer_that_cannot_run_is_listed_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)  # as where it is not installed
    running, missing = peers.find(peers.LOGPROBS, "cpu")
    assert "plain torch" in [p.name for p in running]
    assert missing["Liger GRPO loss"] == "its Triton kernels need a GPU"
    assert "TRL" in missing


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
    rows, _ = kernels.run_case(one_case(), peers.LOGPROBS, ARGS, 1e9, 0.0)
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
