"""Files that are whole or not there: whoever reads them never sees half of one."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def write_rows(path: Path, rows: list[dict]) -> str:
    """One JSON object per line, in a file whose folder need not exist; returns the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes its name when the block ends; where the block raises, nothing is left."""
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(unfinished, folder)
