"""The comparison with TRL's trainers: both do the same, and what differs or is missing is said."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import machine, results, trainers


@pytest.mark.slow
def test_trl_trains_on_the_same_rows_with_the_same_losses():
    words = [sys.executable, "-W", "ignore", "-m", "tests.trainers.bench_pairs"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=machine.ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    rows = json.loads(done.stdout.decode().splitlines()[-1])
    patched = [row["implementation"] for row in rows if row["implementation"].endswith(", patched")]
    assert patched == [
        f"TRL {name}, patched" for name in ("SFTTrainer", "RewardTrainer", "GRPOTrainer")
    ]
    rows = [row for row in rows if row["implementation"] not in patched]
    names = [trainers.OURS, "TRL SFTTrainer", trainers.OURS, "TRL RewardTrainer"]
    assert [row["implementation"] for row in rows] == [
        *names,
        trainers.OURS,
        trainers.LEAN,
        "TRL GRPOTrainer",
    ]
    for row in rows:
        assert row["status"] == results.OK and len(row["samples_ms"]["step"]) == 2, row
        assert row.get("difference", 0) < 1e-5
        parts = [value for part, value in row["ms"].items() if part != "step"]
        assert not parts or sum(parts) == pytest.approx(row["ms"]["step"], rel=0.2)
    ours = rows[4]
    # With one minibatch nothing is measured before the update: the reference's pass is part of it.
    assert set(ours["needed_ms"]) == {"rollout", "update"}
    assert ours["over_needed"]["update"] > 0.9
    titles, cells = results.steps(rows[4:])
    assert {"update / needed", "steps / TRL steps"} <= set(titles) and len(cells) == 3


@pytest.mark.slow
def test_the_passes_of_a_rollout_are_those_that_the_step_measured(tmp_path, monkeypatch):
    seen = {}

    def keep(policy, last):
        samples, batch = last["rollout"].samples, last["rollout"].batch
        found = torch.zeros(batch.response_mask.shape)

        def check(logits, tokens, rows, step):
            logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
            found[rows, batch.prompt_lengths[rows] - 2 + step] = logprobs

        ids, responses = [s.prompt_ids for s in samples], [s.response.ids for s in samples]
        trainers.decode_passes(policy.model.module.eval().base, ids, responses, 0, check)
        seen["measured"] = trainers.grpo.measure(policy, batch, last["parts"]).old_logprobs
        seen["found"] = found
        return {}

    monkeypatch.setattr(trainers, "needed", keep)
    config = trainers.large_grpo(tmp_path, 1, vocabulary=200, hidden_size=64, dtype="float32")
    trainers.run_ours(
        "grpo", config.replace(lr=0.0, steps=1, output_dir=str(tmp_path / "ours")), needs=True
    )
    torch.testing.assert_close(seen["found"], seen["measured"], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_peer_that_is_not_installed_is_a_row(tmp_path, monkeypatch):
    def absent(ours, folder):
        raise trainers.peers.Unavailable("not installed", results.NOT_INSTALLED)

    monkeypatch.setattr(trainers, "run_trl", absent)
    ours, missing = trainers.run_task("sft", "demo", trainers.demo_sft, 2, [1])
    assert ours["status"] == results.OK and ours["steps_over_trl"] == []
    assert (missing["implementation"], missing["status"]) == (
        "TRL SFTTrainer",
        results.NOT_INSTALLED,
    )


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        ([1.00001, 2.0], None),
        ([1.0, 2.5], "loss off by 0.5"),
        ([1.0, float("nan")], "loss off by nan"),
    ],
)
def test_a_peer_that_does_something_else_is_marked(theirs, reason):
    ours = trainers.Run("sft", SimpleNamespace(dtype="float32"), losses=[1.0, 2.0])
    row = trainers.compared(ours, trainers.Run("sft", ours.config, losses=theirs))
    assert (row["status"], row.get("reason")) == (results.WRONG if reason else results.OK, reason)
