"""Files of rows: .jsonl, .json, .csv, .parquet. An error names the file, and the line or row that cannot be read."""

import csv
import io
import json
import re
from pathlib import Path

from fused_rl.trainers.base.text import in_a_line
from fused_rl.trainers.options import InputError


def read_parquet(path: Path) -> list[dict]:
    """Return the rows of a Parquet file."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"dataset file {path} cannot be read as Parquet: {in_a_line(error)}") from error


def read_json(path: Path) -> list[dict]:
    """Return the rows of a file that holds one list of objects, or an object in each line as a .jsonl file does."""
    text = _decoded(path.read_bytes(), str(path))
    if not text.lstrip().startswith("["):
        return read_jsonl(path)[0]
    rows = _parsed(text, str(path))
    for number, row in enumerate(rows, 1):
        _check_object(row, f"{path}, row {number}")
    return rows


def read_csv(path: Path, delimiter: str = ",") -> list[dict]:
    """Return the rows of a CSV file. Every cell is text as it stands ("007", "NA"), and an empty cell is None."""
    text = _decoded(path.read_bytes(), str(path))
    csv.field_size_limit(2**31 - 1)  # its own limit is shorter than documents are
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    try:
        header = next(reader, [])
        rows = []
        if len(header) == 1 and re.search(r"\w[;\t|]\w", header[0]):
            raise InputError(f"{path}: the first line, {header[0]!r:.80}, has no commas; save the file with commas")
        if text and (len({*header}) < len(header) or not all(header) or not header):
            raise InputError(f"{path}: the first line must name each column once, got {header}")
        for cells in reader:
            if cells and len(cells) != len(header):
                what = f"line {reader.line_num}: {len(cells)} cells below {len(header)} names of columns"
                raise InputError(f"{path}, {what}; put text with commas in quotes")
            if any(cells):  # spreadsheets end in rows of commas
                rows.append({name: cell or None for name, cell in zip(header, cells, strict=True)})
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV: {in_a_line(error)}") from error
    return rows


def read_jsonl(path: Path) -> tuple[list[dict], list[int]]:
    """Return the rows of a JSON Lines file, and the line that each stands on."""
    rows, lines = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        where = f"{path}, line {number}"
        text = _decoded(line, where)
        if text.strip():
            rows.append(_parsed(text, where))
            _check_object(rows[-1], where)
            lines.append(number)
    return rows, lines


def _decoded(content: bytes, where: str) -> str:
    """Bytes as UTF-8 text, without a byte order mark."""
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


def _check_object(row, where: str) -> None:
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(row).__name__}")
