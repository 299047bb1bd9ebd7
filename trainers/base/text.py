"""Text from users and libraries: errors in one line, no control characters, options and functions by their names."""

import difflib
import importlib
import os
import sys
import unicodedata
from collections.abc import Callable, Collection


class InputError(ValueError):
    """The user's options, data or disk cannot be used; the message says what came, what was expected and the remedy."""


def in_a_line(error: BaseException) -> str:
    """Return an exception's type and message in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {text[:300]}"


def escaped(text: object, keep: str = "") -> str:
    """Return the text with control characters escaped, ESC as \\x1b, but for those in `keep`."""
    characters = []
    for character in str(text):
        is_space = unicodedata.category(character) == "Zs"
        harmless = is_space or character.isprintable() or character in keep
        characters.append(character if harmless else character.encode("unicode_escape").decode())
    return "".join(characters)


def load_function(option: str, name: str) -> Callable:
    """Return what `module:name` names; an installed command also looks in the folder that it is called from."""
    module, colon, attribute = name.partition(":")
    if not colon or module.endswith(".py"):
        raise InputError(
            f"{option} {name!r}: expected module:function, the module named as in `import`"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module imports what is not there
        where = f"{os.getcwd()}, the current folder, and among what is installed (PYTHONPATH)"
        raise InputError(f"{option} {name!r}: there is no module {module!r} in {where}") from error
    if not callable(vars(imported).get(attribute)):
        raise InputError(f"{option} {name!r}: {imported.__file__} has no function {attribute!r}")
    return vars(imported)[attribute]


def name_of(function: Callable) -> str:
    """Return the function's name in metrics and in config.yaml."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


# The names of TRL's options that people type, and what each is called here; docs/from_trl.md has the differences.
NAMES: dict[str, str] = {
    # Every trainer.
    "learning_rate": "--lr",
    "max_steps": "--steps",
    "per_device_train_batch_size": "--micro_batch_size; the batch of a step is --batch_size or --prompts_per_step",
    "gradient_accumulation_steps": "--batch_size or --prompts_per_step, the batch of a whole step",
    "warmup_ratio": "--warmup_steps, in updates",
    "lr_scheduler_type": "--lr_schedule: constant, linear or cosine",
    "adam_epsilon": "--adam_eps",
    "save_steps": "--save_every",
    "save_total_limit": "--keep_checkpoints",
    "eval_steps": "--eval_every",
    "eval_strategy": "--eval_every; --eval_size 0 evaluates never",
    "bf16": "--dtype bfloat16",
    "report_to": "--wandb_project",
    "resume_from_checkpoint": "--resume, or --resume_from step-4",
    "overwrite_output_dir": "--overwrite",
    "model_name_or_path": "--model",
    "dataset_name": "--dataset",
    "lora_r": "--lora_rank",
    "lora_target_modules": "--lora_targets",
    # SFT and reward.
    "max_seq_length": "--max_length",
    "assistant_only_loss": "--assistant_turns all",
    "center_rewards_coefficient": "--centering",
    # GRPO, PPO and distillation.
    "beta": "--kl_coef; in distill --direction and --jsd_beta",
    "teacher_model_name_or_path": "--teacher",
    "num_generations": "--group_size",
    "num_iterations": "--epochs",
    "steps_per_generation": "--minibatches",
    "max_completion_length": "--max_new_tokens",
    "reward_funcs": "--verifiers",
    "reward_weights": "--verifier_weights",
    "loss_type": "--preset",
    "scale_rewards": "--advantage: group-std, group-mean-batch-std or group-mean",
    "epsilon": "--clip_low and --clip_high",
    "epsilon_high": "--clip_high",
    "mask_truncated_completions": "--mask_truncated",
    "use_vllm": "--server, with the URL of a server",
    "vllm_server_base_url": "--server",
}


def unknown(name: str, names: Collection[str]) -> str:
    """Return the message for an option that is not among the `names`, with the one that is meant if that is clear."""
    meant = name.replace("-", "_")
    nearest = difflib.get_close_matches(meant, [*names, *NAMES], n=1)
    remedy = f"did you mean --{nearest[0]}?" if nearest else "--help all lists the options"
    if meant in NAMES:
        remedy = f"its name here is {NAMES[meant]}"
    elif nearest and nearest[0] in NAMES:
        remedy = f"did you mean {nearest[0]}, as in TRL? its name here is {NAMES[nearest[0]]}"
    return f"unknown option --{name}; {remedy}"
