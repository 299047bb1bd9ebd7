"""Options that mean something only beside others: a table of them for each command, and one check.

A room has the rows of its own options beside them; here are those of the options that all trainers have. Each command
has its whole table as `NEEDS`; an option that is in none must be one that always means something
(tests/trainers/test_needs.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from fused_rl.trainers.options.config import FILES, DataConfig, InputError, Options, is_saved
from fused_rl.trainers.options.handed import are_rows

MAY_BE_EMPTY = {"system_prompt"}  # a message without text


class Needs(NamedTuple):
    """An option that means something only beside another one."""

    option: str
    met: Callable[[Options], bool]
    """Whether the config gives it a meaning."""
    unmet: str
    """What is said after `option=value` where it does not: why, and how to mend it."""


def check_needs(config: Options, needs: Sequence[Needs]) -> None:
    """Refuse an empty text, and an option that was given, and is not its default, where what it needs is not there.

    A default asks for nothing, also where it is spelled out, as in the complete config.yaml of a run.
    """
    empty = [field.name for field in fields(config) if getattr(config, field.name) == ""]
    if set(empty) - MAY_BE_EMPTY:
        raise InputError(f"{empty[0]}='' is empty; give it a value, or leave it out")
    defaults = {field.name: field.default for field in fields(config)}
    for need in needs:
        value = getattr(config, need.option)
        if value != defaults[need.option] and not need.met(config):
            raise InputError(f"{need.option}={value} {need.unmet}")


def without(condition: str) -> str:
    """The usual words."""
    return f"has no meaning without {condition}; give it, or leave the option out"


def on_hub(name: str | None) -> bool:
    """Whether a dataset's name is not that of a file, of a folder that holds one table, or of rows that Python gave."""
    return (
        name is not None and not are_rows(name) and Path(name).suffix not in FILES and not is_saved(name, "state.json")
    )


OF_HUB = "has no meaning for a file, which has no configurations or splits; leave it out"
HUB_NEEDS = (
    Needs("dataset_config", lambda config: on_hub(config.dataset), OF_HUB),
    Needs("dataset_split", lambda config: on_hub(config.dataset), OF_HUB),
)
NO_TEMPLATE = "needs the chat template, which raw_prompt=true leaves out: drop one of them"
TEMPLATE_NEEDS = (
    Needs("system_prompt", lambda config: not config.raw_prompt, NO_TEMPLATE),
    Needs("chat_template_kwargs", lambda config: not config.raw_prompt, NO_TEMPLATE),
)


def _evaluates(config: DataConfig) -> bool:
    return config.eval_size > 0


NO_EVALUATION = "has no meaning with eval_size=0, which evaluates nothing; leave it out, or give --eval_size"
RUN_NEEDS = (
    *HUB_NEEDS,
    *TEMPLATE_NEEDS,
    Needs("eval_dataset", _evaluates, NO_EVALUATION),
    Needs("eval_every", _evaluates, NO_EVALUATION),
    Needs("eval_dataset_config", lambda config: on_hub(config.eval_dataset), without("an eval_dataset of the Hub")),
    Needs("eval_split", lambda config: on_hub(config.eval_dataset), without("an eval_dataset of the Hub")),
    Needs("offload", lambda config: config.zero_stage >= 2, "needs zero_stage 2 or 3, which split what is offloaded"),
    Needs("stage3_param_persistence_threshold", lambda config: config.zero_stage == 3, without("--zero_stage 3")),
    Needs(
        "keep_checkpoints",
        lambda config: config.save_every > 0,
        "has no meaning with save_every=0, which keeps no checkpoint but the last; leave it out, or give --save_every",
    ),
    Needs("accept_changes", lambda config: config.resume, "lets a resumed run have other inputs; add --resume"),
    Needs("hub_model_id", lambda config: config.push_to_hub, "says where to push the model; add --push_to_hub"),
    Needs("hub_private_repo", lambda config: config.push_to_hub, "says where to push the model; add --push_to_hub"),
)
