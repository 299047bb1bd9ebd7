"""Output folders that a command must refuse."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.trainers.bad_inputs.cases import TRAINERS, Case, of


def place(
    title: str, spoil: Callable[[Path], None], message: str, *options: str, commands: str = "sft"
) -> list[Case]:
    """Something about output_dir."""
    return of(commands, f"output_dir {title}", message, *options, spoil=spoil)


def be_a_file(folder: Path) -> None:
    shutil.rmtree(folder / "run")
    (folder / "run").write_text("kept")


def lose_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "checkpoints")


def unchanged(folder: Path) -> None:
    """Nothing."""


OVER, GO_ON = ("--overwrite", "false"), ("--overwrite", "false", "--resume")
PLACES = [
    *place(
        "is a file", be_a_file, "could not be written to .*/run: Not a directory", commands=TRAINERS
    ),
    *place(
        "cannot be written",
        unchanged,
        "could not be written to /proc/run",
        "--output_dir",
        "/proc/run",
    ),
    *place(
        "holds a run",
        unchanged,
        "output_dir=.*run is not empty.*--overwrite",
        *OVER,
        commands=TRAINERS,
    ),
    *place(
        "has no checkpoint",
        lose_checkpoints,
        "resume: there is no checkpoint in",
        *GO_ON,
        commands=TRAINERS,
    ),
    *place(
        "is the current folder",
        unchanged,
        "is the current folder, or holds it",
        "--output_dir",
        ".",
    ),
]
