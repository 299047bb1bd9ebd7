"""Low-rank adapters (peft): which layers get them, those that a folder holds, and whole weights with them merged in."""

from typing import TYPE_CHECKING, Any

from torch import nn

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.options import ModelConfig

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"


def find(name: str, revision: str | None = None) -> "LoraConfig | None":
    """Return the config of the adapters that a folder or Hub name holds instead of whole weights, or None."""
    import peft
    from transformers.utils import find_adapter_config_file

    try:
        if find_adapter_config_file(name, revision=revision) is None:
            return None
    # Neither a folder nor a name of the Hub: reading the model says so.
    except OSError:
        return None
    config = peft.PeftConfig.from_pretrained(name, revision=revision)
    # Of anything else than A and B, such as biases or whole modules, `merged` would lose a part.
    is_lora = isinstance(config, peft.LoraConfig)
    has_more = is_lora and (config.use_dora or config.modules_to_save or config.bias != "none")
    if not is_lora or has_more or not config.base_model_name_or_path:
        what = "adapters other than plain LoRA, or without the name of their model"
        raise InputError(f"{name!r} holds {what}: merge them into their model with peft first")
    return config


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


def continued(lm: Any, name: str, revision: str | None) -> Any:
    """Return `lm` with the adapters that were saved, trainable."""
    import peft

    return peft.PeftModel.from_pretrained(lm, name, revision=revision, is_trainable=True)


def adapted(lm: Any, options: ModelConfig) -> Any:
    """Return `lm` with new adapters, which change nothing at first."""
    import peft

    return peft.get_peft_model(lm, _new(lm, lm.get_output_embeddings(), "CAUSAL_LM", options))


def adapt_in_place(classifier: Any, options: ModelConfig) -> None:
    """Give a sequence classifier new adapters; its head is trained whole."""
    import peft

    peft.inject_adapter_in_model(_new(classifier, classifier.score, "SEQ_CLS", options), classifier)
    # Injecting has frozen all but the adapters.
    classifier.score.requires_grad_(True)


def _new(model: Any, head: Any, task: str, options: ModelConfig):
    import peft
    from transformers.pytorch_utils import Conv1D

    targets = options.lora_targets
    if targets != ALL_LINEAR:
        targets = [target.strip() for target in targets.split(",")]
        # peft would skip a name that no layer has if another one is found.
        inside = []
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, Conv1D)) and module is not head:
                # peft compares a target with the end of the whole name.
                inside.append(f".{name}")
        for target in targets:
            if not any(name.endswith(f".{target}") for name in inside):
                last_names = {name.rpartition(".")[2] for name in inside}
                choices = ", ".join(sorted(last_names))
                what = f"{type(model).__name__} has no linear layer {target!r} that can be adapted"
                raise InputError(f"lora_targets: {what}; choose from {choices} or {ALL_LINEAR}")
    return peft.LoraConfig(
        r=options.lora_rank, lora_alpha=options.lora_alpha, target_modules=targets, task_type=task
    )


def merged(state: dict, model: Any) -> dict:
    """Return the plain model's state from the whole `state` of one with adapters: W becomes W + scale * B A."""
    plain = {}
    for key, value in state.items():
        if ".lora_" in key:
            continue
        # peft keeps the layer that it wraps under this name.
        if ".base_layer." in key:
            name, _, kind = key.rpartition(".base_layer.")
            if kind == "weight":
                # In fp32, rounded once: in bf16 most of a small update would be lost.
                a, b = (state[f"{name}.lora_{side}.default.weight"].float() for side in "AB")
                layer = model.get_submodule(name)
                update = layer.scaling["default"] * (b @ a).to(value.device)
                update = update.T if layer.fan_in_fan_out else update
                value = (value.float() + update).to(value.dtype)
            key = f"{name}.{kind}"
        plain[key] = value
    return plain
