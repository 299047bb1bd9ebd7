"""What a run may not delete: what it reads."""

import os
from collections.abc import Iterable
from pathlib import Path

from fused_rl.trainers.data.sources import of_run, path_of
from fused_rl.trainers.options.config import InputError, Options


def refuse_to_delete(config: Options, doomed: Iterable[Path]) -> None:
    """Refuse to delete paths of which the run reads something, or which lie in a folder of rows.

    Raises:
        InputError: names what would be deleted, and by which option it is read.
    """
    for source in of_run(config):
        path = path_of(source)
        if path is not None:
            # Of a model's folder its own files are read, and what a run in that folder writes is none of them.
            refuse_if_inside(path, source.said, doomed, below=source.kind == "rows")


def refuse_if_inside(path: Path, said: str, doomed: Iterable[Path], *, below: bool = False) -> None:
    """Refuse where one of `doomed` is or holds `path`, links followed or not; with `below` also where it lies in it."""
    for target in doomed:
        for one, other in ((_named(path), _named(target)), (path.resolve(), target.resolve())):
            if one == other or other in one.parents:
                raise InputError(f"overwrite would delete {target}, and {said} lies there; choose another folder")
            if below and one in other.parents:
                raise InputError(f"overwrite would delete {target}, which lies in {said}; choose another folder")


def _named(path: Path) -> Path:
    """The absolute path by its own name, without following links."""
    return Path(os.path.abspath(path))
