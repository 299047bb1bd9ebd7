"""A model with low-rank adapters (peft): which layers get them, those that were saved, and weights that hold them."""

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..base import engine
from ..base.text import InputError, in_a_line
from ..options import ModelConfig
from .lora import MERGE_FIRST

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"


def with_saved_adapters(lm: Any, name: str, revision: str | None, adapters: "LoraConfig") -> Any:
    """Return `lm` with the adapters that were saved under a name, trainable; `adapters` is what `lora.find` returns."""
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


def merged_in_place(lm: Any) -> Any:
    """Return the model under peft's wrapper, with its adapters merged into its weights, of a layer at a time."""
    for layer in lm.modules():
        if hasattr(layer, "base_layer"):
            with engine.gathered(*layer.parameters(), written=True):
                layer.merge()
    return lm.unload()


def merge(model: Any, state: dict | None) -> Any:
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
