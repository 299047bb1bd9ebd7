"""Rows as dictionaries, from a file (.jsonl, .json, .csv, .parquet), a folder or a Hub dataset.

Each row knows where it came from. An error names the file, and the line or row that cannot be read.
"""

import contextlib
import csv
import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fused_rl.trainers.base.ranks import rank
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.base.text import in_a_line
from fused_rl.trainers.options import FILES, DataConfig, InputError, is_saved

if TYPE_CHECKING:
    import datasets

Given: TypeAlias = "str | list[dict[str, Any]] | datasets.Dataset | None"
"""Rows in Python: a name, or the rows themselves."""


@dataclass
class Rows:
    """Rows as dictionaries, each knowing where it came from, so that an error can say so."""

    rows: list[dict]
    source: str
    numbers: Sequence[int] | None = None
    """The line or row number of each in the source, counted from 1; None if they are 1, 2, 3, …"""

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, i: int) -> str:
        """Return `file.jsonl, line 3` or `openai/gsm8k, row 3`, counted from 1."""
        unit = "line" if self.source.endswith(".jsonl") else "row"
        return f"{self.source}, {unit} {i + 1 if self.numbers is None else self.numbers[i]}"

    def get(self, i: int, column: str, option: str | None = None):
        """Return one cell; an error names file, line, column, and the option that names another column."""
        row = self.rows[i]
        if row.get(column) is None:
            remedy = f"; name the right column with --{option}" if option else ""
            if column in row:
                raise InputError(f"{self.where(i)}: column {column!r} is null; mend or remove the row")
            raise InputError(f"{self.where(i)}: column {column!r} is missing; the row has {sorted(row)}{remedy}")
        return row[column]

    @contextlib.contextmanager
    def at(self, i: int) -> Iterator[None]:
        """Prefix an InputError of the block with the place of row i."""
        try:
            yield
        except InputError as error:
            raise InputError(f"{self.where(i)}: {error}") from error

    def split(self, last: int) -> tuple["Rows", "Rows"]:
        """Return all but the last rows, and the last ones."""
        cut = len(self) - last
        if cut <= 0:
            raise InputError(f"eval_size={last} leaves nothing to train on: {self.source} has {len(self)} rows")
        numbers = range(1, len(self) + 1) if self.numbers is None else self.numbers
        before = Rows(self.rows[:cut], self.source, numbers[:cut])
        return before, Rows(self.rows[cut:], self.source, numbers[cut:])


# Files.


def _decoded(content: bytes, where: str) -> str:
    """Return bytes as UTF-8 text, without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}, byte {error.start + 1}: not UTF-8; save the file as UTF-8") from error


def _parsed(text: str, where: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"character {error.colno}" if "\n" not in text else f"line {error.lineno}, character {error.colno}"
        raise InputError(f"{where}, {at}: not JSON: {error.msg}") from error


def _checked(row, where: str) -> dict:
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def read_jsonl(path: Path) -> tuple[list[dict], list[int]]:
    """Return the rows of a JSON Lines file, and the line that each stands on."""
    rows, lines = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        where = f"{path}, line {number}"
        text = _decoded(line, where)
        if text.strip():
            rows.append(_checked(_parsed(text, where), where))
            lines.append(number)
    return rows, lines


def read_json(path: Path) -> list[dict]:
    """Return the rows of a file that holds one list of objects, or an object in each line as a .jsonl file does."""
    text = _decoded(path.read_bytes(), str(path))
    if not text.lstrip().startswith("["):
        return read_jsonl(path)[0]
    rows = _parsed(text, str(path))
    return [_checked(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def read_csv(path: Path) -> list[dict]:
    """Return the rows of a CSV file. Every cell is text as it stands ("007", "NA"), and an empty cell is None."""
    text = _decoded(path.read_bytes(), str(path))
    csv.field_size_limit(2**31 - 1)  # its own limit is shorter than documents are
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        header = next(reader, [])
        for cells in reader:
            if cells and len(cells) != len(header):
                what = f"line {reader.line_num}: {len(cells)} cells below {len(header)} names of columns"
                raise InputError(f"{path}, {what}; put text with commas in quotes")
            if any(cells):  # spreadsheets end in rows of commas
                rows.append({name: cell or None for name, cell in zip(header, cells, strict=True)})
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV: {in_a_line(error)}") from error
    return rows


def read_parquet(path: Path) -> list[dict]:
    """Return the rows of a Parquet file."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"dataset file {path} cannot be read as Parquet: {in_a_line(error)}") from error


# Each returns the rows, and the line that each stands on if that is not its number.
READERS = {
    ".jsonl": read_jsonl,
    ".json": lambda path: (read_json(path), None),
    ".csv": lambda path: (read_csv(path), None),
    ".parquet": lambda path: (read_parquet(path), None),
}


# Folders and the Hub.


def read_dataset(name: str, config_name: str | None, split: str) -> list[dict]:
    """Return the rows of a Hub dataset, or of a folder that `datasets` reads, or wrote by `save_to_disk`."""
    import datasets

    try:
        if is_saved(name):
            saved = datasets.load_from_disk(name)
            return (saved[split] if isinstance(saved, datasets.DatasetDict) else saved).to_list()
        if config_name is None:
            config_name = _only_configuration(name, datasets.get_dataset_config_names(name))
        loaded = datasets.load_dataset(name, config_name, split=split)
    except InputError:
        raise
    except Exception as error:  # a missing split is a ValueError there, a missing file a DataFilesNotFoundError, …
        what = f"dataset={name!r} (configuration {config_name}, split {split})"
        raise InputError(
            f"{what} is neither a file ({', '.join(FILES)}), nor a folder or a Hub dataset that can be read: "
            f"{in_a_line(error)}"
        ) from error
    guessed = [column for column, kind in loaded.features.items() if _is_guessed(loaded, kind)]
    if guessed and rank() == 0:
        what = f"`datasets` made {', '.join(guessed)} of its text, such as 7 of 007"
        tell(f"{name}: {what}; to keep the text give the file itself")
    return loaded.to_list()


def _is_guessed(loaded, kind) -> bool:
    """Return True if a column's type is not the file's: all is text in CSV, and so are dates in JSON."""
    made_of = loaded.info.builder_name
    dtype = str(getattr(kind, "dtype", ""))
    if made_of == "csv":
        return not dtype.endswith("string")
    return made_of == "json" and dtype.startswith("timestamp")


def _only_configuration(name: str, known: list[str]) -> str:
    """Return the configuration to take if none is named."""
    usual = [config for config in ("default", "main") if config in known]
    if not usual and len(known) > 1:
        raise InputError(
            f"dataset {name} has several configurations; name one of {known} with --dataset_config "
            "(--eval_dataset_config for the held-out rows)"
        )
    return (usual or known)[0]


# A run's rows.


def load_rows(name: str, config_name: str | None = None, split: str = "train") -> Rows:
    """Return the rows of a file, a folder or a Hub dataset; an error names what cannot be read."""
    path = Path(name)
    numbers = None
    if path.suffix in FILES:
        if not path.is_file():
            raise InputError(f"dataset file {name} does not exist, or is a folder")
        rows, numbers = READERS[path.suffix](path)
    elif path.is_file():
        raise InputError(f"dataset file {name}: only {', '.join(FILES)} files are read; unpack, rename or convert it")
    else:
        rows = read_dataset(name, config_name, split)
    return _some(Rows(rows, name, numbers))


def _some(rows: Rows) -> Rows:
    if not len(rows):
        raise InputError(f"dataset {rows.source} has no rows")
    return rows


def chosen_rows(option: str, given: Given, named: str | None, config_name: str | None, split: str) -> Rows:
    """Return the rows that Python gave for an option, or that the config names."""
    import datasets

    if given is None and named is None:
        raise InputError(f"{option} is missing; give --{option}, or in Python train(config, {option}=rows)")
    if given is None or isinstance(given, str):
        return load_rows(given or named, config_name, split)
    rows = given.to_list() if isinstance(given, datasets.Dataset) else given
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        expected = "the name of a file or of a Hub dataset, a datasets.Dataset, or a list of dictionaries"
        raise InputError(f"{option}: expected {expected}, got {type(given).__name__}")
    return _some(Rows([dict(row) for row in rows], option))


def load_train_eval(config: DataConfig, dataset: Given = None, eval_dataset: Given = None) -> tuple[Rows, Rows]:
    """Return the rows to train on and the held-out rows: those given, or those that a run config names."""
    train = chosen_rows("dataset", dataset, config.dataset, config.dataset_config, config.dataset_split)
    if not config.eval_size:
        return train, Rows([], train.source)
    if config.eval_dataset is None and eval_dataset is None:
        return train.split(config.eval_size)
    configuration = config.eval_dataset_config
    if configuration is None and config.eval_dataset == config.dataset:
        configuration = config.dataset_config
    held_out = chosen_rows("eval_dataset", eval_dataset, config.eval_dataset, configuration, config.eval_split)
    if len(held_out) < config.eval_size and rank() == 0:
        tell(f"eval_size={config.eval_size}, but {held_out.source} has {len(held_out)} rows: all are used")
    if len(held_out) > config.eval_size and rank() == 0:
        tell(f"{held_out.source}: evaluated on {config.eval_size} of {len(held_out)} held-out rows (--eval_size)")
    return train, dataclasses.replace(held_out, rows=held_out.rows[: config.eval_size])


def tell_dropped(rows: Rows, kept: int, reason: str) -> None:
    """Print how many rows are left out, and why; refuse to leave out all of them."""
    if len(rows) and not kept:
        raise InputError(f"{rows.source}: all {len(rows)} rows are {reason}")
    if kept < len(rows) and rank() == 0:
        tell(f"{rows.source}: dropped {len(rows) - kept} of {len(rows)} rows {reason}")
