"""What a run wrote into its folder, file by file: `--overwrite` deletes that, and nothing else.

    written.json    {"written": ["config.yaml", "checkpoints/step-4/state.json", "model/config.json", …]}

A file is listed before it gets its name, so that none that a run wrote is missing, however it ends. What lies under a
name of `NAMES` and is not listed is somebody else's: a run neither deletes nor replaces it, but ends before it begins.
"""

import fnmatch
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fused_rl.trainers.base.files import delete, files_below, whole_folder, write_atomically
from fused_rl.trainers.options.config import InputError

LIST = "written.json"
NAMES = (
    "checkpoints",
    "tensorboard",
    "model",
    "critic",
    "published",
    "metrics.jsonl",
    "samples.jsonl",
    "curves.png",
    "evaluation.json",
    "scores.png",
    "config.yaml",
)
FOLDERS = ("checkpoints", "tensorboard", "model", "critic", "published")
# Files that every run may write; those of checkpoints and models are listed when they are known.
USUAL = [name for name in NAMES if name not in FOLDERS]
USUAL += ["checkpoints/latest", "tensorboard/events.out.tfevents.*"]


def there(folder: Path) -> list[str]:
    """The names under which a run writes, of those that are taken."""
    names = (*NAMES, *(f"{name}.tmp" for name in NAMES))
    return [name for name in names if os.path.lexists(folder / name)]


def check(folder: Path, names: Iterable[str], remedy: str) -> None:
    """Refuse to delete or replace what stands under `names` where a run has not written all of it.

    Raises:
        InputError: there is no list of what a run wrote, or something is not on it; names that, and the remedy.
    """
    names = list(names)
    listed = _read(folder) if names else set()
    if listed is None:
        raise InputError(
            f"output_dir={folder} holds {', '.join(names)}, and no {LIST} that says what a run wrote: no run of this "
            f"version made them, so nothing of them is deleted or replaced; {remedy}"
        )
    for name in names:
        path = folder / name
        for found in [path] if path.is_symlink() or not path.is_dir() else path.rglob("*"):
            if found.is_dir() and not found.is_symlink():
                continue
            relative = found.relative_to(folder).as_posix()
            if not _is_listed(relative, listed):
                raise InputError(
                    f"output_dir={folder}: no run wrote {relative} ({LIST} does not list it), so it is neither deleted "
                    f"nor replaced; {remedy}"
                )


def has_list(folder: Path) -> bool:
    """Whether a run has said what it wrote there, and what it said can be read."""
    try:
        return _read(folder) is not None
    except InputError:
        return False


def begin(folder: Path) -> None:
    """Start the list of a run that never had one: what stands under a run's names is that run's."""
    names = set(USUAL)
    for name in FOLDERS:
        names |= {f"{name}/{below}" for below in names_below(folder / name)}
    _write(folder, names)


def add(folder: Path, names: Iterable[str]) -> None:
    """List files that are about to get these names, and forget those that have gone; only in a run's own folder."""
    listed = _read(folder)
    if listed is not None:
        kept = {name for name in listed if name in USUAL or (folder / name).exists()}
        _write(folder, {*kept, *names})


def remove(folder: Path) -> None:
    """Delete what stands under the names of a run, half-written files too; `check` has found it to be a run's."""
    for name in there(folder):
        delete(folder / name)


@contextmanager
def listed_folder(folder: Path) -> Iterator[Path]:
    """`whole_folder` for a folder of a run, whose files are listed before they get their names."""
    with whole_folder(folder) as unfinished:
        yield unfinished
        add(folder.parent, [f"{folder.name}/{name}" for name in names_below(unfinished)])


def names_below(folder: Path) -> list[str]:
    """The files in a folder and its folders, as they are called from there."""
    return [path.relative_to(folder).as_posix() for path in files_below(folder)]


def _read(folder: Path) -> set[str] | None:
    """None where there is no list."""
    path = folder / LIST
    try:
        listed = json.loads(path.read_bytes())["written"]
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise ValueError
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path} is not what was written, so what a run wrote there is not known: delete yourself what you do not "
            "need, or choose another folder"
        ) from error
    return set(listed)


def _is_listed(name: str, listed: set[str]) -> bool:
    """Whether a run wrote it: what it was writing when it was killed ends in .tmp, or lies below what does."""
    half_written = any(part.endswith(".tmp") for part in Path(name).parts)
    return name in listed or half_written or any(fnmatch.fnmatchcase(name, usual) for usual in USUAL)


def _write(folder: Path, names: set[str]) -> None:
    write_atomically(folder / LIST, json.dumps({"written": sorted(names)}, indent=1) + "\n")
