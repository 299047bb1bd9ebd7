"""What a run reads, directly and through what it reads: adapters name the model that they belong to.

Groups of options say what they name (`Options.reads`).
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fused_rl.trainers.options.config import InputError, Options
from fused_rl.trainers.options.source import Source
from fused_rl.trainers.options.text import in_a_line

MODELS = ("model", "critic", "reward_model")
FUNCTIONS = ("scorer", "surrogate", "sampler")


def of_run(config: Options) -> list[Source]:
    """All that a run of this config reads."""
    found = []
    for source in config.reads():
        found += _with_base(source) if source.kind in MODELS else [source]
    return found


def _with_base(source: Source) -> Iterator[Source]:
    """A model; of adapters also what they belong to."""
    adapters = find_adapters(source.name, source.revision)
    if adapters is None:
        yield source
        return
    yield source._replace(kind="adapters") if source.kind == "model" else source
    base, of_base = adapters.base
    if base != source.name:
        yield from _with_base(Source(source.kind, f"{source.said}, adapters to {base}", base, of_base))


def path_of(source: Source) -> Path | None:
    """Where it lies on this machine; None for what lies on the Hub, or nowhere."""
    if source.kind in FUNCTIONS:
        return module_file(source.name)
    path = Path(source.name).expanduser()
    return path if path.exists() else None


def module_file(function: str) -> Path | None:
    """The file of the module in `module:function`; None where there is none that is read."""
    name = function.partition(":")[0]
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is not None:
        return Path(loaded)
    try:
        spec = importlib.util.find_spec(name)
    except (Exception, SystemExit):  # of a package around it, or a name that is none: loading it says so
        return None
    if spec is not None:
        return None if spec.origin is None else Path(spec.origin)
    here = Path.cwd() / Path(*name.split("."))  # `load_function` looks there last
    places = [path for path in (here.with_suffix(".py"), here / "__init__.py") if path.is_file()]
    return places[0] if places else None


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
