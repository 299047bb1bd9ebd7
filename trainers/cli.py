"""`fused-rl <command> --config recipes/x.yaml --key value`: one dataclass per trainer, the same keys in YAML and here.

Left out: subcommands inside YAML, environment variables, configs that include configs.
"""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Literal, TypeVar

COMMANDS = ("sft", "reward", "grpo", "demo", "kl-report")
Config = TypeVar("Config")


class InputError(ValueError):
    """The user's configuration or data cannot be used; the message says what came, what was expected and the remedy."""


@dataclass
class RunConfig:
    """What every trainer needs to know: the model, how it is optimised, and what the run leaves behind."""

    model: str
    """A causal language model: a Hub name or a local folder."""
    output_dir: str
    """Folder for metrics.jsonl, TensorBoard, curves.png, checkpoints/ and the trained model/."""
    dataset: str
    """A local .jsonl or .parquet file, or the name of a Hub dataset."""
    dataset_config: str | None = None
    """The Hub dataset's configuration; None takes its only one, or the one named default or main."""
    dataset_split: str = "train"
    """The Hub dataset's split to train on."""
    eval_dataset: str | None = None
    """File or Hub name of the held-out rows; None holds out the last `eval_size` rows of `dataset`."""
    eval_split: str = "test"
    """The split of `eval_dataset`, if that is a Hub name."""
    eval_size: int = 64
    """How many held-out rows to evaluate on; 0 for no evaluation."""
    raw_prompt: bool = False
    """Give text prompts to the model as they are, even where its tokenizer has a chat template."""
    system_prompt: str | None = None
    """System message before a text prompt; needs a chat template."""
    max_prompt_length: int = 512
    """Longer prompts (in tokens) are dropped, counted and reported."""
    steps: int = 100
    """Optimizer updates of sft, rollouts of grpo."""
    micro_batch_size: int = 8
    """Sequences per forward and backward; changes speed and memory, never the result."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """After the warm-up: constant, or annealed to zero at the last update."""
    warmup_steps: int = 0
    """Optimizer updates with a rising learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 switches it off."""
    loss_from: Literal["linear", "logits"] = "linear"
    """linear: from hidden states and the LM head, one chunk of logits at a time; logits: from the whole logits."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO: what is partitioned over the ranks (1 optimizer state, 2 gradients, 3 weights)."""
    offload: bool = False
    """Keep optimizer state (ZeRO 2, 3) and weights (ZeRO 3) in CPU memory."""
    stage3_param_persistence_threshold: int = 100_000
    """ZeRO 3 leaves weights with fewer elements whole on every rank."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto is bfloat16 on a GPU, float32 on a CPU. bfloat16 keeps fp32 master weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    lora_rank: int = 0
    """Train low-rank adapters (peft) on all linear layers instead of the weights; 0 for none."""
    lora_alpha: float = 32.0
    """Scale of the adapters: alpha / rank."""
    seed: int = 1
    """Of everything: weights, data order, sampling. The same seed is the same run, bit for bit, on a CPU."""
    eval_every: int = 50
    """Steps between evaluations; there is always one before and one after."""
    save_every: int = 100
    """Steps between checkpoints; 0 saves one only when the run is interrupted."""
    keep_checkpoints: int = 2
    """Older checkpoints are deleted."""
    resume: bool = False
    """Continue from the latest checkpoint in `output_dir`, as if the run had never stopped."""
    overwrite: bool = False
    """Start anew in an `output_dir` that already holds a run, deleting that run's files."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (needs `pip install wandb`)."""
    dry_run: bool = False
    """Print the resolved configuration and the batch arithmetic, then stop."""


def parse(config_class: type[Config], argv: list[str], prog: str) -> Config:
    """The config from `--config file.yaml` and `--key value`, later ones first; exits with a message on a bad key."""
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(prog=prog, description=config_class.__doc__, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below.")
    parser.add_class_arguments(config_class)
    values = parser.parse_args(_spell_out_flags(config_class, argv)).as_dict()
    values.pop("config")
    try:
        return config_class(**values)
    except ValueError as error:  # from __post_init__
        parser.error(str(error))


def _spell_out_flags(config_class, argv: list[str]) -> list[str]:
    """`--resume` means `--resume true`; a launcher's `--local_rank` is read from the environment instead."""
    flags = {f"--{f.name}" for f in dataclasses.fields(config_class) if f.type in (bool, "bool")}
    spelled = []
    for i, word in enumerate(argv):
        if word.startswith("--local_rank"):
            continue
        spelled.append(word)
        if word in flags and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            spelled.append("true")
    return spelled


def check_positive(config, *names: str) -> None:
    """Refuse a config whose named numbers are not above zero."""
    for name in names:
        if getattr(config, name) <= 0:
            raise InputError(f"{name} must be above 0, got {getattr(config, name)}")


def describe(config, arithmetic: dict[str, object]) -> str:
    """The resolved configuration and the batch arithmetic, one `key: value` per line (the first part is YAML)."""
    lines = [f"{key}: {value}" for key, value in dataclasses.asdict(config).items()]
    return "\n".join([*lines, "", "# batch arithmetic", *(f"# {key}: {value}" for key, value in arithmetic.items())])


def run(module_name: str, config_name: str, argv: list[str] | None = None) -> None:
    """`main` of every trainer: parse, then either describe the run or train."""
    import importlib
    import os

    module = importlib.import_module(f"fused_rl.trainers.{module_name}")
    argv = sys.argv[1:] if argv is None else argv
    config = parse(getattr(module, config_name), argv, f"fused-rl {module_name}")
    try:
        arithmetic = module.arithmetic(config, int(os.environ.get("WORLD_SIZE", "1")))
        if config.dry_run:
            print(describe(config, arithmetic))
            return
        module.train(config)
    except InputError as error:
        sys.exit(f"fused-rl {module_name}: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # the usual status of a command that Ctrl-C ended; the trainer has said where it stopped
    from fused_rl.trainers import engine

    engine.teardown()


def main() -> None:
    """Entry point of the `fused-rl` command."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command not in COMMANDS:
        print(f"usage: fused-rl {{{','.join(COMMANDS)}}} [--config FILE] [--key value ...]")
        print("       fused-rl COMMAND --help lists the keys of a command")
        sys.exit(0 if command in ("-h", "--help") else f"fused-rl: error: unknown command {command!r}")
    import importlib

    module = importlib.import_module(f"fused_rl.trainers.{command.replace('-', '_')}")
    module.main(sys.argv[2:])
