"""A file of DeepSpeed's own options (`--deepspeed`): those that change speed or memory alone are passed on.

Every other one has an option here, and is refused with its name: DeepSpeed would ignore some of them in silence
(`optimizer`, `scheduler`, `activation_checkpointing`), and others would change what a run computes.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fused_rl.trainers.base.text import InputError

PARTITION = "zero_optimization"
# Of the section `zero_optimization`: numbers of elements or processes, and switches.
SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "zero_hpz_partition_size",
    "offload_optimizer.buffer_count",
    "offload_param.buffer_count",
    "offload_param.buffer_size",
    "offload_param.max_in_cpu",
)
SWITCHES = (
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "allgather_partitions",
    "use_multi_rank_bucket_allreduce",
    "round_robin_gradients",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "offload_optimizer.pin_memory",
    "offload_optimizer.fast_init",
    "offload_param.pin_memory",
)
DEVICES = ("offload_optimizer.device", "offload_param.device")
# What DeepSpeed prints and measures.
PRINTED = (
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "comms_logger",
    "comms_config",
    "monitor_config",
)
COMMUNICATED = "communication_data_type"

# The option that says it here, by the key or its section.
NAMES = {
    "train_batch_size": "--batch_size or --prompts_per_step",
    "train_micro_batch_size_per_gpu": "--micro_batch_size",
    "gradient_accumulation_steps": "--batch_size or --prompts_per_step, and --micro_batch_size",
    "gradient_clipping": "--max_grad_norm",
    "sequence_parallel_size": "--sequence_parallel",
    "data_parallel_size": "--sequence_parallel",
    "optimizer": "--lr, --weight_decay, --adam_beta2 and --adam_eps",
    "scheduler": "--lr_schedule and --warmup_steps",
    "activation_checkpointing": "--gradient_checkpointing and --checkpoint_activations_on",
    "bf16": "--dtype",
    "fp16": "--dtype",
    "amp": "--dtype",
    "torch_autocast": "--dtype",
    "data_types": "--grad_accum_dtype",
    f"{PARTITION}.stage3_param_persistence_threshold": "--stage3_param_persistence_threshold",
    f"{PARTITION}.stage": "--zero_stage",
    f"{PARTITION}.cpu_offload": "--offload",
    f"{PARTITION}.cpu_offload_params": "--offload",
}


def check(path: str, ours: Mapping[str, object], zero_stage: int, processes: int) -> None:
    """Refuse a file with options that are not passed on, all in one line.

    Args:
        path: of a JSON file in DeepSpeed's format, where `auto` leaves an option as it is here.
        ours: by dotted key, what the run has there anyway, which the file may repeat.
        zero_stage: of the run.
        processes: of the run.
    """
    keys_of: dict[str, list[str]] = {}
    for key, value in _flat(_read(path)).items():
        repeats = value == "auto" or (key in ours and value == ours[key])
        problem = None
        if not repeats:
            problem = _problem(key, value, ours.get(key), zero_stage, processes)
        if problem is not None:
            keys_of.setdefault(problem, []).append(f"{key}={json.dumps(value)}")
    if keys_of:
        reasons = [f"{', '.join(keys)}: {problem}" for problem, keys in keys_of.items()]
        raise InputError(f"deepspeed={path}: {'; '.join(reasons)}")


def passed_on(path: str | None) -> dict[str, Any]:
    """Return the options of a checked file that DeepSpeed gets beside ours; none without a file."""
    passed: dict[str, Any] = {}
    contents = {} if path is None else _flat(_read(path))
    for key, value in contents.items():
        if _is_passed(key) and value != "auto":
            _put(passed, key, value)
    return passed


def merged(ours: Mapping[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """Return our sections with what was passed on."""
    both = dict(ours)
    for key, value in passed.items():
        both[key] = merged(both.get(key, {}), value) if isinstance(value, dict) else value
    return both


def offloads(path: str | None) -> bool:
    """Return True if the file keeps weights or the optimizer's state in CPU memory."""
    partition = passed_on(path).get(PARTITION, {})
    sections = [partition.get(name, {}) for name in ("offload_optimizer", "offload_param")]
    return any(section.get("device") == "cpu" for section in sections)


def changes_sums(path: str | None) -> str | None:
    """Return the line for a run whose processes add gradients up in the dtype that the file says; None otherwise."""
    dtype = passed_on(path).get(COMMUNICATED)
    if dtype is None:
        return None
    return f"deepspeed: {COMMUNICATED}={dtype}: processes add up gradients in it, which changes their rounding"


def _read(path: str) -> dict[str, Any]:
    try:
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"deepspeed={path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"deepspeed={path}: not JSON: {error}") from error
    if not isinstance(contents, dict):
        raise InputError(f"deepspeed={path}: expected a JSON object of DeepSpeed's options")
    return contents


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key; a section that can be switched off is that switch."""
    flat = {}
    for name, value in section.items():
        key = prefix + name
        if not isinstance(value, dict) or key in PRINTED:
            flat[key] = value
        elif "enabled" in value:
            flat[f"{key}.enabled"] = value["enabled"]
        else:
            flat |= _flat(value, f"{key}.")
    return flat


def _is_passed(key: str) -> bool:
    name = key.removeprefix(f"{PARTITION}.")
    return key in (*PRINTED, COMMUNICATED) or (
        key != name and name in (*SIZES, *SWITCHES, *DEVICES)
    )


def _problem(key: str, value: object, here: object, zero_stage: int, processes: int) -> str | None:
    """Return what is wrong with an option, and what to do; None if it is passed on, or says what holds anyway."""
    name = key.removeprefix(f"{PARTITION}.")
    if not _is_passed(key):
        # Switched off, as it is here; whole weights are saved in any case.
        is_off = value is None or value is False
        if is_off and (not here or name.endswith("weights_on_model_save")):
            return None
        meant = [option for start, option in NAMES.items() if f"{key}.".startswith(f"{start}.")]
        if meant:
            return f"take it out and give {meant[0]}"
        return "take it out, it is not among what is passed on (docs/scaling.md)"
    if name in SIZES and not (_is_number(value) and value == int(value) >= 0):
        return "expected a whole number, 0 or more"
    if name in SWITCHES and not isinstance(value, bool):
        return "expected true or false"
    if name in DEVICES and value not in ("cpu", "none"):
        return "expected cpu or none"
    if value == "none" and here == "cpu":
        return "contradicts --offload true; remove one of them"
    if key == COMMUNICATED and value not in ("fp32", "bf16"):
        return "expected fp32 or bf16"

    # What DeepSpeed refuses only when the model is loaded.
    least = {"overlap_comm": 2, "offload_optimizer.device": 2, "offload_param.device": 3}
    is_on = value not in (False, "none")
    if is_on and zero_stage < least.get(name, 1):
        return f"needs --zero_stage {least.get(name, 1)} or more"
    if name == "zero_hpz_partition_size" and value > 1 and (zero_stage < 3 or processes % value):
        return f"needs --zero_stage 3, and a number of processes that it divides, not {processes}"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _put(sections: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key."""
    *outer, last = key.split(".")
    for name in outer:
        sections = sections.setdefault(name, {})
    # JSON has 5e8 as a number with a fraction.
    sections[last] = int(value) if isinstance(value, float) else value
