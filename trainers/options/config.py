"""What a run is told: options with their ranges, read from YAML and the command line, and the error for bad input.

Options stand in groups (`OptimConfig`, `EngineConfig`, …), and a run's config is all of them: a room that needs the
optimizer's options takes an `OptimConfig`, and so works for a policy and a critic alike.
"""

import dataclasses
import functools
import math
import operator
import os
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import yaml
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    restricted_number_type,
)

from fused_rl.checks import LEAST_TEMPERATURE, MOST_TEMPERATURE
from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.options.handed import named
from fused_rl.trainers.options.names import unknown

FILES = (".jsonl", ".json", ".csv", ".parquet")  # a dataset that ends so is a file, any other a name


def is_saved(name: str, *marks: str) -> bool:
    """Whether `datasets` wrote this folder by `save_to_disk`: one table, or several splits."""
    return any((Path(name) / mark).is_file() for mark in marks or ("state.json", "dataset_dict.json"))


# Numbers with a range. NaN is in none of them, infinity only where it says so.
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**31)])
Finite = restricted_number_type("Finite", float, [(">", -math.inf), ("<", math.inf)])
Positive = restricted_number_type("Positive", float, [(">", 0), ("<", math.inf)])
NonNegative = restricted_number_type("NonNegative", float, [(">=", 0), ("<", math.inf)])
Temperature = restricted_number_type("Temperature", float, [(">=", LEAST_TEMPERATURE), ("<=", MOST_TEMPERATURE)])
PositiveFraction = restricted_number_type("PositiveFraction", float, [(">", 0), ("<=", 1)])
Decay = restricted_number_type("Decay", float, [(">=", 0), ("<", 1)])
Smoothing = restricted_number_type("Smoothing", float, [(">=", 0), ("<", 0.5)])
LARGEST = {int: 2**63 - 1, float: 3.4e38}  # of tensors' int64 and fp32
RANGES = {
    PositiveInt: "a whole number above 0",
    NonNegativeInt: "a whole number, 0 or more",
    Seed: "a whole number from 0 to 2^31 - 1",
    Finite: "a finite number",
    Positive: "a finite number above 0",
    NonNegative: "a finite number, 0 or more",
    Temperature: f"a number from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}",
    NonNegativeFloat: "a number, 0 or more, or inf",
    ClosedUnitInterval: "a number from 0 to 1",
    PositiveFraction: "a number above 0, at most 1",
    Decay: "a number from 0 to below 1",
    Smoothing: "a number from 0 to below 0.5",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    str | list[str]: "text, or a list of texts",
    list[Finite]: "a list of finite numbers",
    list[Finite | None]: "a list of finite numbers, or of null",
    dict: "a mapping from names to values, such as {enable_thinking: false}",
}


_kinds = functools.cache(typing.get_type_hints)


@dataclass(kw_only=True)
class Options:
    """A group of options that keeps to its ranges, however it is made."""

    sections: ClassVar[dict[str, str]] = {}
    """Names of options, or `*` for all of the group -> their section of --help (`help.SECTIONS`)."""
    command: ClassVar[str | None] = None
    """`fused-rl <command>`, of a config that is whole."""

    def __new__(cls, *args, **given):
        """Refuse an unknown name in Python as on the command line, in place of a TypeError without a remedy."""
        known = names_of(cls)
        for name in given:
            if name not in known:
                raise InputError(f"{cls.__name__}: {unknown(name, known, cls.command)}")
        return super().__new__(cls)

    def __setattr__(self, name: str, value):
        """Options keep to their ranges when they are set later, too; `train` checks what they are together."""
        known = names_of(type(self))
        if name not in known:
            raise AttributeError(f"{type(self).__name__}: {unknown(name, known, self.command)}")
        super().__setattr__(name, _checked(name, value, _kinds(type(self))[name]))

    def __post_init__(self):
        """Check the options together; once more does no harm."""


def names_of(config_class: type[Options]) -> list[str]:
    """The names of its options."""
    return [field.name for field in dataclasses.fields(config_class)]


def _without_none(kind):
    """(X, whether None will do as well) of a type X or X | None."""
    choices = typing.get_args(kind)
    if type(None) not in choices:
        return kind, False
    others = [choice for choice in choices if choice is not type(None)]
    return functools.reduce(operator.or_, others), True


def _checked(name: str, value, kind):
    """`value` as the plain number or text that an option of type `kind` takes; raises on everything else."""
    kind, optional = _without_none(kind)
    if value is None and optional:
        return None
    value = named(name, value)
    refusal = InputError(f"{name}={value!r}: expected {in_words(kind)}")
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise refusal
        return value
    if kind in (str, str | list[str]):
        return _text(value, kind, refusal)
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            raise refusal
        return [_checked(name, one, typing.get_args(kind)[0]) for one in value]
    if kind is bool and not isinstance(value, bool):
        raise refusal
    if kind is dict and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
        raise refusal
    if kind is bool or not isinstance(kind, type) or not issubclass(kind, (int, float)):
        return value
    plain = int if issubclass(kind, int) else float
    try:
        number = plain(kind(value))  # a restricted type is not YAML
    except (TypeError, ValueError) as error:
        raise refusal from error
    if LARGEST[plain] < abs(number) < math.inf:
        raise InputError(f"{name}={value!r}: the largest number that can be computed with is {LARGEST[plain]:g}")
    return number


def _text(value, kind, refusal: InputError):
    """Text, of a path too, or where the option takes them a list of texts; raises `refusal` on everything else."""
    if kind is not str and isinstance(value, list):
        return [_text(one, str, refusal) for one in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise refusal
    if kind is str and re.fullmatch(r"~/\S*", value):
        return str(Path(value).expanduser())  # as a shell does, which sees neither YAML nor --option=~/...
    return value


def in_words(kind) -> str:
    """What an option of this type takes, in words."""
    kind, _ = _without_none(kind)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    return RANGES[kind]


def check_revision(model: str, revision: str | None) -> None:
    """Refuse the revision of a folder."""
    if revision is not None and Path(model).is_dir():
        raise InputError(f"revision={revision} is of a model on the Hub, and model={model} is a folder")


@dataclass(kw_only=True)
class ModelConfig(Options):
    """Which model, and which of its weights are trained."""

    sections: ClassVar[dict[str, str]] = {"*": "model"}

    model: str
    """A causal language model, or adapters to one: a Hub name or a local folder."""
    revision: str | None = None
    """Branch, tag or commit of `model` on the Hub: of its weights, its tokenizer and what else is read of it."""
    attn_implementation: str | None = None
    """Of every model that is read, as transformers names them: eager, sdpa, flash_attention_2, …; None is the choice of
    each."""
    lora_rank: NonNegativeInt = 0
    """Train low-rank adapters (peft) instead of the weights; 0 for none, or for those that `model` holds."""
    lora_alpha: Positive = 32.0
    """Scale of the adapters: alpha / rank."""
    lora_targets: str = "all-linear"
    """The linear layers that get adapters: q_proj,v_proj by name, or all-linear."""
    save_merged: bool = False
    """Save whole weights with the adapters merged in, instead of the adapters alone; reward models always are."""
    load_in_4bit: bool = False
    """Keep the weights under the adapters in 4 bits, NF4 (needs `pip install fused-rl[bnb]`)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    loss_from: Literal["linear", "logits"] = "linear"
    """linear: from hidden states and the LM head, one chunk of logits at a time; logits: from the whole logits."""
    head_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the logits of bfloat16 weights, in sampling and in the loss (loss_from linear): float32, or rounded to
    bfloat16, by which log-probabilities are off by about 0.01. auto is float32 on a GPU, bfloat16 on a CPU."""

    def __post_init__(self):
        super().__post_init__()
        check_revision(self.model, self.revision)
        if self.loss_from == "logits" and self.head_dtype != "auto":
            raise InputError(
                f"head_dtype={self.head_dtype} has no meaning with loss_from=logits, whose logits are the model's own, "
                "rounded as its weights are; leave it out, or choose --loss_from linear"
            )


@dataclass(kw_only=True)
class DataConfig(Options):
    """Which rows, and how they become prompts."""

    sections: ClassVar[dict[str, str]] = {"*": "data"}

    dataset: str
    """A local file (.jsonl, .json, .csv, .parquet) or folder (of save_to_disk too), or the name of a Hub dataset."""
    dataset_config: str | None = None
    """The Hub dataset's configuration; None takes its only one, or the one named default or main."""
    dataset_split: str = "train"
    """The Hub dataset's split to train on."""
    eval_dataset: str | None = None
    """File or Hub name of the held-out rows; None holds out the last `eval_size` rows of `dataset`."""
    eval_dataset_config: str | None = None
    """The configuration of `eval_dataset`; None takes dataset_config where both name the same dataset."""
    eval_split: str = "test"
    """The split of `eval_dataset`, if that is a Hub name."""
    eval_size: NonNegativeInt = 64
    """How many held-out rows to evaluate on; 0 for no evaluation."""
    raw_prompt: bool = False
    """Give text prompts to the model as they are, even where its tokenizer has a chat template."""
    system_prompt: str | None = None
    """System message before a text prompt; needs a chat template."""
    chat_template_kwargs: dict | None = None
    """What the chat template is told besides the messages, as YAML or JSON: {enable_thinking: false}."""
    max_prompt_length: PositiveInt = 512
    """Longer prompts (in tokens) are dropped, counted and reported."""


@dataclass(kw_only=True)
class OptimConfig(Options):
    """How weights are optimised."""

    sections: ClassVar[dict[str, str]] = {"*": "optimizer"}

    lr: NonNegative = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """After the warm-up: constant, or annealed to zero at the last update."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer updates with a rising learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    adam_beta2: Decay = 0.999
    """Decay of the second moment."""
    adam_eps: Positive = 1e-8
    """Adam's epsilon."""
    tf_adam: bool = False
    """Epsilon outside the bias correction, as in TensorFlow 1: smaller first updates (fused_rl.tf_adam_epsilon)."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are scaled down to this norm; 0 switches it off."""


@dataclass(kw_only=True)
class EngineConfig(Options):
    """How DeepSpeed holds and splits a model."""

    sections: ClassVar[dict[str, str]] = {"*": "optimizer"}

    micro_batch_size: PositiveInt = 8
    """Sequences per forward and backward; changes speed and memory, never the result."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO: what is partitioned over the ranks (1 optimizer state, 2 gradients, 3 weights)."""
    offload: bool = False
    """Keep optimizer state (ZeRO 2, 3) and weights (ZeRO 3) in CPU memory."""
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    """ZeRO 3 leaves weights with fewer elements whole on every rank."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto is bfloat16 on a GPU, float32 on a CPU. bfloat16 keeps fp32 master weights."""


@dataclass(kw_only=True)
class OutputConfig(Options):
    """What a run leaves behind and where, and whether it goes on with what is there."""

    output_dir: str
    """Folder for metrics.jsonl, TensorBoard, curves.png, checkpoints/ and the trained model/."""
    save_every: NonNegativeInt = 100
    """Steps between checkpoints; 0 saves one only when the run is interrupted."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints to keep; older ones are deleted."""
    resume: bool = False
    """Continue from the latest checkpoint in `output_dir`, as if the run had never stopped. Of the options those may
    change that docs/training.md lists."""
    resume_from: str | None = None
    """Continue from this checkpoint instead, such as step-4; later ones are moved to <output_dir>.1."""
    accept_changes: bool = False
    """With resume: continue although rows, models or the chat template have changed since."""
    overwrite: bool = False
    """Start again in an `output_dir` that is not empty: what is in it is moved to <output_dir>.1."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (needs `pip install wandb`)."""
    trackio_project: str | None = None
    """Also log to this trackio project, on this machine (needs `pip install trackio`)."""
    push_to_hub: bool = False
    """Upload `model/` to the Hub when it is saved; the token is looked at when the run begins."""
    hub_model_id: str | None = None
    """Where to: owner/name, or a name of yours; None is the name of `output_dir`."""
    hub_private_repo: bool = False
    """Make that repository a private one; one that is public already is refused."""

    def __post_init__(self):
        super().__post_init__()
        self.resume = self.resume or self.resume_from is not None


@dataclass(kw_only=True)
class StepsConfig(Options):
    """How long a run is."""

    batch_option: ClassVar[str]
    """The option that says how many rows a step takes."""

    steps: PositiveInt | None = None
    """Optimizer updates of sft and reward, rollouts of grpo and ppo; None is 100, or what num_train_epochs comes to."""
    num_train_epochs: Positive | None = None
    """Instead of steps: passes over the rows to train on, such as 1.5."""

    @property
    def splits_rows(self) -> bool:
        """Whether a row may be trained on as several, so that their number is known only when they are tokens."""
        return False

    def __post_init__(self):
        super().__post_init__()
        if self.num_train_epochs is None:
            self.steps = 100 if self.steps is None else self.steps
        elif self.steps is not None:
            raise InputError(
                f"num_train_epochs={self.num_train_epochs} and steps={self.steps} are both given; give one of them "
                "(--steps null takes back what a file says)"
            )


@dataclass(kw_only=True)  # --help lists the last group first
class RunConfig(StepsConfig, OutputConfig, EngineConfig, OptimConfig, DataConfig, ModelConfig):
    """What every trainer needs to know: the model, how it is optimised, and what the run leaves behind."""

    sections: ClassVar[dict[str, str]] = {"*": "run"}

    seed: Seed = 1
    """Of everything: weights, data order, sampling. The same seed is the same run, bit for bit, on a CPU."""
    eval_every: PositiveInt = 50
    """Steps between evaluations; there is always one before and one after."""
    dry_run: bool = False
    """Print the resolved configuration and the batch arithmetic, look whether model and rows are there, then stop."""


# What is done with a run, not what the run is.
ACTIONS = ("resume", "resume_from", "accept_changes", "overwrite", "dry_run")


def to_yaml(config: Options) -> str:
    """The complete config as YAML that `--config` reads back."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in ACTIONS}
    if values.get("num_train_epochs") is not None:
        values["steps"] = None  # what they come to is not an option
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
