"""A file of DeepSpeed's own options (`--deepspeed`), merged under ours: what a run sets itself is refused there.

DeepSpeed says what else its file may hold.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .files import names_read
from .text import InputError

# Our option for a key or a section, which DeepSpeed would ignore, or by which it would compute something else.
NAMES = {
    "train_batch_size": "--batch_size or --prompts_per_step",
    "train_micro_batch_size_per_gpu": "--micro_batch_size",
    "gradient_accumulation_steps": "--batch_size or --prompts_per_step, and --micro_batch_size",
    "gradient_clipping": "--max_grad_norm",
    "sequence_parallel_size": "--sequence_parallel",
    "optimizer": "--lr, --weight_decay, --adam_beta2 and --adam_eps",
    "scheduler": "--lr_schedule and --warmup_steps",
    "activation_checkpointing": "--gradient_checkpointing and --checkpoint_activations_on",
    "bf16": "--dtype",
    "fp16": "--dtype",
    "wandb": "--wandb_project",
    "amp": "--dtype",
    "torch_autocast": "--dtype",
    "data_types": "--grad_accum_dtype",
    "zero_optimization.stage": "--zero_stage",
    "zero_optimization.stage3_param_persistence_threshold": "--stage3_param_persistence_threshold",
    "zero_optimization.offload_optimizer.device": "--offload false",
    "zero_optimization.offload_param.device": "--offload false",
}


def read(path: str) -> dict[str, Any]:
    """Return the sections of a file, without values of `auto`."""
    try:
        names_read.add(path)
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"deepspeed={path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"deepspeed={path}: not JSON: {error}") from error
    if not isinstance(contents, dict):
        raise InputError(f"deepspeed={path}: expected a JSON object of DeepSpeed's options")
    return _without_auto(contents)


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section without what the run is to choose."""
    kept = {}
    for name, value in section.items():
        if isinstance(value, dict):
            is_auto = value.get("enabled") == "auto"
            value = {} if is_auto else _without_auto(value)
        if value not in ("auto", {}):
            kept[name] = value
    return kept


def check(path: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse what the run sets itself and the file has otherwise, all in one line."""
    problems = [*_problems(theirs, ours)]
    if problems:
        raise InputError(f"deepspeed={path}: {'; '.join(problems)}")


def _problems(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], section: str = ""
) -> Iterator[str]:
    for name, value in theirs.items():
        key = section + name
        setting = ours.get(name)
        is_ours = name in ours or (not section and key in NAMES)
        if isinstance(value, dict) and key not in NAMES:
            yield from _problems(value, setting or {}, f"{key}.")
        elif is_ours and value != setting and (_is_on(value) or _is_on(setting)):
            option = f" and give {NAMES[key]}" if key in NAMES else f", it is {json.dumps(setting)}"
            yield f"{key}={json.dumps(value)}: take it out{option}"


def _is_on(value: Any) -> bool:
    """Return False for a section that is switched off, and for what is not given."""
    return bool(value.get("enabled", True) if isinstance(value, dict) else value)


def merged(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return our sections, with what else a checked file has in them and beside them."""
    options = {name: value for name, value in theirs.items() if name not in NAMES}
    for name, value in ours.items():
        options[name] = merged(options.get(name, {}), value) if isinstance(value, dict) else value
    return options
