"""Low-rank adapters (peft): which layers get them, those that a folder holds, and whole weights with them merged in."""

import copy
import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fused_rl.trainers.base.files import base_of_adapters, is_missing_path
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.options import ModelConfig

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
MERGE_FIRST = "merge them into their model with peft first (merge_and_unload)"
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
    config: Any = peft.PeftConfig.from_pretrained(name, revision=revision)
    if (problem := _beyond_plain_lora(config)) is not None:
        raise InputError(
            f"{name!r} holds adapters {problem}; only plain LoRA is read: {MERGE_FIRST}"
        )
    config.base_model_name_or_path = base_of_adapters(
        name, config.base_model_name_or_path, config.revision
    )
    return config


def _beyond_plain_lora(config) -> str | None:
    """Return what of saved adapters a run could not train or save as they are, in words, or None."""
    import peft

    if not isinstance(config, peft.LoraConfig):
        return f"of the kind {type(config).__name__}"
    if not config.base_model_name_or_path:
        return "without the name of their model (base_model_name_or_path)"
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_plain = not value or value == field.default or field.name in PLAIN
        if field.name == "init_lora_weights":
            is_plain = value in PLAIN_STARTS
        if not is_plain:
            return f"with {field.name}={value!r:.60}"
    return None


def check_options(options: ModelConfig, adapters: "LoraConfig | None") -> None:
    """Refuse options of adapters that would have no effect, or that contradict the adapters that are read."""
    if adapters is None and options.lora_rank:
        return
    # Beside the defaults, the values of the adapters that are read may be repeated, as a run's
    # config.yaml does.
    defaults = {
        "lora_rank": 0,
        "lora_alpha": 32.0,
        "lora_targets": ALL_LINEAR,
        "save_merged": False,
    }
    repeated: dict[str, object] = {}
    reason = "says how adapters are made or saved, but there are none: give --lora_rank"
    if adapters is not None:
        repeated = {"lora_rank": adapters.r, "lora_alpha": adapters.lora_alpha, "save_merged": True}
        reason = f"is not that of the adapters in {options.model!r}, which the run trains on: leave it out"
    for option, default in defaults.items():
        value = getattr(options, option)
        if value not in (default, repeated.get(option)):
            raise InputError(f"{option}={value} {reason}")


def with_saved_adapters(lm: Any, name: str, revision: str | None, adapters: "LoraConfig") -> Any:
    """Return `lm` with the adapters that were saved under a name, trainable; `adapters` are what `find` found there."""
    import peft

    # Merged into a weight that embedding and head share, adapters of one would change the other.
    saved = peft.load_peft_weights(name, device="cpu", revision=revision)
    ends = lm.get_input_embeddings(), lm.get_output_embeddings()
    for layer, module in lm.named_modules():
        prefix = f"base_model.model.{layer}."
        if module in ends and any(key.startswith(prefix) for key in saved):
            raise InputError(f"{name!r} holds adapters or rows of {layer}: {MERGE_FIRST}")
    with warnings.catch_warnings():
        # Adapters that a file lacks would be new ones, which change nothing.
        warnings.filterwarnings("error", "Found missing adapter keys")
        return peft.PeftModel.from_pretrained(
            lm, name, revision=revision, config=adapters, is_trainable=True
        )


def with_new_adapters(lm: Any, options: ModelConfig) -> Any:
    """Return `lm` with new adapters, which change nothing at first."""
    import peft

    return peft.get_peft_model(
        lm, _lora_config(lm, lm.get_output_embeddings(), "CAUSAL_LM", options)
    )


def adapt_in_place(classifier: Any, options: ModelConfig) -> None:
    """Give a sequence classifier new adapters; its head is trained whole."""
    import peft

    peft.inject_adapter_in_model(
        _lora_config(classifier, classifier.score, "SEQ_CLS", options), classifier
    )
    # Injecting has frozen all but the adapters.
    classifier.score.requires_grad_(True)


def _lora_config(model: Any, head: Any, task: str, options: ModelConfig):
    import peft
    from transformers.pytorch_utils import Conv1D

    targets = options.lora_targets
    if targets != ALL_LINEAR:
        targets = [target.strip() for target in targets.split(",")]
        linear = [
            f".{name}"
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) and module is not head
        ]
        for target in targets:
            # peft compares it with the end of the whole name, and skips one that no layer has beside others.
            if not any(name.endswith(f".{target}") for name in linear):
                choices = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
                problem = f"lora_targets: {type(model).__name__} has no linear layer {target!r} that can be adapted"
                raise InputError(f"{problem}; choose from {choices} or {ALL_LINEAR}")
    return peft.LoraConfig(
        r=options.lora_rank, lora_alpha=options.lora_alpha, target_modules=targets, task_type=task
    )


def merged(model: Any, state: dict | None) -> Any:
    """Return a plain copy of a transformers model with adapters, which peft has merged into its weights.

    `state` is the whole state of a partitioned model. Weights without adapters are shared with `model`.
    """
    import peft

    config = copy.deepcopy(model.peft_config["default"])
    config.init_lora_weights = True
    with torch.device("meta"):
        plain = type(model)(model.config)
        adapted = peft.LoraModel(plain, config, "default")
    # A name that one side lacks is an error, so nothing that was trained can be left out.
    plain.load_state_dict(model.state_dict() if state is None else state, assign=True)
    # transformers saves weights under the names by which it has read them.
    plain._weight_conversions = getattr(model, "_weight_conversions", None)
    # Safe means that sums are new tensors: the weights of `model` stay as they are.
    return adapted.merge_and_unload(safe_merge=True)
