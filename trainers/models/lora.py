"""Low-rank adapters (peft): which layers get them, those that a folder holds, and whole weights with them merged in."""

from torch import nn

from fused_rl.trainers.base.text import in_a_line
from fused_rl.trainers.data.fingerprints import Adapters
from fused_rl.trainers.options import InputError, ModelConfig

ALL_LINEAR = "all-linear"


def check_options(options: ModelConfig, adapters: Adapters | None) -> None:
    """Refuse options of adapters that would have no effect, or that contradict the adapters that are read."""
    trained = adapters is not None or options.lora_rank > 0
    default = {"lora_rank": 0, "lora_alpha": 32.0, "lora_targets": ALL_LINEAR, "save_merged": False}
    given = {name: getattr(options, name) for name in default if getattr(options, name) != default[name]}
    if given and not trained:
        names = ", ".join(given)
        raise InputError(f"{names} says how adapters are made or saved, but there are none: give --lora_rank")
    if adapters is None:
        return
    there = {"lora_rank": adapters.config.r, "lora_alpha": adapters.config.lora_alpha, "save_merged": True}
    for option, value in given.items():
        if there.get(option) != value:
            raise InputError(
                f"model={adapters.name!r} holds adapters of rank {adapters.config.r} and alpha "
                f"{adapters.config.lora_alpha}, which the run trains on: leave out {option}={value}"
            )


def continued(lm: nn.Module, adapters: Adapters) -> nn.Module:
    """Return `lm` with the adapters that were saved, trainable."""
    import peft

    try:
        return peft.PeftModel.from_pretrained(lm, adapters.name, revision=adapters.revision, is_trainable=True)
    except Exception as error:  # shapes of another model, missing or damaged safetensors
        base, _ = adapters.base
        raise InputError(f"the adapters in {adapters.name!r} do not fit {base!r}: {in_a_line(error)}") from error


def adapted(lm: nn.Module, options: ModelConfig) -> nn.Module:
    """Return `lm` with new adapters, which change nothing at first."""
    import peft

    chosen = {"rank": options.lora_rank, "alpha": options.lora_alpha, "targets": options.lora_targets}
    return peft.get_peft_model(lm, _new(lm, lm.get_output_embeddings(), "CAUSAL_LM", **chosen))


def adapt_in_place(classifier: nn.Module, **chosen) -> None:
    """Give a sequence classifier new adapters (rank, alpha, targets); its head is trained whole."""
    import peft

    peft.inject_adapter_in_model(_new(classifier, classifier.score, "SEQ_CLS", **chosen), classifier)
    classifier.score.requires_grad_(True)  # injecting froze all but the adapters


def _new(
    model: nn.Module,
    head: nn.Module,
    task: str,
    *,
    rank: int,
    alpha: float,
    targets: str,
):
    import peft

    if targets != ALL_LINEAR:
        targets = [part.strip() for part in targets.split(",")]
        # peft would skip a name that no layer has if another one is found.
        inside = [name for name, module in _linear_layers(model).items() if module is not head]
        for target in targets:
            if not any(name == target or name.endswith(f".{target}") for name in inside):
                there = ", ".join(sorted({name.rpartition(".")[2] for name in inside}))
                what = f"{type(model).__name__} has no linear layer {target!r} that can be adapted"
                raise InputError(f"lora_targets: {what}; there are {there} (or {ALL_LINEAR}, which is all of them)")
    return peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type=task)


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}


def merged(state: dict, model: nn.Module) -> dict:
    """Return the plain model's state from the whole `state` of one with adapters: W becomes W + scale * B A."""
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
