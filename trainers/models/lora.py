"""Low-rank adapters (peft) that a folder or Hub name holds, found and checked; adapters.py makes and merges them."""

import dataclasses
from typing import TYPE_CHECKING, Any

from ..base.files import base_of_adapters, is_missing_path
from ..base.text import InputError, in_a_line
from ..options import ModelConfig

if TYPE_CHECKING:
    from peft import LoraConfig

MERGE_FIRST = "merge them, with the config of their training, into their model with peft first (merge_and_unload)"
# What peft's config may say of plain adapters: W becomes W + scale * B A, and nothing else of the model changes.
PLAIN = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config"),
    *("base_model_name_or_path", "revision", "r", "lora_alpha", "rank_pattern", "alpha_pattern"),
    *("target_modules", "target_parameters", "exclude_modules"),
    *("layers_to_transform", "layers_pattern"),
    *("lora_dropout", "fan_in_fan_out", "use_rslora", "eva_config"),
}
# Other ways to begin (PiSSA, OLoRA, LoftQ, …) change W itself, so without its adapters the model would be another one.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")


def find(name: str, revision: str | None = None) -> "LoraConfig | None":
    """Return the config of the adapters that a folder or Hub name holds instead of whole weights, or None."""
    import peft
    from transformers.utils.peft_utils import find_adapter_config_file

    if is_missing_path(name):
        return None  # reading the model says so
    try:
        if find_adapter_config_file(name, revision=revision) is None:
            return None
    # Neither a folder nor a name of the Hub: reading the model says so.
    except OSError:
        return None
    try:
        adapters: Any = peft.PeftConfig.from_pretrained(name, revision=revision)
    except Exception as error:  # of a kind or with a field that this peft does not know
        raise InputError(
            f"{name!r} holds adapters that cannot be read: {in_a_line(error)}"
        ) from error
    if (problem := _beyond_plain_lora(adapters)) is not None:
        raise InputError(
            f"{name!r} holds adapters {problem}; only plain LoRA is read: {MERGE_FIRST}"
        )
    adapters.base_model_name_or_path = base_of_adapters(
        name, adapters.base_model_name_or_path, adapters.revision
    )
    return adapters


def _beyond_plain_lora(adapters) -> str | None:
    """Return what of saved adapters a run could not train or save as they are, in words, or None."""
    import peft

    if not isinstance(adapters, peft.LoraConfig):
        return f"of the kind {type(adapters).__name__}"
    if not adapters.base_model_name_or_path:
        return "without the name of their model (base_model_name_or_path)"
    for field in dataclasses.fields(adapters):
        value = getattr(adapters, field.name)
        is_plain = not value or value == field.default or field.name in PLAIN
        if field.name == "init_lora_weights":
            is_plain = value in PLAIN_STARTS
        elif field.name in ("lora_alpha", "alpha_pattern"):
            # Without a scale adapters change nothing, and learn nothing.
            is_plain = 0 not in (value.values() if isinstance(value, dict) else [value])
        if not is_plain:
            return f"with {field.name}={value!r:.60}"
    return None


def check_options(options: ModelConfig, adapters: "LoraConfig | None") -> None:
    """Refuse options of adapters that would have no effect, or that contradict the adapters that are read."""
    if adapters is None and options.lora_rank:
        return
    # Beside the defaults, the values of the adapters that are read may be repeated, as a run's
    # config.yaml does.
    repeated: dict[str, Any] = dict.fromkeys(
        ("lora_rank", "lora_alpha", "lora_targets", "save_merged")
    )
    reason = "says how adapters are made or saved, but there are none: give --lora_rank"
    if adapters is not None:
        repeated |= {
            "lora_rank": adapters.r,
            "lora_alpha": adapters.lora_alpha,
            "save_merged": True,
        }
        reason = f"is not that of the adapters in {options.model!r}, which the run trains on: leave it out"
    for option, of_adapters in repeated.items():
        value = getattr(options, option)
        if value not in (ModelConfig.model_fields[option].default, of_adapters):
            raise InputError(f"{option}={value} {reason}")
