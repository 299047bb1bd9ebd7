"""The command line, the YAML files and the --help of a command; an error of the user is one line.

Left out: subcommands inside YAML, environment variables, and configs that include configs.
"""

import re
import textwrap
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..base.files import names_read
from ..base.options import Options, choices_of, in_words, kinds_of
from ..base.text import InputError
from ..cli import program
from ..options import FIRST

Config = TypeVar("Config", bound=Options)


class HelpPrinted(SystemExit):
    """Ends the process after `--help`."""


class Values(yaml.SafeLoader):
    """Reads YAML 1.1, but for 1e-6, which is text there, 010 and 1:30, which are 8 and 90, and keys that repeat."""

    def construct_mapping(self, node, deep=False):
        """Return a mapping; refuse a key that is there twice."""
        names = [str(key.value) for key, _ in node.value]
        if len({*names}) < len(names):
            raise ValueError(f"{max(names, key=names.count)} is there twice; keep one")
        return super().construct_mapping(node, deep)


Values.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
Values.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"(?:[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+|[-+]?inf|nan)$"),
    list("-+.0123456789in"),
)


def parse(config_class: type[Config], argv: list[str]) -> Config:
    """Return the config that `--config file.yaml` and `--key value` describe; later ones replace earlier ones.

    Args:
        config_class: the options of the command.
        argv: the words after the command.

    Raises:
        InputError: a word, a file, an option or a value is not valid; all unknown options are named at once.
        HelpPrinted: after `--help` has printed its text.
    """
    words = list(argv)
    if words and words[0] in ("-h", "--help"):
        print(help_text(config_class, everything=words[1:] == ["all"]), flush=True)
        raise HelpPrinted(0)

    # Word by word, so that a later file or option wins over an earlier one.
    fields = config_class.model_fields
    from_files: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    unknown: list[str] = []
    where = ""
    while words:
        word = words.pop(0)
        name, is_joined, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise InputError(f"expected --option value, got {word!r}; --help lists the options")
        values = [value] if is_joined else []
        # An option takes one value, or one that takes a list several. An unknown one takes all that follow, so that no
        # value is reported as a stray word.
        is_unknown = name not in (*fields, "config", "local_rank")
        takes_all = is_unknown or list[str] in typing.get_args(kinds_of(config_class).get(name))
        while words and not words[0].startswith("--") and (takes_all or not values):
            values.append(words.pop(0))
        if name == "config":
            path = Path(*values)
            read = read_file(path)
            in_file = [option for option in read if option not in fields]
            where = f"{path}: " if in_file and not unknown else ""
            unknown += in_file
            from_files |= read
            texts = {option: text for option, text in texts.items() if option not in read}
        elif is_unknown:
            unknown.append(name)
            where = ""
        # DeepSpeed's launcher adds --local_rank, which we read from the environment instead.
        elif name != "local_rank":
            texts[name] = (values[0] if values else None) if len(values) < 2 else values
    if unknown:
        raise config_class.unknown(unknown, where)
    options = {
        name: text if isinstance(text, list) else _value(config_class, name, text)
        for name, text in texts.items()
    }

    # A run's config.yaml may hold a value that was chosen for its machine, such as micro_batch_tokens. An option given
    # now that stands in its place, here micro_batch_size, removes it.
    for name, other in config_class.replaces.items():
        if name in options and other not in options:
            from_files.pop(other, None)

    # A file may spell out every default, as a run's own config.yaml does; those do not count as given.
    options = {
        name: setting for name, setting in from_files.items() if setting != fields[name].default
    } | options
    for name, value in options.items():
        # A shell's unset variable leaves an empty value. A system message may have no text on purpose.
        if value == "" and name != "system_prompt":
            raise InputError(f"{name}='' is empty; give it a value, or leave it out")
    return config_class(**options)


def _value(config_class: type[Options], name: str, text: str | None) -> Any:
    """Return the value of a word for an option: the word read as YAML, or the word itself if the option takes text.

    `text` is None for an option without a value.
    """
    kind = kinds_of(config_class)[name]
    # Only a flag may stand without a value.
    if text is None:
        if bool in choices_of(kind):
            return True
        raise InputError(f"{name}: expected a value after --{name}: {in_words(kind)}")
    choices = typing.get_args(kind) or (kind,)
    if text == "null" and type(None) in choices:
        return None

    # YAML's quotes and escapes do not apply to text, so it stays as it is, unless it begins like a list or a mapping
    # that the option takes as well.
    brackets = {list: "[", dict: "{"}
    opening_brackets = tuple(
        brackets[kind] for kind in map(typing.get_origin, choices) if kind in brackets
    )
    if str in choices and not text.startswith(opening_brackets):
        return text
    try:
        return yaml.load(text, Values)
    except yaml.YAMLError as error:
        raise InputError(f"{name}={text!r}: expected {in_words(kind)}") from error
    except ValueError as error:  # an impossible date
        raise InputError(f"{name}={text!r}: {error}") from error


def read_file(path: Path) -> dict[str, Any]:
    """Return the options in a file of `option: value` lines; raise `InputError` if it cannot be read as that."""
    # However a file is unreadable, the error is one line that names it.
    try:
        names_read.add(str(path))
        values = yaml.load(path.read_text(encoding="utf-8"), Values) or {}
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected lines of `option: value`")
    return {str(name): value for name, value in values.items()}


def help_text(config_class: type[Options], *, everything: bool) -> str:
    """Return what `--help` prints: the main options, or all options in groups if `everything` is set."""
    doc = (config_class.__doc__ or "").strip().splitlines()[0]
    lines = [
        f"usage: {program(config_class.command)} [--config FILE] [--key value ...]",
        "",
        doc,
        "",
    ]

    # The short help has the options that matter to every run, each with the first sentence of its docstring.
    if config_class.main and not everything:
        for name in config_class.main:
            lines += _described(config_class, name, in_short=True)
        hidden = len(config_class.model_fields) - len(config_class.main)
        lines += [
            "",
            f"--help all lists the other {hidden} options, too; FILE has lines of `key: value`.",
        ]
        return "\n".join(lines)

    # The long help has first what a reader looks for first, then the groups: the base classes of the config, from the
    # most general one on.
    groups = [("The model, the rows, and the folder of the run.", FIRST)]
    for group in reversed(config_class.__mro__):
        groups.append((group.__doc__ or "", tuple(vars(group).get("__annotations__", ()))))
    waiting = set(config_class.model_fields)
    for doc, declared in groups:
        if new := [name for name in declared if name in waiting]:
            waiting -= {*new}
            lines += [doc.strip().splitlines()[0], ""]
            for name in new:
                lines += _described(config_class, name, in_short=False)
            lines += [""]
    return "\n".join(lines)


def _described(config_class: type[Options], name: str, *, in_short: bool) -> list[str]:
    """Return an option's help in lines of at most 110 characters."""
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
