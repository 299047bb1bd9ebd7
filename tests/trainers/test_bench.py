"""The comparison with TRL's trainers: both do the same, and what differs or is missing is said."""

import json
import math
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
    theirs = ["TRL SFTTrainer", "TRL RewardTrainer", "TRL GRPOTrainer"]
    names = [row["implementation"] for row in rows]
    assert [name for name in names if "patched" in name] == [f"{name}, patched" for name in theirs]
    rows = [row for row in rows if "patched" not in row["implementation"]]
    ours = trainers.OURS
    expected = [ours, theirs[0], ours, theirs[1], ours, trainers.LEAN, theirs[2]]
    assert [row["implementation"] for row in rows] == expected
    for row in rows:
        assert row["status"] == results.OK and len(row["samples_ms"]["step"]) == 2, row
        assert row.get("difference", 0) < 1e-5
        parts = [value for part, value in row["ms"].items() if part != "step"]
        assert not parts or sum(parts) == pytest.approx(row["ms"]["step"], rel=0.2)
    # With one minibatch nothing is measured before the update: the reference's pass is part of it.
    assert set(rows[4]["needed_ms"]) == {"rollout", "update"}
    assert rows[4]["over_needed"]["update"] > 0.9
    titles, cells = results.steps(rows[4:])
    assert {"update / needed", "steps / TRL steps"} <= set(titles) and len(cells) == 3


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [(1.00001, None), (1.5, "loss off by 0.5"), (math.nan, "loss off by nan")],
)
def test_a_peer_that_does_something_else_is_marked(theirs, reason):
    config = SimpleNamespace(dtype="float32")
    ours, peer = (trainers.Run("sft", config, losses=[2.0, loss]) for loss in (1.0, theirs))
    row = trainers.compared(ours, peer)
    assert (row["status"], row.get("reason")) == (results.WRONG if reason else results.OK, reason)
