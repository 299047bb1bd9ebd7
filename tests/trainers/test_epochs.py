"""Passes over the rows instead of steps: how many steps they come to, what a dry run says, and resuming."""

import pytest

from fused_rl.trainers import sft
from fused_rl.trainers.data.order import in_steps
from fused_rl.trainers.options import to_yaml
from fused_rl.trainers.run.parse import parse
from tests.trainers import tiny


@pytest.mark.parametrize(
    ("passes", "rows", "per_step", "steps"),
    # whole; begun is counted; a fraction that binary numbers miss from above (0.1 * 30 > 3); less than a step; a step
    # of all rows
    [(2, 16, 8, 4), (1, 17, 8, 3), (0.1, 30, 3, 1), (0.01, 16, 8, 1), (2, 8, 8, 2)],
)
def test_steps_are_as_many_as_the_passes_need(passes, rows, per_step, steps):
    for trainer, option in (("sft", "batch_size"), ("grpo", "prompts_per_step")):
        config = tiny.config_of(trainer, num_train_epochs=passes, **{option: per_step})
        assert in_steps(config, rows).steps == steps
        assert "\nsteps: null\n" in to_yaml(in_steps(config, rows))  # whose file is read again
        assert config.steps is None  # the config itself is left as it was


def test_steps_are_taken_back_for_passes_and_without_either_there_are_100(tmp_path):
    needed = ["--model=m", "--dataset=d.jsonl", "--output_dir=o"]
    assert parse(sft.SFTConfig, needed).steps == 100
    (tmp_path / "c.yaml").write_text("steps: 7\n")
    more = [f"--config={tmp_path}/c.yaml", "--steps=null", "--num_train_epochs=2"]
    taken_back = parse(sft.SFTConfig, [*needed, *more])
    assert (taken_back.steps, taken_back.num_train_epochs) == (None, 2.0)


def test_a_dry_run_counts_the_rows_of_a_file(files, tmp_path, capsys):
    words = [f"--model={files[0]}", f"--dataset={files[1]}", f"--output_dir={tmp_path}/run"]
    words += ["--eval_size=4", "--batch_size=4", "--num_train_epochs=2.1", "--dry_run"]
    with pytest.raises(SystemExit, match="'completion' is missing; the row has .*--completion_col"):
        sft.main(words)
    sft.main([*words, "--completion_column=answer"])
    printed = capsys.readouterr().out
    assert "# optimizer steps: 9\n" in printed and "\nnum_train_epochs: 2.1\n" in printed
