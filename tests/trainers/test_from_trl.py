"""From TRL: the names that people type are answered with ours, and the options that the page names exist."""

import dataclasses
import importlib
import math
import re
import shlex
from pathlib import Path

import pytest

from fused_rl.trainers import cli, grpo, sft
from fused_rl.trainers.base.text import InputError, unknown
from fused_rl.trainers.base.trl import ABSENT, NAMES, reason_of
from fused_rl.trainers.commands import from_trl
from fused_rl.trainers.commands.trl_files import CONFIGS, Found, Unread, read
from fused_rl.trainers.data.order import in_steps
from fused_rl.trainers.policy.options import LossConfig, loss_options
from fused_rl.trainers.run.parse import parse
from tests.trainers import tiny

OPTIONS = [{*trainer.config_class().model_fields} for trainer in cli.TRAINERS.values()]
GRPO = grpo.GRPOConfig.model_fields
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


def test_the_table_has_options_that_exist_and_the_page_has_the_table():
    for theirs, ours in NAMES.items():
        assert theirs not in set.intersection(*OPTIONS), theirs  # DPO has a beta of its own
        assert set(re.findall(r"--(\w+)", ours)) <= KNOWN, theirs
    renamed, absent = PAGE.split("## Options that have another name")[1].split("## What does not")
    rows = [row.split(" | ") for row in renamed.splitlines() if row.startswith(("| `", "| PPO"))]
    on_page = {}
    for names, ours, *_ in rows:
        for name in re.findall(r"`(\w+)`", names):
            on_page[name] = set(re.findall(r"`(?:--)?(\w+)", ours))
    assert on_page.keys() == NAMES.keys()
    for name, options in on_page.items():
        assert options & {*re.findall(r"--(\w+)", NAMES[name])}, name
    assert re.findall(r"^- \*\*(.*?)\*\*", absent, re.MULTILINE) == [*ABSENT]
    for name in re.findall(r"`(\w+)`", " ".join(re.findall(r"\*\* \((.*?)\)", absent, re.DOTALL))):
        assert reason_of(name) is not None, name


def converted(config: str, processes: int | None = None, rows: int | None = None, **options):
    """Return our options for a config of TRL, and everything that is said about them."""
    made = from_trl.convert(Found(config, "here", options), processes, rows)
    return made.options, from_trl.script_of(made)


GIVEN = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "output_dir": "o"}
CASES = [
    ("SFTConfig", {"max_seq_length": 2048, "assistant_only_loss": True}, "--max_length 2048"),
    ("SFTConfig", {"gradient_accumulation_steps": 3}, "--batch_size 24"),
    ("SFTConfig", {"warmup_ratio": 0.1, "max_steps": 50}, "--warmup_steps 5"),
    ("SFTConfig", {"warmup_steps": 0.1, "max_steps": 55}, "--warmup_steps 6"),
    ("SFTConfig", {"eval_strategy": "steps", "eval_steps": 7}, "--eval_every 7"),
    ("SFTConfig", {"save_strategy": "no"}, "--save_every 0"),
    ("RewardConfig", {"center_rewards_coefficient": 0.01}, "--centering 0.01 --lr 0.0001"),
    ("DPOConfig", {"loss_type": ["apo_zero"], "max_length": 1500}, "--loss_type apo-zero"),
    ("DPOConfig", {"max_length": 1500}, "--max_response_length 988"),
    ("DPOConfig", {"per_device_train_batch_size": 2}, "--batch_size 2 --micro_batch_size 4"),
    ("CPOConfig", {"loss_type": "simpo", "cpo_alpha": 0.0}, "--loss_type simpo --margin 0.5"),
    ("ORPOConfig", {"beta": 0.2}, "--loss_type orpo --nll_coef 1 --beta 0.2"),
    ("KTOConfig", {"undesirable_weight": 2.0}, "--undesirable_weight 2"),
    ("GKDConfig", {"teacher_model_name_or_path": "t"}, "--teacher t --on_policy 0.5"),
    ("GKDConfig", {"teacher_model_name_or_path": "t", "beta": 0.9}, "--jsd_beta 0.9"),
    ("DistillationConfig", {"teacher_model_name_or_path": "t", "beta": 0.0}, "--direction forward"),
    ("GRPOConfig", {"loss_type": "dr_grpo"}, "--preset dr_grpo --advantage group-std"),
    ("GRPOConfig", {"loss_type": "cispo", "epsilon_high": 5.0}, "--preset cispo --clip_high 4"),
    ("GRPOConfig", {"cast_lm_head_to_fp32": True}, "--head_dtype float32"),
    ("GRPOConfig", {"loss_type": "cispo"}, "--preset cispo --minibatches 1"),
    (
        "GRPOConfig",
        {"loss_type": "cispo", "epsilon_high": 5.0, "delta": 1.5},
        "--preset cispo --clip_high 4",
    ),
    ("GRPOConfig", {"loss_type": "luspo"}, "--ratio_level token --clip_low 0.2 --clip_high 0.2"),
    ("GRPOConfig", {"scale_rewards": False}, "--advantage group-mean --preset dapo"),
    ("GRPOConfig", {"beta": 0.04, "use_bias_correction_kl": False}, "--kl_coef 0.04"),
    ("GRPOConfig", {"reward_funcs": ["accuracy_reward", "a.b.c"]}, "--verifiers '[math, a.b:c]'"),
    ("GRPOConfig", {"use_vllm": True, "vllm_server_port": 9}, "--server http://127.0.0.1:9"),
    ("RLOOConfig", {"num_generations": 4}, "--preset rloo --kl_in reward --kl_coef 0.05"),
]


@pytest.mark.parametrize(("config", "options", "words"), CASES, ids=lambda value: str(value)[:40])
def test_a_config_of_trl_is_a_command_that_ours_takes(config, options, words):
    made, script = converted(config, **GIVEN, **options)
    command = script.partition("\nfused-rl ")[2].replace("\\\n    ", "")
    assert all(f"--{each.strip()} " in f"{command} " for each in words.split("--")[1:]), script
    ours = parse(cli.TRAINERS[command.split()[0]].config_class(), shlex.split(command)[1:])
    if isinstance(ours, LossConfig):
        loss_options(ours)
    assert "refuses" not in script and {"model", "dataset", "output_dir"} <= made.keys()


def test_the_arithmetic_of_a_rollout_is_that_of_trl():
    """2 processes x 4 x 8 / 8 prompts; 4 minibatches of 2 accumulated; 3 iterations: 12 updates of a rollout."""
    options = {"per_device_train_batch_size": 4, "steps_per_generation": 8, "num_generations": 8}
    options |= {"gradient_accumulation_steps": 2, "num_iterations": 3, "warmup_ratio": 0.1}
    options |= {"max_steps": 1200, "save_steps": 240, "sync_ref_model": True}
    made, script = converted("GRPOConfig", 2, **GIVEN, **options, ref_model_sync_steps=24, beta=0.1)
    expected = {"prompts_per_step": 8, "minibatches": 4, "epochs": 3, "steps": 100}
    expected |= {"save_every": 20, "warmup_steps": 120, "ref_sync_every": 2}
    assert {name: made[name] for name in expected} == expected
    assert "steps 100 = max_steps 1200 / 12 updates of a rollout" in script
    assert "deepspeed --num_gpus 2 --module fused_rl.trainers.grpo" in script
    del options["max_steps"]
    options["save_steps"] = 0.003
    made, script = converted("GRPOConfig", 2, 864, **GIVEN, **options, num_train_epochs=2)
    assert made["num_train_epochs"] == 2 and made["warmup_steps"] == 240 and "200 steps" in script
    assert made["save_every"] == 1 and "0.003 x 2400 updates / 12 updates of a rollout" in script


@pytest.mark.parametrize(("processes", "of_printing"), [(1, 1), (4, 1), (2, 8)])
def test_a_printed_rollout_follows_the_processes_that_are_given(processes, of_printing):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    options |= {"generation_batch_size": 32 * of_printing, "steps_per_generation": 8}
    made, script = converted("GRPOConfig", processes, **GIVEN, **options)
    prompts = made.get("prompts_per_step", GRPO["prompts_per_step"].default)
    assert prompts == 4 * processes and "whole" not in script
    disagree = f"generation_batch_size={32 * of_printing} was resolved on {of_printing};"
    assert (disagree in script) == (processes != of_printing)


@pytest.mark.parametrize("group", [3, 7, 14, 32, 48])
def test_groups_that_are_not_whole_name_the_processes_that_make_them_so(group):
    script = converted("GRPOConfig", 1, **GIVEN, num_generations=group)[1]
    fitting = int(re.search(r"its processes, (\d+) or a multiple", script)[1])
    for processes in range(1, fitting + 1):
        script = converted("GRPOConfig", processes, **GIVEN, num_generations=group)[1]
        assert ("no whole groups" in script) == (processes < fitting)


@pytest.mark.parametrize("epochs", [0.3, 1, 2.5])
@pytest.mark.parametrize("held_out", [None, "e.jsonl"])
def test_epochs_are_the_steps_of_our_run(epochs, held_out):
    options = GIVEN | {"num_train_epochs": epochs, "warmup_ratio": 1.0, "save_steps": 0.3}
    options |= {} if held_out is None else {"eval_dataset": held_out, "eval_strategy": "epoch"}
    made, script = converted("SFTConfig", 1, 1003, **options)
    trained = 1003 if held_out else 1003 - 64
    config = sft.SFTConfig(model="m", output_dir="o", num_train_epochs=epochs, batch_size=8)
    steps = in_steps(config, trained).steps
    assert made["warmup_steps"] == steps and made["save_every"] == math.ceil(0.3 * steps)
    assert f"{steps} steps = " in script and f"save_steps 0.3 x {steps} updates" in script


@pytest.mark.parametrize(
    ("config", "loss", "trained"),
    [
        ("CPOConfig", "sigmoid", "--loss_type sigmoid"),
        ("CPOConfig", "hinge", "--loss_type sigmoid"),
        ("DPOConfig", ["bco_pair"], "--loss_type sigmoid"),
        ("DPOConfig", ["ipo", "sigmoid"], "ipo"),
        ("SFTConfig", "dft", "negative log-likelihood"),
        ("KTOConfig", "apo_zero_unpaired", "KTO's"),
    ],
)
def test_another_loss_is_named_before_everything_else(config, loss, trained):
    made, script = converted(config, **GIVEN, loss_type=loss)
    first = script.splitlines()[1]
    assert first.startswith("# ANOTHER LOSS than ") and trained in first
    assert config in ("SFTConfig", "KTOConfig") or made["loss_type"] in first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "every token, if the rows are messages"),
        ({"completion_only_loss": False}, "every token, completion_only_loss=False"),
        ({"completion_only_loss": True}, None),
        ({"assistant_only_loss": True}, None),
    ],
)
def test_the_tokens_that_sft_does_not_train_are_another_loss(options, said):
    first = converted("SFTConfig", **GIVEN, **options)[1].splitlines()[1]
    assert said in first if said else "ANOTHER LOSS" not in first


@pytest.mark.parametrize("config", dict.fromkeys(CONFIGS.values()))
def test_a_bound_that_is_taken_away_is_named(config):
    """Of each trainer whose rows TRL cuts unless an option is None; and what it reads otherwise than ours is said."""
    script = converted(config, **GIVEN, max_length=None, warmup_steps=0.1, use_peft=True)[1]
    is_cut = "max_length" in from_trl.DEFAULTS[config]
    assert ("max_length=None: TRL sets no bound" in script) == is_cut
    assert "--raw_prompt true" in script and "warmup_steps=0.1: of all" in script
    assert "lora_dropout=0.05: adapters are plain" in script
    assert "lora_dropout" not in converted(config, **GIVEN, use_peft=True, lora_dropout=0.0)[1]


def test_held_out_rows_are_those_that_are_evaluated():
    rows = GIVEN | {"dataset_test_split": "dev"}
    for unevaluated in ({}, {"eval_strategy": "no"}):
        made, script = converted("SFTConfig", **rows, **unevaluated, eval_dataset="e")
        assert not {"eval_dataset", "eval_split"} & made.keys() and "last 64 rows" in script
    rows["dataset_name"] = "hub/rows"
    made, script = converted("SFTConfig", **rows, eval_strategy="epoch")
    assert made["eval_dataset"] == "hub/rows" and made["eval_split"] == "dev"


def test_reasons_name_what_to_do():
    """Of each option that had another one's reason, a word of its own."""
    words = {
        "lr_scheduler_kwargs": "--lr_schedule module:function",
        "use_cpu": "GPUs that it finds",
    }
    words |= {"gradient_checkpointing_kwargs": "--checkpoint_activations_on"}
    words |= {"per_device_eval_batch_size": "a run evaluates", "chat_template": "save_pretrained"}
    script = converted("SFTConfig", **GIVEN, **dict.fromkeys(words, "x"))[1]
    for name, word in words.items():
        assert [line for line in script.splitlines() if f"{name}=x" in line and word in line]
    wandb = {"report_to": "wandb", "wandb_project": "p"}
    made, script = converted("SFTConfig", **GIVEN, **wandb)
    assert made["wandb_project"] == "p" and "report_to" not in script


def test_defaults_that_differ_are_given():
    rows = PAGE.split("## Defaults that differ")[1].split("## Options that have")[0]
    for name, of in re.findall(r"^\| `(\w+)` of (\w+)", rows, re.MULTILINE):
        defaults = from_trl.OF_ALL | (from_trl.DEFAULTS["GRPOConfig"] if of == "all" else {})
        assert name in (defaults | from_trl.DEFAULTS.get(of, {})) or name.startswith("vllm_")
    made, script = converted("SFTConfig", **GIVEN)
    assert made["seed"] == 42 and "differ from those here: " in script and "--seed" in script
    assert "seed" not in converted("SFTConfig", **GIVEN, seed=1)[0]


@pytest.mark.parametrize("config", dict.fromkeys(CONFIGS.values()))
def test_a_value_that_only_the_script_knows_is_the_default(config):
    names = from_trl.OF_ALL | from_trl.DEFAULTS[config]
    made, script = converted(config, **dict.fromkeys(names, Unread("args.x")))
    made.pop("micro_batch_size")  # which is ours to choose, unless TRL's is given
    assert made == converted(config)[0] and "Unread" not in script


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# This file has been moved to https://a/b.py #\n", "moved to https://a/b.py; give that"),
        ('"""Old name."""\nfrom trl.scripts.dpo import main\n', "imports from trl.scripts.dpo"),
        ("from trl import PPOConfig\nPPOConfig()", "PPO is not converted; docs/from_trl.md"),
        ("from trl import XYConfig, XYTrainer\nXYConfig()", "; XYConfig has no counterpart"),
    ],
)
def test_a_file_without_a_config_says_where_to_look(tmp_path, text, said):
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(InputError, match=said):
        read(tmp_path / "a.py", None)


SCRIPT = """
'''Nothing of this file is run.'''
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
raise SystemExit(model_id)
model_id = "m"
rate = 1e-6
rate = 2 * rate
def brief(completions, **columns):
    return [-len(each) for each in completions]
train, test = load_dataset("d.jsonl", split=["train", "test"])
config = GRPOConfig("o", num_generations=4, learning_rate=rate, bf16=True, run_name=f"{model_id}-1")
config.max_steps = 30
config.epsilon = args.eps
adapters = LoraConfig(r=4)
rewards = [accuracy_reward, brief]
GRPOTrainer(model_id, args=config, reward_funcs=rewards, train_dataset=train, peft_config=adapters)
"""
YAML = """
model_name_or_path: m
dataset_name: d.jsonl
dataset_train_split: train
output_dir: o
num_generations: 4
learning_rate: 2e-6
bf16: true
run_name: m-1
max_steps: 30
reward_funcs: [accuracy_reward, script.brief]
use_peft: true
lora_r: 4
lora_alpha: 8
"""
WORDS = """
# a comment, and train.py --with an option
accelerate launch --num_processes 1 train.py other
trl grpo --model_name_or_path m --dataset_name d.jsonl --output_dir o --bf16 --run_name m-1 \\
    --num_generations 4 --learning_rate 2e-6 --max_steps 30 --reward_funcs accuracy_reward script.brief \\
    --use_peft --lora_r=4 --lora_alpha 8
"""


OLDER = """
import argparse
from datasets import load_dataset
from transformers import TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--lr", default=5e-6)
options = parser.parse_args()
model, tokenizer = FastLanguageModel.from_pretrained(model_name="m", load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj"], lora_alpha=8)
rows = load_dataset("json", data_files="d.jsonl", split="train").map(print)
given = dict(warmup_steps=5, max_steps=60)
arguments = TrainingArguments("o", learning_rate=options.lr, optim="adamw_8bit", **given)
SFTTrainer(model, args=arguments, train_dataset=rows, tokenizer=tokenizer, max_seq_length=2048)
"""


def test_an_older_script_is_followed_through_its_model_rows_and_options(tmp_path):
    (tmp_path / "train.py").write_text(OLDER)
    (found,) = read(tmp_path / "train.py", None)
    made = from_trl.convert(found)
    expected = {"model": "m", "dataset": "d.jsonl", "lr": 5e-6, "max_length": 2048, "steps": 60}
    expected |= {"lora_rank": 4, "lora_alpha": 8, "lora_targets": "q_proj", "load_in_4bit": True}
    assert made.command == "sft" and expected | made.options == made.options
    script = from_trl.script_of(made)
    assert "the script changes the rows (map)" in script and "optim=adamw_8bit" in script
    assert "push_to_hub" not in script


def test_what_a_script_says_beside_its_config_is_heeded(tmp_path):
    text = OLDER.replace("print)", "print).train_test_split(9)").replace('"adamw_8bit"', '"x"')
    text = text.replace("max_steps=60", "num_train_epochs=2, eval_strategy='epoch'")
    text = text.replace("tokenizer=tok", "eval_dataset=rows['test'], tokenizer=tok")
    (tmp_path / "train.py").write_text(text + "trainer.train(resume_from_checkpoint=True)\n")
    (found,) = read(tmp_path / "train.py", None)
    script = from_trl.script_of(from_trl.convert(found, rows=800))
    assert "add --resume when you continue" in script and "lora_dropout" not in script
    assert "200 steps = 2 epochs x 800 rows / 8 rows of a step" in script  # none held out of them


def test_held_out_rows_that_a_script_makes_and_its_upload_are_named(tmp_path):
    given = 'optim="adamw_8bit"'
    text = OLDER.replace(given, 'eval_strategy="steps"').replace(
        "print)", "print).train_test_split(9)"
    )
    text = text.replace(
        "train_dataset=rows", 'train_dataset=rows["train"], eval_dataset=rows["test"]'
    )
    (tmp_path / "train.py").write_text(f"{text}model.push_to_hub('name')\n")
    (found,) = read(tmp_path / "train.py", None)
    made = from_trl.convert(found)
    script = from_trl.script_of(made)
    for rows, option in (("rows", "dataset"), ("held-out rows", "eval_dataset")):
        assert f"changes the {rows} (map, train_test_split)" in script
        assert f"as --{option}, without a split" in script
    assert "eval_dataset" not in made.options and "the script calls push_to_hub()" in script


def test_a_script_a_file_and_a_command_line_come_to_the_same(tmp_path, capsys):
    files = {"script.py": SCRIPT, "grpo.yaml": YAML, "run.sh": WORDS}
    made = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (found,) = read(tmp_path / name, None)
        made[name] = from_trl.convert(found).options
    assert made["script.py"] == made["grpo.yaml"] == made["run.sh"]
    expected = {"lr": 2e-6, "steps": 30, "lora_rank": 4, "verifiers": ["math", "script:brief"]}
    assert {name: made["script.py"][name] for name in expected} == expected
    from_trl.main([str(tmp_path / "script.py")])
    said = capsys.readouterr().out
    assert "epsilon=args.eps: its value is known when the script runs; epsilon=0.2 is" in said
    assert "run_name=m-1: every step is logged" in said
    (tmp_path / "none.py").write_text("print(1)")
    with pytest.raises(InputError, match="found no config"):
        read(tmp_path / "none.py", None)


def read_one(folder: Path, name: str, text: str):
    """Return the conversion of a file with one run, and its script."""
    (folder / name).write_text(text)
    (found,) = read(folder / name, None)
    made = from_trl.convert(found)
    return made, from_trl.script_of(made)


LATER = """
given = dict(max_steps=4, num_generations=4)
if True:
    given["learning_rate"] = 1e-5
given.update(weight_decay=0.5)
given |= {"seed": 3}
rate = 1.0
rate *= 2
config = GRPOConfig("o", **given, max_grad_norm=rate)
config.beta = 0.5
setattr(config, "temperature", 0.5)
config.epsilon *= 2
GRPOTrainer("m", args=config, train_dataset=rows)
"""
PARSED = """
parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
script_args, config, model_args = parser.parse_args_and_config()
config.beta = 0.5
config.model_init_kwargs = model_args.kwargs
GRPOTrainer(model_args.model_name_or_path, args=config)
"""


def test_options_that_a_script_sets_later_are_taken_or_named(tmp_path):
    made, script = read_one(tmp_path, "later.py", LATER)
    expected = {"lr": 1e-5, "seed": 3, "weight_decay": 0.5, "max_grad_norm": 2.0, "kl_coef": 0.5}
    expected |= {"temperature": 0.5, "group_size": 4, "steps": 4}
    assert expected | made.options == made.options
    assert "epsilon=config.epsilon *= 2: its value is known when" in script
    made, script = read_one(tmp_path, "parsed.py", PARSED)
    assert made.options["kl_coef"] == 0.5 and "kwargs" not in script


@pytest.mark.parametrize(
    ("arguments", "dataset", "said"),
    [
        ('data_files="d.jsonl", split="train[:80%]"', "d.jsonl", "rows (split train[:80%])"),
        ('data_files={"train": "d.jsonl", "test": "e.jsonl"}', "d.jsonl", ""),
        ('data_files={"test": "e.jsonl"}', "DATASET", "train of data_files"),
        ('data_files=["d.jsonl", "e.jsonl"]', "DATASET", "the files"),
        ("data_files=args.train_file", "d.jsonl", ""),
        ("data_files=other.file", "DATASET", "other.file"),
        ('path="a/b", data_files="d.jsonl"', "DATASET", "the files d.jsonl of a/b"),
    ],
)
def test_the_rows_of_a_script_are_its_file_or_named(tmp_path, arguments, dataset, said):
    path = "" if "path=" in arguments else '"json", '
    text = f"""
class Arguments:
    train_file: str = field(default="d.jsonl")
rows = load_dataset({path}{arguments})
GRPOTrainer("m", args=GRPOConfig("o"), train_dataset=rows)
"""
    made, script = read_one(tmp_path, "train.py", text)
    assert made.options["dataset"] == dataset and said in script
    assert "dataset_split" not in made.options and "refuses" not in script


LAUNCHED = """
export NGPU=4
MODEL="m"
LR=3e-6
OUT=runs/${MODEL}
accelerate launch --config_file zero2.yaml --num_processes $NGPU -m trl.scripts.sft --output_dir $OUT \\
    --model_name_or_path $MODEL --dataset_name ${DATA} --learning_rate ${LR} --max_steps 4
"""


def test_variables_of_the_shell_are_followed_or_named(tmp_path):
    made, script = read_one(tmp_path, "launch.sh", LAUNCHED)
    expected = {"model": "m", "lr": 3e-6, "output_dir": "runs/m", "dataset": "DATASET"}
    assert made.command == "sft" and expected | made.options == made.options
    assert made.processes == 4 and "config_file=zero2.yaml: " in script
    assert "dataset_name=${DATA}: its value is known when the script runs" in script
    made, script = read_one(tmp_path, "launch.sh", LAUNCHED.replace("export NGPU=4", ""))
    assert made.processes == 1 and "processes $NGPU: 1 is assumed" in script


REWARDED = """
import scoring
import trl.rewards
from trl import GRPOConfig, GRPOTrainer, rewards
from trl.rewards import accuracy_reward, think_format_reward as think
def reasoning_accuracy_reward(completions, **columns):
    return [0.0] * len(completions)
partial = make(accuracy_reward)
GRPOTrainer("m", {}, GRPOConfig("o"), "rows")
"""
OF_TRL = ("accuracy_reward", "trl.rewards.accuracy_reward", "rewards.accuracy_reward")


@pytest.mark.parametrize("trainer", ["GRPO", "RLOO"])
@pytest.mark.parametrize(
    ("reward", "verifier"),
    [
        *((name, "math") for name in OF_TRL),
        ("think", from_trl.REWARDS["think_format_reward"]),
        ("reasoning_accuracy_reward", "train:reasoning_accuracy_reward"),
        ("scoring.accuracy_reward", "scoring:accuracy_reward"),
        ("partial", None),
    ],
)
def test_only_rewards_of_trl_are_taken_for_those_of_trl(tmp_path, trainer, reward, verifier):
    """Of the names in a script, given by their place; a function of its own may have the name of one of TRL's."""
    text = REWARDED.replace("{}", f"[{reward}]").replace("GRPO", trainer)
    made, script = read_one(tmp_path, "train.py", text)
    assert made.options.get("verifiers") == (verifier and [verifier]), script
    assert made.options["output_dir"] == "o" and made.command == "grpo"
    assert (f"reward {reward}: give it as --verifiers" in script) == (verifier is None)


@pytest.mark.slow
def test_every_option_of_trl_is_converted_or_named(tmp_path):
    """Of TRL itself: all options at their defaults as it prints them, and each changed; its defaults are those here."""
    trl = pytest.importorskip("trl")
    for config in dict.fromkeys(CONFIGS.values()):
        room = f"trl.experimental.{config.removesuffix('Config').lower()}"
        config_class = getattr(
            trl if hasattr(trl, config) else importlib.import_module(room), config
        )
        fields = {each.name: each.default for each in dataclasses.fields(config_class)}
        for name, default in (from_trl.OF_ALL | from_trl.DEFAULTS[config]).items():
            if (config, name) != ("DPOConfig", "loss_type") and name != "output_dir":
                assert fields[name] == default, (config, name)
        changed = dict(GIVEN)
        for name, default in fields.items():
            is_number = isinstance(default, int | float) and not isinstance(default, bool)
            other = 8 if "batch" in name or "steps" in name else "x"
            value = not default if isinstance(default, bool) else other
            changed.setdefault(name, default if is_number or isinstance(default, str) else value)
        _, script = converted(config, **changed)
        assert "not among the options of TRL" not in script, script
    # The last one follows from the level at which transformers logs, which other tests change.
    given = {"bf16": False, "report_to": "none", "learning_rate": 3e-6, "disable_tqdm": False}
    printed = str(trl.GRPOConfig(str(tmp_path), **given))
    (tmp_path / "printed.txt").write_text(printed)
    (found,) = read(tmp_path / "printed.txt", None)
    found.options |= GIVEN
    of_printed = from_trl.convert(found)
    found = Found("GRPOConfig", "here", GIVEN | {"learning_rate": 3e-6})
    of_given = from_trl.convert(found)
    size = {"micro_batch_size": 8, "seed": 42}  # which are given there
    assert of_printed.options == of_given.options | size
    assert not of_printed.absent


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
