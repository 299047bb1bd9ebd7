"""Whoever comes from TRL: each name of its configs is answered rightly, and what the page says of it is so."""

import dataclasses
import re
from pathlib import Path

import pytest

from bench import docs
from fused_rl import PRESETS
from fused_rl.presets import PolicyLossOptions
from fused_rl.trainers import grpo, ppo, reward, sft
from fused_rl.trainers.options import trl
from fused_rl.trainers.options.config import InputError, names_of
from fused_rl.trainers.options.names import unknown
from fused_rl.trainers.options.parse import parse
from tests.trainers import tiny

COMMANDS = {module.__name__.rsplit(".", 1)[1]: module for module in (sft, reward, grpo, ppo)}
CONFIGS = {"sft": sft.SFTConfig, "reward": reward.RewardConfig, "grpo": grpo.GRPOConfig, "ppo": ppo.PPOConfig}
NEEDED = {"model": "m", "dataset": "d.jsonl", "output_dir": "o"}
KNOWN = set().union(*map(names_of, CONFIGS.values()))
ELSEWHERE = ", of another command"
NOTHING = "TRL has it, and here there is none: "


def answer(command: str, name: str) -> str:
    """What is said of an option that the command does not have, after its name."""
    line = unknown(name, names_of(CONFIGS[command]), command)
    assert "\n" not in line
    return line.removeprefix(f"unknown option --{name}; ")


def test_every_row_says_something_and_names_only_what_there_is():
    for table in trl.TABLES.values():
        for theirs, here in table.items():
            assert set(here.names.split()) <= KNOWN, theirs
            assert here.names or here.note, theirs
            assert set(re.findall(r"--(\w+)", here.note)) <= KNOWN, theirs


@pytest.mark.parametrize(
    ("command", "name", "said"),
    [
        ("grpo", "beta", r"its name here is --kl_coef: in the loss"),
        ("sft", "beta", r"its name here is --kl_coef, of another command"),
        ("grpo", "num_generations", "its name here is --group_size$"),
        ("grpo", "save-steps", "its name here is --save_every: steps of grpo and ppo are rollouts"),
        ("grpo", "epsilon", "its name here is --clip_low and --clip_high"),
        ("grpo", "loss_type", "its name here is --preset: .*--clip_high 0.2 with dapo"),
        ("grpo", "steps_per_generation", "its name here is --minibatches: divided by gradient_accumulation_steps"),
        ("grpo", "per_device_train_batch_size", "--micro_batch_size: what a step trains on is --batch_size, --prompts"),
        ("grpo", "scale_rewards", "--advantage: group: group-std, batch: group-mean-batch-std, none: group-mean"),
        # What has no counterpart names no option as its own.
        ("grpo", "vllm_gpu_memory_utilization", NOTHING + "vLLM is started by you"),
        ("grpo", "use_adaptive_entropy", NOTHING + "entropy_coef is constant"),
        ("grpo", "repetition_penalty", NOTHING + "tokens would not be drawn from"),
        # The command's own config answers, not one that shares the name.
        ("sft", "loss_type", NOTHING + "negative log-likelihood alone"),
        ("reward", "max_length", "its name here is --max_prompt_length and --max_response_length"),
        ("ppo", "batch_size", "its name here is --prompts_per_step and --group_size"),
        # Names that look like one of ours, and are none.
        ("grpo", "ld_alpha", NOTHING + "DPO and KTO are not here"),
        ("grpo", "local_rank", NOTHING + "DeepSpeed divides"),
        ("grpo", "log_level", NOTHING + "every step is logged"),
        ("sft", "fsdp_config", NOTHING + "DeepSpeed divides"),
        ("sft", "load_in_8bit", NOTHING + "NF4"),
        # A slip in a name of TRL's, in one of ours, and in none.
        ("grpo", "num_generation", r"did you mean num_generations, as in TRL\? its name here is --group_size$"),
        ("grpo", "max_completion_len", r"did you mean max_completion_length, as in TRL\? .* --max_new_tokens$"),
        ("grpo", "group_sizes", r"did you mean --group_size\?$"),
        ("grpo", "xyzzy", "--help lists the options$"),
    ],
)
def test_a_name_of_trl_is_answered(command, name, said):
    assert re.match(said, answer(command, name)) or re.search(said, answer(command, name)), answer(command, name)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_answer_names_an_option_as_ours_that_the_command_does_not_have(command):
    known = names_of(CONFIGS[command])
    for name in set(trl.NAMES) - set(known):
        said = answer(command, name)
        here = re.match(r"its name here is (--\w+(?: and --\w+)*)(, of another command)?", said)
        assert here or said.startswith(NOTHING), said
        named = re.findall(r"--(\w+)", here[1]) if here else []
        assert not here or (set(named) <= set(known)) == (here[2] is None), said
        assert here is None or name not in trl.OF_COMMAND[command] or here[2] is None, said


@pytest.mark.parametrize("command", COMMANDS)
def test_command_line_file_and_python_say_the_same(command, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("lr: 1.0\nlearning_rate: 4\n")
    said = "unknown option --learning_rate; its name here is --lr\n"
    for argv in (["--learning_rate", "4"], ["--config", str(tmp_path / "c.yaml")]):
        with pytest.raises(SystemExit):
            parse(CONFIGS[command], [*(word for k, v in NEEDED.items() for word in (f"--{k}", v)), *argv], "fused-rl")
        (line,) = capsys.readouterr().err.splitlines(keepends=True)
        assert line.endswith(said) and ("c.yaml, line 2: " in line) == ("--config" in argv)
    with pytest.raises(InputError) as error:
        CONFIGS[command](**NEEDED, learning_rate=4)
    assert f"{error.value}\n" == f"{CONFIGS[command].__name__}: {said}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_config_of_somebody_else_is_refused(command):
    other = "sft" if command != "sft" else "grpo"
    with pytest.raises(InputError, match=rf"train\(\) takes a fused_rl.trainers.{command}.*got a .*docs/from_trl.md"):
        COMMANDS[command].train(CONFIGS[other](**NEEDED))


def default_of(name: str):
    """Ours: of an option that is the preset's, that of the loss's options, and of steps what None comes to."""
    found = {field.name: field.default for field in dataclasses.fields(grpo.GRPOConfig)}[name]
    if name == "steps":
        return grpo.GRPOConfig(**NEEDED).steps
    return getattr(PolicyLossOptions, name) if found is None else found


def test_the_defaults_that_are_said_to_differ_do():
    for _, theirs, default, name, own in docs.DEFAULTS:
        assert own == default_of(name) != default, theirs
    assert PRESETS["dapo"].options == {"clip_high": 0.28}, "what the row of loss_type says to give"
    assert PRESETS["dr_grpo"].advantage != "group-std" == PRESETS["dapo"].advantage


@pytest.mark.slow
def test_the_table_has_the_names_and_defaults_that_the_installed_trl_has():
    """A new release of TRL's shows here."""
    import transformers

    installed = pytest.importorskip("trl")
    of_training, shared = set(names_of(transformers.TrainingArguments)), set()
    tables = {"GRPOConfig": trl.GRPO, "SFTConfig": trl.SFT, "RewardConfig": trl.REWARD, "RLOOConfig": trl.RLOO}
    for name, table in tables.items():
        own = set(names_of(getattr(installed, name))) - of_training
        others = trl.GRPO.keys() if table is trl.RLOO else set()
        assert table.keys() <= own <= table.keys() | trl.SHARED.keys() | others, name
        shared |= own & trl.SHARED.keys()
    assert shared == trl.SHARED.keys()
    assert trl.TRAINING.keys() == of_training
    assert trl.MODEL.keys() == set(names_of(installed.ModelConfig))
    assert trl.SCRIPT.keys() == set(names_of(installed.ScriptArguments))
    for config, theirs, default, _, _ in docs.DEFAULTS:
        found = {
            field.name: field.default
            for field in dataclasses.fields(getattr(installed, config.replace("all", "SFTConfig")))
        }[theirs]
        assert found == default, (config, theirs)


@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "from_trl.md").read_text(encoding="utf-8")
    (script,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "fused_rl" in block)
    rows = [{"prompt": row["question"], "answer": row["answer"]} for row in tiny.sums(80)]
    exec(
        script.replace("512", "8").replace("steps=5", "steps=1"),
        {"model": tiny.model_folder(tmp_path / "model"), "rows": rows, "correct": correct},
    )
    assert (tmp_path / "runs" / "ours" / "model" / "config.json").is_file()


def correct(prompts, completions, answer, **columns):
    """A reward function as TRL calls it."""
    return [float(len(completion) % 2) for completion in completions]
