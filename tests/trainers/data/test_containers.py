"""A row has the same token ids in every kind of file, from Python, and after a table has filled in its nulls."""

import gzip
import json
import re

import pytest

from fused_rl.trainers import distill, dpo, grpo, kto, ppo, reward, sft
from fused_rl.trainers.data.reading import RowReport, chosen_rows
from tests.lazy import datasets
from tests.tools import forms

PAGE = forms.PAGE.read_text()
EXAMPLES = forms.examples(PAGE)
# Rows beside the example's, whose other keys a table fills in with null at every depth of the example. They come last,
# as in the table: a template that writes a whole call writes its keys in their order.
OTHERS = {
    "messages with tools": {
        "messages": [
            {"role": "user", "content": "hi", "name": "a"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"zone": {"deep": 1}}'},
                        "id": "1",
                    }
                ],
            },
            {"role": "tool", "content": "1", "tool_call_id": "1"},
            {"role": "assistant", "content": "ok", "weight": 1},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {
                        "type": "object",
                        "properties": {"zone": {"type": "string", "enum": ["a"]}},
                        "required": ["zone"],
                    },
                },
            }
        ],
    }
}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def packed(writer):
    return lambda rows, path: path.write_bytes(gzip.compress(written(writer, rows, path)))


def written(writer, rows, path) -> bytes:
    """The bytes of a file of another kind."""
    unpacked = path.parent / path.stem
    WRITERS[writer](rows, unpacked)
    content = unpacked.read_bytes()
    unpacked.unlink()
    return content


def folder(rows, path):
    """As the Hub's: a file for each split."""
    path.mkdir()
    path.joinpath("train.jsonl.gz").write_bytes(gzip.compress(lines(rows)))
    path.joinpath("test.jsonl").write_bytes(lines(rows[:1]))


def spreadsheet(rows, path):
    # With the mark of a byte order and Windows' ends of lines.
    path.write_bytes(
        b"\xef\xbb\xbf" + lines(rows).replace(b"\n", b"\r\n").replace(b"}\r", b"}\r\n \r", 1)
    )


WRITERS = {
    "d.jsonl": lambda rows, path: path.write_bytes(lines(rows)),
    "windows.jsonl": spreadsheet,
    "list.json": lambda rows, path: path.write_text(json.dumps(rows)),
    "pretty.json": lambda rows, path: path.write_text(json.dumps(rows, indent=2)),
    "lines.json": lambda rows, path: path.write_bytes(lines(rows)),
    "d.parquet": lambda rows, path: datasets.Dataset.from_list(rows).to_parquet(path),
    "d.csv": lambda rows, path: datasets.Dataset.from_list(rows).to_csv(path),
    "d.jsonl.gz": packed("d.jsonl"),
    "pretty.json.gz": packed("pretty.json"),
    "d.parquet.gz": packed("d.parquet"),
    "d.csv.gz": packed("d.csv"),
    "saved": lambda rows, path: datasets.Dataset.from_list(rows).save_to_disk(path),
    "splits": lambda rows, path: datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows)}
    ).save_to_disk(path),
    "folder": folder,
}
WITHOUT_TEXT = (list, dict)


def ids(trainer: forms.Trainer, rows) -> list:
    """The token ids that a trainer makes of rows from a file or from Python."""
    read = trainer.read
    config = trainer.module.main.args[0](model="m", output_dir="o", **trainer.options)
    with RowReport() as reading:
        given = None if isinstance(rows, str) else rows
        name = rows if isinstance(rows, str) else None
        found = reading.add(chosen_rows("dataset", given, name, None, "train", reading.bad))
        examples = read(config, found, forms.encoder())
    return [examples.record(i)["ids"] for i in range(len(examples))]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_row_has_the_same_ids_in_every_container(name, tmp_path, capsys):
    rows = [EXAMPLES[name], OTHERS.get(name, EXAMPLES[name])]
    able = [
        one
        for one in forms.TRAINERS
        if forms.refusal(one, rows[0], forms.encoder()) is None and one.module is not ppo
    ]
    assert able
    expected = [ids(one, rows) for one in able]
    is_flat = not any(isinstance(value, WITHOUT_TEXT) for row in rows for value in row.values())
    for container, write in WRITERS.items():
        if "csv" in container and not is_flat:
            continue
        path = tmp_path / container
        write(rows, path)
        assert [ids(one, str(path)) for one in able] == expected, container
    assert [ids(one, datasets.Dataset.from_list(rows)) for one in able] == expected


def test_the_page_has_the_table_that_the_code_makes():
    assert forms.with_table(PAGE) == PAGE, "python -m tests.tools.forms writes it"
    assert {one.module for one in forms.TRAINERS} == {sft, dpo, reward, kto, grpo, ppo, distill}
    for name in EXAMPLES:
        assert re.search(rf"^\|([^|]*;)? {re.escape(name)}(;[^|]*)? \|.*trains", PAGE, re.M), name
