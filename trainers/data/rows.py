"""Rows as dictionaries, from a JSONL or Parquet file or a Hub dataset; an error names what cannot be read and where."""

import json
from pathlib import Path

from fused_rl.trainers.options.config import InputError, in_a_line

FILES = (".jsonl", ".parquet")


def check_readable(path: Path) -> None:
    """Refuse a file that this process may not read."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"dataset file {path} cannot be read: {error.strerror}") from error


def read_parquet(path: Path) -> list[dict]:
    """Of a whole file."""
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        return table.to_pylist()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, column {_not_utf_8(table)!r}: not UTF-8; write the text as UTF-8") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"dataset file {path} is not a whole Parquet file: {in_a_line(error)}") from error


def _not_utf_8(table) -> str:
    """The first column of a table whose text cannot be read."""
    for name in table.column_names:
        try:
            table[name].to_pylist()
        except UnicodeDecodeError:
            return name
    raise AssertionError("all of it can be read")


def read_dataset(name: str, config_name: str | None, split: str) -> list[dict]:
    """Of a Hub dataset, or of a folder that `datasets` reads."""
    import datasets

    try:
        config_name = config_name or _only_configuration(name, datasets.get_dataset_config_names(name))
        return datasets.load_dataset(name, config_name, split=split).to_list()
    except InputError:
        raise
    except Exception as error:  # a missing split is a ValueError there, a missing file a DataFilesNotFoundError, …
        what = f"dataset={name!r} (configuration {config_name}, split {split})"
        raise InputError(
            f"{what} is neither a .jsonl or .parquet file, nor a folder or a Hub dataset that can be read: "
            f"{in_a_line(error)}"
        ) from error


def _only_configuration(name: str, known: list[str]) -> str:
    """The configuration to take where none is named."""
    usual = [config for config in ("default", "main") if config in known]
    if not usual and len(known) > 1:
        raise InputError(
            f"dataset {name} has several configurations; name one of {known} with --dataset_config "
            "(--eval_dataset_config for the held-out rows)"
        )
    return (usual or known)[0]


def read_jsonl(path: Path) -> list[dict]:
    """Each with the line that it stands on, as `__line__`."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{where}, byte {error.start + 1}: not UTF-8; save the file as UTF-8") from error
        if text.strip():
            rows.append({**_read_object(text, where), "__line__": number})
    return rows


def _read_object(text: str, where: str) -> dict:
    """One line as a dictionary whose text can be tokenised."""
    try:
        row = json.loads(text, object_pairs_hook=lambda pairs: _without_repeats(pairs, where))
    except json.JSONDecodeError as error:
        raise InputError(f"{where}, character {error.colno}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise InputError(f"{where}: JSON nested too deeply to be read") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise InputError(f"{where}: not JSON that can be read: {in_a_line(error)}") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(row).__name__}")
    if "\\u" in text:  # only an escape can spell half a character
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{where}: {error.object[error.start]!r} is half a surrogate pair, and no character"
            ) from error
    return row


def _without_repeats(pairs: list[tuple[str, object]], where: str) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{where}: key {twice!r} stands {names.count(twice)} times in one object")
    return row
