"""A run that is continued from a checkpoint is the uninterrupted run, bit for bit, for every case of the golden run.

Ten steps make the golden run, whose weights and metrics are what they were before; the last two are then made again.
"""

import shutil

import pytest

from tests import digests
from tests.trainers import test_hooks

# Each part that keeps a state of its own is in one of them: order, generators, optimizer, lag, critic, KL controller.
FAST = {"sft-zero1", "grpo-synced"}
CASES = [
    (name, 8, {}) if name in FAST else pytest.param(name, 8, {}, marks=pytest.mark.slow)
    for name in digests.CASES
]
HOOKED = test_hooks.HOOKED | {"steps": 4}
CASES.append(("sft-zero1", 2, HOOKED))
CASES.append(pytest.param("grpo-zero0", 2, HOOKED, marks=pytest.mark.slow))
CASES.append(("reward-zero0", 10, {}))  # nothing is left to train
CASES.append(("grpo-zero0", 4, {"steps": 6, "micro_batch_tokens": 60}))
CASES.append(("ppo-zero0", 1, {"steps": 2}))  # its KL controller is in a fast one


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The models and rows of all cases."""
    folder = tmp_path_factory.mktemp("resume")
    digests.make_files(folder)
    return folder


@pytest.mark.parametrize(("name", "step", "more"), CASES)
def test_a_resumed_run_is_the_uninterrupted_one(name, step, more, files):
    command, options, world = digests.CASES[name]
    run = "-".join([name, *more, str(step)])
    whole, resumed = files / "runs" / run, files / "runs" / f"{run}-resumed"
    options = {"save_every": step, "keep_checkpoints": 9} | options | more

    def train(output_dir, *resuming):
        words = [*digests.words_of(command, options, files, output_dir), *resuming]
        digests.run(command, options, world, words)

    train(whole)
    expected = digests.digest(whole)
    if not more:
        assert digests.unlike_stored(name, expected) == []

    shutil.copytree(whole, resumed)
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # a line that the end of a process cut
    for left in ("model", "critic"):
        shutil.rmtree(resumed / left, ignore_errors=True)
    train(resumed, "--resume_from", f"step-{step}")
    found = digests.digest(resumed)
    assert list(digests.differences(expected, found, exact=True, tolerance=0.0)) == []
