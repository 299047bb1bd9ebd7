"""Rows that cannot be used are said at once: how many, each kind with its first row, and what to do."""

import json
import re

import pytest

from fused_rl.trainers import sft
from fused_rl.trainers.base.text import InputError, InputErrors
from fused_rl.trainers.data.reading import RowReport
from fused_rl.trainers.data.rows import Rows, load_rows
from tests.tools import forms
from tests.trainers import runs, tiny

USER = {"role": "user", "content": "a"}
GOOD = {"completion": "b", "chosen": "b", "rejected": "c", "label": True}


def with_prompt(*roles: str, **columns) -> dict:
    return {"prompt": [{"role": role, "content": "a"} for role in roles]} | GOOD | columns


# A kind of fault that every trainer sees, and its rows, whose columns and values differ.
FAULTS = {
    "the prompt is empty": [{"prompt": ""} | GOOD, {"prompt": "", "id": 1} | GOOD],
    "has an unknown role": [with_prompt("user", "queen"), with_prompt("user", "king")],
    "a tool call cannot be parsed as JSON": [with_prompt("user", tools="x"), {**GOOD, "prompt": "a", "tools": "y"}],
    "column 'tools' must be a list of JSON schemas": [with_prompt("user", tools=5)],
    "column 'images' is filled": [with_prompt("user", images=["a.png"])],
    "half of a character": [{"prompt": "\ud83d"} | GOOD, {"prompt": "\ude00"} | GOOD],
    "expected a JSON object": [[1], 7],
}  # fmt: skip
TORN = b'{"prompt": "a", "compl'


def lines_of(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read(trainer: forms.Trainer, path, bad_rows=0.01) -> int:
    """The number of examples of a file."""
    config = trainer.module.main.args[0](model="m", dataset="d", output_dir="o", **trainer.options)
    with RowReport(bad_rows) as reading:
        rows = reading.add(load_rows(str(path), bad_rows=reading.bad))
        return len(trainer.read(config, rows, forms.encoder()))


@pytest.mark.parametrize("trainer", forms.TRAINERS, ids=[one.name for one in forms.TRAINERS])
def test_every_kind_of_reason_is_one_line_with_its_count_and_first_row(trainer, tmp_path, capsys):
    path = tmp_path / "d.jsonl"
    faults = [row for rows in FAULTS.values() for row in rows]
    good = [{"prompt": f"{i}"} | GOOD for i in range(3)]
    path.write_bytes(lines_of(good[:1]) + b"\n" + lines_of([*faults, *good[1:]]) + TORN)

    with pytest.raises(InputErrors) as error:
        read(trainer, path)
    title, *kinds = str(error.value).splitlines()
    bad = len(faults) + 1
    assert title.startswith(f"{bad} of {bad + len(good)} rows cannot be used")
    assert len(kinds) == len(FAULTS) + 1, "values are no part of a kind"
    number = 3  # behind a row and an empty line, which keeps its number
    for reason, rows in FAULTS.items():
        pattern = rf"^ +{len(rows)}  .*d.jsonl, line {number}: .*{re.escape(reason)}.*; \w+"
        assert any(re.match(pattern, kind) for kind in kinds), reason
        number += len(rows)
    assert any("not JSON in UTF-8" in kind and f"line {number + 2}:" in kind for kind in kinds)

    # The others are read, and the same block is printed.
    capsys.readouterr()
    assert read(trainer, path, 1) >= len(good)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("rows: ")
    assert (
        f"left out {bad} of {bad + len(good)} rows that cannot be used; the first of each kind:"
        in printed
    )
    assert set(kinds) <= set(printed)

    # With nothing left there is no run.
    path.write_bytes(lines_of(faults))
    with pytest.raises(InputError, match="no row from .*d.jsonl, line .* can be used; "):
        read(trainer, path, 1)


def test_one_row_in_a_hundred_is_left_out_and_listed_in_the_runs_folder(files, tmp_path, capsys):
    rows = tiny.sums(99)
    rows.insert(7, {"question": 3, "answer": "b"})
    of_99 = (files[0], tiny.jsonl(tmp_path / "of_99.jsonl", rows[1:]))
    runs.refused(
        runs.sft_config(of_99, tmp_path / "run"), "line 7: .*; or --bad_rows 1 leaves them out"
    )
    path = tiny.jsonl(tmp_path / "rows.jsonl", rows)
    sft.train(runs.sft_config((files[0], path), tmp_path / "run", steps=1))
    assert "left out 1 of 100 rows that cannot be used" in capsys.readouterr().out
    (line,) = (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()
    listed = json.loads(line)
    assert listed["where"] == f"{path}, line 8" and listed["got"] == "got 3"
    assert {*listed} == {"reason", "remedy", "got", "where"}


def test_a_row_that_a_scorer_cannot_score_is_left_out(tmp_path):
    rows = [{"prompt": "a", "answer": "b"} for _ in range(99)]
    path = tiny.jsonl(tmp_path / "rows.jsonl", [*rows[:7], {"prompt": "a"}, *rows[7:]])
    config = tiny.config_of("grpo", verifiers=["exact_match"])
    with RowReport(0.01) as reading:
        given = reading.add(load_rows(str(path), bad_rows=reading.bad))
        prompts = forms.prompts(config, given, forms.encoder())
    assert [prompt.row for prompt in prompts] == rows


@pytest.mark.parametrize("held_out", ["eval_dataset", "dataset"])
def test_held_out_rows_that_are_all_bad_are_refused_where_bad_rows_are_skipped(
    held_out, files, tmp_path
):
    good, bad = tiny.sums(6), [{"question": 3, "answer": "b"}] * 3
    if held_out == "dataset":
        good, bad = good + bad, []
    else:
        tiny.jsonl(tmp_path / "test.jsonl", bad)
    rows = tiny.jsonl(tmp_path / "rows.jsonl", good)
    options = {"eval_size": 3, "bad_rows": 1}
    if bad:
        options["eval_dataset"] = str(tmp_path / "test.jsonl")
    source = (
        "test.jsonl, line 1 to .*test.jsonl, line 3" if bad else "rows.jsonl, line 7 to .*line 9"
    )
    message = f"no row from .*{source} can be used; .*column 'question' must be text"
    runs.refused(runs.sft_config((files[0], rows), tmp_path / "run", **options), message)


def test_rows_beyond_the_held_out_ones_are_read_with_their_own_numbers():
    bad = []
    rows = Rows([{"prompt": "a"}] * 4, "d.jsonl", bad=bad).subset(range(2, 4)).subset(range(1, 2))
    with rows.collecting(0):
        raise InputError("x")
    assert [str(error) for error in bad] == ["d.jsonl, line 4: x"]


def test_a_file_without_rows_is_named(tmp_path):
    with pytest.raises(InputError, match="none.jsonl has no rows"):
        load_rows(tiny.jsonl(tmp_path / "none.jsonl", []))
