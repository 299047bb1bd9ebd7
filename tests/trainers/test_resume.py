"""A run that is continued from a checkpoint is the uninterrupted run, bit for bit, for every case of the golden run."""

import shutil

import pytest

from tests import digests

# Each part that keeps a state of its own is in one of them: order, generators, optimizer, lag, critic, KL controller.
FAST = {"sft-zero1"}
CASES = [
    (name, 4, {}) if name in FAST else pytest.param(name, 4, {}, marks=pytest.mark.slow)
    for name in digests.CASES
]
CASES.append(("reward-zero0", 6, {}))  # nothing is left to train
CASES.append(("grpo-zero0", 4, {"micro_batch_tokens": 60}))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The models and rows of all cases."""
    folder = tmp_path_factory.mktemp("resume")
    digests.make_files(folder)
    return folder


@pytest.mark.parametrize(("name", "step", "more"), CASES)
def test_a_resumed_run_is_the_uninterrupted_one(name, step, more, files):
    command, options, world = digests.CASES[name]
    run = "-".join([name, *more])
    whole, resumed = files / "runs" / run, files / "runs" / f"{run}-{step}"
    options = options | more | {"save_every": 2, "keep_checkpoints": 9, "steps": 6}

    def train(output_dir, *resuming):
        words = [*digests.words_of(command, options, files, output_dir), *resuming]
        digests.run(command, options, world, words)

    if not whole.exists():
        train(whole)
    shutil.copytree(whole, resumed)
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # a line that the end of a process cut
    for left in ("model", "critic"):
        shutil.rmtree(resumed / left, ignore_errors=True)
    train(resumed, "--resume_from", f"step-{step}")
    found, expected = digests.digest(resumed), digests.digest(whole)
    assert list(digests.differences(expected, found, exact=True, tolerance=0.0)) == []
