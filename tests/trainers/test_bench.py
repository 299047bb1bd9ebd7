"""The benchmark of a training step: its bare passes are those of the step, and what is missing is said."""

from dataclasses import replace

import pytest
import torch

from bench import machine, peers, report, results, trainers
from bench.trainer_steps import NEEDED, PARTS, Ours, Watch, decode_passes

SIZES = {"vocabulary": 200, "hidden": 128, "layers": 1, "prompt": 6, "response": 4, "dtype": "float32"}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A run on a tiny model whose weights stay as they are, after one step."""
    config = trainers.qwen(tmp_path_factory.mktemp("bench"), **SIZES)
    config = replace(config, lr=0.0, steps=6, minibatches=2, micro_batch_size=8)
    made = Ours(config)
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
        raise peers.Unavailable("not installed", results.NOT_INSTALLED)

    monkeypatch.setattr(peers, "import_peer", absent)
    ours.number = 0
    task = trainers.Task("tiny", trainers.qwen)
    samples, missing = trainers.take_turns(ours, task, tmp_path, "all", 0.0)
    assert [row["status"] for row in missing] == [results.NOT_INSTALLED]
    with_kl, without = trainers.rows_of(task, ours, samples)
    assert (with_kl["implementation"], without["implementation"]) == (trainers.OURS, trainers.LEAN)
    for row in (with_kl, without):
        assert row["status"] == results.OK and len(row["samples_ms"]["step"]) == 1
        assert sum(row["ms"][part] for part in PARTS) == pytest.approx(row["ms"]["step"])
        assert set(row["over_needed"]) == set(NEEDED)
    trainers.show(task, [with_kl, without, *missing])
    page = report.of_trainers({"environment": machine.environment("cpu"), "rows": [with_kl, without, *missing]}, "cpu")
    assert "| **fused_rl --kl_every 0** |" in page and "Not run: TRL GRPOTrainer at tiny (not installed)." in page


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
