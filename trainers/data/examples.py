"""Rows as examples: encoded once by all cores, and read from the disk when one is asked for."""

import functools
import gc
import importlib.metadata
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import filelock
import numpy
import pyarrow

from ..base.files import hash_of
from ..base.screen import print_rank0
from ..base.text import InputError
from .forms import RowReader
from .rows import CACHE, BadRow, Rows, parsed, quiet_datasets

# What a table has in the columns that a row does without.
BLANKS = (None, "", [], {})
INT = datasets.Value("int32")
FEATURES = datasets.Features(
    row=datasets.Value("int64"),
    ids=datasets.List(datasets.List(INT)),
    **dict.fromkeys(("prompt", "response", "tokens", "largest"), INT),
    **dict.fromkeys(("beside", "unusable", "group", "digest"), datasets.Value("string")),
    **dict.fromkeys(("error", "notes"), datasets.Value("string")),
)
# What the options of lengths limit, in words.
LIMITED = {
    "tokens": "longer",
    "prompt": "with a prompt longer",
    "response": "with a response longer",
}


class Record(NamedTuple):
    """What a trainer makes of a row, or of a part of it."""

    ids: Sequence[list[int]]
    """Prompt and response of one sequence or of two; further lists are of the trainer's own."""
    beside: Any = None
    """What else belongs to it, as JSON can write it."""
    unusable: str | None = None
    """Why it is left out without an error."""
    group: str | None = None
    """What says the same of the records of one prompt."""


Encode = functools.partial[list[Record]]
"""Calls a function of an encoder, a row's RowReader and options, which name the cached ids."""
Make = Callable[[list[list[int]], Any, Rows, int], Any]
"""(ids, beside, rows, index of the row) -> the trainer's example."""


@dataclass(eq=False)
class Examples(Sequence[Any]):
    """Examples of one kind in the order of their rows."""

    rows: Rows
    table: datasets.Dataset
    """Of `FEATURES`."""
    make: Make
    places: numpy.ndarray
    """Those of the examples in the table."""

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i) -> Any:
        if isinstance(i, slice):
            return [self[place] for place in range(*i.indices(len(self)))]
        record = self.record(i)
        return self.make(record["ids"], json.loads(record["beside"]), self.rows, record["row"])

    def record(self, i: int) -> dict[str, Any]:
        """Return what the table has of an example."""
        return self.table[int(self.places[i])]

    def column(self, name: str) -> numpy.ndarray:
        """Return a column of the table: lengths of the prompt, of the response and of both, the largest id, …"""
        return self.table.data.column(name).to_numpy()[self.places]

    @property
    def digests(self) -> list[str]:
        """The hash of each example, without where it came from: a moved file has the same rows."""
        return self.column("digest").tolist()

    def where(self, i: int) -> str:
        """Return the file and line of an example."""
        return self.rows.where(int(self.column("row")[i]))

    def within_limits(self, noun: str, limits: dict[str, tuple[str, int]]) -> "Examples":
        """Return the examples of rows that fit; print how many do not, and why. `limits` are options by column."""
        keep = numpy.ones(len(self), bool)
        # What is longest in a row stands in each of its records, so a row is kept as a whole or not at all.
        is_first = numpy.diff(self.column("row"), prepend=-1) != 0
        reasons = {}
        for name, (option, limit) in limits.items():
            lengths = self.column(name)
            too_long = keep & (lengths > limit)
            if too_long.any():
                longest = f"the longest has {lengths[too_long].max()} tokens"
                reasons[f"{LIMITED[name]} than {option}={limit} ({longest})"] = too_long
            keep &= ~too_long
        unusable = self.column("unusable")
        for reason in sorted({*unusable[keep]} - {None}):
            reasons[reason] = keep & (unusable == reason)
        keep &= unusable == None  # noqa: E711 (elementwise)
        counts = ", ".join(
            f"{(mask & is_first).sum()} {reason}" for reason, mask in reasons.items()
        )
        if reasons and not keep.any():
            raise InputError(f"{self.rows.source}: no {noun} is left of {len(self.rows)}: {counts}")
        if reasons:
            dropped = (is_first & ~keep).sum()
            print_rank0(
                f"{self.rows.source}: dropped {dropped} of {len(self.rows)} {noun}s: {counts}"
            )
        return self.chosen(keep)

    def chosen(self, mask: numpy.ndarray | slice) -> "Examples":
        """Return the examples at which a mask is True, or those of a slice."""
        return Examples(self.rows, self.table, self.make, self.places[mask])

    def parsed_rows(self) -> Iterator[tuple[int, dict]]:
        """Yield the index and the columns of each row that has an example."""
        usable = [*dict.fromkeys(self.column("row").tolist())]
        return zip(usable, Rows(self.rows.table.select(usable)), strict=True)


def encode_rows(rows: Rows, key: str, read: Encode, make: Make) -> Examples:
    """Return the examples of all rows; those that cannot be used are collected, or the first of them is raised.

    Ids of large files are cached by the rows, the encoder's `key`, and the options of `read`.
    """
    processes = min(len(os.sched_getaffinity(0)), len(rows) // 1000)
    options: dict[str, Any] = {
        "function": functools.partial(_encode, read=read),
        "with_indices": True,
        "batched": True,
        "remove_columns": rows.table.column_names,
        "features": FEATURES,
        "num_proc": processes if processes > 1 else None,
        "desc": "encoding rows",
    }
    # Workers need not look for garbage among what their parent has imported: an eighth of their time.
    gc.freeze()
    if not len(rows):
        table = datasets.Dataset.from_dict({name: [] for name in FEATURES}, FEATURES)
    elif rows.key is None:
        with quiet_datasets(is_quick=processes < 2):
            table = rows.table.map(**options, new_fingerprint="in memory")
    else:
        version = importlib.metadata.version("transformers"), _code_hash()
        name = hash_of([rows.key, key, read.func.__qualname__, read.keywords, version])
        CACHE.mkdir(parents=True, exist_ok=True)
        # One rank of a node encodes, and the others wait for its file.
        with filelock.FileLock(CACHE / f"{name}.lock"), quiet_datasets():
            table = rows.table.map(
                **options,
                cache_file_name=str(CACHE / f"{name}.arrow"),
                new_fingerprint=name,
            )
    gc.unfreeze()
    return Examples(rows, table, make, _usable(rows, table))


@functools.cache
def _code_hash() -> str:
    """Return the hash of the code that makes ids of rows."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hash_of([file.read_text() for file in files])


def _encode(batch: dict[str, list], indices: list[int], read: Encode) -> pyarrow.Table:
    """Return the columns of `FEATURES` of some rows."""
    records = [
        record
        for text, index in zip(batch["row"], indices, strict=True)
        for record in _records(text, index, read)
    ]
    return pyarrow.Table.from_pylist(records, FEATURES.arrow_schema)


def _records(text: bytes, index: int, read: Encode) -> Iterator[dict[str, Any]]:
    reader = RowReader({})
    try:
        reader = RowReader(parsed(text))
        records, error = read(reader), None
    # Also what the reader of another trainer raises, as float() does.
    except ValueError as refusal:
        bad = BadRow.located(refusal)
        records, error = [Record(([], []))], json.dumps([bad.reason, bad.remedy, bad.got])
    filled = [name for name, value in reader.row.items() if value not in BLANKS]
    notes = json.dumps([reader.form, sorted(reader.columns), filled])

    # Two lists are a sequence.
    pairs = (zip(record.ids[::2], record.ids[1::2], strict=False) for record in records)
    sequences = [*itertools.chain.from_iterable(pairs)]
    row_columns = {
        "row": index,
        "prompt": max(len(prompt) for prompt, _ in sequences),
        "response": max(len(response) for _, response in sequences),
        "tokens": max(len(prompt) + len(response) for prompt, response in sequences),
        "largest": max((max(ids) for pair in sequences for ids in pair if ids), default=0),
        "error": error,
    }
    for record in records:
        yield (
            row_columns
            | record._asdict()
            | {
                "beside": json.dumps(record.beside),
                "digest": hash_of([record.ids, record.beside]),
                "notes": notes,
            }
        )
        notes = None


def _usable(rows: Rows, table: datasets.Dataset) -> numpy.ndarray:
    """Return the places of a table's examples; what its rows say of themselves goes to `rows`."""
    for entry in table.data.column("notes").value_counts().to_pylist():
        if entry["values"] is None:
            continue
        form, read, filled = json.loads(entry["values"])
        if form:
            rows.forms[form] += entry["counts"]
        rows.columns_read.update(read)
        rows.columns_filled |= dict.fromkeys(filled)
    is_bad = table.data.column("error").is_valid().to_numpy()
    for place in is_bad.nonzero()[0]:
        record = table[int(place)]
        reason, remedy, got = json.loads(record["error"])
        with rows.collecting(record["row"]):
            raise BadRow(reason, remedy, got=got)
    return (~is_bad).nonzero()[0]
