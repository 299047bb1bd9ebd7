"""What a case of bad input is."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ALL, TRAINERS, READERS = "sft grpo reward eval", "sft grpo reward", "sft grpo eval"


class Case(NamedTuple):
    """One bad input of one command."""

    command: str
    title: str
    message: str
    options: tuple[str, ...] = ()
    spoil: Callable[[Path], None] | None = None


def of(commands: str, title: str, message: str, *options: str, **fields) -> list[Case]:
    """The case for each of the commands."""
    return [Case(command, title, message, options, **fields) for command in commands.split()]


def words(commands: str, line: str, message: str, **fields) -> list[Case]:
    """Other words on the command line."""
    return of(commands, line or "no words", message, *line.split(), **fields)
