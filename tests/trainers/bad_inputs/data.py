"""Rows and files of rows that a command must refuse."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.trainers import tiny
from tests.trainers.bad_inputs.cases import ALL, READERS, Case, of, words

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}


def columns_of(command: str) -> dict:
    pair = {"prompt": "a=", "chosen": "b", "rejected": "c"}
    return pair if command == "reward" else {"question": "1+1?", "answer": "2"}


def data(commands: str, title: str, content: str | bytes, message: str, name="data.jsonl", **fields) -> list[Case]:
    """A dataset with this content."""
    made, more = [], fields.pop("options", ())
    for command in commands.split():
        write = _writer(name, content)
        made += of(command, title, message, "--dataset", name, *more, spoil=write, **fields)
    return made


def _writer(name: str, content: str | bytes) -> Callable[[Path], None]:
    content = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return lambda folder: (folder / name).write_bytes(content)


def line(commands: str, text: str | bytes, message: str, **fields) -> list[Case]:
    """Six good rows, of which the third is this text instead; the error must name the line."""
    made = []
    for command in commands.split():
        good = json.dumps(columns_of(command)).encode() + b"\n"
        content = good * 2 + (text if isinstance(text, bytes) else text.encode()) + b"\n" + good * 3
        made += data(command, f"line {text[:40]!r}", content, f"data.jsonl, line 3.*{message}", **fields)
    return made


def cell(commands: str, column: str, value, message: str, **fields) -> list[Case]:
    """Six good rows, of which the third has this in a column."""
    made = []
    for command in commands.split():
        made += line(command, json.dumps(columns_of(command) | {column: value}), message, **fields)
    return made


def files(commands: str, title: str, spoil: Callable[[Path], None], name: str, message: str, *more: str) -> list[Case]:
    """A dataset that `spoil` makes."""
    return [Case(c, title, message, ("--dataset", name, *more), spoil) for c in commands.split()]


def a_table(folder: Path, rows: list[dict], name: str = "data.parquet") -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)


def half_a_table(folder: Path) -> None:
    a_table(folder, tiny.sums(50))
    path = folder / "data.parquet"
    path.write_bytes(path.read_bytes()[:-100])


def a_folder(folder: Path, **names: str) -> None:
    (folder / "set").mkdir()
    for name, text in names.items():
        (folder / "set" / f"{name}.jsonl").write_text(text)


TEXT_OR_MESSAGES = "column 'question' must be text or a list of messages"
LONG = json.dumps({"question": "9" * 20_000, "answer": "2"}) + "\n"


def saved_in_splits(folder: Path) -> None:
    import datasets

    part = datasets.Dataset.from_list([{"question": "1+1=", "answer": "2"}])
    datasets.DatasetDict(train=part, test=part).save_to_disk(folder / "saved")


DATA = [
    *words("sft", "--dataset rows", "dataset='rows' .* is neither a file"),
    *of(
        "sft",
        "a split that is not there",
        "dataset='saved' .*split trian",
        *("--dataset", "saved", "--dataset_split", "trian"),
        spoil=saved_in_splits,
    ),
    *data(ALL, "an empty file", "", "data.jsonl has no rows"),
    *data("sft", "a JSON list over lines", "[\n{}\n]\n", "line 1.*not JSON"),
    *data("sft", "CSV of ragged rows", "question,answer\n1,2,3\n", "line 2: 3 cells below 2 names", "data.csv"),
    *data("sft", "CSV with an open quote", 'question,answer\n"1,2\n', "data.csv, line 2: not CSV", "data.csv"),
    *data("sft", "half a JSON list", '[{"question": "a"},\n', "data.json, line 2, character 1: not JSON", "data.json"),
    *data(
        "sft",
        "packed lines",
        b"\x1f\x8b\x08",
        "only .jsonl, .json, .csv, .parquet files are read; unpack",
        "d.jsonl.gz",
    ),
    *data(READERS, "all prompts too long", LONG * 12, r"(all \d+ rows are longer|20\d+ tokens, but the model has 128)"),
    *files("sft", "half a Parquet file", half_a_table, "data.parquet", "data.parquet cannot be read as Parquet"),
    *files(ALL, "no such file", lambda folder: None, "none.jsonl", "dataset file none.jsonl does not exist"),
    *files(ALL, "an empty folder", a_folder, "set", "dataset='set'"),
    *files(
        "sft",
        "numbers in Parquet",
        lambda f: a_table(f, [{"question": 1, "answer": 2}] * 5),
        "data.parquet",
        "data.parquet, row 1: " + TEXT_OR_MESSAGES,
    ),
    *of("sft", "a dataset whose name is empty", "dataset", "--dataset", ""),
    *words("sft", "--eval_dataset none.jsonl", "dataset file none.jsonl does not exist"),
    *words("reward", "--reference_dataset rows.jsonl", "rows.jsonl, line 1: column 'chosen' is missing"),
    *words(
        "sft",
        "--prompt_column q",
        "line 1: column 'q' is missing; .*--prompt_column",
    ),
    *words("grpo", "--answer_column a --verifiers math", "line 1: column 'a' is missing; .*--answer_column"),
    *words("reward", "--dataset rows.jsonl", "rows.jsonl, line 1: column 'chosen' is missing; .*--chosen_column"),
    *words("sft", "--max_length 3", "rows.jsonl: all 10 rows are longer than .*max_length"),
    *words("reward", "--max_prompt_length 1", "pairs.jsonl: no pair is left of 10: 10 with a prompt longer"),
    *line(ALL, "{", "character 2: not JSON"),
    *line(ALL, b'{"question": "\xff"}', "not UTF-8"),
    *line(ALL, "[1]", "expected a JSON object, got list"),
    *cell("sft", "answer", "b<end>c", "the completion spells '<end>', the token that ends a response"),
    *cell("reward", "chosen", "b<end>c", "the completion spells '<end>'"),
    *line("sft", json.dumps({"question": [USER, CALLS]}), "turn has tool_calls, but the chat template leaves it out"),
    *cell("reward", "chosen", [CALLS], "column 'chosen' is a turn with tool_calls; give the whole conversation"),
    *line(
        "reward", json.dumps({"chosen": [USER, CALLS], "rejected": [USER, ASSISTANT]}), "but the chat template leaves"
    ),
    *cell(READERS, "tools", [{"name": "f"}], "the row has tools, but the chat template does not read them"),
    *cell(READERS, "question", 5, TEXT_OR_MESSAGES),
    *cell(READERS, "question", [{"role": "user", "content": None}], TEXT_OR_MESSAGES),
    *cell(READERS, "question", json.dumps([USER]), "column 'question' is a text that spells messages"),
    *cell(READERS, "question", [{"from": "human", "value": "a"}], TEXT_OR_MESSAGES),
    *cell("sft", "question", [USER, ASSISTANT], "ends with the assistant's turn, and column 'answer' has one too"),
    *line(
        "sft", json.dumps({"question": [USER, ASSISTANT, USER]}), "ends with role 'user', and column 'answer' is mis"
    ),
    *line("sft", json.dumps({"question": [USER, {**ASSISTANT, "content": ""}]}), "a completion is empty, and would"),
    *cell("sft grpo", "question", [USER], "system_prompt has no meaning for", options=("--system_prompt", "s")),
    *cell("sft", "images", ["a.png"], "column 'images' is not read; remove it"),
    *cell("sft", "answer", "", "a completion is empty, and would teach to end at once; remove the row"),
    *cell(READERS, "question", [ASSISTANT], "the assistant's messages alone"),
    *cell("sft", "answer", 5, "column 'answer' must be text, or with a chat template"),
    *cell("reward", "chosen", 3, "column 'chosen' must be text"),
    *cell("reward", "rejected", [ASSISTANT, USER], "column 'rejected' must be text, or messages that end"),
    *cell("reward", "prompt", [{"role": "user", "content": None}], "column 'prompt' must be text"),
    *cell("reward", "chosen", [USER, ASSISTANT], "column 'chosen' holds several messages, and the prompt is none of"),
    *cell("reward", "margin", float("nan"), "column 'margin' must be a number, got nan"),
]
