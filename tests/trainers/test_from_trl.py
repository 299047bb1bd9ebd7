"""From TRL: the names that people type are answered with ours, and the options that the page names exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from fused_rl.trainers import cli, grpo
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.policy.options import LossConfig, loss_options
from fused_rl.trainers.run.parse import parse
from fused_rl.trainers.trl_names import NAMES, unknown_options_error
from tests.trainers import tiny

OPTIONS = [{*trainer.config_class().model_fields} for trainer in cli.TRAINERS.values()]
KNOWN = set().union(*OPTIONS)
PAGE = (Path(__file__).parents[2] / "docs" / "from_trl.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("beta", "its name here is --kl_coef"),
        ("gradient-accumulation-steps", "here it is no option, but a part of --prompts_per_step, "),
        ("dataloader_num_workers", "--help all lists the options, and docs/from_trl.md what TRL"),
        ("epsilon", "its name here is --clip_low and --clip_high"),
        ("num_generation", "did you mean num_generations, as in TRL? its name here is --group_s"),
        ("group_sizes", "did you mean --group_size?"),
        ("kl_target", "it is an option of ppo"),
        ("xyzzy", "--help all lists the options"),
    ],
)
def test_a_name_of_trl_is_answered(name, said):
    error = unknown_options_error([name], grpo.GRPOConfig.model_fields)
    assert str(error).startswith(f"unknown option --{name}; {said}")


def test_all_unknown_options_are_named_at_once(tmp_path):
    """Of a file, of the command line, whose values may be several words, and of Python."""
    (tmp_path / "c.yaml").write_text("learning_rate: 1\nbeta: 0.1\nseed: 3\n")
    words = "--log_completions --steps many --report_to wandb tensorboard --xyzzy\x1b=2 --beta 1"
    given = ["--config", str(tmp_path / "c.yaml"), *words.split(" ")]
    with pytest.raises(InputError) as from_words:
        parse(grpo.GRPOConfig, given)
    title, *lines = str(from_words.value).split("\n  ")
    names = ["learning_rate", "beta", "log_completions", "report_to", r"xyzzy\x1b"]
    assert title == "5 unknown options" and "docs/from_trl.md" in lines.pop()
    assert [line.partition("; ")[0] for line in lines] == [f"--{name}" for name in names]
    with pytest.raises(InputError) as from_python:
        tiny.config_of("grpo", learning_rate=1, beta=0.1, steps="many")
    assert str(from_python.value).split("\n  ")[1:3] == lines[:2]


def test_the_table_has_options_that_exist_and_the_page_has_the_table():
    for theirs, ours in NAMES.items():
        assert theirs not in set.intersection(*OPTIONS), theirs  # DPO has a beta of its own
        assert set(re.findall(r"--(\w+)", ours)) <= KNOWN, theirs
    renamed = PAGE.split("## Options that have another name")[1].split("## What does not")[0]
    rows = [row.split(" | ") for row in renamed.splitlines() if row.startswith(("| `", "| PPO"))]
    on_page = {}
    for names, ours, *_ in rows:
        for name in re.findall(r"`(\w+)`", names):
            on_page[name] = set(re.findall(r"`(?:--)?(\w+)", ours))
    assert on_page.keys() == NAMES.keys()
    for name, options in on_page.items():
        assert options & {*re.findall(r"--(\w+)", NAMES[name])}, name


# The number of processes, TRL's config and the command for the same training, for each trainer of the page.
EXAMPLES = re.findall(
    r"^\*\*[\w ]+\*\* on (one|\d) process.*?```python\n(\w+Config)\((.*?)\)\n```\n```bash\n(.*?)\n```",
    PAGE.split("## Examples")[1],
    re.DOTALL | re.MULTILINE,
)
IDS = [config for _, config, *_ in EXAMPLES]
# The options of an example from which the size of a batch or the loss follows, by arithmetic and not by a name.
CONVERTED = {"gradient_accumulation_steps", "total_episodes", "eval_strategy"}
CONVERTED |= {"loss_type", "loss_weights"}


@pytest.mark.parametrize(("processes", "config", "given", "command"), EXAMPLES, ids=IDS)
def test_an_example_of_the_page_is_a_command_that_ours_takes(processes, config, given, command):
    """With the options and the numbers that the tables of the page make of TRL's."""
    given = eval(f"dict(output_dir={given})")
    command = re.sub(r"^deepspeed --num_gpus \d --module fused_rl.trainers.", "fused-rl ", command)
    _, trainer, *words = shlex.split(command.replace("\\\n", ""))
    ours = parse(cli.TRAINERS[trainer].config_class(), words)
    if isinstance(ours, LossConfig):
        loss_options(ours)
    for name in given.keys() - CONVERTED - {"per_device_train_batch_size"}:
        names = {name, *re.findall(r"--(\w+)", NAMES.get(name, ""))}
        assert names & {word.removeprefix("--") for word in words}, name
    rows = given["per_device_train_batch_size"] * int(processes.replace("one", "1"))
    rows *= given.get("steps_per_generation", given["gradient_accumulation_steps"])
    assert rows == (vars(ours).get("batch_size") or ours.prompts_per_step * ours.group_size)
    updates = ours.epochs * ours.minibatches if trainer == "grpo" else 1
    counts = {"steps": "max_steps", "save_every": "save_steps", "eval_every": "eval_steps"}
    for option, name in counts.items():
        assert name not in given or vars(ours)[option] * updates == given[name]
    assert trainer != "ppo" or ours.steps * rows == given["total_episodes"]


def config_of_trl(name):
    """Return a class of TRL's options, as the release that is installed has it; None if it has none of the name."""
    trl = pytest.importorskip("trl")
    if hasattr(trl, name):
        return getattr(trl, name)
    room = f"trl.experimental.{name.removesuffix('Config').lower()}"
    return None if name == "PPOConfig" else getattr(importlib.import_module(room), name)


@pytest.mark.slow
def test_the_defaults_of_the_page_are_those_of_both():
    rows = PAGE.split("## Defaults that differ")[1].split("## Options that have")[0]
    found = re.findall(r"^\| `(\w+)` of (\w+) \| (\S+) \| `(\w+)`: (\S+) \|", rows, re.MULTILINE)
    assert len(found) > 10
    for name, of, theirs, option, default in found:
        fields = config_of_trl("GRPOConfig" if of == "all" else of).__dataclass_fields__
        assert str(fields[name].default) == theirs, name
        ours = cli.TRAINERS[{"SFTConfig": "sft", "RewardConfig": "reward"}.get(of, "grpo")]
        value = ours.config_class().model_fields[option].default
        assert str(value) in (default, "None"), option  # None is chosen by another option


@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (script,) = (block for block in blocks if "fused_rl" in block)
    rows = [{"prompt": row["question"], "answer": row["answer"]} for row in tiny.sums(80)]
    given = {"model": tiny.model_folder(tmp_path / "model"), "rows": rows, "correct": correct}
    exec(script.replace("512", "8").replace("steps=5", "steps=1"), given)
    assert (tmp_path / "runs" / "ours" / "model" / "config.json").is_file()


def correct(prompts, completions, answer, **columns):
    """A reward function as TRL calls it."""
    return [float(len(completion) % 2) for completion in completions]
