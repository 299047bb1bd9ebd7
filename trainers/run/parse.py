"""The command line, YAML files and --help of a command: every refusal is one line.

Left out: subcommands inside YAML, environment variables, configs that include configs.
"""

import re
import textwrap
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fused_rl.trainers.base.text import InputError, refusal_of
from fused_rl.trainers.options import FIRST, Options, choices_of, in_words, kinds_of

Config = TypeVar("Config", bound=Options)


class Values(yaml.SafeLoader):
    """YAML 1.1, which reads 1e-6 as a text, with numbers as everybody writes them."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Return a mapping; refuse a key that stands twice in it, of which PyYAML takes the last without a word."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            raise ValueError(f"{key.value} stands in line {lines[key.value]} and in line {line}")
        lines[key.value] = line
    return loader.construct_mapping(node, deep=True)


Values.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
Values.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"(?:[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+|[-+]?inf|nan)$"),
    list("-+.0123456789in"),
)


def parse(config_class: type[Config], argv: list[str]) -> Config:
    """Return the config that `--config file.yaml` and `--key value` describe; later ones win."""
    words = list(argv)
    if words and words[0] in ("-h", "--help"):
        print(help_text(config_class, everything=words[1:] == ["all"]))
        raise SystemExit(0)

    # Word by word, so that a later file or option wins over an earlier one.
    fields = config_class.model_fields
    from_files: dict[str, Any] = {}
    texts: dict[str, str | None] = {}
    strange: list[str] = []
    where = ""
    while words:
        word = words.pop(0)
        name, is_joined, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise InputError(f"expected --option value, got {word!r}; --help lists the options")
        values = [value] if is_joined else []
        # An option takes one value, and an unknown one all that follow.
        is_strange = name not in (*fields, "config", "local_rank")
        while words and not words[0].startswith("--") and (is_strange or not values):
            values.append(words.pop(0))
        if name == "config":
            path = Path(*values)
            read = read_file(path)
            in_file = [option for option in read if option not in fields]
            where = f"{path}: " if in_file and not strange else ""
            strange += in_file
            from_files |= read
            texts = {option: text for option, text in texts.items() if option not in read}
        elif is_strange:
            strange.append(name)
            where = ""
        # DeepSpeed's launcher adds --local_rank, which is read from the environment.
        elif name != "local_rank":
            texts[name] = values[0] if values else None
    if strange:
        raise refusal_of(strange, fields, where)
    given = {name: _value(config_class, name, text) for name, text in texts.items()}

    # A file may hold what a machine chose in place of what is given now.
    for name, other in config_class.replaces.items():
        if name in given and other not in given:
            from_files.pop(other, None)

    # A file may spell out every default, as a run's own config.yaml does: those were not given.
    given = {
        name: came for name, came in from_files.items() if came != fields[name].default
    } | given
    for name, value in given.items():
        # A shell's unset variable leaves an empty value. A system message may have no text on purpose.
        if value == "" and name != "system_prompt":
            raise InputError(f"{name}='' is empty; give it a value, or leave it out")
    return config_class(**given)


def _value(config_class: type[Options], name: str, text: str | None) -> Any:
    """Return the value of a word for an option: YAML, but an option that may be text takes text that is no list."""
    kind = kinds_of(config_class)[name]
    # An option without a value is a flag.
    if text is None:
        if bool in choices_of(kind):
            return True
        raise InputError(f"{name}: expected {in_words(kind)} after --{name}")
    choices = typing.get_args(kind) or (kind,)
    if text == "null" and type(None) in choices:
        return None

    # Text stays as it is, without YAML's quotes and escapes, unless it begins as a list or mapping that the option
    # takes.
    brackets = {list: "[", dict: "{"}
    of_several = tuple(
        brackets[kind] for kind in map(typing.get_origin, choices) if kind in brackets
    )
    if str in choices and not text.startswith(of_several):
        return text
    try:
        return yaml.load(text, Values)
    except yaml.YAMLError as error:
        raise InputError(f"{name}={text!r}: expected {in_words(kind)}") from error
    except ValueError as error:  # a key that stands twice, or a date that is none
        raise InputError(f"{name}={text!r}: {error}") from error


def read_file(path: Path) -> dict[str, Any]:
    """Return what a file of `option: value` lines says."""
    # Every way in which a file can be unreadable ends in one line that names it.
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Values) or {}
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected lines of `option: value`")
    return {str(name): value for name, value in values.items()}


def help_text(config_class: type[Options], *, everything: bool) -> str:
    """Return what `--help` prints: the main options, or `everything` in groups."""
    doc = (config_class.__doc__ or "").strip().splitlines()[0]
    lines = [
        f"usage: fused-rl {config_class.command} [--config FILE] [--key value ...]",
        "",
        doc,
        "",
    ]

    # In short: the options that every run has to think about, each with the first sentence of its docstring.
    if config_class.main and not everything:
        for name in config_class.main:
            lines += _described(config_class, name, in_short=True)
        hidden = len(config_class.model_fields) - len(config_class.main)
        lines += [
            "",
            f"--help all lists the other {hidden} options, too; FILE has lines of `key: value`.",
        ]
        return "\n".join(lines)

    # All of them: what a reader looks for first, and then group by group, the base classes of the config last to first.
    lines += ["The model, the rows, and the folder of the run.", ""]
    for name in FIRST:
        lines += _described(config_class, name, in_short=False)
    lines += [""]
    seen = set(FIRST)
    for group in reversed(config_class.__mro__):
        own = [
            name
            for name in vars(group).get("__annotations__", {})
            if name in config_class.model_fields
        ]
        new = [name for name in own if name not in seen]
        seen |= {*new}
        lines += [(group.__doc__ or "").strip().splitlines()[0], ""] if new else []
        for name in new:
            lines += _described(config_class, name, in_short=False)
        lines += [""] if new else []
    return "\n".join(lines)


def _described(config_class: type[Options], name: str, *, in_short: bool) -> list[str]:
    """Return an option's help in lines of 110 characters."""
    field = config_class.model_fields[name]
    default = (
        "required"
        if field.is_required()
        else f"default {yaml.safe_dump(field.default).splitlines()[0]}"
    )
    text = " ".join((field.description or "").split())
    if in_short:
        text = text.partition(". ")[0].removesuffix(".") + "."
    text = f"--{name}  {text} ({in_words(kinds_of(config_class)[name])}; {default})"
    return textwrap.wrap(
        text, 110, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
    )
