"""The comparison with TRL's trainers: both do the same, and what differs or is missing is said."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

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
