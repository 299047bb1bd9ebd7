"""Rows as dictionaries, from a file, a folder or a Hub dataset, each knowing where it came from."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fused_rl.trainers.base.ranks import rank
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.base.text import in_a_line
from fused_rl.trainers.data.formats import read_csv, read_json, read_jsonl, read_parquet
from fused_rl.trainers.options import FILES, DataConfig, InputError, is_saved

if TYPE_CHECKING:
    import datasets

Given: TypeAlias = "str | list[dict[str, Any]] | datasets.Dataset | None"
"""Rows in Python: a name, or the rows themselves."""
# Each returns the rows, and the line that each stands on, where that is not its number.
READERS = {
    ".jsonl": read_jsonl,
    ".json": lambda path: (read_json(path), None),
    ".csv": lambda path: (read_csv(path), None),
    ".parquet": lambda path: (read_parquet(path), None),
}


def read_dataset(name: str, config_name: str | None, split: str) -> list[dict]:
    """Of a Hub dataset, or of a folder that `datasets` reads, or wrote by `save_to_disk`."""
    import datasets

    try:
        if is_saved(name):
            saved = datasets.load_from_disk(name)
            if isinstance(saved, datasets.DatasetDict) and split not in saved:
                raise InputError(f"dataset={name!r} has no split {split!r}; it has {', '.join(saved)}")
            return (saved[split] if isinstance(saved, datasets.DatasetDict) else saved).to_list()
        config_name = config_name or _only_configuration(name, datasets.get_dataset_config_names(name))
        builder = datasets.load_dataset_builder(name, config_name) if Path(name).is_dir() else None
        if builder is not None and builder.name in ("csv", "json"):
            return _read_text(builder, split)
        loaded = datasets.load_dataset(name, config_name, split=split)
        guessed = [column for column, kind in loaded.features.items() if _is_guessed(loaded, kind)]
        if guessed and rank() == 0:
            what = f"`datasets` made {', '.join(guessed)} of its text, such as 7 of 007"
            tell(f"{name}: {what}; to keep the text download the file, and name that")
        return loaded.to_list()
    except InputError:
        raise
    except Exception as error:  # a missing split is a ValueError there, a missing file a DataFilesNotFoundError, …
        what = f"dataset={name!r} (configuration {config_name}, split {split})"
        raise InputError(
            f"{what} is neither a file ({', '.join(FILES)}), nor a folder or a Hub dataset that can be read: "
            f"{in_a_line(error)}"
        ) from error


def _read_text(builder, split: str) -> list[dict]:
    """A folder's CSV and JSON as the files alone are read: `datasets` makes numbers, dates and nulls of text."""
    import datasets

    unpack = datasets.DownloadManager()
    rows = {}
    for part, paths in builder.config.data_files.items():
        rows[str(part)] = []
        for path in map(Path, unpack.iter_files(unpack.extract(list(paths))) if str(part) in split else []):
            if builder.name == "csv":
                rows[str(part)] += read_csv(path, builder.config.sep)
            else:
                rows[str(part)] += read_jsonl(path)[0] if path.suffix == ".jsonl" else read_json(path)
    wanted = datasets.ReadInstruction.from_spec(split).to_absolute({part: len(of) for part, of in rows.items()})
    return [row for one in wanted for row in rows[one.splitname][one.from_ : one.to]]


def _is_guessed(loaded, kind) -> bool:
    """Whether a column's type was no type of the file: of CSV everything is text, of JSON dates are."""
    made_of = loaded.info.builder_name
    dtype = str(getattr(kind, "dtype", ""))
    return (made_of == "csv" and not dtype.endswith("string")) or (made_of == "json" and dtype.startswith("timestamp"))


def _only_configuration(name: str, known: list[str]) -> str:
    """The configuration to take where none is named."""
    usual = [config for config in ("default", "main") if config in known]
    if not usual and len(known) > 1:
        raise InputError(
            f"dataset {name} has several configurations; name one of {known} with --dataset_config "
            "(--eval_dataset_config for the held-out rows)"
        )
    return (usual or known)[0]


@dataclass
class Rows:
    """Rows as dictionaries, each knowing where it came from, so that an error can say so."""

    rows: list[dict]
    source: str
    numbers: Sequence[int] | None = None
    """Of each the line or row that it is there, counted from 1; None where none is left out."""

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, i: int) -> str:
        """`file.jsonl, line 3` or `openai/gsm8k, row 3`, counted from 1."""
        unit = "line" if self.source.endswith(".jsonl") else "row"
        return f"{self.source}, {unit} {i + 1 if self.numbers is None else self.numbers[i]}"

    def get(self, i: int, column: str, option: str | None = None):
        """One cell; an error names file, line, column, and the option that names another column."""
        row = self.rows[i]
        if row.get(column) is None:
            remedy = f"; name the right column with --{option}" if option else ""
            if column in row:
                raise InputError(f"{self.where(i)}: column {column!r} is null; mend or remove the row")
            raise InputError(f"{self.where(i)}: column {column!r} is missing; the row has {sorted(row)}{remedy}")
        return row[column]

    @contextlib.contextmanager
    def at(self, i: int) -> Iterator[None]:
        """Inside, a refusal is one of row i, and says so."""
        try:
            yield
        except InputError as error:
            raise InputError(f"{self.where(i)}: {error}") from error

    def split(self, last: int) -> tuple["Rows", "Rows"]:
        """All but the last rows, and the last ones."""
        cut = len(self) - last
        if cut <= 0:
            raise InputError(f"eval_size={last} leaves nothing to train on: {self.source} has {len(self)} rows")
        numbers = range(1, len(self) + 1) if self.numbers is None else self.numbers
        before = Rows(self.rows[:cut], self.source, numbers[:cut])
        return before, Rows(self.rows[cut:], self.source, numbers[cut:])


def given_rows(option: str, given: Given) -> Rows:
    """Rows that Python gave."""
    import datasets

    if isinstance(given, datasets.DatasetDict):
        raise InputError(
            f"{option} has several splits ({', '.join(map(str, given))}); give one of them, {option}[name]"
        )
    rows = given.to_list() if isinstance(given, datasets.Dataset) else given
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        expected = "the name of a file or of a Hub dataset, a datasets.Dataset, or a list of dictionaries"
        raise InputError(f"{option}: expected {expected}, got {type(given).__name__}")
    return _some(Rows([dict(row) for row in rows], option))


def load_rows(name: str, config_name: str | None = None, split: str = "train") -> Rows:
    """Rows of a file, a folder or a Hub dataset; an error names what cannot be read."""
    path = Path(name)
    numbers = None
    if path.suffix in FILES:
        if not path.is_file():
            raise InputError(f"dataset file {name} does not exist, or is a folder")
        try:
            path.open("rb").close()
        except OSError as error:
            raise InputError(f"dataset file {path} cannot be read: {error.strerror}") from error
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
    """The rows that Python gave for an option, or that the config names."""
    if given is not None and not isinstance(given, str):
        return given_rows(option, given)
    if given is None and named is None:
        raise InputError(f"{option} is missing; give --{option}, or in Python train(config, {option}=rows)")
    return load_rows(given or named, config_name, split)


def load_train_eval(config: DataConfig, dataset: Given = None, eval_dataset: Given = None) -> tuple[Rows, Rows]:
    """The rows to train on and the held-out rows: those given, or those that a run config names."""
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
    """Say how many rows are left out, and why; refuse to leave out all of them."""
    if len(rows) and not kept:
        raise InputError(f"{rows.source}: all {len(rows)} rows are {reason}")
    if kept < len(rows) and rank() == 0:
        tell(f"{rows.source}: dropped {len(rows) - kept} of {len(rows)} rows {reason}")
