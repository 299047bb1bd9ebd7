"""Output folders that a command must refuse."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.trainers.bad_inputs.cases import TRAINERS, Case, of


def place(title: str, spoil: Callable[[Path], None], message: str, *options: str, commands: str = "sft") -> list[Case]:
    """Something about output_dir."""
    return of(commands, f"output_dir {title}", message, *options, spoil=spoil)


def be_a_file(folder: Path) -> None:
    shutil.rmtree(folder / "run")
    (folder / "run").write_text("kept")


def be_a_broken_link(folder: Path) -> None:
    shutil.rmtree(folder / "run")
    (folder / "run").symlink_to("nowhere")


def lose_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "checkpoints")


def hold_notes(folder: Path) -> None:
    (folder / "run" / "model" / "notes.txt").write_text("mine")


def be_in_a_model(folder: Path) -> None:
    """The run lies in the folder of the model that it trains, which keeps the run's deletions out of nothing."""
    shutil.copytree(folder / "model", folder / "run", dirs_exist_ok=True)
    (folder / "run" / "checkpoints" / "notes.txt").write_text("mine")


def hold_a_link(folder: Path) -> None:
    (folder / "run" / "checkpoints" / "linked").symlink_to(folder / "model")


def be_no_run(folder: Path) -> None:
    (folder / "run" / "written.json").unlink()


def be_told_of_wrongly(folder: Path) -> None:
    (folder / "run" / "written.json").write_text("[" * 100_000)


def unchanged(folder: Path) -> None:
    """Nothing."""


OVER, GO_ON = ("--overwrite", "false"), ("--overwrite", "false", "--resume")
PLACES = [
    *place("is a file", be_a_file, "output_dir=run cannot be used: File exists", commands=TRAINERS),
    *place("is below a file", unchanged, "cannot be used: Not a directory", "--output_dir", "rows.jsonl/run"),
    *place("is a link to nothing", be_a_broken_link, "output_dir=run cannot be used"),
    *place("cannot be written", unchanged, "/proc/run cannot be used", "--output_dir", "/proc/run", commands=TRAINERS),
    *place("has too long a name", unchanged, "cannot be used: File name too long", "--output_dir", "x" * 300),
    *place("holds a run", unchanged, r"run already holds a run \(checkpoints, .*--overwrite", *OVER, commands=TRAINERS),
    *place(
        "is a model's and holds others'",
        be_in_a_model,
        "no run wrote checkpoints/notes.txt",
        *("--model", "run"),
        commands=TRAINERS,
    ),
    *place("holds notes", hold_notes, "no run wrote model/notes.txt", commands=TRAINERS),
    *place("holds a link of others", hold_a_link, "no run wrote checkpoints/linked"),
    *place("was no run", be_no_run, "holds checkpoints, .*no written.json that says what", commands=TRAINERS),
    *place("has a damaged list", be_told_of_wrongly, "written.json is not what was written"),
    *place("accepts", unchanged, "accept_changes=.* add --resume", "--accept_changes"),
    *place("has no checkpoint", lose_checkpoints, "resume: there is no checkpoint in", *GO_ON, commands=TRAINERS),
    *place("is new to resume", unchanged, "resume: there is no checkpoint in", *GO_ON, "--output_dir", "new"),
    *place("has another step", unchanged, "resume_from='step-9' is not in", *OVER, "--resume_from", "step-9"),
    *place("has no such step", unchanged, "resume_from='../../model' is not", *OVER, "--resume_from", "../../model"),
]
