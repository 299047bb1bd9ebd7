"""The runner tells right from wrong, and every case gives rows of one form."""

import json

import pytest
import torch

from bench import machine, peers, results, run, timing
from bench.cases import linear
from bench.cases.case import Spec
from bench.cases.kl import KLCase
from bench.cases.linear import ExactHead, LinearCase
from bench.cases.logprobs import LogprobsCase, TopkCase
from bench.cases.support import HEAD, KeptHead, KeptLogits
from tests.bench.cases import checked, contend, one_case

CASES = [
    (LogprobsCase, Spec((6, 500), "bf16", 0.5)),
    (LogprobsCase, Spec((2, 4, 500), "bf16", layout="shift")),
    (KLCase, Spec((6, 500), "fp32", 0.5)),
    (TopkCase, Spec((6, 500), "bf16", layout="K=8")),
    (LinearCase, Spec((256, 16, 300), "fp32")),
    (ExactHead, Spec((256, 16, 300), "bf16")),
    (KeptLogits, Spec((6, 500), "bf16", layout="mixture")),
    (KeptHead, Spec((100, 16, 300), "fp32", layout="K=8")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec"), CASES)
def test_a_right_op_passes_the_check(kind, spec):
    case = kind(spec, "cpu")
    mine = [peer for peer in case.ours() if peer.role == "ours" and peer.name != HEAD]
    assert mine
    for peer in mine:
        errors = checked(case, peer)
        assert len(errors) > 1
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


def test_a_case_ends_on_a_machine_that_is_too_slow_for_it(clock, monkeypatch):
    """Where each call takes 50 s, no call begins a minute after the case's time, and every row says what it has."""
    case, calls = one_case(), []

    def slow(name):
        def call(x):
            calls.append(name)
            clock.now += 50
            return case.call(x)

        return call

    names = ["floor", "fused_rl", "fused_rl inplace", "plain torch"]
    roles = ["floor", "ours", "ours", "peer"]
    contend(
        monkeypatch,
        case,
        *(peers.Peer(n, "0", slow(n), role=r) for n, r in zip(names, roles, strict=True)),
    )
    monkeypatch.setattr(case, "errors", lambda *_: {})
    monkeypatch.setattr(machine, "peak_extra_bytes", lambda work, device: work())
    rows = {row["implementation"]: row for row in run.run_case(case, "all", 1e9, 30.0)}
    assert calls == ["floor", "fused_rl"], "which had 30 + 60 s"
    assert [*rows] == names and "1 of 3 turns" in rows["fused_rl"]["few"]
    for name in names[2:]:
        assert rows[name]["status"] == results.NO_TIME
        assert rows[name]["reason"] == "ran out of time: the case has taken 100 s"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "what"),
    [(broken_value, "logprob"), (broken_gradient, "gradient"), (broken_nan, "entropy")],
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
    assert len(peer["samples_ms"]["both"]) == timing.MOST
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
    assert [row["reason"] for row in rows] == [
        "RuntimeError: no kernel",
        "OutOfMemoryError: 40 GiB",
    ]
    assert results.measured(rows) == []
    run.show(case, rows, 1e9)


@pytest.mark.parametrize(("failing", "status"), [(None, 0), ("fused_rl", 1), ("another peer", 0)])
def test_a_group_fails_where_ours_does(failing, status, tmp_path, monkeypatch):
    def run_case(case, wanted, copy_bytes_per_s, seconds):
        rows = [results.not_run("a peer", results.CANNOT_RUN, "no GPU", case.op)]
        if failing:
            rows.append(
                results.not_run(failing, results.FAILED, "RuntimeError: no kernel", case.op)
            )
        return rows

    monkeypatch.setattr(run, "run_case", run_case)
    monkeypatch.setattr(machine, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(run, "warm_up", lambda kinds, device, wanted: None)
    words = [
        "--device",
        "cpu",
        "--shapes",
        "6x500,4x300",
        "--dtype",
        "bf16",
        "--out",
        str(tmp_path),
    ]
    assert run.command("kernels", words) == status
    rows = json.loads((tmp_path / "kernels-cpu.json").read_text())["rows"]
    assert run.passes("cuda", "all") == ["none", "all"] and run.passes("cpu", "all") == ["all"]
    of_peer = [row["op"] for row in rows if row["implementation"] == "a peer"]
    assert of_peer == ["token_logprobs"], "what cannot run at any case is told once"


def test_linear_truth_is_autograd_in_fp64_and_finds_a_wrong_gradient():
    case = LinearCase(Spec((1152, 16, 300), "fp32"), "cpu")  # two pieces of 512 rows and a tail
    hidden, weight = (t.detach().double().requires_grad_() for t in (case.hidden, case.weight))
    loss = peers.plain_head(hidden, weight, case.targets, case.advantages.double())
    exact = (loss, *torch.autograd.grad(loss, (hidden, weight)))
    case.exact = linear.Truth(case)
    # `plain_head` makes fp32 logits, whatever it is given
    assert all(e < 1e-6 for e in case.of_loss(*exact, unweighted=False).values())
    peer = peers.Peer("a peer", None, None)
    for broken, name in enumerate(("loss", "dhidden", "dweight")):
        changed = [t * (1.002 if i == broken else 1) for i, t in enumerate(exact)]
        found = run.judged(case, peer, case.of_loss(*changed, unweighted=False))
        assert found["status"] == results.WRONG
        assert found["reason"].split(" off by")[0] == name
        assert found["reason"].count("off by") == 1
    likelihood = torch.nn.functional.cross_entropy(hidden @ weight.t(), case.targets)
    errors = case.of_loss(
        likelihood, *torch.autograd.grad(likelihood, (hidden, weight)), unweighted=True
    )
    assert all(e < 1e-12 for e in errors.values())
