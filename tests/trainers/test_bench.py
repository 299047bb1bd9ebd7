"""The benchmark of a training step: its bare passes are those of the step, and what is missing is said."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import (
    machine,
    report,
    results,
    trainer_losses,
    trainer_peers,
    trainer_tasks,
    trainers,
)
from bench.trainer_steps import GRPO, NEEDED, PARTS, Watch, decode_passes

SIZES = {"vocabulary": 200, "hidden": 128, "layers": 1, "prompt": 6, "response": 4, "dtype": "float32"}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A run on a tiny model whose weights stay as they are, after one step."""
    config = trainer_tasks.qwen(tmp_path_factory.mktemp("bench"), prompts=2, **SIZES)
    config = config.changed(lr=0.0, steps=6, minibatches=2, micro_batch_size=8)
    made = GRPO(config)
    made.step()
    return made


@pytest.mark.slow
def test_bare_passes_compute_what_the_step_computes(ours):
    assert ours.passes_differ() < 1e-5
    seen, policy = ours.seen, ours.policy
    samples, batch = seen.rollout.samples, seen.rollout.batch
    found = torch.zeros(batch.response_mask.shape)

    def keep(logits, tokens, rows, step):
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
        found[rows, batch.prompt_lengths[rows] - 2 + step] = logprobs

    ids, responses = [s.prompt_ids for s in samples], [s.response.ids for s in samples]
    decode_passes(policy.model.module.base.eval(), ids, responses, policy.tokenizer.pad_token_id, keep)
    torch.testing.assert_close(found, seen.measured.old_logprobs, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_needed_passes_leave_out_the_policy_where_the_step_does(ours):
    assert seen_on(ours, kl_every=1) == [True] * 2
    assert seen_on(ours, kl_every=0) == [False, True]
    assert ours.metrics["val/ratio"] == pytest.approx(1, abs=1e-6)
    assert set(ours.needed()) == set(NEEDED)
    assert not any(weight.grad is not None and weight.grad.any() for weight in ours.policy.model.module.parameters())


def seen_on(ours, kl_every: int) -> list[bool]:
    ours.config.kl_every = kl_every
    ours.step()
    return ours.seen.run_on


@pytest.mark.slow
def test_a_peer_that_is_not_installed_says_so_and_ours_is_measured(ours, tmp_path, monkeypatch):
    def absent(module):
        raise trainer_peers.peers.Unavailable("not installed", results.NOT_INSTALLED)

    monkeypatch.setattr(trainer_peers.peers, "import_peer", absent)
    monkeypatch.setattr(ours, "number", 0)
    task = trainer_tasks.Task("grpo", "tiny", lambda _: ours, lambda _: None, 1.0)
    with_kl, without, missing = trainers.run_task(task, "all", 0.0)
    assert missing["status"] == results.NOT_INSTALLED
    assert (with_kl["implementation"], without["implementation"]) == (trainers.OURS, trainers.LEAN)
    for row in (with_kl, without):
        assert row["status"] == results.OK and len(row["samples_ms"]["step"]) == trainers.LEAST
        assert sum(row["ms"].get(part, 0) for part in PARTS) == pytest.approx(row["ms"]["step"], rel=0.2)
        assert set(row["over_needed"]) == set(NEEDED)
    rows = [with_kl, without, missing]
    trainers.show(task, rows)
    page = report.of_trainers({"environment": machine.environment("cpu"), "rows": rows}, "cpu")
    assert "| **fused_rl --kl_every 0** |" in page and "Not run: TRL GRPOTrainer at tiny (not installed)." in page


@pytest.mark.slow
def test_trl_trains_on_the_same_ids_with_the_same_losses(tmp_path):
    words = [sys.executable, "-W", "ignore", "-m", "tests.trainers.bench_pairs", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("LOCAL_RANK", None)  # an earlier run in this process may have said so
    done = subprocess.run(words, cwd=machine.ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads(done.stdout.decode().splitlines()[-1])
    assert set(found) == set(trainer_peers.KINDS)
    for name, pair in found.items():
        assert pair["same_ids"] and pair["other_is_seen"], name
        assert pair["first_difference"] < 1e-5 and "status" not in pair, (name, pair)
        assert pair["losses"] == trainer_peers.WATCHED and "optimizer" in pair["parts"]
        assert len(pair["first"]) == (1 if name == "grpo" else 2)  # the second loss is after a step of both


def test_the_time_of_a_function_inside_another_counts_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("bench.trainer_steps.seconds", lambda: now[0])
    watch = Watch()

    def passes(spent):
        now[0] += spent

    inner = watch.around("inner", passes)

    def outer_body():
        passes(1.0)
        inner(4.0)
        passes(2.0)
        inner(8.0)

    watch.around("outer", outer_body)()
    assert watch.taken == {"inner": 12.0, "outer": 3.0}


@pytest.mark.parametrize(
    ("same", "pairs", "status", "reason"),
    [
        (True, [(1.0, 1.00001), (2.0, 2.0)], None, None),
        (False, [(1.0, 1.0)], results.WRONG, "other token ids than ours"),
        (True, [(1.0, 1.0), (2.0, 2.5)], results.WRONG, "loss off by 0.5"),
        (True, [(1.0, float("nan"))], results.WRONG, "loss off by nan"),
    ],
)
def test_a_peer_that_does_something_else_is_marked(same, pairs, status, reason):
    config = SimpleNamespace(dtype="float32")
    peer = SimpleNamespace(config=config, what="loss", same_ids=lambda: same, compared=lambda: pairs)
    row = trainers.compared(peer)
    assert (row.get("status"), row.get("reason")) == (status, reason)


def test_a_library_whose_loss_is_another_is_wrong(monkeypatch):
    monkeypatch.setattr(trainer_losses, "SHAPE", (4, 16))
    call = trainer_losses.ours()

    def other():
        return lambda x: (call(x)[0], 2 * call(x)[1])

    monkeypatch.setattr(trainer_losses, "MAKERS", {"fused_rl": trainer_losses.ours, "verl": other})
    ours, theirs = trainer_losses.rows()
    assert ours["status"] == results.OK and ours["difference"] == 0 and results.repeats(ours) == trainer_losses.TURNS
    assert theirs["status"] == results.WRONG and "off by 1" in theirs["reason"]
