"""Low-rank adapters (peft): which layers get them, those that a folder holds, and whole weights with them merged in."""

from torch import nn

from fused_rl.trainers.base.text import in_a_line
from fused_rl.trainers.data.fingerprints import Adapters
from fused_rl.trainers.options import InputError, ModelConfig

ALL_LINEAR = "all-linear"


def check_options(options: ModelConfig, adapters: Adapters | None) -> None:
    """Refuse options of adapters that would have no effect, or that contradict the adapters that are read."""
    trained = adapters is not None or options.lora_rank > 0
    default = {"lora_rank": 0, "lora_alpha": 32.0, "lora_targets": ALL_LINEAR}
    needing = {name: getattr(options, name) != default[name] for name in ("lora_alpha", "lora_targets")}
    needing["save_merged"] = options.save_merged
    idle = [name for name, given in needing.items() if given and not trained]
    if idle:
        raise InputError(f"{', '.join(idle)} says how adapters are made or saved, but there are none: give --lora_rank")
    if adapters is None:
        return
    there = {"lora_rank": adapters.config.r, "lora_alpha": adapters.config.lora_alpha, "lora_targets": None}
    for option, value in there.items():
        given = getattr(options, option)
        if given not in (value, default[option]):
            raise InputError(
                f"model={adapters.name!r} holds adapters of rank {adapters.config.r} and alpha "
                f"{adapters.config.lora_alpha}, which the run trains on: leave out {option}={given}"
            )


def continued(lm: nn.Module, adapters: Adapters) -> nn.Module:
    """`lm` with the adapters that were saved, to be trained on."""
    import peft

    try:
        return peft.PeftModel.from_pretrained(lm, adapters.name, revision=adapters.revision, is_trainable=True)
    except Exception as error:  # shapes of another model, missing or damaged safetensors
        base, _ = adapters.base
        raise InputError(f"the adapters in {adapters.name!r} do not fit {base!r}: {in_a_line(error)}") from error


def adapted(lm: nn.Module, options: ModelConfig) -> nn.Module:
    """`lm` with new adapters, which change nothing at first."""
    import peft

    chosen = {"rank": options.lora_rank, "alpha": options.lora_alpha, "targets": options.lora_targets}
    return peft.get_peft_model(lm, _new(lm, lm.get_output_embeddings(), "CAUSAL_LM", **chosen))


def adapt_in_place(classifier: nn.Module, **chosen) -> None:
    """Give a sequence classifier new adapters (rank, alpha, targets); its head is trained whole."""
    import peft

    peft.inject_adapter_in_model(_new(classifier, classifier.score, "SEQ_CLS", **chosen), classifier)
    classifier.score.requires_grad_(True)  # injecting froze all but the adapters


def _new(model: nn.Module, head: nn.Module, task: str, *, rank: int, alpha: float, targets: str):
    import peft

    widest = max(min(_features(layer)) for layer in _linear_layers(model).values())
    if rank > widest:
        raise InputError(f"lora_rank={rank} is more than any layer of {type(model).__name__} has: at most {widest}")
    if targets != ALL_LINEAR:
        targets = [part.strip() for part in targets.split(",")]
        _check_targets(model, targets, head)
    return peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type=task)


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}


def _features(layer: nn.Module) -> tuple[int, int]:
    """In and out; the shape of a weight may be that of packed bits."""
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (layer.nx, layer.nf)


def _check_targets(model: nn.Module, targets: list[str], head: nn.Module) -> None:
    """Refuse a name that no linear layer but the head has: peft would leave it out where another name is found."""
    inside = [name for name, module in _linear_layers(model).items() if module is not head]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in inside):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in inside}))
            raise InputError(
                f"lora_targets: {type(model).__name__} has no linear layer {target!r} that can be adapted; there are "
                f"{there} (or {ALL_LINEAR}, which is all of them)"
            )


def merged(state: dict, model: nn.Module) -> dict:
    """Of the whole `state` of a model with adapters that of the plain one: each weight W becomes W + scale * B A."""
    plain = {}
    for key, value in state.items():
        if ".lora_" in key:
            continue
        if ".base_layer." in key:
            name, _, kind = key.rpartition(".base_layer.")
            if kind == "weight":
                a, b = (state[f"{name}.lora_{side}.default.weight"].float() for side in "AB")
                layer = model.get_submodule(name)
                update = layer.scaling["default"] * (b @ a).to(value.device)
                value = (value.float() + (update.T if layer.fan_in_fan_out else update)).to(value.dtype)
            key = f"{name}.{kind}"
        plain[key] = value
    return plain
