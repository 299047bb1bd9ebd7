import subprocess
import sys
from pathlib import Path

import pytest

from fused_rl.trainers import cli, grpo, sft

RECIPES = Path(__file__).parents[2] / "recipes"
NEEDED = ["--model", "m", "--dataset", "d.jsonl", "--output_dir", "o"]


def parse(*argv, config=grpo.GRPOConfig):
    return cli.parse(config, [*NEEDED, *argv], "fused-rl grpo")


def test_the_command_line_wins_over_the_file_and_over_the_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("lr: 1.0e-3\ngroup_size: 16\n")
    config = parse("--config", str(tmp_path / "c.yaml"), "--lr", "2e-3")
    assert (config.lr, config.group_size, config.minibatches) == (2e-3, 16, grpo.GRPOConfig.minibatches)


def test_a_flag_needs_no_value_and_a_launchers_rank_is_not_a_key():
    config = parse("--resume", "--local_rank=1", "--raw_prompt", "false")
    assert config.resume is True and config.raw_prompt is False


@pytest.mark.parametrize(
    ("text", "argv", "named"),
    [
        ("group_sizee: 4\n", [], "group_sizee"),
        ("", ["--group_sizee", "4"], "group_sizee"),
        ("group_size: many\n", [], "group_size"),
        ("", ["--group_size", "many"], "group_size"),
        ("", ["--zero_stage", "4"], "zero_stage"),
        ("", ["--dtype", "float8"], "dtype"),
        ("lr: [1]\n", [], "lr"),
    ],
)
def test_an_unknown_key_or_a_bad_value_is_named(text, argv, named, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(text or "lr: 1.0\n")
    with pytest.raises(SystemExit) as stopped:
        parse("--config", str(tmp_path / "c.yaml"), *argv)
    assert stopped.value.code != 0
    assert named in capsys.readouterr().err.split("error:")[1]


@pytest.mark.parametrize(
    ("argv", "world", "message"),
    [
        (["--prompts_per_step", "3"], 2, "prompts_per_step=3 does not divide over 2 processes"),
        (["--minibatches", "3"], 1, "minibatches=3 does not divide the 256 responses"),
        (["--group_size", "1"], 1, "at least 2"),
        (["--preset", "grpoo"], 1, "grpoo.*grpo"),
        (["--steps", "0"], 1, "steps must be above 0, got 0"),
        (["--temperature", "0"], 1, "temperature must be above 0"),
    ],
)
def test_arithmetic_that_does_not_work_out_is_refused(argv, world, message):
    with pytest.raises(cli.InputError, match=message):
        grpo.arithmetic(parse(*argv), world)


def test_batch_arithmetic():
    made = grpo.arithmetic(parse("--prompts_per_step", "6", "--group_size", "4", "--epochs", "3", "--steps", "5"), 2)
    assert made["responses per process and step"] == 12
    assert made["responses per process and minibatch"] == 6
    assert made["optimizer updates in the run"] == 5 * 2 * 3
    made = sft.arithmetic(parse("--batch_size", "24", "--micro_batch_size", "5", config=sft.SFTConfig), 2)
    assert made["micro-batches per process and step"] == "3 of at most 5"


def test_dry_run_prints_the_resolved_config_and_needs_no_files():
    command = [sys.executable, "-m", "fused_rl.trainers.grpo", "--config", str(RECIPES / "demo_grpo.yaml")]
    done = subprocess.run([*command, "--dry_run", "--lr", "0.25"], capture_output=True, text=True, check=True)
    assert "lr: 0.25" in done.stdout and "verifiers: reasoning_gym" in done.stdout
    assert "# responses per step: 256 = 32 prompts x 8" in done.stdout


def test_every_recipe_of_sft_and_grpo_parses():
    for recipe in [*RECIPES.glob("*sft*.yaml"), *RECIPES.glob("*grpo*.yaml"), *RECIPES.glob("gsm8k*.yaml")]:
        trainer, config = (sft, sft.SFTConfig) if "sft" in recipe.name else (grpo, grpo.GRPOConfig)
        trainer.arithmetic(cli.parse(config, ["--config", str(recipe)], "fused-rl"), 1)


def test_an_unknown_command_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fused-rl", "grop"])
    with pytest.raises(SystemExit, match="grop"):
        cli.main()
