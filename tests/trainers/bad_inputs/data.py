"""Rows and files of rows that a command must refuse."""

import json
from pathlib import Path

from tests.trainers.bad_inputs.cases import ALL, READERS, Case, of, words

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def columns_of(command: str) -> dict:
    pair = {"prompt": "a=", "chosen": "b", "rejected": "c"}
    return pair if command == "reward" else {"question": "1+1?", "answer": "2"}


def data(
    commands: str, title: str, content: str | bytes, message: str, name="data.jsonl", options=()
) -> list[Case]:
    """A dataset with this content."""
    content = content if isinstance(content, bytes) else content.encode()
    return of(
        commands,
        title,
        message,
        "--dataset",
        name,
        *options,
        spoil=lambda folder: (folder / name).write_bytes(content),
    )


def line(commands: str, text: str | bytes, message: str, **fields) -> list[Case]:
    """Six good rows, of which the third is this text instead; the error must name the line."""
    made = []
    for command in commands.split():
        good = json.dumps(columns_of(command)).encode() + b"\n"
        content = good * 2 + (text if isinstance(text, bytes) else text.encode()) + b"\n" + good * 3
        made += data(
            command, f"line {text[:40]!r}", content, f"data.jsonl, line 3.*{message}", **fields
        )
    return made


def cell(commands: str, column: str, value, message: str, **fields) -> list[Case]:
    """Six good rows, of which the third has this in a column."""
    made = []
    for command in commands.split():
        made += line(command, json.dumps(columns_of(command) | {column: value}), message, **fields)
    return made


def saved_in_splits(folder: Path) -> None:
    import datasets

    part = datasets.Dataset.from_list([{"question": "1+1=", "answer": "2"}])
    datasets.DatasetDict(train=part, test=part).save_to_disk(folder / "saved")


TEXT_OR_MESSAGES = "column 'question' must be text or a list of messages"
TWO_SIDES = "must be text or a list of messages|end with the user's turn"
LONG = json.dumps({"question": "9" * 20_000, "answer": "2"}) + "\n"
TRIAN = ("--dataset", "saved", "--dataset_split", "trian")
DATA = [
    # Files.
    *words("sft", "--dataset rows", "dataset='rows' .* cannot be read"),
    *words("sft", "--eval_dataset ./rows", "./rows does not exist; the current folder is"),
    *words(ALL, "--dataset none.jsonl", "dataset file none.jsonl does not exist"),
    *of(
        "sft",
        "a split that is not there",
        "saved has the splits train, test, and not trian",
        *TRIAN,
        spoil=saved_in_splits,
    ),
    *of(
        "sft",
        "an empty folder",
        "dataset='set'",
        "--dataset",
        "set",
        spoil=lambda folder: (folder / "set").mkdir(),
    ),
    *of("sft", "a dataset whose name is empty", "dataset", "--dataset", ""),
    *data(ALL, "an empty file", "", "data.jsonl has no rows"),
    *data("sft", "half a JSON list", '[{"question": "a"},\n', "data.json .*not JSON", "data.json"),
    *data("sft", "half a Parquet file", b"PAR1", "data.parquet.* cannot be read", "data.parquet"),
    *line(ALL, "{", "not JSON"),
    *line("sft", b'{"question": "\xff"}', "not JSON in UTF-8"),
    # Columns.
    *words("reward", "--prompt_column q", "line 1: column 'q' is missing; .*--prompt_column"),
    *words(
        "sft",
        "--prompt_column q --completion_column c",
        "line 1: column 'q' is missing; .*--prompt_column and --completion_column",
    ),
    *words(
        "grpo",
        "--answer_column a --verifiers math",
        "line 1: column 'a' is missing or null; .*--answer_column",
    ),
    *words(
        "reward", "--reference_dataset rows.jsonl", "rows.jsonl, line 1: column 'chosen' is missing"
    ),
    *cell("reward", "chosen", 3, f"column 'chosen' {TWO_SIDES}"),
    *cell("reward", "rejected", [ASSISTANT, USER], f"column 'rejected' {TWO_SIDES}"),
    *cell(
        "reward", "prompt", [{"role": "user", "content": None}], "column 'prompt' has no content"
    ),
    *cell("reward", "margin", float("nan"), "column 'margin' must be a number, got nan"),
    # Prompts.
    *cell(READERS, "question", 5, TEXT_OR_MESSAGES),
    *cell(
        "sft grpo",
        "question",
        [ASSISTANT],
        "the prompt is empty|a response begins with the assistant's",
    ),
    *cell(
        "sft",
        "question",
        [USER],
        "system_prompt has no meaning for",
        options=("--system_prompt", "s"),
    ),
    *data(
        READERS,
        "all prompts too long",
        LONG * 12,
        r"data.jsonl: no (row|prompt) is left of 1\d",
    ),
    *words(
        "reward",
        "--max_prompt_length 1",
        "pairs.jsonl: no pair is left of 10: 10 with a prompt longer",
    ),
    # Completions.
    *line("sft", json.dumps({"question": [USER, ASSISTANT, USER]}), "column 'answer' is missing"),
    *cell(
        "sft",
        "answer",
        "",
        "the completion is empty, and would only teach the model to stop; remove the row",
    ),
    *cell(
        "sft",
        "answer",
        "b<end>c",
        "the completion contains '<end>', the token that ends a response",
    ),
    *words("sft", "--max_length 3", "rows.jsonl: no row is left of 10.*max_length"),
]
