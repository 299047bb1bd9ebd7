"""`fused-rl from-trl FILE`: a script, a YAML file, a command line or a printed config of TRL, as our command.

    fused-rl from-trl train.py
    fused-rl from-trl config.yaml --trainer grpo --processes 8 --rows 7473 > run.sh

It prints a shell script: comments with the arithmetic and with what has no counterpart here, and then the command.
Nothing in FILE is run. Options that only have another name are in fused_rl/trainers/base/trl.py; this module has those
whose conversion takes more than a name.
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
from fused_rl.trainers.commands.trl_files import CONFIGS, Found, is_unread, of_model, read
from fused_rl.trainers.data.order import steps_of as steps_of_passes
from fused_rl.trainers.options import FIRST
from fused_rl.trainers.policy.options import LossConfig, loss_options
from fused_rl.trainers.run.command import around
from fused_rl.trainers.run.parse import parse

# TRL's defaults of the options whose value matters for the conversion.
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
# The names of TRL's own rewards here.
REWARDS = {
    "accuracy_reward": "math",
    "accuracy": "math",
    "reasoning_accuracy_reward": "math",
    "think_format_reward": r"regex:(?s)^<think>(?!.*<think>).*?</think>.*$",
    "format": "format",
}
# The options that make grpo compute TRL's RLOO.
RLOO = {
    "preset": "rloo",
    "surrogate": "clip",
    "ratio_level": "sequence-sum",
    "loss_agg": "seq-mean-token-mean",
}
# The advantage here for each value of TRL's scale_rewards.
ADVANTAGES = {
    "group": "group-std",
    "True": "group-std",
    "batch": "group-mean-batch-std",
    "none": "group-mean",
    "False": "group-mean",
}
# Options that TRL reads only if it evaluates.
OF_EVALUATIONS = (
    "eval_dataset",
    "eval_dataset_config",
    "eval_split",
    "dataset_test_split",
    "eval_dataset after",
)
# Values that request nothing, so that they need no comment.
IDLE = (None, False, "", "none", "no", "auto", [], {})
# Defaults of options without a counterpart. A printed config has all of these, so they need no comment either.
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
    """The options here for one run of TRL, and the comments about them, while they are converted one after another."""

    def __init__(self, found: Found, processes: int | None, rows: int | None):
        self.found = found
        self.command = COMMANDS[found.config]
        self.known = cli.TRAINERS[self.command].config_class().model_fields
        self.comments: list[str] = []
        self.processes = processes or 1
        if isinstance(found.processes, int) and not processes:
            self.processes = found.processes
        elif found.processes and not processes:
            self.comments.append(
                f"processes {shown(found.processes)}: 1 is assumed; give --processes N to from-trl"
            )
        self.rows = rows
        self.left = dict(found.options)
        """TRL's options that are given and not converted yet."""
        self.defaults = OF_ALL | DEFAULTS[found.config]
        """TRL's defaults of the options that are not converted yet."""
        self.options: dict[str, Any] = {}
        """The options of our command."""
        self.arithmetic: list[str] = []
        """Lines that show how numbers were computed."""
        self.another_loss: list[str] = []
        """Losses of TRL that do not exist here, each with the loss that the command trains instead."""
        self.from_defaults: set[str] = set()
        """Our options whose value is a default of TRL."""
        self.holds_out = True
        """True if the run holds out the last of the rows, as there are no others to evaluate on."""
        self.absent: dict[str, list[str]] = {}
        """TRL's options that are left out, by the reason."""

    def take(self, name: str) -> Any:
        """Return the value of an option of TRL, or TRL's default if it is not given, and mark it as converted."""
        default = self.defaults.pop(name, None)
        value = self.left.pop(name, None)
        if is_unread(value):
            remedy = "give it yourself" if default is None else f"{name}={default} is assumed"
            self.comments.append(
                f"{name}={value.source}: its value is known when the script runs; {remedy}"
            )
            return default
        return default if value is None else value

    def drop(self, *names: str) -> None:
        """Mark options of TRL as converted that have no meaning beside the others."""
        for name in names:
            self.left.pop(name, None)
            self.defaults.pop(name, None)

    def has(self, name: str) -> bool:
        """Return True if an option of TRL is given with a value that requests something."""
        return name in self.found.options and self.found.options[name] not in IDLE

    def give(self, option: str, value: Any, *names: str) -> None:
        """Set an option of ours, unless its value is None or our default.

        `names` are the options of TRL from which the value comes. If the file gives none of them, the script says that
        the value is a default of TRL.
        """
        if value is None or value == self.known[option].default:
            return
        self.options[option] = value
        if names and not any(name in self.found.options for name in names):
            self.from_defaults.add(option)

    def renamed(self, name: str, option: str) -> None:
        """Set an option of ours to the value of an option of TRL."""
        self.give(option, self.take(name), name)

    def needed(self, name: str, option: str, what: str) -> Any:
        """Set an option that every run needs, and return its value, or None if the file does not say it.

        The command then has the option's name in capitals, for the user to replace; `what` says by what.
        """
        value = self.take(name)
        self.options[option] = option.upper() if value is None else value
        if value is None:
            self.comments.append(f"{option.upper()}: {what}; give it yourself")
        return value

    def say(self, name: str, text: str) -> None:
        """Add a comment on an option of TRL, with its value."""
        self.comments.append(f"{name}={shown(self.found.options.get(name))}: {text}")

    def whole(self, value: float, words: str) -> int:
        """Return a number rounded down to a whole one of at least 1, and add its arithmetic and what rounding changes.

        `words` say what the number is and where it comes from; {} stands for the number.
        """
        # A quotient that should be whole may be just below it.
        number = max(1, math.floor(value + 1e-9))
        changed = "" if number == value else f" = {value:.4g}, and must be a whole number"
        self.arithmetic.append(f"{words.format(number)}{changed}")
        return number


def shown(value: Any) -> str:
    """Return a value of TRL in the words of a comment, cut to 60 characters."""
    values = value if isinstance(value, list) else [value]
    texts = [each.source if is_unread(each) else str(each) for each in values]
    text = " ".join(", ".join(texts).split())
    return text if len(text) <= 60 else f"{text[:60]}…"


# Parts of every trainer's options. Each function here converts some options of TRL into options of `made`.


def model_and_rows(made: Conversion) -> None:
    """Convert the model, the rows to train on, and those that are held out."""
    # The arguments that load the model are options of their own, unless these are given, too.
    kwargs = made.left.pop("model_init_kwargs", None)
    if isinstance(kwargs, dict):
        made.left |= of_model(kwargs) | made.left
    made.drop("teacher_model_init_kwargs")
    made.needed("model_name_or_path", "model", "the name or the folder of the model")
    # A script may prepare held-out rows that it never evaluates on.
    if not made.has("eval_strategy"):
        made.drop(*OF_EVALUATIONS)
    made.holds_out = made.left.keys().isdisjoint(OF_EVALUATIONS)
    dataset = made.needed("dataset_name", "dataset", "a file, a folder or a name on the Hub")
    for name, option, kind in (
        ("dataset_name after", "dataset", "rows"),
        ("eval_dataset after", "eval_dataset", "held-out rows"),
    ):
        changes = made.left.pop(name, None)
        if changes:
            made.comments.append(
                f"the script changes the {kind} ({changes}): save them by `to_json` and give that file as --{option}, "
                "without a split"
            )
    # In TRL the held-out rows may be another split of the training rows' dataset.
    if "dataset_test_split" in made.left:
        made.left.setdefault("eval_dataset", dataset)
        made.left.setdefault("eval_split", made.left.pop("dataset_test_split"))
    made.renamed("eval_dataset", "eval_dataset")
    made.comments.append(
        "prompts that are text: TRL leaves them as they are; here each is a user's message if the tokenizer has a chat "
        "template, unless you give --raw_prompt true"
    )


def weights_and_memory(made: Conversion) -> None:
    """Convert the dtype of the weights, adapters, activation checkpointing and DeepSpeed."""
    revision = made.take("model_revision")
    made.give("revision", None if revision == "main" else revision)
    # "dtype" was "torch_dtype" before, and a training flag has the same effect here.
    dtype = str(made.take("dtype") or made.take("torch_dtype") or "").removeprefix("torch.")
    if made.take("bf16") or dtype == "bfloat16":
        made.options["dtype"] = "bfloat16"
    if dtype == "float16":
        made.comments.append("dtype=float16: weights are bfloat16 or float32 here")
    # A config of LoRA without use_peft still means that there are adapters; 16 and 32 are TRL's defaults.
    if made.take("use_peft") or not made.left.keys().isdisjoint(("lora_r", "lora_alpha")):
        made.options["lora_rank"] = made.take("lora_r") or 16
        made.give("lora_alpha", made.take("lora_alpha") or 32)
        targets = made.take("lora_target_modules")
        if targets is None:
            made.comments.append(
                "lora_target_modules is not given: PEFT then takes a model's own, mostly q_proj and v_proj; here "
                "--lora_targets is all-linear"
            )
        made.give("lora_targets", ",".join(targets) if isinstance(targets, list) else targets)
        made.left.setdefault("lora_dropout", 0.05)  # the default of a command line
    made.drop("torch_dtype", "lora_r", "lora_alpha", "lora_target_modules")
    if made.take("activation_offloading"):
        made.left["gradient_checkpointing"] = True
        made.options["checkpoint_activations_on"] = "cpu"

    # Only the stage of ZeRO is taken, by the name of DeepSpeed's file, because the file itself may not be here.
    if made.take("config_file"):
        made.say(
            "config_file",
            "of a launcher's file, only the number of processes and a stage of ZeRO in its name are taken",
        )
    deepspeed = made.take("deepspeed")
    stage = re.search(r"zero_?([0-3])", str(deepspeed))
    if stage is not None:
        made.give("zero_stage", int(stage[1]))
    if deepspeed is not None and not str(deepspeed).startswith("zero"):
        made.say(
            "deepspeed",
            "--zero_stage and --offload say this here; the rest of such a file is chosen",
        )


def optimizer(made: Conversion) -> None:
    """Convert the schedule of the learning rate, without its warm-up."""
    schedule = str(made.take("lr_scheduler_type"))
    # Schedules such as cosine_with_restarts have the shape of their first word.
    kind = schedule.partition("_with")[0]
    remedy = "--lr_schedule module:function takes yours (docs/hooks.md)"
    if kind not in ("linear", "cosine", "constant"):
        made.say("lr_scheduler_type", f"linear is taken, not constant or cosine; {remedy}")
        kind = "linear"
    elif kind not in (schedule, "constant"):
        made.say("lr_scheduler_type", f"{kind} is taken, which ends at 0; {remedy}")
    made.give("lr_schedule", kind)


def length(made: Conversion, rows_of_step: int, updates: float = 1, unit: str = "updates") -> None:
    """Convert the steps, the warm-up, checkpoints and evaluations.

    TRL counts optimizer updates. A step here is a rollout in trainers that sample, and may have several updates.

    Args:
        rows_of_step: the number of rows in a step here.
        updates: the number of optimizer updates in a step here.
        unit: the name of a step here, "updates" or "rollouts".
    """
    of_updates = f" / {updates:g} updates of a rollout" if unit == "rollouts" else ""

    def steps_of(count: float, name: str, option: str) -> int:
        """Return a number of TRL's updates as steps here."""
        if updates == 1:
            return max(1, int(count))
        return made.whole(count / updates, f"{option} {{}} = {name} {count:g}{of_updates}")

    # The length: `total` is the number of updates, or None if the number of rows, on which it depends, is not known.
    total, epochs = made.take("max_steps"), float(made.take("num_train_epochs"))
    held_out = made.known["eval_size"].default if made.holds_out else 0
    trained = made.rows and max(1, made.rows - held_out)
    counted = f"({made.rows} - {held_out} held-out)" if held_out else made.rows
    per_step = f"{counted} rows / {rows_of_step} rows of a step"
    if total > 0:
        made.options["steps"] = steps_of(total, "max_steps", "steps")
    else:
        made.give("num_train_epochs", epochs, "num_train_epochs")
        total = None
        if trained:
            steps = steps_of_passes(epochs, trained, rows_of_step)
            total = steps * updates
            made.arithmetic.append(f"{steps} steps = {epochs:g} epochs x {per_step}, rounded up")

    # The warm-up, which is in updates here, too; a fraction is a part of all updates.
    ratio, warmup = made.take("warmup_ratio") or 0, made.take("warmup_steps")
    warmup_name = "warmup_ratio"
    if 0 < warmup < 1:
        ratio, warmup, warmup_name = warmup, 0, "warmup_steps"
    if ratio and not warmup and total is None:
        made.comments.append(
            f"{warmup_name}={ratio:g}: of all updates, whose number follows from the rows; give --rows N to from-trl, "
            "or --warmup_steps yourself"
        )
    elif ratio and not warmup:
        warmup = math.ceil(ratio * total)
        made.arithmetic.append(
            f"warmup_steps {warmup} = {warmup_name} {ratio:g} x {total:g} updates, rounded up"
        )
    made.give("warmup_steps", int(warmup))

    # Checkpoints and evaluations: every epoch, every so many updates, or a fraction of all updates.
    for kind, option in (("save", "save_every"), ("eval", "eval_every")):
        strategy = made.take(f"{kind}_strategy")
        name = f"{kind}_steps"
        # TRL evaluates as often as it logs unless it is told otherwise.
        every = made.take(name) or made.defaults["logging_steps"]
        remedy = f"give --rows N to from-trl, or --{option} yourself"
        if strategy == "epoch" and trained:
            made.options[option] = max(1, trained // rows_of_step)
            made.arithmetic.append(
                f"{option} {made.options[option]} = an epoch of {per_step}, rounded down"
            )
        elif strategy == "epoch":
            made.comments.append(f"{kind}_strategy=epoch: --{option} counts {unit}; {remedy}")
        elif strategy == "steps" and every >= 1:
            made.give(option, steps_of(every, name, option), name, f"{kind}_strategy")
        elif strategy == "steps" and total is None:
            made.say(name, f"a part of all steps; {remedy}")
        elif strategy == "steps":
            made.options[option] = math.ceil(every * total / updates)
            made.arithmetic.append(
                f"{option} {made.options[option]} = {name} {every:g} x {total:g} updates{of_updates}, rounded up"
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
    """Convert where a run writes and reports, and what is not an option of a run here."""
    made.options["output_dir"] = made.take("output_dir")
    report_to = made.take("report_to") or []
    report_to = {report_to} if isinstance(report_to, str) else {*report_to}
    if "wandb" in report_to and not made.has("wandb_project"):
        made.comments.append("report_to=wandb: give --wandb_project and the project's name")
    if report_to - {"none", "tensorboard", "all", "wandb"}:
        made.say("report_to", "TensorBoard, metrics.jsonl and Weights & Biases are written")
    if made.take("resume_from_checkpoint"):
        made.comments.append("resume_from_checkpoint: add --resume when you continue the run")
    made.drop("hub_token")
    if made.take("push_to_hub()") and not made.has("push_to_hub"):
        made.comments.append(
            "the script calls push_to_hub(): --push_to_hub true uploads the model at the end of the run"
        )


def update(made: Conversion, *, batch: str = "batch_size", pairs: bool = False) -> None:
    """Convert the batch and the length of trainers without a rollout; `pairs` count as two sequences each."""
    of_device = made.take("per_device_train_batch_size")
    accumulated = made.take("gradient_accumulation_steps")
    rows_of_step = of_device * accumulated * made.processes
    made.give(batch, rows_of_step)
    made.arithmetic.append(
        f"{batch} {rows_of_step} = {of_device} per device x {accumulated} gradient_accumulation_steps x "
        f"{processes_of(made)}"
    )
    # A default of TRL's fits no particular model, so the micro-batch is then left to our own choice.
    if made.has("per_device_train_batch_size"):
        made.options["micro_batch_size"] = of_device * (2 if pairs else 1)
        if pairs:
            made.arithmetic.append(
                f"micro_batch_size {2 * of_device} sequences = {of_device} pairs"
            )
    length(made, rows_of_step)


def processes_of(made: Conversion) -> str:
    """Return the number of processes with its noun."""
    return f"{made.processes} process" + ("es" if made.processes > 1 else "")


# The options of each trainer.


def sft(made: Conversion) -> None:
    """Convert an SFTConfig."""
    # The option had this name in earlier versions of TRL.
    if "max_seq_length" in made.left:
        made.left.setdefault("max_length", made.left.pop("max_seq_length"))
    if made.take("packing"):
        made.options["packing"] = True
        made.say(
            "packing",
            "TRL counts packed rows of max_length in a batch, which hold several rows each; --batch_size counts rows",
        )
    # TRL's default is a column "text", which is read here without an option.
    column = made.take("dataset_text_field")
    made.give("prompt_column", None if column == "text" else column)
    loss = made.take("loss_type")
    if loss not in (None, "nll", "chunked_nll"):
        made.another_loss.append(f"{loss} of SFTConfig; the negative log-likelihood is trained")
    # Without these options TRL trains every token of a conversation, whose columns are not known here.
    of_completions = made.take("completion_only_loss")
    if of_completions is False and not made.has("assistant_only_loss"):
        made.another_loss.append(
            "that of every token, completion_only_loss=False; of messages and of prompts with completions, only what "
            "the assistant says is trained (a column text of rendered rows is trained whole)"
        )
    elif of_completions is None and not made.has("assistant_only_loss"):
        made.another_loss.append(
            "that of every token, if the rows are messages: the assistant's last turn is trained (--assistant_turns "
            "all: each of its turns); rows of prompt and completion, or of text, are trained as in TRL"
        )
    update(made)


def pairs(made: Conversion) -> None:
    """Convert the batch of pairs, and the lengths of prompt and response, of which TRL bounds only the sum."""
    # Without a bound of its own, the prompt gets 512 tokens, or half of the sum if that is smaller.
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
    update(made, pairs=True)


def dpo(made: Conversion) -> None:
    """Convert a DPOConfig, CPOConfig or ORPOConfig."""
    if made.found.config == "ORPOConfig":
        made.options |= {"loss_type": "orpo", "nll_coef": 1.0}
    else:
        preference_loss(made)
    if made.take("sync_ref_model"):
        made.say("sync_ref_model", "the reference of pairs stays the starting model")
    made.drop("ref_model_sync_steps", "ref_model_mixup_alpha")
    pairs(made)


def preference_loss(made: Conversion) -> None:
    """Convert the loss of a DPOConfig or CPOConfig, of which TRL may add up several."""
    # Only a sum with the negative log-likelihood ("sft") has a counterpart, which is nll_coef.
    losses = made.take("loss_type")
    losses = losses if isinstance(losses, list) else [losses]
    weights = made.take("loss_weights") or [1.0] * len(losses)
    weight_of = dict(zip(losses, weights, strict=False))
    made.give("nll_coef", weight_of.get("sft"))
    is_cpo = made.found.config == "CPOConfig"
    trained = ("simpo",) if is_cpo else ("sigmoid", "hinge", "ipo", "apo-zero", "apo-down")
    loss = losses[0].replace("_", "-")
    if loss not in trained:
        loss = made.options["loss_type"] = "sigmoid"
        made.another_loss.append(
            f"{losses[0]} of {made.found.config}; --loss_type sigmoid is DPO's, with a reference model"
        )
    made.give("loss_type", loss)
    if loss == "simpo":
        made.options["margin"] = made.take("simpo_gamma")
    made.drop("simpo_gamma")
    if {*losses[1:]} - {"sft"}:
        made.another_loss.append(
            f"{' + '.join(losses)}, as losses are not added up; {loss} is trained"
        )


def kto(made: Conversion) -> None:
    """Convert a KTOConfig."""
    loss = made.take("loss_type")
    if loss != "kto":
        made.another_loss.append(f"{loss} of KTOConfig; KTO's, arXiv:2402.01306, is trained")
    made.drop("max_completion_length")
    update(made)


def sampling(made: Conversion) -> None:
    """Convert how responses are sampled, and if a server samples them."""
    made.give("max_new_tokens", made.take("max_completion_length") or made.take("max_new_tokens"))
    if made.has("max_prompt_length"):
        made.say("max_prompt_length", "longer prompts are dropped and counted, not cut")
    if made.left.get("top_k") in (-1, 0):
        made.take("top_k")
    if made.take("use_vllm"):
        url = made.take("vllm_server_base_url")
        host, port = made.take("vllm_server_host"), made.take("vllm_server_port")
        # 0.0.0.0 is an address to listen on, not one to connect to.
        if url is None and (host or port):
            url = f"http://{'127.0.0.1' if host in (None, '0.0.0.0') else host}:{port or 8000}"
        made.give("server", url)
        if url is None:
            made.say(
                "use_vllm",
                "start an unmodified vLLM server yourself and add --server URL (docs/rollouts.md)",
            )
        else:
            made.renamed("vllm_server_timeout", "server_timeout")
    made.drop("max_new_tokens", "vllm_mode", "vllm_server_base_url", "vllm_server_timeout")
    made.drop("vllm_server_host", "vllm_server_port")


def rewards(made: Conversion) -> None:
    """Convert the rewards to scorers, which a command line names as module:function."""
    verifiers = []
    functions = made.take("reward_funcs") or []
    for reward in functions if isinstance(functions, list) else [functions]:
        name = reward.source if is_unread(reward) else str(reward)
        # A name without a module is one of TRL's rewards in a file or a command line, but a script may define its own.
        module, _, short = name.replace(":", ".").rpartition(".")
        is_of_trl = module.startswith("trl.") or not (module or is_unread(reward))
        if is_of_trl and short in REWARDS:
            verifiers.append(REWARDS[short])
        elif name.startswith("get_soft_overlong_punishment"):
            made.comments.append(
                f"{name}: give --overlong_buffer, with the tokens of its soft_punish_cache"
            )
        elif is_unread(reward):
            made.comments.append(f"reward {shown(reward)}: give it as --verifiers module:function")
        # A function of the script, a reward model on the Hub, or a name whose module must be guessed.
        elif ":" in name:
            verifiers.append(name)
        elif "/" in name:
            verifiers.append(f"reward_model:{name}")
        else:
            verifiers.append(f"{module or 'rewards'}:{short}")
            made.comments.append(
                f"reward {name}: --verifiers takes module:function; name its module"
            )
    model = made.take("reward_model_name_or_path")
    verifiers += [f"reward_model:{model}"] if model else []
    # To load such a reward, our command imports the script, which may not be meant for that.
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
    """Convert the batch of trainers that sample groups, and return the number of optimizer updates per rollout.

    TRL counts responses per device and updates; here a rollout has a number of prompts, which minibatches divide.
    """
    of_device = made.take("per_device_train_batch_size")
    accumulated = made.take("gradient_accumulation_steps")
    at_once = of_device * made.processes
    responses = made.take("generation_batch_size")
    per_rollout = made.take("steps_per_generation")
    # A printed config has both options, resolved for the number of processes that printed it.
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
    # TRL may accumulate an update over several rollouts, which here are one larger rollout.
    if per_rollout < accumulated:
        made.arithmetic.append(
            f"an update of TRL is on {accumulated / per_rollout:g} rollouts of {per_rollout:g} steps_per_generation; "
            f"here it is one rollout, of {accumulated} gradient_accumulation_steps"
        )
        per_rollout = accumulated
    responses = at_once * per_rollout

    # The groups: TRL counts responses, and prompts_per_step counts the groups of responses to one prompt.
    group = made.take("num_generations")
    made.give("group_size", group, "num_generations")
    prompts = made.whole(
        responses / group,
        f"prompts_per_step {{}} = {of_device} per device x {per_rollout:g} steps_per_generation x "
        f"{processes_of(made)} / {group} num_generations",
    )
    made.give("prompts_per_step", prompts)
    if responses % group:
        fitting = group // math.gcd(group, int(of_device * per_rollout))
        remedy = (
            "choose another num_generations"
            if is_fixed
            else f"give the number of its processes, {fitting} or a multiple of it, by --processes N of from-trl"
        )
        made.comments.append(
            f"the {responses:g} responses of {processes_of(made)} make no whole groups of {group}, and TRL "
            f"refuses that; {remedy}"
        )
    if prompts % made.processes:
        made.comments.append(
            f"{prompts} prompts do not divide over {processes_of(made)}, as a run here needs: start it on "
            f"{math.gcd(prompts, made.processes)}, or give another --prompts_per_step"
        )

    # The updates: minibatches of a rollout, and passes over it.
    minibatches = made.whole(
        per_rollout / accumulated,
        f"minibatches {{}} = {per_rollout:g} steps_per_generation / {accumulated} gradient_accumulation_steps",
    )
    made.give("minibatches", minibatches)
    iterations = made.take("num_iterations")
    made.give("epochs", iterations, "num_iterations")
    if made.has("per_device_train_batch_size"):
        made.options["micro_batch_size"] = of_device
    length(made, prompts, minibatches * iterations, "rollouts")
    return minibatches * iterations


def grpo(made: Conversion) -> None:
    """Convert a GRPOConfig or an RLOOConfig."""
    updates = rollouts(made)
    sampling(made)
    rewards(made)
    is_rloo = made.found.config == "RLOOConfig"
    # In TRL the upper bound is the lower one unless it is given.
    low = made.take("epsilon")
    high = made.take("epsilon_high")
    high = low if high is None else high
    if is_rloo:
        made.options |= RLOO
        made.give("clip_low", low if low != 0.2 else None)
        made.give("clip_high", high if high != 0.2 else None)
    else:
        grpo_loss(made, low, high)

    # The reference: the weight of the KL and its estimator, and when the reference is updated.
    kl_coef = made.take("beta")
    made.give("kl_coef", kl_coef, "beta")
    corrects = made.take("use_bias_correction_kl")
    if kl_coef and is_rloo:
        made.options["kl_in"] = "reward"
    elif kl_coef and corrects is False:
        made.options["kl_estimator"] = "k3"
    if made.take("sync_ref_model"):
        every = made.take("ref_model_sync_steps")
        made.options["ref_sync_every"] = made.whole(
            every / updates, f"ref_sync_every {{}} = ref_model_sync_steps {every} / {updates:g}"
        )
        made.renamed("ref_model_mixup_alpha", "ref_mixup_alpha")
    made.drop("ref_model_sync_steps", "ref_model_mixup_alpha")

    # TRL corrects for the difference of a server's log-probabilities unless it is told not to.
    mode = made.take("vllm_importance_sampling_mode")
    high, low = (made.take(f"vllm_importance_sampling_clip_{end}") for end in ("max", "min"))
    corrected = made.take("vllm_importance_sampling_correction") is not False
    made.drop("vllm_importance_sampling_cap")
    if "server" in made.options and corrected:
        made.options["rollout_correction"] = str(mode or "sequence_mask").replace("_", "-")
        made.options["rollout_high"] = float(high or 3.0)
        made.give("rollout_low", low)


def grpo_loss(made: Conversion, low: float, high: float) -> None:
    """Convert the loss of a GRPOConfig to the preset of the same name, and to options where TRL's loss differs from it.

    `low` and `high` are the distances of the clip bounds from 1.
    """
    preset = str(made.take("loss_type"))
    options: dict[str, Any] = {"preset": preset}
    level = made.take("importance_sampling_level") or "token"
    if preset == "cispo" and high < 1:
        made.comments.append(
            f"epsilon_high {high:g}: TRL bounds the weight to it; here the bound is at least 1, "
            "and that of the preset stays"
        )
    elif preset == "cispo":
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
    # Bounds of 0.2 are left out where they are the preset's own.
    bounds = {"dapo": ("clip_low",), "gspo": (), "luspo": ()}
    for name in bounds.get(options["preset"], ("clip_low", "clip_high")):
        if options.get(name) == 0.2:
            del options[name]
    made.options |= options
    if "loss_type" not in made.found.options:
        made.from_defaults.update(options)

    # The advantages, which the option names only where they are not the preset's.
    scale = made.take("scale_rewards")
    advantage = ADVANTAGES.get(str(scale))
    if made.take("multi_objective_aggregation") == "normalize_then_sum":
        advantage = "gdpo"
    usual = "group-mean" if preset == "dr_grpo" else "group-std"
    if advantage not in (None, usual):
        made.options["advantage"] = advantage
    quantile = made.take("top_entropy_quantile")
    made.give("top_entropy", None if quantile == 1.0 else quantile)


def distill(made: Conversion) -> None:
    """Convert a GKDConfig or a DistillationConfig."""
    what = "the name or the folder of the teacher"
    made.needed("teacher_model_name_or_path", "teacher", what)
    update(made, batch="prompts_per_step")
    # TRL's beta is the direction of the divergence: 0 is forward, 1 is reverse, and Jensen-Shannon lies between.
    beta = made.take("beta")
    if 0 < beta < 1:
        made.options["direction"] = "jensen-shannon"
        made.give("jsd_beta", beta, "beta")
    else:
        made.give("direction", "reverse" if beta == 1 else "forward")
    if made.found.config == "GKDConfig":
        temperature = made.take("temperature")
        made.options["distill_temperature"] = temperature
        made.give("temperature", temperature, "temperature")
        if made.take("max_length") is not None:
            made.say("max_length", "--max_prompt_length and --max_new_tokens bound a row")
    sampling(made)


EVERY = (model_and_rows, weights_and_memory, optimizer, output)
TRAINERS: dict[str, Callable[[Conversion], None]] = {
    "sft": sft,
    "reward": pairs,
    "dpo": dpo,
    "kto": kto,
    "grpo": grpo,
    "distill": distill,
}


def convert(found: Found, processes: int | None = None, rows: int | None = None) -> Conversion:
    """Return the conversion of one run of TRL.

    Args:
        found: the options of the run.
        processes: the number of its processes, if that is given; it replaces the number in the file.
        rows: the number of training rows, if that is given, to turn epochs into steps.
    """
    # First what takes arithmetic or depends on other options, then what only has another name, then what is absent.
    made = Conversion(found, processes, rows)
    for name, bound in DEFAULTS[found.config].items():
        if name in found.options and found.options[name] is None and name.startswith("max_"):
            made.comments.append(
                f"{name}=None: TRL sets no bound; here there is always one, and TRL's default of {bound} is taken: "
                "give that of your longest row"
            )
    for part in (*EVERY, TRAINERS[made.command]):
        part(made)
    for name in [*made.defaults]:
        option, _ = option_of(made, name)
        if option is not None:
            made.renamed(name, option)
    for name, value in list(made.left.items()):
        remaining(made, name, value)
    leave_out_meaningless(made)
    return made


def option_of(made: Conversion, name: str) -> tuple[str | None, str | None]:
    """Return our name for an option of TRL whose value can stay, and the value here that replaces a true one, if any.

    The name is None if there is no such option.
    """
    renamed = re.match(r"--(\w+)(?: (\w+))?", trl.NAMES.get(name, ""))
    option, of_true = (name, None) if renamed is None or name in made.known else renamed.groups()
    return (option if option in made.known else None), of_true


def remaining(made: Conversion, name: str, value: Any) -> None:
    """Convert an option of TRL that only needs another name, or note why there is no such option here."""
    # An idle value is converted only if a user wrote it for an option that we have, too.
    idle = value in IDLE or IDLE_OF.get(name) == value
    if idle and (name not in made.known or made.found.is_printed):
        return
    option, of_true = option_of(made, name)
    if is_unread(value):
        made.take(name)
    elif option is not None:
        made.give(option, of_true if of_true and value is True else value)
    elif not (made.found.is_printed and is_default_of_transformers(name, value)):
        reason = trl.NAMES.get(name) or trl.reason_of(name)
        reason = reason or "not among the options of TRL that this command knows"
        made.absent.setdefault(reason, []).append(f"{name}={shown(value)}")


def leave_out_meaningless(made: Conversion) -> None:
    """Leave out options without a meaning beside the others, such as the repository of a model that is not pushed."""
    # Our command refuses one option at a time, so this is repeated as often as there can be such options.
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
    """Return True if an option has transformers' own default, as most options of a printed config have."""
    import transformers

    fields = {each.name: each for each in dataclasses.fields(transformers.TrainingArguments)}
    of_none = name == "accelerator_config"
    return of_none or (name in fields and str(fields[name].default) == str(value))


def script_of(made: Conversion) -> str:
    """Return the shell script of a conversion: first comments, then the command."""
    lines = [f"# {made.found.config} of {made.found.where}, on {processes_of(made)}."]
    lines += [f"# ANOTHER LOSS than {text}" for text in made.another_loss]
    lines += [f"#   {text}" for text in dict.fromkeys(made.arithmetic)]
    names = sorted(made.options, key=[*FIRST, *made.known].index)
    defaults = " ".join(f"--{name}" for name in names if name in made.from_defaults)
    if defaults:
        lines.append(f"# From TRL's defaults, which differ from those here: {defaults}")
    if made.comments or made.absent:
        lines.append("# What has no counterpart, or is for you to look at:")
        lines += [f"#   {text}" for text in dict.fromkeys(made.comments)]
        lines += [
            f"#   {', '.join(left_out)}: {reason}" for reason, left_out in made.absent.items()
        ]
    refused = refusal(made)
    if refused is not None:
        lines.append(f"# fused-rl {made.command} refuses this: {refused}")
    # Several processes need a launcher, which starts the module of the trainer.
    words = [f"fused-rl {made.command}"]
    if made.processes > 1:
        module = cli.TRAINERS[made.command].module
        words = [f"deepspeed --num_gpus {made.processes} --module {module}"]
    words += [f"--{name} {word_of(made.options[name])}" for name in names]
    return "\n".join([*(escaped(line) for line in lines), " \\\n    ".join(words)])


def word_of(value: Any) -> str:
    """Return a value as a word for the shell, which our command line reads back as the same value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return shlex.quote(json.dumps(value))
    # A list of one is written as its element, as a user would.
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        return shlex.quote(f"[{', '.join(map(quoted, value))}]")
    return shlex.quote(str(value))


def quoted(value: Any) -> str:
    """Return a value as an element of a YAML list, quoted so that the backslashes of patterns stay."""
    if isinstance(value, str) and not re.fullmatch(r"[\w./:-]+", value):
        return "'" + value.replace("'", "''") + "'"
    return str(value)


def config_of(made: Conversion) -> Any:
    """Return the config that our command makes of the options."""
    words = " ".join(f"--{name} {word_of(value)}" for name, value in made.options.items())
    return parse(cli.TRAINERS[made.command].config_class(), shlex.split(words))


def refusal(made: Conversion) -> str | None:
    """Return why our command refuses the options, or None if it accepts them."""
    try:
        config = config_of(made)
        # The options of the loss are checked together when a run begins.
        if isinstance(config, LossConfig):
            loss_options(config)
    except InputError as error:
        return " ".join(str(error).split())
    return None


@around("fused-rl from-trl")
def main(argv: list[str] | None = None) -> None:
    """Run `fused-rl from-trl`."""
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
