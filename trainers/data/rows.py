"""Rows as dictionaries that know where they came from: .jsonl and .json files, and what `datasets` reads."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fused_rl.trainers.base.screen import print_rank0
from fused_rl.trainers.base.text import InputError, in_a_line
from fused_rl.trainers.options import FILES, DataConfig

if TYPE_CHECKING:
    import datasets

RowsLike: TypeAlias = "str | list[dict[str, Any]] | datasets.Dataset | None"
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

    def get(self, i: int, column: str, option: str):
        """Return one cell; an error names file, line, column, and the option that names another column."""
        row = self.rows[i]
        if row.get(column) is None:
            what = f"{self.where(i)}: column {column!r} is {'null' if column in row else 'missing'}"
            raise InputError(
                f"{what}; the row has {sorted(row)}; name the right column with --{option}"
            )
        return row[column]

    @contextlib.contextmanager
    def at(self, i: int) -> Iterator[None]:
        """Prefix an InputError of the block with the place of row i."""
        try:
            yield
        except InputError as error:
            raise InputError(f"{self.where(i)}: {error}") from error


def _parse(content: bytes, where: str):
    try:
        return json.loads(content)
    except ValueError as error:
        raise InputError(f"{where}: not JSON in UTF-8: {error}") from error


def read_dataset(name: str, config_name: str | None, split: str) -> list[dict]:
    """Return the rows that `datasets` reads from a .csv or .parquet file, a folder or the Hub."""
    # Imported here, because it takes a second that a .jsonl file does not need.
    import datasets

    datasets.disable_progress_bars()
    kind = Path(name).suffix
    try:
        if kind in FILES:
            options = {}
            if kind == ".csv":
                # Without these NA is a missing value, and a first column without a header an index.
                options = {"keep_default_na": False, "na_values": [""], "index_col": False}
            loaded = datasets.load_dataset(kind[1:], data_files=name, split="train", **options)
        elif Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file():
            # A folder of save_to_disk, which load_dataset would read as loose files.
            loaded = datasets.load_from_disk(name)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            # Datasets such as gsm8k call their usual configuration main, and `datasets` would
            # refuse to choose.
            if config_name is None and "main" in datasets.get_dataset_config_names(name):
                config_name = "main"
            loaded = datasets.load_dataset(name, config_name, split=split)
    # A missing split is a ValueError there, a missing file a DataFilesNotFoundError, …
    except Exception as error:
        what = f"dataset={name!r} (configuration {config_name}, split {split}) cannot be read as a file"
        reason = in_a_line(error.__cause__ or error)
        raise InputError(
            f"{what} ({', '.join(FILES)}), a folder or a Hub dataset: {reason}"
        ) from error
    # A .csv file has no types, and those that `datasets` guesses change what is written.
    if loaded.info.builder_name == "csv":
        columns = loaded.features.items()
        numbers = [name for name, feature in columns if not feature.dtype.endswith("string")]
        if numbers:
            print_rank0(
                f"{name}: {', '.join(numbers)} read as numbers, 007 as 7; a .jsonl file keeps text as it is"
            )
    return loaded.to_list()


def _checked(rows: Rows) -> Rows:
    if not len(rows):
        raise InputError(f"dataset {rows.source} has no rows")
    for i, row in enumerate(rows.rows):
        if not isinstance(row, dict):
            raise InputError(f"{rows.where(i)}: expected a JSON object, got {type(row).__name__}")
    return rows


def load_rows(name: str, config_name: str | None = None, split: str = "train") -> Rows:
    """Return the rows of a file, a folder or a Hub dataset; an error names what cannot be read."""
    path = Path(name)
    if path.is_file() != (path.suffix in FILES):
        raise InputError(f"dataset file {name} does not exist, or is none of {', '.join(FILES)}")
    if path.suffix not in (".jsonl", ".json"):
        return _checked(Rows(read_dataset(name, config_name, split), name))
    # Many .json files hold one object per line, too. An empty line is no row, and keeps its number.
    content = path.read_bytes()
    if path.suffix == ".json" and content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return _checked(Rows(_parse(content, str(path)), name))
    rows, numbers = [], []
    # Lines of bytes: those of text would also end at characters that JSON allows in strings.
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            rows.append(_parse(line, f"{path}, line {number}"))
            numbers.append(number)
    return _checked(Rows(rows, name, numbers))


def chosen_rows(
    option: str, rows: RowsLike, name: str | None, config_name: str | None, split: str
) -> Rows:
    """Return the rows that Python gave for an option, or that the config names."""
    named = name if rows is None else rows
    if named is None:
        raise InputError(
            f"{option} is missing; give --{option}, or in Python train(config, {option}=rows)"
        )
    if isinstance(named, str):
        return load_rows(named, config_name, split)
    # Who has a Dataset has imported `datasets`; importing it here would cost everybody else a
    # second.
    if "datasets" in sys.modules and isinstance(rows, sys.modules["datasets"].Dataset):
        rows = rows.to_list()
    if not isinstance(rows, list):
        expected = (
            "the name of a file or of a Hub dataset, a datasets.Dataset, or a list of dictionaries"
        )
        raise InputError(f"{option}: expected {expected}, got {type(rows).__name__}")
    return _checked(Rows(list(rows), option))


def load_train_eval(
    config: DataConfig, dataset: RowsLike = None, eval_dataset: RowsLike = None
) -> tuple[Rows, Rows]:
    """Return the rows to train on and the held-out rows: those given, or those that a run config names."""
    train = chosen_rows(
        "dataset", dataset, config.dataset, config.dataset_config, config.dataset_split
    )
    if not config.eval_size:
        return train, Rows([], train.source)
    # Held out from the end of the rows: the same rows, whatever the seed.
    if config.eval_dataset is None and eval_dataset is None:
        cut = len(train) - config.eval_size
        if cut <= 0:
            what = f"eval_size={config.eval_size} leaves nothing to train on"
            raise InputError(f"{what}: {train.source} has {len(train)} rows")
        # Both parts keep their numbers in the file, so that errors name the right line.
        numbers = range(1, len(train) + 1) if train.numbers is None else train.numbers
        held_out = Rows(train.rows[cut:], train.source, numbers[cut:])
        return Rows(train.rows[:cut], train.source, numbers[:cut]), held_out
    # Or of a dataset of its own, which has the same configuration if it has the same name.
    configuration = config.eval_dataset_config
    if configuration is None and config.eval_dataset == config.dataset:
        configuration = config.dataset_config
    held_out = chosen_rows(
        "eval_dataset", eval_dataset, config.eval_dataset, configuration, config.eval_split
    )
    if len(held_out) != config.eval_size:
        evaluated = min(len(held_out), config.eval_size)
        print_rank0(
            f"{held_out.source}: evaluated on {evaluated} of {len(held_out)} held-out rows (--eval_size)"
        )
    return train, dataclasses.replace(held_out, rows=held_out.rows[: config.eval_size])


def log_dropped(rows: Rows, kept: int, reason: str) -> None:
    """Print how many rows are left out, and why; refuse to leave out all of them."""
    if len(rows) and not kept:
        raise InputError(f"{rows.source}: all {len(rows)} rows are {reason}")
    if kept < len(rows):
        print_rank0(f"{rows.source}: dropped {len(rows) - kept} of {len(rows)} rows {reason}")
