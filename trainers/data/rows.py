"""Rows as dictionaries that know where they came from: .jsonl and .json files, and what `datasets` reads."""

import contextlib
import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fused_rl.trainers.base.files import check_exists
from fused_rl.trainers.base.screen import print_rank0
from fused_rl.trainers.base.text import InputError, in_a_line
from fused_rl.trainers.options import FILES, is_file_name

# Reasons of lines that hold no row at all.
NOT_JSON, NO_OBJECT = NO_ROW = ("not JSON in UTF-8", "expected a JSON object")
# What a table has in the columns that a row does without.
EMPTY = (None, "", [], {})
# Columns of a .csv file in which numbers are text, too.
TEXTS = ("prompt", "question", "problem", "instruction", "input", "output", "system", "text")
TEXTS += ("system_prompt", "completion", "chosen", "rejected")


class BadRow(InputError):
    """A row that cannot be used: a reason that other rows may share, what came in this one, what to do, and where."""

    def __init__(self, reason: str, remedy: str = "", *, came: str = "", where: str = ""):
        self.reason = reason
        self.remedy = remedy
        self.came = came
        self.where = where
        if came:
            mark = ", " if came.startswith("got ") else "; " if " has " in came else ": "
            reason = f"{reason}{mark}{came}"
        problem = f"{where}: {reason}" if where else reason
        super().__init__(f"{problem}; {remedy}" if remedy else problem)

    @classmethod
    def located(cls, error: InputError, where: str) -> "BadRow":
        """Return the error of a row with the place of the row, if it does not have one yet."""
        if not isinstance(error, BadRow):
            return cls(str(error), where=where)
        return cls(error.reason, error.remedy, came=error.came, where=error.where or where)


@dataclass
class Rows:
    """Rows as dictionaries, each knowing where it came from, so that an error can say so."""

    rows: list[dict]
    source: str
    numbers: Sequence[int] | None = None
    """The line or row number of each in the source, counted from 1; None if they are 1, 2, 3, …"""
    forms: Counter[str] = field(default_factory=Counter)
    """How many rows were read in which form (forms.py)."""
    columns_read: set[str] = field(default_factory=set)
    bad: list[BadRow] | None = None
    """Collects the rows that cannot be used; None raises the first one."""

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, i: int) -> str:
        """Return `file.jsonl, line 3` or `openai/gsm8k, row 3`, counted from 1."""
        unit = "line" if self.source.endswith((".jsonl", ".jsonl.gz")) else "row"
        return f"{self.source}, {unit} {i + 1 if self.numbers is None else self.numbers[i]}"

    def subset(self, indices: Sequence[int]) -> "Rows":
        """Return some of the rows; they keep their numbers in the file, so that errors name the right line."""
        numbers = range(1, len(self) + 1) if self.numbers is None else self.numbers
        chosen = [self.rows[i] for i in indices]
        return Rows(chosen, self.source, [numbers[i] for i in indices], bad=self.bad)

    @contextlib.contextmanager
    def at(self, i: int) -> Iterator[None]:
        """Give an InputError of the block the place of row i."""
        try:
            yield
        except InputError as error:
            raise BadRow.located(error, self.where(i)) from error

    @contextlib.contextmanager
    def collecting(self, i: int) -> Iterator[None]:
        """Collect an InputError of the block, which is about row i, so that the other rows are read as well."""
        try:
            with self.at(i):
                yield
        except BadRow as error:
            if self.bad is None:
                raise
            self.bad.append(error)

    def unused_columns(self) -> list[str]:
        """Return the columns in which some row has a value and that nothing has read."""
        filled: dict[str, None] = {}
        for row in self.rows:
            filled |= {name: None for name, value in row.items() if value not in EMPTY}
        return [name for name in filled if name not in self.columns_read]


def _parse(content: bytes, where: str):
    try:
        return json.loads(content)
    except ValueError as error:
        remedy = "give one object per line, or one list or object in a .json file"
        raise BadRow(NOT_JSON, remedy, came=str(error), where=where) from error


def _cell_of_text(cell: str) -> str | None:
    return cell or None


def read_dataset(name: str, config_name: str | None, split: str) -> list[dict]:
    """Return the rows that `datasets` reads from a .csv or .parquet file, a folder or the Hub."""
    # Imported here, because it takes a second that a .jsonl file does not need.
    import datasets

    datasets.disable_progress_bars()
    kind = Path(name).suffix
    try:
        if kind == ".gz":
            # `datasets` opens what is packed only for some of the formats.
            with tempfile.TemporaryDirectory() as folder:
                unpacked = Path(folder, Path(name).stem)
                unpacked.write_bytes(gzip.decompress(Path(name).read_bytes()))
                return read_dataset(str(unpacked), None, split)
        if kind in FILES:
            options = {}
            if kind == ".csv":
                # Without these NA is a missing value, and a first column without a header an index.
                options = {"keep_default_na": False, "na_values": [""], "index_col": False}
                options["converters"] = dict.fromkeys(TEXTS, _cell_of_text)
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
                f"{name}: read as numbers (007 becomes 7): {', '.join(numbers)}; a .jsonl file keeps text as it is"
            )
    return loaded.to_list()


def checked(rows: Rows) -> Rows:
    """Return the rows that are objects; the others are collected, or the first of them is raised."""
    if not len(rows) and not rows.bad:
        raise InputError(f"dataset {rows.source} has no rows")
    objects = []
    for i, row in enumerate(rows.rows):
        with rows.collecting(i):
            if not isinstance(row, dict):
                remedy = 'a row is an object with columns, such as {"messages": [...]}'
                raise BadRow(NO_OBJECT, remedy, came=f"got {type(row).__name__}")
            objects.append(i)
    return rows if len(objects) == len(rows) else rows.subset(objects)


def load_rows(
    name: str,
    config_name: str | None = None,
    split: str = "train",
    bad_rows: list[BadRow] | None = None,
) -> Rows:
    """Return the rows of a file, a folder or a Hub dataset.

    Lines that hold no row are added to `bad_rows`, and so are later those that cannot be used; without such a list the
    first one is raised.
    """
    check_exists(name)
    path = Path(name)
    if path.is_file() != is_file_name(name):
        raise InputError(
            f"dataset file {name} does not exist, or its name ends in none of {', '.join(FILES)} (each also with .gz)"
        )
    kind = Path(name.removesuffix(".gz")).suffix
    if kind not in (".jsonl", ".json"):
        return checked(Rows(read_dataset(name, config_name, split), name, bad=bad_rows))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"dataset file {name} cannot be read: {error.strerror}") from error
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise InputError(f"{name} cannot be unpacked: {in_a_line(error)}") from error

    # Many .json files hold one object per line, too; others one object or one list over many lines.
    if kind == ".json":
        first = content.lstrip(b"\xef\xbb\xbf \t\r\n").split(b"\n", 1)[0]
        if first.startswith(b"["):
            return checked(Rows(_parse(content, name), name, bad=bad_rows))
        if first.startswith(b"{") and not first.rstrip().endswith(b"}"):
            return checked(Rows([_parse(content, name)], name, bad=bad_rows))
    rows, numbers = [], []
    # Lines of bytes: those of text would also end at characters that JSON allows in strings.
    for number, line in enumerate(content.splitlines(), 1):
        # An empty line is no row, and keeps its number.
        if not line.strip():
            continue
        try:
            rows.append(_parse(line, f"{name}, line {number}"))
        except BadRow as error:
            if bad_rows is None:
                raise
            bad_rows.append(error)
        else:
            numbers.append(number)
    return checked(Rows(rows, name, numbers, bad=bad_rows))
