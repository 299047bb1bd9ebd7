"""From TRL: the names that people type are answered with ours, and the options that the page names exist."""

import re
from pathlib import Path

import pytest

from fused_rl.trainers import cli, grpo
from fused_rl.trainers.base.text import InputError, unknown
from fused_rl.trainers.base.trl import NAMES
from fused_rl.trainers.run.parse import parse
from tests.trainers import tiny

OPTIONS = [{*trainer.config_class().model_fields} for trainer in cli.TRAINERS.values()]
KNOWN = set().union(*OPTIONS)
PAGE = (Path(__file__).parents[2] / "docs" / "from_trl.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("beta", "its name here is --kl_coef"),
        ("max_completion_length", "its name here is --max_new_tokens"),
        (
            "gradient-accumulation-steps",
            "here it is no option, but a part of --prompts_per_step, the prompts of a rollout",
        ),
        (
            "dataloader_num_workers",
            "it has no counterpart: rows are read, encoded and shuffled by ",
        ),
        ("save-steps", "its name here is --save_every"),
        ("epsilon", "its name here is --clip_low and --clip_high"),
        (
            "num_generation",
            "did you mean num_generations, as in TRL? its name here is --group_size",
        ),
        ("group_sizes", "did you mean --group_size?"),
        ("xyzzy", "--help all lists the options"),
    ],
)
def test_a_name_of_trl_is_answered(name, said):
    message = unknown(name, grpo.GRPOConfig.model_fields)
    assert message.startswith(f"unknown option --{name}; {said}")


def test_all_unknown_options_are_named_at_once(tmp_path):
    """Of a file, of the command line, whose values may be several words, and of Python."""
    (tmp_path / "c.yaml").write_text("learning_rate: 1\nbeta: 0.1\nseed: 3\n")
    words = "--log_completions --steps many --report_to wandb tensorboard --xyzzy\x1b=2 --beta 1"
    given = ["--config", str(tmp_path / "c.yaml"), *words.replace("\\x1b", "\x1b").split(" ")]
    with pytest.raises(InputError) as from_words:
        parse(grpo.GRPOConfig, given)
    title, *lines = str(from_words.value).split("\n  ")
    names = ["learning_rate", "beta", "log_completions", "report_to", "xyzzy\\x1b"]
    assert title == "5 unknown options" and "from-trl" in lines.pop()
    assert [line.partition("; ")[0] for line in lines] == [f"--{name}" for name in names]
    assert lines[2].endswith("samples of each evaluation are in samples.jsonl")
    with pytest.raises(InputError) as from_python:
        grpo.GRPOConfig(model="m", output_dir="o", learning_rate=1, beta=0.1, steps="many")
    assert str(from_python.value).split("\n  ")[1:3] == lines[:2]


def test_the_table_and_the_page_name_options_that_exist():
    for theirs, ours in NAMES.items():
        assert theirs not in set.intersection(*OPTIONS), theirs  # DPO has a beta of its own
        assert set(re.findall(r"--(\w+)", ours)) <= KNOWN, theirs
    table = PAGE.split("## Options that have another name")[1].split("## What does not exist")[0]
    for row in table.splitlines()[4:]:
        ours = re.findall(r"`(?:--)?(\w+)", row.split(" | ")[1]) if row.startswith("|") else []
        assert not row.startswith("|") or set(ours) & KNOWN, row


@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        if "fused_rl" in block
    )
    rows = [{"prompt": row["question"], "answer": row["answer"]} for row in tiny.sums(80)]
    exec(
        script.replace("512", "8").replace("steps=5", "steps=1"),
        {"model": tiny.model_folder(tmp_path / "model"), "rows": rows, "correct": correct},
    )
    assert (tmp_path / "runs" / "ours" / "model" / "config.json").is_file()


def correct(prompts, completions, answer, **columns):
    """A reward function as TRL calls it."""
    return [float(len(completion) % 2) for completion in completions]
