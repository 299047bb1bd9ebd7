"""`--help` of a command: its options in sections, what each takes in words, and its default."""

import argparse
import dataclasses
import json
import typing

from fused_rl.trainers.options.config import Options, in_words, names_of

SECTIONS = {
    "model": "which model, and which of its weights are trained",
    "data": "which rows, and how they become token ids",
    "rollout": "which responses are drawn, and by whom",
    "scorers": "who judges a response",
    "loss": "rewards, advantages, and what is minimised",
    "critic": "what it starts from, and how it is trained",
    "optimizer": "weights, learning rates, processes, memory",
    "run": "how long, what is measured, and what is left where",
}


def sections(config_class: type[Options]) -> dict[str, list[str]]:
    """The options of a command by their section, as `Options.sections` of the groups says; sections without any are
    left out."""
    placed = dict.fromkeys(names_of(config_class), "run")
    groups = [group for group in config_class.__mro__ if "sections" in vars(group)]
    for group in groups:  # what derives from another comes before it: an option is where it was declared first
        for names, section in group.sections.items():
            placed |= dict.fromkeys(names_of(group) if names == "*" else names.split(), section)
    found = {section: [name for name in placed if placed[name] == section] for section in SECTIONS}
    return {section: names for section, names in found.items() if names}


def text(config_class: type[Options], prog: str, told: dict[str, str]) -> str:
    """What `--help` prints; `told` are the docstrings of the options."""
    parser = argparse.ArgumentParser(
        prog,
        usage=f"{prog} [--config FILE] [--key value ...]",
        description=(config_class.__doc__ or "").strip(),
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28),
    )
    _add(parser, "config", "YAML file with any of the keys below; what follows it on the command line wins.")
    _add(parser, "print_config", "Print the configuration as YAML, then stop.")
    _add(parser, "help", "Print this, then stop.")
    kinds = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for section, names in sections(config_class).items():
        group = parser.add_argument_group(section, SECTIONS[section])
        for name in names:
            _add(group, name, f"{told[name]} ({in_words(kinds[name])}; {_default(fields[name])})")
    return parser.format_help()


def _add(parser, name: str, told: str) -> None:
    parser.add_argument(f"--{name}", action="store_true", help=told.replace("%", "%%"))


def _default(field: dataclasses.Field) -> str:
    """As it is spelled in YAML."""
    if field.default is dataclasses.MISSING:
        return "required"
    return f"default {field.default if isinstance(field.default, (str, float)) else json.dumps(field.default)}"
