"""Rows as JSON text in one memory-mapped column, in the order of their files; nothing about their form is guessed."""

import contextlib
import copy
import csv
import glob
import gzip
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import datasets.config
import numpy
import pandas

from ..base.files import check_exists, fingerprint, hash_of, names_read
from ..base.ranks import process_index
from ..base.screen import print_rank0
from ..base.text import InputError, in_a_line
from ..options import FILES, is_file_name

# Where the column of text and the token ids of large files are kept, as `datasets` keeps what it reads.
CACHE = Path(datasets.config.HF_DATASETS_CACHE, "fused_rl")
# Rows of fewer bytes are read and encoded in about a second, so they are kept in memory.
SMALL = 1 << 20
BLOCK = 1 << 24  # characters that are read at once of a file that holds one list
FEATURES = datasets.Features(
    row=datasets.Value("binary"), file=datasets.Value("int32"), number=datasets.Value("int64")
)
SEPARATORS = re.compile(r"[\s,]*")
# Words by which files and folders are named after a split, as `datasets` knows them.
SPLITS = {"train": ("train", "training"), "test": ("test", "testing", "eval", "evaluation")}
SPLITS["validation"] = ("validation", "valid", "val", "dev")


class BadRow(InputError):
    """A row that cannot be used: a reason that other rows may share, what came in this one, what to do, and where."""

    def __init__(self, reason: str, remedy: str = "", *, got: str = "", where: str = ""):
        self.reason = reason
        self.remedy = remedy
        self.got = got
        self.where = where
        if got:
            mark = ", " if got.startswith("got ") else "; " if " has " in got else ": "
            reason = f"{reason}{mark}{got}"
        problem = f"{where}: {reason}" if where else reason
        super().__init__(f"{problem}; {remedy}" if remedy else problem)

    @classmethod
    def located(cls, error: ValueError, where: str = "") -> "BadRow":
        """Return the error of a row with the place of the row, if it does not have one yet."""
        if not isinstance(error, BadRow):
            return cls(str(error), where=where)
        return cls(error.reason, error.remedy, got=error.got, where=error.where or where)


class Rows(Sequence[dict]):
    """Rows that are parsed when one is asked for, each knowing where it came from, so that an error can say so."""

    def __init__(
        self,
        rows: Iterable[Any] | datasets.Dataset,
        *sources: str,
        key: str | None = None,
        bad: list[BadRow] | None = None,
    ):
        """Take rows, or a table of `FEATURES`, and the names of their files.

        Args:
            rows: the rows.
            sources: the names, by the number in the column `file`.
            key: what the cached token ids of the rows are named after; None caches none.
            bad: collects the rows that cannot be used; None raises the first one.
        """
        if not isinstance(rows, datasets.Dataset):
            rows = datasets.Dataset.from_list(
                [{"row": text_of(row), "file": 0, "number": i} for i, row in enumerate(rows, 1)],
                FEATURES,
            )
        self.table: Any = rows
        self.sources = sources
        self.source = ", ".join(sources)
        """What messages name: the files, or the folders that hold them."""
        self.key = key
        self.bad = bad
        self.forms: Counter[str] = Counter()
        """How many rows were read in which form (forms.py)."""
        self.columns_read: set[str] = set()
        self.columns_filled: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> dict:
        return parsed(self.table[i]["row"])

    def __iter__(self) -> Iterator[dict]:
        for rows in self.table.iter(1000):
            yield from map(parsed, rows["row"])

    def where(self, i: int) -> str:
        """Return `file.jsonl, line 3` or `openai/gsm8k, row 3`, counted from 1."""
        row = self.table[i]
        source = self.sources[row["file"]]
        unit = "line" if source.endswith((".jsonl", ".jsonl.gz")) else "row"
        return f"{source}, {unit} {row['number']}"

    def subset(self, indices: range) -> "Rows":
        """Return neighbouring rows, which say with the others what was read.

        They keep their numbers in the file, so that errors name the right line.
        """
        rows = copy.copy(self)
        rows.table = self.table.select(indices)
        rows.key = None if self.key is None else f"{self.key}-{indices.start}-{indices.stop}"
        return rows

    @contextlib.contextmanager
    def collecting(self, i: int) -> Iterator[None]:
        """Collect an InputError of the block, which is about row i, so that the other rows are read as well."""
        try:
            yield
        except InputError as error:
            bad_row = BadRow.located(error, self.where(i))
            if self.bad is None:
                raise bad_row from error
            self.bad.append(bad_row)


@contextlib.contextmanager
def quiet_datasets(*, is_quick: bool = False) -> Iterator[None]:
    """Show the bars of `datasets` on rank 0 alone, and for what is quick none."""
    shows = datasets.is_progress_bar_enabled()
    if is_quick or process_index():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shows:
            datasets.enable_progress_bars()


def text_of(row: Any) -> bytes:
    """Return a row as JSON; arrays become lists, and what JSON does not know becomes text."""
    return json.dumps(
        row, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v)
    ).encode()


def parsed(text: bytes) -> dict:
    """Return the row that a text of JSON says."""
    try:
        row = json.loads(text)
    except ValueError as error:
        remedy = "give one object per line, or one list or object in a .json file"
        raise BadRow("not JSON in UTF-8", remedy, got=str(error)) from error
    if not isinstance(row, dict):
        remedy = 'a row is an object with columns, such as {"messages": [...]}'
        raise BadRow("expected a JSON object", remedy, got=f"got {type(row).__name__}")
    return row


# Files, each as texts of rows.


def rows_of_file(name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a file as JSON, after their numbers."""
    try:
        read = READERS[Path(name.removesuffix(".gz")).suffix]
        with gzip.open(name) if name.endswith(".gz") else open(name, "rb") as file:
            read_rows = read(cast(IO[bytes], file))  # a GzipFile is one in all but its type
            # An empty line is no row, and keeps its number.
            yield from ((number, row) for number, row in enumerate(read_rows, 1) if row.strip())
    except (OSError, EOFError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or in_a_line(error)
        raise InputError(f"dataset file {name} cannot be read: {reason}") from error


def _json(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the rows of a file of one list, of one object, or of one object in each line."""
    filled = (line for line in file if line.strip(b"\xef\xbb\xbf \t\r\n"))
    first, second = next(filled, b""), next(filled, b"")
    file.seek(0)
    begin = first.lstrip(b"\xef\xbb\xbf \t")
    if begin.startswith(b"["):
        yield from map(str.encode, _elements(io.TextIOWrapper(file, "utf-8-sig")))
    elif second and begin.rstrip().endswith(b"}"):
        yield from file
    else:
        content = file.read()
        lists = []
        with contextlib.suppress(ValueError, AttributeError):
            # A list of objects in an object without other columns of rows, as in {"version": 1, "data": [...]}.
            lists = [v for k, v in json.loads(content).items() if _is_list_of_rows(k, v)]
        yield from map(text_of, lists[0]) if len(lists) == 1 else [content]


def _is_list_of_rows(column: str, value: Any) -> bool:
    """Return True for a list of objects that are no messages."""
    is_list = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    return bool(is_list) and not {"role", "from"} & set(value[0]) and column != "tools"


def _elements(file: IO[str]) -> Iterator[str]:
    """Yield the text of each value in a list, holding no more of the file than a block and a value."""
    decode = json.JSONDecoder().raw_decode
    text = file.read(BLOCK).lstrip()[1:]
    position = count = 0
    while True:
        position = SEPARATORS.match(text, position).end()  # type: ignore[union-attr]
        if text.startswith("]", position):
            return
        problem = "the list does not end"
        try:
            _, end = decode(text, position)
        except ValueError as error:
            problem, end = str(error), len(text)
        # What reaches the end of a block may go on in the next one.
        if end == len(text):
            block = file.read(BLOCK)
            if not block:
                raise BadRow("not JSON in UTF-8", f"fix row {count + 1}", got=problem)
            text, position = text[position:] + block, 0
            continue
        count += 1
        yield text[position:end]
        position = end


def _csv(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the rows of a table whose cells are text, as they are written; empty ones are null."""
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    header = text.readline()
    text.seek(0)
    csv.field_size_limit(sys.maxsize)
    for row in csv.DictReader(text, delimiter=max(",;\t", key=header.count)):
        if None in row:
            raise ValueError(f"a row has more cells than the header has names: {row[None]!r:.80}")
        yield text_of({name: cell or None for name, cell in row.items() if name})


def _parquet(file: IO[bytes]) -> Iterator[bytes]:
    import pyarrow.parquet

    is_packed = isinstance(file, gzip.GzipFile)
    table = pyarrow.parquet.ParquetFile(io.BytesIO(file.read()) if is_packed else file)
    for batch in table.iter_batches(1000):
        yield from map(text_of, batch.to_pylist())


READERS: dict[str, Callable[[IO[bytes]], Iterator[bytes]]] = {
    # Lines of bytes: those of text would also end at characters that JSON allows in strings.
    **{".jsonl": iter, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
}


# Names, each of a file, a folder, a pattern or a Hub dataset.


def entries_of(folder: Path, split: str) -> list[str]:
    """Return the files of rows in a folder, and the folders that `datasets` saved there.

    Those whose names say that they are of another split are left out.
    """
    chosen, other_splits = [], []
    paths = sorted(folder.rglob("*"))
    saved = {*filter(_is_saved, paths)}
    for path in paths:
        inside = path.relative_to(folder)
        is_file = path.is_file() and is_file_name(path.name)
        if not (is_file or path in saved) or saved & {*path.parents} or inside.parts[0][0] == ".":
            continue
        words = [re.split(r"[-._0-9]", part.lower(), maxsplit=1)[0] for part in inside.parts]
        named = {name for name, words_of_split in SPLITS.items() if {*words} & {*words_of_split}}
        has_splits = (path / "dataset_dict.json").is_file()
        named = named or {split if has_splits else "train"}
        (chosen if split in named else other_splits).append(str(path))
    if chosen and other_splits:
        print_rank0(
            f"{folder}: {len(other_splits)} files of other splits than {split} are not read"
        )
    return chosen


def read_dataset(name: str, config_name: str | None, split: str) -> datasets.Dataset:
    """Return the rows of a folder from `save_to_disk`, of one with configurations, or of the Hub."""
    try:
        if _is_saved(Path(name)):
            return table_of(datasets.load_from_disk(name), name, split)
        # Datasets such as gsm8k call their usual configuration main, and `datasets` would refuse to choose.
        if config_name is None and "main" in datasets.get_dataset_config_names(name):
            config_name = "main"
        return datasets.load_dataset(name, config_name, split=split)
    except InputError:
        raise
    # A missing split is a ValueError there, a missing file a DataFilesNotFoundError, …
    except Exception as error:
        problem = f"dataset={name!r} (configuration {config_name}, split {split}) cannot be read as a file"
        reason = in_a_line(error.__cause__ or error)
        raise InputError(
            f"{problem} ({', '.join(FILES)}), a folder or a Hub dataset: {reason}"
        ) from error


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def table_of(loaded: Any, name: str, split: str) -> datasets.Dataset:
    """Return what `datasets` or pandas holds as a `Dataset`; of several splits the named one."""
    if isinstance(loaded, pandas.DataFrame):
        return datasets.Dataset.from_pandas(loaded, preserve_index=False)
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        has = f"{name} has the splits {', '.join(map(str, loaded))}, and not {split}"
        raise InputError(f"{has}: name one (--dataset_split; of eval_dataset --eval_split)")
    return loaded[split]


def _sources(
    name: str, config_name: str | None, split: str
) -> Iterator[tuple[str, str | datasets.Dataset]]:
    """Yield the files and the `Dataset`s that a name stands for, each after its name."""
    path = Path(name)
    card = path / "README.md"
    has_configurations = config_name or (os.path.isfile(card) and "configs:" in card.read_text())
    names = [name]
    if glob.has_magic(name) and not os.path.lexists(name):
        names = sorted(glob.glob(name, recursive=True))
        if not names:
            raise InputError(f"dataset={name} matches no file; the current folder is {os.getcwd()}")
    elif os.path.isdir(path) and not has_configurations and not _is_saved(path):
        names = entries_of(path, split)
        if not names:
            expected = f"files ({', '.join(FILES)}) or folders from save_to_disk, of split {split}"
            raise InputError(f"dataset={name!r}: expected {expected}; the folder has none")
    for label in names:
        check_exists(label)
        is_file = os.path.isfile(label)
        if is_file != is_file_name(label):
            expected = f"or its name ends in none of {', '.join(FILES)} (each also with .gz)"
            raise InputError(f"dataset file {label} does not exist, {expected}")
        yield label, label if is_file else read_dataset(label, config_name, split)


Table: TypeAlias = datasets.Dataset | datasets.DatasetDict | pandas.DataFrame
Name: TypeAlias = str | os.PathLike[str] | Table
IS_NAME = str | os.PathLike | Table  # for isinstance, which takes no parameters of types


def load_rows(
    names: Name | Sequence[Name],
    config_name: str | None = None,
    split: str = "train",
    bad_rows: list[BadRow] | None = None,
    option: str = "dataset",
) -> Rows:
    """Return the rows of files, folders, Hub datasets and tables, one after the other.

    Rows that cannot be used are added to `bad_rows`; without such a list the first one is raised. The `option` names
    tables.
    """
    sources, titles = [], []
    for name in [names] if isinstance(names, IS_NAME) else names:
        is_path = isinstance(name, str | os.PathLike)
        titles.append(str(name) if is_path else option)
        if is_path:
            sources += _sources(str(name), config_name, split)
        else:
            sources.append((option, table_of(name, option, split)))
    rows = rows_of_sources(sources, bad_rows)
    rows.source = ", ".join(titles)
    if len(sources) > 1:
        counts = numpy.bincount(rows.table.data.column("file").to_numpy(), minlength=len(sources))
        for label, count in zip(rows.sources, counts, strict=True):
            print_rank0(f"{label}: {count} rows")
    return rows


def rows_of_sources(
    named_sources: Sequence[tuple[str, str | datasets.Dataset]], bad: list[BadRow] | None
) -> Rows:
    """Return the rows of files and tables; large ones are kept in the cache, by their content."""
    labels, sources = zip(*named_sources, strict=True)

    def rows() -> Iterator[dict]:
        for file, source in enumerate(sources):
            is_file = isinstance(source, str)
            texts = rows_of_file(source) if is_file else enumerate(map(text_of, source), 1)
            for number, text in texts:
                yield {"row": text, "file": file, "number": number}

    names_read.update(labels)
    sizes = [os.path.getsize(s) if isinstance(s, str) else s.data.nbytes for s in sources]
    key = None
    if sum(sizes) < SMALL:
        few = [*rows()]
        table = few and datasets.Dataset.from_list(few, FEATURES)  # which takes no empty list
    else:
        contents = [
            [*Path(s).suffixes, *fingerprint(Path(s))] if isinstance(s, str) else [s._fingerprint]
            for s in sources
        ]
        key = hash_of(["rows", contents])
        with quiet_datasets():
            table = datasets.Dataset.from_generator(
                rows, features=FEATURES, cache_dir=str(CACHE), fingerprint=key
            )
    if not len(table):
        raise InputError(f"dataset {', '.join(labels)} has no rows")
    return Rows(table, *labels, key=key, bad=bad)
