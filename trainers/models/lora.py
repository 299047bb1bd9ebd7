"""Low-rank adapters (peft): which layers get them, those that a folder holds, and whole weights with them merged in."""

import copy
import dataclasses
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..base.files import base_of_adapters, is_missing_path
from ..base.text import InputError, in_a_line
from ..options import ModelConfig

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
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


def with_saved_adapters(lm: Any, name: str, revision: str | None, adapters: "LoraConfig") -> Any:
    """Return `lm` with the adapters that were saved under a name, trainable; `adapters` are what `find` found there."""
    import peft

    saved = peft.load_peft_weights(name, device="cpu", revision=revision)
    # Merged into a weight that embedding and head share, adapters of one would change the other.
    ends = lm.get_input_embeddings(), lm.get_output_embeddings()
    names = [f".{layer}." for layer, module in lm.named_modules() if module in ends]
    plain = {key for key in saved if ".lora_" in key and not any(name in key for name in names)}
    adapters.inference_mode = False
    adapted = peft.get_peft_model(lm, adapters)
    report = peft.set_peft_model_state_dict(adapted, {key: saved[key] for key in plain})
    # peft would drop what has no layer, and begin anew with what is missing.
    problems = {
        "that are no adapters of layers between embedding and LM head": saved.keys() - plain,
        "of layers that its adapter_config.json leaves out": report.unexpected_keys,
        "missing": [key for key in report.missing_keys if ".lora_" in key],
    }
    for problem, keys in problems.items():
        if keys:
            some = ", ".join(sorted(keys)[:3])
            raise InputError(f"{name!r} has {len(keys)} tensors {problem}: {some}; {MERGE_FIRST}")
    return adapted


def with_new_adapters(lm: Any, options: ModelConfig) -> Any:
    """Return `lm` with new adapters, which change nothing at first."""
    import peft

    return peft.get_peft_model(lm, _lora_config(lm, "CAUSAL_LM", options))


def adapt_in_place(classifier: Any, options: ModelConfig) -> None:
    """Give a sequence classifier new adapters; its head is trained whole."""
    import peft

    peft.inject_adapter_in_model(_lora_config(classifier, "SEQ_CLS", options), classifier)
    # Injecting has frozen all but the adapters.
    classifier.score.requires_grad_(True)


def _lora_config(model: Any, task: str, options: ModelConfig):
    import peft

    with torch.device("meta"):
        plain = type(model)(model.config)
    head = plain.score if task == "SEQ_CLS" else plain.get_output_embeddings()
    modules = {name: module for name, module in plain.named_modules() if module is not head}
    matrices = _matrices(modules)
    targets, ends = options.lora_targets, ("",)
    if targets != ALL_LINEAR:
        targets = [target.strip() for target in targets.split(",")]
        ends = tuple(f".{target}" for target in targets)
        _check_targets(targets, [*matrices])
    # peft's annotation of lora_alpha is of whole numbers, which it does not need.
    config = cast(Any, peft).LoraConfig(
        r=options.lora_rank, lora_alpha=options.lora_alpha, target_modules=targets, task_type=task
    )
    if any(weight.dim() == 3 for weight in plain.parameters()):
        # A layer's adapter adds to its output, which some routers return in a tuple; a weight's adapter does not.
        config.exclude_modules = [
            name
            for name, module in modules.items()
            if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
        ]

    # peft adapts the experts of some models only, and there no linear layer that has the name of an expert's.
    try:
        with torch.device("meta"):
            adapted = peft.LoraModel(plain, copy.deepcopy(config), "default")
    except ValueError as error:
        raise InputError(f"lora_targets={options.lora_targets}: {in_a_line(error)}") from error
    reached = adapted.targeted_module_names + adapted.targeted_parameter_names
    left_out = matrices.keys() - {name.removesuffix(".weight") for name in reached}
    names = sorted(matrices[name] for name in left_out if name.endswith(ends))
    # Weights of 4 bits are bytes, which take no adapter.
    names = [name for name in names if model.get_parameter(name).is_floating_point()]
    config.target_parameters = names or None
    return config


def _check_targets(targets: list[str], layers: list[str]) -> None:
    """Refuse a name that no layer has."""
    for target in targets:
        # peft compares it with the end of the whole name, and skips one that no layer has beside others.
        if not any(layer.endswith(f".{target}") for layer in layers):
            choices = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
            problem = f"lora_targets: no linear layer {target!r} can be adapted"
            raise InputError(f"{problem}; choose from {choices} or {ALL_LINEAR}")


def _matrices(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Return the names of the matrices that hidden states meet, also of experts' stacks, by those of their layers."""
    names = {}
    for layer, module in modules.items():
        if not isinstance(module, (nn.Embedding, nn.Conv1d)):
            for name, weight in module.named_parameters(layer, recurse=False):
                is_matrix = weight.dim() == 3 or (weight.dim() == 2 and name.endswith(".weight"))
                if is_matrix and min(weight.shape) > 1:
                    names[name.removesuffix(".weight")] = name
    return names


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
