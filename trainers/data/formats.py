"""Files of rows: .jsonl, .json, .csv, .parquet; an error names the file, and the line or row that cannot be read."""

import csv
import io
import json
import re
from pathlib import Path

from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.options.text import in_a_line


def read_parquet(path: Path) -> list[dict]:
    """Of a whole file."""
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        return table.to_pylist()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, column {_not_utf_8(table)!r}: not UTF-8; write the text as UTF-8") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"dataset file {path} cannot be read as Parquet: {in_a_line(error)}") from error


def _not_utf_8(table) -> str:
    """The first column of a table whose text cannot be read."""
    for name in table.column_names:
        try:
            table[name].to_pylist()
        except UnicodeDecodeError:
            return name
    raise AssertionError("all of it can be read")


def read_json(path: Path) -> list[dict]:
    """A file of one list of objects; one of lines, which many call .json too, is read as .jsonl is.

    One object alone is refused: a list under a name, and a dictionary of columns, look like a row.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, byte {error.start + 1}: not UTF-8; save the file as UTF-8") from error
    if not text.lstrip().startswith("["):
        _refuse_one_object(text.strip(), path)
        return read_jsonl(path)[0]
    rows = _loaded(text, str(path))
    for number, row in enumerate(rows, 1):
        _check_object(row, f"{path}, row {number}", "\\u" in text)
    return rows


def _refuse_one_object(text: str, path: Path) -> None:
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # `read_jsonl` says where
        return
    if end == len(text) and isinstance(found, dict):
        what = f"one JSON object, of {sorted(found)!r:.80}; expected a list of objects, or one object in each line"
        raise InputError(f"{path}: {what}: write its rows so (a file of one row is .jsonl)")


def read_csv(path: Path, delimiter: str = ",") -> list[dict]:
    """Every cell is text, as it stands: no number is guessed, and NA is a word; an empty cell is null."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, byte {error.start + 1}: not UTF-8; save the file as UTF-8") from error
    csv.field_size_limit(2**31 - 1)  # its own limit is shorter than documents are
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    try:
        header, rows = next(reader, []), []
        if len(header) == 1 and re.search(r"\w[;\t|]\w", header[0]):
            raise InputError(f"{path}: the first line, {header[0]!r:.80}, has no commas; save the file with commas")
        if text and (len({*header}) < len(header) or not all(header)) or text and not header:
            raise InputError(f"{path}: the first line must name each column once, got {header}")
        for cells in reader:
            if cells and len(cells) != len(header):
                what = f"line {reader.line_num}: {len(cells)} cells below {len(header)} names of columns"
                raise InputError(f"{path}, {what}; put text with commas in quotes")
            if any(cells):  # spreadsheets end in rows of commas
                rows.append({name: cell or None for name, cell in zip(header, cells, strict=True)})
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV: {in_a_line(error)}") from error
    if "messages" in header:
        raise InputError(f"{path}: column 'messages': a cell of CSV is text; write conversations as .jsonl")
    return rows


def read_jsonl(path: Path) -> tuple[list[dict], list[int]]:
    """Rows, and the line that each stands on."""
    rows, lines = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{where}, byte {error.start + 1}: not UTF-8; save the file as UTF-8") from error
        if text.strip():
            rows.append(_read_object(text, where))
            lines.append(number)
    return rows, lines


def _read_object(text: str, where: str) -> dict:
    """One line as a dictionary whose text can be tokenised."""
    row = _loaded(text, where)
    _check_object(row, where, "\\u" in text)
    return row


def _loaded(text: str, where: str):
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _without_repeats(pairs, where))
    except json.JSONDecodeError as error:
        at = f"character {error.colno}" if "\n" not in text else f"line {error.lineno}, character {error.colno}"
        raise InputError(f"{where}, {at}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise InputError(f"{where}: JSON nested too deeply to be read") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise InputError(f"{where}: not JSON that can be read: {in_a_line(error)}") from error


def _check_object(row, where: str, escapes: bool) -> None:
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(row).__name__}")
    if not escapes:  # nothing else can spell half a character
        return
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: {error.object[error.start]!r} is half a surrogate pair, and no character"
        ) from error


def _without_repeats(pairs: list[tuple[str, object]], where: str) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{where}: key {twice!r} stands {names.count(twice)} times in one object")
    return row
