"""From TRL: the names that people type are answered with ours, and the options that the page names exist."""

import re
from pathlib import Path

import pytest

from fused_rl.trainers import cli, grpo
from fused_rl.trainers.base.text import NAMES, unknown
from tests.trainers import tiny

OPTIONS = [{*trainer.config_class().model_fields} for trainer in cli.TRAINERS.values()]
KNOWN = set().union(*OPTIONS)
PAGE = (Path(__file__).parents[2] / "docs" / "from_trl.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("beta", "its name here is --kl_coef; in distill --direction and --jsd_beta"),
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
    assert unknown(name, grpo.GRPOConfig.model_fields) == f"unknown option --{name}; {said}"


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
