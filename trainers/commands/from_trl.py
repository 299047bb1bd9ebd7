"""`fused-rl from-trl FILE`: a script, a YAML file, a command line or a printed config of TRL, as our command.

    fused-rl from-trl train.py
    fused-rl from-trl config.yaml --trainer grpo --processes 8 --rows 7473 > run.sh

It prints a shell script: the arithmetic and what has no counterpart as comments, then the command. Nothing in FILE is
run. Options that have another name follow fused_rl/trainers/base/trl.py; here stands what takes more than a name.
"""

import argparse
import dataclasses
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fused_rl.trainers import cli
from fused_rl.trainers.base import trl
from fused_rl.trainers.base.text import InputError, escaped
from fused_rl.trainers.commands.trl_files import CONFIGS, Found, Unread, is_unread, read
from fused_rl.trainers.data.order import steps_of as steps_of_passes
from fused_rl.trainers.options import FIRST
from fused_rl.trainers.run.command import around
from fused_rl.trainers.run.parse import parse

# TRL's defaults, where they matter here.
OF_ALL: dict[str, Any] = {
    "output_dir": "trainer_output",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "logging_steps": 10,
    "gradient_checkpointing": True,
    "seed": 42,
}
OF_ROLLOUTS = {"max_completion_length": 512, "temperature": 1.0}
OF_GROUPS = OF_ROLLOUTS | {"num_generations": 8, "num_iterations": 1, "epsilon": 0.2, "beta": 0.0}
OF_GROUPS |= {"ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6}
DEFAULTS: dict[str, dict[str, Any]] = {
    "SFTConfig": {"learning_rate": 2e-5, "max_length": 1024},
    "RewardConfig": {"learning_rate": 1e-4, "max_length": 1024},
    "DPOConfig": {"max_length": 1024, "beta": 0.1, "loss_type": "sigmoid"},
    "CPOConfig": {"max_length": 1024, "beta": 0.1, "loss_type": "sigmoid", "simpo_gamma": 0.5}
    | {"cpo_alpha": 1.0},
    "ORPOConfig": {"max_length": 1024, "beta": 0.1},
    "KTOConfig": {"max_length": 1024, "beta": 0.1, "loss_type": "kto"},
    "GRPOConfig": OF_GROUPS | {"loss_type": "dapo", "scale_rewards": "group"},
    "RLOOConfig": OF_GROUPS | {"num_generations": 2, "beta": 0.05},
    "GKDConfig": {"learning_rate": 2e-5, "temperature": 0.9, "lmbda": 0.5, "beta": 0.5}
    | {"max_new_tokens": 128},
    "DistillationConfig": OF_ROLLOUTS | {"beta": 1.0},
}
COMMANDS = {
    "SFTConfig": "sft",
    "RewardConfig": "reward",
    "DPOConfig": "dpo",
    "CPOConfig": "dpo",
    "ORPOConfig": "dpo",
    "KTOConfig": "kto",
    "GRPOConfig": "grpo",
    "RLOOConfig": "grpo",
    "GKDConfig": "distill",
    "DistillationConfig": "distill",
}
# What TRL's own rewards are called here.
REWARDS = {
    "accuracy_reward": "math",
    "accuracy": "math",
    "reasoning_accuracy_reward": "math",
    "think_format_reward": r"regex:(?s)^<think>(?!.*<think>).*?</think>.*$",
    "format": "format",
}
# What evaluations read in TRL.
OF_EVALUATIONS = (
    "eval_dataset",
    "eval_dataset_config",
    "eval_split",
    "dataset_test_split",
    "eval_dataset after",
)
# Values that ask for nothing, so that no comment is made of them.
IDLE = (None, False, "", "none", "no", "auto", [], {})
# Defaults of options without a counterpart, which a printed config has.
IDLE_OF = {
    "logging_strategy": "steps",
    "logging_steps": 10,
    "log_multimodal": True,
    "optim": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "repetition_penalty": 1.0,
    "lora_task_type": "CAUSAL_LM",
    "shuffle_dataset": True,
    "disable_dropout": True,
    "ds3_gather_for_generation": True,
    "truncation_mode": "keep_start",
    "precompute_ref_log_probs": False,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "discopop_tau": 0.05,
    "packing_strategy": "bfd",
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_group_port": 51216,
    "vllm_model_impl": "vllm",
    "vllm_tensor_parallel_size": 1,
}


class Conversion:
    """Our options for those of one run of TRL, and what is to be said about them."""

    def __init__(self, found: Found, processes: int | None, rows: int | None):
        self.found = found
        self.command = COMMANDS[found.config]
        self.known = cli.TRAINERS[self.command].config_class().model_fields
        self.processes = int(processes or found.processes or 1)
        self.rows = rows
        self.left = dict(found.options)
        self.defaults = OF_ALL | DEFAULTS[found.config]
        self.options: dict[str, Any] = {}
        self.arithmetic: list[str] = []
        self.another_loss: list[str] = []
        """Losses of TRL that are not here, each with the one that the command trains."""
        self.comments: list[str] = []
        self.from_defaults: list[str] = []
        self.absent: dict[str, list[str]] = {}
        """Options of TRL that are left out, by the reason."""

    def take(self, name: str) -> Any:
        """Return the value of an option of TRL, its default if it is not given; nothing more is said about it."""
        default = self.defaults.get(name)
        value = self.left.pop(name, None)
        if is_unread(value):
            remedy = f"{name}={default} is assumed" if default is not None else "give it yourself"
            self.comments.append(
                f"{name}={value.source}: its value is known when the script runs; {remedy}"
            )
            return default
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Return True if an option of TRL is given, and asks for something."""
        return name in self.found.options and self.found.options[name] not in IDLE

    def give(self, option: str, value: Any, *names: str) -> None:
        """Give an option of ours, unless it is the default; `names` are TRL's, of which none may be given."""
        if value is None or value == self.known[option].default:
            return
        self.options[option] = value
        if names and not any(name in self.found.options for name in names):
            self.from_defaults.append(f"--{option}")

    def renamed(self, name: str, option: str) -> None:
        """Give an option of ours the value of one of TRL's."""
        self.give(option, self.take(name), name)

    def say(self, name: str, text: str) -> None:
        """Comment on an option of TRL by its value."""
        self.comments.append(f"{name}={shown(self.found.options.get(name))}: {text}")

    def whole(self, value: float, words: str) -> int:
        """Return a number as a whole one, and say where that changes it; `words` say what it is and comes from."""
        number = max(1, math.floor(value + 1e-9))
        changed = "" if number == value else f" = {value:.4g}, and must be a whole number"
        self.arithmetic.append(f"{words.format(number)}{changed}")
        return number


def shown(value: Any) -> str:
    """Return a value of TRL's as a comment says it."""
    values = value if isinstance(value, list) else [value]
    texts = [each.source if isinstance(each, Unread) else str(each) for each in values]
    text = " ".join(", ".join(texts).split())
    return text if len(text) <= 60 else f"{text[:60]}…"


# Every trainer.


def model_and_rows(made: Conversion) -> None:
    """The model, its adapters, and the rows."""
    for name in ("model_init_kwargs", "teacher_model_init_kwargs"):
        kwargs = made.left.pop(name, None)
        if name == "model_init_kwargs" and isinstance(kwargs, dict):
            renames = {"torch_dtype": "dtype", "revision": "model_revision"}
            for key, value in kwargs.items():
                made.left.setdefault(renames.get(key, key), value)
    model = made.take("model_name_or_path")
    made.options["model"] = "MODEL" if model is None else model
    if model is None:
        made.comments.append("MODEL: the name or the folder of the model; give it yourself")
    if not made.has("eval_strategy"):
        for name in OF_EVALUATIONS:
            made.left.pop(name, None)
    changed = {
        option: made.left.pop(f"{name} after", None)
        for option, name in (("dataset", "dataset_name"), ("eval_dataset", "eval_dataset"))
    }
    dataset = made.take("dataset_name")
    made.options["dataset"] = "DATASET" if dataset is None else dataset
    if dataset is None:
        made.comments.append("DATASET: a file, a folder or a name on the Hub; give it yourself")
    for option, changes in changed.items():
        if changes:
            rows = "rows" if option == "dataset" else "held-out rows"
            made.comments.append(
                f"the script changes the {rows} ({changes}): save them by `to_json` and give that file as --{option}, "
                "without a split"
            )
    made.options["output_dir"] = made.take("output_dir")
    made.renamed("dataset_train_split", "dataset_split")
    if "dataset_test_split" in made.left:
        made.left.setdefault("eval_dataset", dataset)
        made.left.setdefault("eval_split", made.left.pop("dataset_test_split"))
    made.renamed("eval_dataset", "eval_dataset")
    made.renamed("eval_split", "eval_split")
    revision = made.take("model_revision")
    made.give("revision", None if revision == "main" else revision)

    # Weights: 16 bits, or 4 under adapters.
    dtype = str(made.take("dtype") or made.take("torch_dtype") or "").removeprefix("torch.")
    made.left.pop("torch_dtype", None)
    if made.take("bf16") or dtype == "bfloat16":
        made.options["dtype"] = "bfloat16"
    if dtype == "float16":
        made.comments.append("dtype=float16: weights are bfloat16 or float32 here")
    if made.take("use_peft") or any(name in made.left for name in ("lora_r", "lora_alpha")):
        made.options["lora_rank"] = made.take("lora_r") or 16
        made.give("lora_alpha", made.take("lora_alpha") or 32)
        targets = made.take("lora_target_modules")
        if targets is None:
            made.comments.append(
                "lora_target_modules is not given: PEFT then takes a model's own, mostly q_proj and v_proj; here "
                "--lora_targets is all-linear"
            )
        made.give("lora_targets", ",".join(targets) if isinstance(targets, list) else targets)
    for name in ("lora_r", "lora_alpha", "lora_target_modules"):
        made.left.pop(name, None)
    made.renamed("gradient_checkpointing", "gradient_checkpointing")
    if made.take("activation_offloading"):
        made.options |= {"gradient_checkpointing": True, "checkpoint_activations_on": "cpu"}

    # DeepSpeed: of its file the stage, by its name if it is not here.
    deepspeed = made.take("deepspeed")
    if deepspeed is not None:
        text = str(deepspeed)
        stage = next((digit for digit in "0123" if f"zero{digit}" in text.replace("_", "")), None)
        if stage is not None:
            made.give("zero_stage", int(stage))
        if not text.startswith("zero"):
            made.say(
                "deepspeed",
                "--zero_stage and --offload say this here; the rest of such a file is chosen",
            )


def optimizer(made: Conversion) -> None:
    """The optimizer and its schedule but for the warm-up."""
    made.renamed("learning_rate", "lr")
    schedule = str(made.take("lr_scheduler_type"))
    known = {"linear", "cosine", "constant"}
    kind = schedule if schedule in known else schedule.partition("_with")[0]
    if kind not in known:
        made.say(
            "lr_scheduler_type",
            "linear is taken, not constant or cosine; --lr_schedule module:function takes yours (docs/hooks.md)",
        )
        kind = "linear"
    elif kind != schedule and kind != "constant":
        made.say(
            "lr_scheduler_type",
            f"{kind} is taken, which ends at 0; --lr_schedule module:function takes yours (docs/hooks.md)",
        )
    made.give("lr_schedule", kind)


def length(made: Conversion, rows_of_step: int, updates: float, *, sampled: bool) -> None:
    """Steps, the warm-up, checkpoints and evaluations; a step has so many rows and updates."""
    unit = "rollouts" if sampled else "updates"
    of_updates = f" / {updates:g} updates of a rollout" if sampled else ""

    def steps_of(count: float, name: str, option: str) -> int:
        if updates == 1:
            return max(1, int(count))
        return made.whole(count / updates, f"{option} {{}} = {name} {count:g}{of_updates}")

    # The length, in TRL's updates if it is known.
    most, epochs = made.take("max_steps"), made.take("num_train_epochs")
    total = most if most > 0 else None
    held_out = 0 if "eval_dataset" in made.options else made.known["eval_size"].default
    trained = None if made.rows is None else max(1, made.rows - held_out)
    rows = f"{made.rows} rows" if not held_out else f"({made.rows} - {held_out} held-out) rows"
    if most > 0:
        made.options["steps"] = steps_of(most, "max_steps", "steps")
    else:
        made.give("num_train_epochs", float(epochs), "num_train_epochs")
        if trained is not None:
            steps = steps_of_passes(float(epochs), trained, rows_of_step)
            total = steps * updates
            made.arithmetic.append(
                f"{steps} steps = {epochs:g} epochs x {rows} / {rows_of_step} rows of a step, rounded up"
            )

    # The warm-up, in updates; a fraction is one of all updates.
    ratio, warmup = made.take("warmup_ratio") or 0, made.take("warmup_steps")
    if 0 < warmup < 1:
        ratio, warmup = warmup, 0
    if ratio and not warmup and total is None:
        made.comments.append(
            f"warmup_ratio={ratio:g}: of all updates, whose number follows from the rows; give --rows N to from-trl, "
            "or --warmup_steps yourself"
        )
    elif ratio and not warmup:
        warmup = math.ceil(ratio * total)
        made.arithmetic.append(f"warmup_steps {warmup} = {ratio:g} x {total:g} updates, rounded up")
    made.give("warmup_steps", int(warmup))

    for kind, option in (("save", "save_every"), ("eval", "eval_every")):
        strategy = made.take(f"{kind}_strategy")
        every = made.take(f"{kind}_steps") or made.defaults["logging_steps"]
        if strategy == "epoch" and trained is not None:
            every = max(1, trained // rows_of_step)
            made.options[option] = every
            made.arithmetic.append(
                f"{option} {every} = an epoch of {rows} / {rows_of_step} rows of a step, rounded down"
            )
        elif strategy == "epoch":
            made.comments.append(
                f"{kind}_strategy=epoch: --{option} counts {unit}; give --rows N to from-trl, or --{option} yourself"
            )
        elif strategy == "steps" and every < 1 and total is not None:
            steps = math.ceil(every * total / updates)
            made.options[option] = steps
            made.arithmetic.append(
                f"{option} {steps} = {kind}_steps {every:g} x {total:g} updates{of_updates}, rounded up"
            )
        elif strategy == "steps" and every >= 1:
            made.give(
                option,
                steps_of(every, f"{kind}_steps", option),
                f"{kind}_steps",
                f"{kind}_strategy",
            )
        elif strategy == "steps":
            made.say(
                f"{kind}_steps",
                f"a part of all steps; give --rows N to from-trl, or --{option} yourself",
            )
        elif strategy == "best":
            made.say("save_strategy", "the last step's model is saved, and checkpoints have others")
        elif kind == "save":
            made.options[option] = 0
    if not made.has("eval_strategy"):
        made.comments.append(
            "eval_strategy is no: here the last 64 rows are held out and evaluated; --eval_size 0 trains on all rows"
        )


def output(made: Conversion) -> None:
    """Where a run reports, and what is not an option of a run."""
    report_to = made.take("report_to") or []
    report_to = [report_to] if isinstance(report_to, str) else report_to
    others = [name for name in report_to if name not in ("none", "tensorboard", "all", "wandb")]
    if "wandb" in report_to and not made.has("wandb_project"):
        made.comments.append("report_to=wandb: give --wandb_project and the project's name")
    if others:
        made.say("report_to", "TensorBoard, metrics.jsonl and Weights & Biases are written")
    if made.take("resume_from_checkpoint"):
        made.comments.append("resume_from_checkpoint: add --resume when you continue the run")
    made.left.pop("hub_token", None)
    made.renamed("seed", "seed")
    if made.left.pop("push_to_hub()", False) and not made.has("push_to_hub"):
        made.comments.append(
            "the script calls push_to_hub(): --push_to_hub true uploads the model at the end of the run"
        )


def update(made: Conversion, *, batch: str = "batch_size", pairs: bool = False) -> int:
    """The batch of trainers without a rollout; returns its rows."""
    of_device = made.take("per_device_train_batch_size")
    accumulated = made.take("gradient_accumulation_steps")
    rows = of_device * accumulated * made.processes
    made.give(batch, rows)
    made.arithmetic.append(
        f"{batch} {rows} = {of_device} per device x {accumulated} gradient_accumulation_steps x "
        f"{processes_of(made)}"
    )
    if made.has("per_device_train_batch_size"):
        made.options["micro_batch_size"] = of_device * (2 if pairs else 1)
        if pairs:
            made.arithmetic.append(
                f"micro_batch_size {2 * of_device} sequences = {of_device} pairs"
            )
    return rows


def processes_of(made: Conversion) -> str:
    """Return the number of processes in words."""
    return f"{made.processes} process" + ("es" if made.processes > 1 else "")


# Each trainer.


def sft(made: Conversion) -> None:
    """SFTConfig."""
    if "max_seq_length" in made.left:
        made.left.setdefault("max_length", made.left.pop("max_seq_length"))
    made.renamed("max_length", "max_length")
    if made.take("assistant_only_loss"):
        made.options["assistant_turns"] = "all"
    if made.take("packing"):
        made.options["packing"] = True
        made.say(
            "packing",
            "TRL counts packed rows of max_length in a batch, which hold several rows each; --batch_size counts rows",
        )
    column = made.take("dataset_text_field")
    made.give("prompt_column", None if column == "text" else column)
    loss = made.take("loss_type")
    if loss not in (None, "nll", "chunked_nll"):
        made.another_loss.append(f"{loss} of SFTConfig; the negative log-likelihood is trained")
    if made.left.pop("completion_only_loss", None) is False:
        made.say("completion_only_loss", "the prompt of a row is never trained")
    length(made, update(made), 1, sampled=False)


def pair_lengths(made: Conversion) -> None:
    """The length of prompt and response, of which TRL bounds the sum."""
    most, prompt = made.take("max_length"), made.take("max_prompt_length")
    response = made.take("max_completion_length")
    if prompt is None:
        prompt = 512 if most is None or most > 512 else most // 2
    if response is None and most is not None:
        response = max(1, most - prompt)
        made.arithmetic.append(
            f"max_length {most} = max_prompt_length {prompt} + max_response_length {response}; of TRL's the sum alone "
            "is bounded"
        )
    made.give("max_prompt_length", prompt)
    made.give("max_response_length", response)


def dpo(made: Conversion) -> None:
    """DPOConfig, CPOConfig and ORPOConfig."""
    pair_lengths(made)
    made.renamed("beta", "beta")
    if made.found.config == "ORPOConfig":
        made.options |= {"loss_type": "orpo", "nll_coef": 1.0}
    else:
        losses = made.take("loss_type")
        losses = losses if isinstance(losses, list) else [losses]
        weights = made.left.pop("loss_weights", None) or [1.0] * len(losses)
        weight_of = dict(zip(losses, weights, strict=False))
        if "sft" in weight_of:
            made.give("nll_coef", float(weight_of["sft"]))
        loss = losses[0].replace("_", "-")
        is_cpo = made.found.config == "CPOConfig"
        listed = ("sigmoid", "hinge", "ipo", "apo-zero", "apo-down")
        if loss == "simpo" and is_cpo:
            made.options |= {"loss_type": loss, "margin": float(made.take("simpo_gamma"))}
        elif loss in listed and not is_cpo:
            made.give("loss_type", loss)
        else:
            made.options["loss_type"] = "sigmoid"
            made.another_loss.append(
                f"{losses[0]} of {made.found.config}; --loss_type sigmoid is DPO's, with a reference model"
            )
        if [name for name in losses[1:] if name != "sft"]:
            summed = " + ".join(losses)
            made.another_loss.append(
                f"{summed}, as losses are not added up; {made.options.get('loss_type', loss)} is trained"
            )
        if is_cpo:
            made.give("nll_coef", float(made.take("cpo_alpha")), "cpo_alpha")
        made.left.pop("simpo_gamma", None)
        made.give("nll_coef", made.take("rpo_alpha"))
    if made.take("sync_ref_model"):
        made.say("sync_ref_model", "the reference of pairs stays the starting model")
    for name in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
        made.left.pop(name, None)
    length(made, update(made, pairs=True), 1, sampled=False)


def reward(made: Conversion) -> None:
    """RewardConfig."""
    pair_lengths(made)
    made.renamed("center_rewards_coefficient", "centering")
    length(made, update(made, pairs=True), 1, sampled=False)


def kto(made: Conversion) -> None:
    """KTOConfig."""
    made.renamed("max_length", "max_length")
    made.renamed("beta", "beta")
    loss = made.take("loss_type")
    if loss != "kto":
        made.another_loss.append(f"{loss} of KTOConfig; KTO's, arXiv:2402.01306, is trained")
    made.left.pop("max_completion_length", None)
    length(made, update(made), 1, sampled=False)


def sampling(made: Conversion) -> None:
    """How responses are sampled, and by whom."""
    made.give("max_new_tokens", made.take("max_completion_length") or made.take("max_new_tokens"))
    made.left.pop("max_new_tokens", None)
    if made.has("max_prompt_length"):
        made.say("max_prompt_length", "longer prompts are dropped and counted, not cut")
    made.renamed("temperature", "temperature")
    for name, off in (("top_k", (-1, 0)), ("top_p", ()), ("min_p", ())):
        value = made.take(name)
        made.give(name, None if value in off else value)
    if made.take("use_vllm"):
        url = made.take("vllm_server_base_url")
        host, port = made.take("vllm_server_host"), made.take("vllm_server_port")
        if url is None and (host or port):
            url = f"http://{'127.0.0.1' if host in (None, '0.0.0.0') else host}:{port or 8000}"
        if url is None:
            made.say(
                "use_vllm",
                "start an unmodified vLLM server yourself and add --server URL (docs/rollouts.md)",
            )
        made.give("server", url)
        if url is not None:
            made.renamed("vllm_server_timeout", "server_timeout")
            if made.take("vllm_enable_sleep_mode"):
                made.options["server_sleeps"] = True
    for name in ("vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"):
        made.left.pop(name, None)
    made.left.pop("vllm_server_base_url", None)


def rewards(made: Conversion) -> None:
    """The scorers."""
    verifiers = []
    functions = made.take("reward_funcs") or []
    for reward in functions if isinstance(functions, list) else [functions]:
        name = reward.source if isinstance(reward, Unread) else str(reward)
        short = name.rpartition(":")[2].rpartition(".")[2]
        if short in REWARDS:
            verifiers.append(REWARDS[short])
        elif short.startswith("get_soft_overlong_punishment"):
            made.comments.append(
                f"{name}: give --overlong_buffer, with the tokens of its soft_punish_cache"
            )
        elif is_unread(reward):
            made.comments.append(f"reward {shown(reward)}: give it as --verifiers module:function")
        elif ":" in name:
            verifiers.append(name)
        elif "/" in name:
            verifiers.append(f"reward_model:{name}")
        else:
            verifiers.append(name.replace(".", ":", 1) if "." in name else f"rewards:{name}")
            made.comments.append(
                f"reward {name}: --verifiers takes module:function; name its module"
            )
    model = made.take("reward_model_name_or_path")
    verifiers += [f"reward_model:{model}"] if model else []
    module = Path(made.found.where.partition(" line ")[0]).stem
    if any(text.startswith(f"{module}:") for text in verifiers):
        made.comments.append(
            f"--verifiers imports {module}.py: move the rewards to a file of their own if that would start training"
        )
    if not verifiers:
        made.comments.append("no reward was found: give --verifiers (docs/verifiers.md)")
        return
    made.options["verifiers"] = verifiers
    weights = made.take("reward_weights")
    if weights is not None:
        made.options["verifier_weights"] = [float(weight) for weight in weights]


def rollouts(made: Conversion) -> float:
    """The batch of trainers that sample groups; returns the updates of a rollout."""
    of_device = made.take("per_device_train_batch_size")
    accumulated = made.take("gradient_accumulation_steps")
    at_once = of_device * made.processes
    responses = made.take("generation_batch_size")
    per_rollout = made.take("steps_per_generation")
    # A printed config has both, resolved for the processes that printed it.
    if per_rollout is not None and responses not in (None, at_once * per_rollout):
        made.comments.append(
            f"generation_batch_size={responses} was resolved on {responses / (of_device * per_rollout):g}; "
            f"steps_per_generation={per_rollout} is taken, which is {at_once * per_rollout} responses on "
            f"{processes_of(made)}"
        )
    is_fixed = responses is not None and per_rollout is None
    if is_fixed:
        per_rollout = responses / at_once
    per_rollout = per_rollout or accumulated
    if per_rollout < accumulated:
        made.arithmetic.append(
            f"an update of TRL is on {accumulated / per_rollout:g} rollouts of {per_rollout:g} steps_per_generation; "
            f"here it is one rollout, of {accumulated} gradient_accumulation_steps"
        )
        per_rollout = accumulated
    group = made.take("num_generations")
    made.give("group_size", group, "num_generations")
    prompts = made.whole(
        at_once * per_rollout / group,
        f"prompts_per_step {{}} = {of_device} per device x {per_rollout:g} steps_per_generation x "
        f"{processes_of(made)} / {group} num_generations",
    )
    if at_once * per_rollout % group:
        fitting = group // math.gcd(group, int(of_device * per_rollout))
        remedy = (
            "choose another num_generations"
            if is_fixed
            else f"give the number of its processes, {fitting} or a multiple of it, by --processes N of from-trl"
        )
        made.comments.append(
            f"the {at_once * per_rollout:g} responses of {processes_of(made)} make no whole groups of {group}, and TRL "
            f"refuses that; {remedy}"
        )
    made.give("prompts_per_step", prompts)
    if prompts % made.processes:
        made.comments.append(
            f"{prompts} prompts do not divide over {processes_of(made)}, as a run here needs: start it on "
            f"{math.gcd(prompts, made.processes)}, or give another --prompts_per_step"
        )
    minibatches = made.whole(
        per_rollout / accumulated,
        f"minibatches {{}} = {per_rollout:g} steps_per_generation / {accumulated} gradient_accumulation_steps",
    )
    made.give("minibatches", minibatches)
    made.renamed("num_iterations", "epochs")
    if made.has("per_device_train_batch_size"):
        made.options["micro_batch_size"] = of_device
    length(made, prompts, minibatches * made.take("num_iterations"), sampled=True)
    return minibatches * made.take("num_iterations")


def grpo(made: Conversion) -> None:
    """GRPOConfig and RLOOConfig."""
    iterations = made.found.options.get("num_iterations")
    if isinstance(iterations, int):
        made.defaults["num_iterations"] = iterations
    updates = rollouts(made)
    sampling(made)
    rewards(made)

    # The loss: a preset, and what TRL's loss of that name does otherwise.
    low = made.take("epsilon")
    high = made.take("epsilon_high")
    high = low if high is None else high
    if made.found.config == "RLOOConfig":
        made.options |= {"preset": "rloo", "surrogate": "clip", "ratio_level": "sequence-sum"}
        made.options |= {"loss_agg": "seq-mean-token-mean"}
        made.give("clip_low", low if low != 0.2 else None)
        made.give("clip_high", high if high != 0.2 else None)
    else:
        grpo_loss(made, low, high)
    kl_coef = made.take("beta")
    made.give("kl_coef", float(kl_coef), "beta")
    corrects = made.take("use_bias_correction_kl")
    if kl_coef and made.found.config == "RLOOConfig":
        made.options["kl_in"] = "reward"
    elif kl_coef and corrects is False:
        made.options["kl_estimator"] = "k3"
    if made.take("sync_ref_model"):
        every = made.take("ref_model_sync_steps")
        made.options["ref_sync_every"] = made.whole(
            every / updates, f"ref_sync_every {{}} = ref_model_sync_steps {every} / {updates:g}"
        )
        made.renamed("ref_model_mixup_alpha", "ref_mixup_alpha")
    for name in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
        made.left.pop(name, None)

    # What corrects for a server's log-probabilities.
    mode = made.take("vllm_importance_sampling_mode")
    high, low = (made.take(f"vllm_importance_sampling_clip_{end}") for end in ("max", "min"))
    corrected = made.take("vllm_importance_sampling_correction") is not False
    made.left.pop("vllm_importance_sampling_cap", None)
    if "server" in made.options and corrected:
        made.options["rollout_correction"] = str(mode or "sequence_mask").replace("_", "-")
        made.options["rollout_high"] = float(high or 3.0)
        made.give("rollout_low", low)


def grpo_loss(made: Conversion, low: float, high: float) -> None:
    """The loss of GRPOConfig: the preset of the same name, and how TRL's differs from it."""
    preset = str(made.take("loss_type"))
    options: dict[str, Any] = {"preset": preset}
    level = made.take("importance_sampling_level") or "token"
    if preset == "cispo":
        options["clip_high"] = high - 1
        made.arithmetic.append(
            f"clip_high {high - 1:g} = epsilon_high {high:g} - 1, an offset here"
        )
    elif preset in ("sapo", "vespo"):
        pass
    elif level == "sequence" and preset == "grpo":
        options = {"preset": "gspo", "clip_low": low, "clip_high": high}
    else:
        options |= {"clip_low": low, "clip_high": high}
        if level == "sequence" or preset == "luspo":
            options["ratio_level"] = level
    defaults = {"clip_low": 0.2, "clip_high": 0.2}
    if preset == "dapo":
        defaults.pop("clip_high")
    if preset == "luspo" or options["preset"] == "gspo":
        defaults = {}
    is_default = {name for name, value in defaults.items() if options.get(name) == value}
    made.options |= {name: value for name, value in options.items() if name not in is_default}
    if "loss_type" not in made.found.options:
        made.from_defaults += [f"--{name}" for name in options if name not in is_default]

    scale = made.take("scale_rewards")
    scale = {True: "group", False: "none"}.get(scale, scale) if isinstance(scale, bool) else scale
    advantages = {"group": "group-std", "batch": "group-mean-batch-std", "none": "group-mean"}
    advantage = advantages.get(scale)
    if made.take("multi_objective_aggregation") == "normalize_then_sum":
        advantage = "gdpo"
    usual = "group-mean" if preset == "dr_grpo" else "group-std"
    if advantage is not None and advantage != usual:
        made.options["advantage"] = advantage
    if made.take("top_entropy_quantile") not in (None, 1.0):
        made.options["top_entropy"] = made.found.options["top_entropy_quantile"]


def distill(made: Conversion) -> None:
    """GKDConfig and DistillationConfig."""
    teacher = made.take("teacher_model_name_or_path")
    made.options["teacher"] = "TEACHER" if teacher is None else teacher
    if teacher is None:
        made.comments.append("TEACHER: the name or the folder of the teacher; give it yourself")
    prompts = update(made, batch="prompts_per_step")
    length(made, prompts, 1, sampled=False)
    beta = float(made.take("beta"))
    if 0 < beta < 1:
        made.options |= {"direction": "jensen-shannon"}
        made.give("jsd_beta", beta, "beta")
    else:
        made.give("direction", "reverse" if beta == 1 else "forward")
    if made.found.config == "GKDConfig":
        made.options["distill_temperature"] = made.defaults["temperature"]
        if made.has("temperature"):
            made.options["distill_temperature"] = made.found.options["temperature"]
        made.renamed("lmbda", "on_policy")
        if "lmbda" not in made.found.options:
            made.from_defaults.append("--on_policy")
        most = made.take("max_length")
        if most is not None:
            made.say("max_length", "--max_prompt_length and --max_new_tokens bound a row")
    sampling(made)


TRAINERS: dict[str, Callable[[Conversion], None]] = {
    "sft": sft,
    "reward": reward,
    "dpo": dpo,
    "kto": kto,
    "grpo": grpo,
    "distill": distill,
}


def convert(found: Found, processes: int | None = None, rows: int | None = None) -> Conversion:
    """Return our options for a run of TRL's."""
    made = Conversion(found, processes, rows)
    model_and_rows(made)
    optimizer(made)
    output(made)
    TRAINERS[made.command](made)
    for name, value in list(made.left.items()):
        remaining(made, name, value)
    leave_out_meaningless(made)
    return made


def remaining(made: Conversion, name: str, value: Any) -> None:
    """Convert an option that takes no more than a name, or say why there is none."""
    idle = value in IDLE or IDLE_OF.get(name) == value
    if idle and (name not in made.known or made.found.is_printed):
        return
    if is_unread(value):
        made.take(name)
        return
    option = name if name in made.known else None
    clause = trl.NAMES.get(name, "").split("; ")[0]
    words = clause.removeprefix("--").replace(",", " ").replace(":", " ").split()
    if option is None and clause.startswith("--") and words[0] in made.known:
        option = words[0]
    if option is not None:
        made.give(option, value)
    elif made.found.is_printed and is_default_of_transformers(name, value):
        return
    else:
        told = trl.NAMES.get(name) or trl.reason_of(name)
        reason = told or "not among the options of TRL that this command knows"
        made.absent.setdefault(reason, []).append(f"{name}={shown(value)}")


def leave_out_meaningless(made: Conversion) -> None:
    """Leave out what means nothing beside the others here, such as where to push a model that is not pushed."""
    kept = dict(made.options)
    for name in made.found.options:
        refused = refusal(made)
        named = (refused or "").partition("=")[0]
        if named in made.found.options and named in made.options:
            del made.options[named]
        elif refused is None and name in made.options and not config_of(made).has_meaning(name):
            del made.options[name]
    left_out = [name for name in kept if name not in made.options]
    if left_out and not made.found.is_printed:
        made.comments.append(
            f"{', '.join(left_out)}: left out, as it means nothing beside the others"
        )


def is_default_of_transformers(name: str, value: Any) -> bool:
    """Return True for an option that asks for nothing, as a printed config has all of them."""
    import transformers

    fields = {each.name: each for each in dataclasses.fields(transformers.TrainingArguments)}
    of_none = name == "accelerator_config"
    return of_none or (name in fields and str(fields[name].default) == str(value))


def script_of(made: Conversion) -> str:
    """Return the shell script: comments, and the command."""
    lines = [f"# {made.found.config} of {made.found.where}, on {processes_of(made)}."]
    lines += [f"# ANOTHER LOSS than {text}" for text in made.another_loss]
    lines += [f"#   {text}" for text in dict.fromkeys(made.arithmetic)]
    if made.from_defaults:
        names = " ".join(dict.fromkeys(made.from_defaults))
        lines.append(f"# From TRL's defaults, which differ from those here: {names}")
    if made.comments or made.absent:
        lines.append("# What has no counterpart, or is for you to look at:")
        lines += [f"#   {text}" for text in dict.fromkeys(made.comments)]
        lines += [f"#   {', '.join(names)}: {reason}" for reason, names in made.absent.items()]
    refused = refusal(made)
    if refused is not None:
        lines.append(f"# fused-rl {made.command} refuses this: {refused}")
    words = [f"fused-rl {made.command}"]
    if made.processes > 1:
        module = cli.TRAINERS[made.command].module
        words = [f"deepspeed --num_gpus {made.processes} --module {module}"]
    names = sorted(made.options, key=[*FIRST, *made.known].index)
    words += [f"--{name} {word_of(made.options[name])}" for name in names]
    return "\n".join([*(escaped(line) for line in lines), " \\\n    ".join(words)])


def word_of(value: Any) -> str:
    """Return a value as a shell's word, which our command line reads back."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return shlex.quote(json.dumps(value))
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        return shlex.quote(f"[{', '.join(map(quoted, value))}]")
    return shlex.quote(str(value))


def quoted(value: Any) -> str:
    """Return a value in a list of YAML, in which backslashes of patterns stay."""
    if isinstance(value, str) and not re.fullmatch(r"[\w./:-]+", value):
        return "'" + value.replace("'", "''") + "'"
    return str(value)


def config_of(made: Conversion) -> Any:
    """Return our config of the command."""
    words = " ".join(f"--{name} {word_of(value)}" for name, value in made.options.items())
    return parse(cli.TRAINERS[made.command].config_class(), shlex.split(words))


def refusal(made: Conversion) -> str | None:
    """Return why our command refuses these options; None if it takes them."""
    try:
        config_of(made)
    except InputError as error:
        return " ".join(str(error).split())
    return None


@around("fused-rl from-trl")
def main(argv: list[str] | None = None) -> None:
    """`fused-rl from-trl`."""
    parser = argparse.ArgumentParser(
        prog="fused-rl from-trl", description=str(__doc__).split("\n", 1)[0]
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--trainer", choices=[*CONFIGS], help="whose options a YAML file has")
    parser.add_argument("--processes", type=int, help="processes (GPUs) of TRL's run; default 1")
    parser.add_argument("--rows", type=int, help="training rows, to turn epochs into steps")
    given = parser.parse_args(argv)
    found = read(given.file, given.trainer)
    print("\n\n".join(script_of(convert(each, given.processes, given.rows)) for each in found))


if __name__ == "__main__":
    main()
