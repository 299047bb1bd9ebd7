"""Adapters that were saved apart from the weights that they belong to."""

from typing import NamedTuple

from fused_rl.trainers.base.text import in_a_line
from fused_rl.trainers.options import InputError


class Adapters(NamedTuple):
    """Adapters that were saved apart from the weights that they belong to."""

    name: str
    """The folder or Hub name that holds them."""
    revision: str | None
    config: object
    """peft's `LoraConfig`."""

    @property
    def base(self) -> tuple[str, str | None]:
        """The folder or Hub name of the weights that they belong to, and its revision."""
        return self.config.base_model_name_or_path, self.config.revision


def find_adapters(name: str, revision: str | None = None) -> Adapters | None:
    """The adapters that a folder or Hub name holds in place of whole weights; None where it holds something else.

    Raises:
        InputError: adapters that are not read here, or that do not say what they belong to.
    """
    import peft
    from transformers.utils import find_adapter_config_file

    try:
        if find_adapter_config_file(name, revision=revision) is None:
            return None
    except OSError:  # no folder and no name of the Hub: reading the model says so
        return None
    try:
        config = peft.PeftConfig.from_pretrained(name, revision=revision)
    except Exception as error:  # OSError, JSON errors, fields that this release of peft does not know
        raise InputError(
            f"{name!r} holds adapters whose adapter_config.json cannot be read: {in_a_line(error)}"
        ) from error
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA" or config.use_dora or config.modules_to_save or config.bias != "none":
        raise InputError(
            f"{name!r} holds adapters of kind {kind} with use_dora={getattr(config, 'use_dora', None)}, "
            f"modules_to_save={getattr(config, 'modules_to_save', None)}, bias={getattr(config, 'bias', None)}; plain "
            "LoRA is read here: merge them into their model with peft first"
        )
    if not config.base_model_name_or_path:
        raise InputError(
            f"{name!r} holds adapters that do not say to which model they belong (base_model_name_or_path)"
        )
    return Adapters(name, revision, config)


def base_of(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Name and revision of the whole weights: those that adapters belong to, else `name` itself."""
    adapters = find_adapters(name, revision)
    return (name, revision) if adapters is None else adapters.base
