"""The command line and YAML files of a command, parsed into its config: every refusal is one line.

Left out: subcommands inside YAML, environment variables, configs that include configs.
"""

import dataclasses
import itertools
import re
import sys
import typing
from pathlib import Path
from typing import TypeVar

import jsonargparse
import yaml

from fused_rl.trainers.options import help
from fused_rl.trainers.options.config import InputError, Options, in_words, names_of
from fused_rl.trainers.options.names import unknown
from fused_rl.trainers.options.text import shown

Config = TypeVar("Config", bound=Options)


class Refused(SystemExit):
    """A command line that was refused, after its one line was printed."""

    def __init__(self, line: str):
        super().__init__(2)
        self.line = line


class _Parser(jsonargparse.ArgumentParser):
    """Errors in one line, without the usage of 40 options before them."""

    def error(self, message, ex=None):
        line = self._in_a_line(message)
        self._print_message(f"{self.prog}: error: {shown(line)}\n", sys.stderr)
        raise Refused(line)

    def format_help(self) -> str:
        """As `help.text`."""
        return help.text(self.config_class, self.prog, {action.dest: action.help for action in self._actions})

    def _in_a_line(self, message: str) -> str:
        found = re.match(r'Parser key "([\w.]+)":', message)
        if found is None or found[1] not in names_of(self.config_class):
            return " ".join(message.split())
        kind = typing.get_type_hints(self.config_class)[found[1]]
        value = re.search(r"Given value: (.*)|: (\S+) does not conform|'([^']*)'$|Got value: (.*)", message)
        came = "" if value is None else f", got {next(v for v in value.groups() if v is not None)}"
        return f"{found[1]}: expected {in_words(kind)}{came}"


def parse(config_class: type[Config], argv: list[str], prog: str) -> Config:
    """The config from `--config file.yaml` and `--key value`, later ones first; exits with a line on a bad key."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(prog=prog, allow_abbrev=False)
    parser.config_class = config_class
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(config_class)
    argv = _spell_out_flags(config_class, argv)
    try:
        _check_names(config_class, argv)
        for path in config_files(argv):
            _check_file(path, config_class)
    except InputError as error:
        parser.error(str(error))
    values = parser.parse_args(argv).as_dict()
    values.pop("config")
    try:
        return config_class(**values)
    except ValueError as error:  # from __post_init__
        parser.error(str(error))


def _spell_out_flags(config_class: type[Options], argv: list[str]) -> list[str]:
    """`--resume` means `--resume true`; a launcher's `--local_rank` is read from the environment instead.

    After `--server` there may be several words.
    """
    flags = {f"--{f.name}" for f in dataclasses.fields(config_class) if f.type in (bool, "bool")}
    spelled = []
    for i, word in enumerate(argv):
        if word.startswith("--local_rank"):
            continue
        if spelled[-2:-1] == ["--server"] and not word.startswith("--"):
            spelled[-1] += f",{word}"
            continue
        spelled.append(word)
        if word in flags and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            spelled.append("true")
    return spelled


def _check_names(config_class: type[Options], argv: list[str]) -> None:
    """Refuse an unknown option, with the nearest one that there is."""
    known = {"config", "help", "print_config", *names_of(config_class)}
    for word in argv:
        name = word[2:].split("=")[0]
        if not word.startswith("--") or not name or name in known:
            continue
        raise InputError(unknown(name, known, config_class.command))
    kinds = {f"--{name}": str(kind) for name, kind in typing.get_type_hints(config_class).items()}
    for i, option in enumerate(argv):
        words = itertools.takewhile(lambda word: not word.startswith("--"), argv[i + 1 :])
        if "list[" in kinds.get(option, "") and len(listed := list(words)) > 1:
            raise InputError(f"{option}: several are one word, a list: {option} '[{', '.join(listed)}]'")


def config_files(argv: list[str]) -> list[Path]:
    """The files that `--config` names and that exist; the parser speaks of the others."""
    after = [argv[i + 1] for i, word in enumerate(argv[:-1]) if word == "--config"]
    joined = [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    return [Path(name) for name in after + joined if Path(name).is_file()]


def _check_file(path: Path, config_class: type[Options]) -> None:
    """Refuse what is no YAML of the known options: the parser takes the last of two equal keys without a word."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise InputError(f"{path}: expected lines of `option: value`")
    seen, known = {}, names_of(config_class)
    for key, _ in [] if node is None else node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise InputError(f"{path}, line {line}: expected the name of an option before the colon")
        if key.value in seen:
            raise InputError(f"{path}, line {line}: key {key.value!r} stands on line {seen[key.value]} too")
        seen[key.value] = line
        if key.value not in known:
            raise InputError(f"{path}, line {line}: {unknown(key.value, known, config_class.command)}")
