"""Every form in which others keep their rows: taken as it is meant, or refused with how to convert it."""

import json

import pytest

from fused_rl.trainers import sft
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data.encode import Encoder
from fused_rl.trainers.data.rows import Rows, load_rows
from fused_rl.trainers.scorers.builtin import answer_of
from tests.lazy import datasets
from tests.trainers import tiny
from tests.trainers.runs import sft_config

ROWS = [{"question": "a, b?", "answer": "007"}, {"question": 'say "é"\nnow', "answer": "NA"}]


def said(tokenizer, pairs) -> list[tuple[str, str]]:
    return [tuple(map(tokenizer.decode, pair)) for pair in pairs]


# Files and folders.


def saved(rows, path):
    datasets.Dataset.from_list(rows).save_to_disk(path)


def splits(rows, path):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(path)


WRITERS = {
    "lines.jsonl": lambda rows, path: tiny.jsonl(path, rows),
    "list.json": lambda rows, path: path.write_text(json.dumps(rows, indent=1)),
    "lines.json": lambda rows, path: tiny.jsonl(path, rows),
    "by-datasets.json": lambda rows, path: datasets.Dataset.from_list(rows).to_json(path),
    "by-datasets.csv": lambda rows, path: datasets.Dataset.from_list(rows).to_csv(path),
    "by-datasets.parquet": lambda rows, path: datasets.Dataset.from_list(rows).to_parquet(path),
    "saved": saved,
    "splits": splits,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_or_folder_holds_the_rows_that_were_written(name, tmp_path):
    WRITERS[name](ROWS, tmp_path / name)
    read = load_rows(str(tmp_path / name))
    assert read.rows == ROWS, "no number is guessed, and no word is a null"
    assert read.where(1).endswith("line 2" if name == "lines.jsonl" else "row 2")


def test_columns_of_a_csv_that_became_numbers_are_printed(tmp_path, capsys):
    path = tmp_path / "d.csv"
    # As a spreadsheet writes it.
    path.write_bytes("\ufeffprompt,answer,id\r\na,007,NA\r\nb,,\r\n".encode())
    rows = [{"prompt": "a", "answer": 7, "id": "NA"}, {"prompt": "b", "answer": None, "id": None}]
    assert load_rows(str(path)).rows == rows
    assert (
        "d.csv: read as numbers (007 becomes 7): answer; a .jsonl file keeps text as it is"
        in capsys.readouterr().out
    )


# Prompts and completions.


@pytest.mark.parametrize("prompt", ["2+3?", [{"role": "user", "content": "2+3?"}]])
def test_a_completion_is_text_or_one_message(prompt):
    tokenizer = tiny.tokenizer()
    message = {"role": "assistant", "content": "5", "tool_calls": None}
    forms = [Rows([{"prompt": prompt, "completion": form}], "d.jsonl") for form in ("5", [message])]
    text, conversation = (Encoder(tokenizer).pairs(rows, 0, None, "completion") for rows in forms)
    assert text == conversation
    assert said(tokenizer, text) == [("<bos><user>2+3?<end>\n<assistant>", "5<end>")]


CONVERSATION = [
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def test_every_turn_of_the_assistant_is_trained_once_with_all_turns():
    tokenizer = tiny.tokenizer()
    encoder, rows = Encoder(tokenizer), Rows([{"messages": CONVERSATION}], "d.jsonl")
    first, last = said(tokenizer, encoder.pairs(rows, 0, None, "completion", "all"))
    assert first == ("<bos><assistant>hi<end>\n<user>a<end>\n<assistant>", "b<end>")
    assert last == (f"{first[0]}b<end>\n<user>c<end>\n<assistant>", "d<end>")
    assert said(tokenizer, encoder.pairs(rows, 0, None, "completion")) == [last]


def test_a_conversation_that_is_too_long_is_dropped_whole(files, tmp_path):
    rows = Rows([{"messages": CONVERSATION}, {"messages": CONVERSATION[:3]}], "d.jsonl")
    encoder = Encoder(tiny.tokenizer())
    last = sft.encoded(sft_config(files, tmp_path), rows, encoder)
    each = sft.encoded(sft_config(files, tmp_path, assistant_turns="all"), rows, encoder)
    assert [example.where for example in each] == ["d.jsonl, line 1"] * 2 + ["d.jsonl, line 2"]
    assert last == each[1:]
    assert (
        sft.encoded(
            sft_config(files, tmp_path, assistant_turns="all", max_length=15), rows, encoder
        )
        == each[2:]
    )


def test_a_row_of_text_is_trained_after_its_first_token():
    for chat, bos in ((True, False), (False, True)):
        tokenizer = tiny.tokenizer(chat=chat, adds_bos=bos)
        eos = tokenizer.eos_token
        rows = Rows(
            [{"text": "ab"}, {"text": f"<user>a{eos}b{eos}"}, {"text": "a"}, {"text": ""}],
            "d.jsonl",
        )
        encoder = Encoder(tokenizer)
        pairs = said(tokenizer, [encoder.pairs(rows, i, None, "completion")[0] for i in range(3)])
        if bos:
            assert pairs[0] == ("<bos>", f"ab{eos}") and pairs[2] == ("<bos>", f"a{eos}")
        else:
            assert pairs == [("a", f"b{eos}"), ("<bos>", f"<user>a{eos}b{eos}"), ("a", eos)]
            with pytest.raises(InputError, match="^d.jsonl, line 4: the text is empty"):
                encoder.pairs(rows, 3, None, "completion")
    both = Rows([{"text": "ab", "question": "a", "completion": "b"}], "d.jsonl")
    assert said(tokenizer, Encoder(tokenizer).pairs(both, 0, None, "completion"))[0][1] == f"b{eos}"


# Answers.


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("so it is\n\\boxed{3} or \\boxed{\\frac{1}{2}}, as was asked", "\\frac{1}{2}"),
        ("work\n#### 42", "42"),
        ("$\\frac{63}{400}$", "$\\frac{63}{400}$"),
        (7, "7"),
    ],
)
def test_the_answer_of_a_solution(solution, answer):
    assert answer_of({"problem": "p", "solution": solution}, None) == answer
    assert answer_of({"answer": "5", "solution": solution}, None) == "5"


@pytest.mark.parametrize("skipped", ["<think>\n\n</think>\n\n", "<|channel>thought\n<channel|>"])
def test_a_response_follows_reasoning_that_the_prompt_closes_and_the_template_does_not_write(
    skipped,
):
    """As Gemma 4, QwQ and DeepSeek V3.2 begin an answer where they are not to reason."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ '<assistant>' }}", "{{ '<assistant>" + skipped.replace("\n", "\\n") + "' }}"
    )
    encoder = Encoder(tokenizer)
    rows = Rows([{"prompt": "a", "completion": "b"}], "d.jsonl")
    pairs = said(tokenizer, encoder.pairs(rows, 0, None, "completion"))
    assert pairs == [(f"<bos><user>a<end>\n<assistant>{skipped}", "b<end>")]
    if "think" in skipped:
        rows.rows[0]["completion"] = "<think>c</think>b"
        with pytest.raises(InputError, match="does not continue its own generation prompt"):
            encoder.pairs(rows, 0, None, "completion")


def test_a_turn_that_a_template_begins_behind_the_last_one_is_not_trained():
    tokenizer = tiny.tokenizer()
    always = "{% if add_generation_prompt or true %}"
    tokenizer.chat_template = tiny.CHAT_TEMPLATE.replace("{% if add_generation_prompt %}", always)
    rows = Rows([{"text": "<bos><user>a<end>\n<assistant>b<end>\n<assistant>"}], "d.jsonl")
    pairs = said(tokenizer, Encoder(tokenizer).pairs(rows, 0, None, "completion"))
    assert pairs == [("<bos>", "<user>a<end>\n<assistant>b<end>")]
