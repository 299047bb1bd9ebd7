"""Every form in which others keep their rows: taken as it is meant, or refused with how to convert it."""

import gzip
import json
from types import SimpleNamespace

import datasets
import pytest

from fused_rl.trainers import sft
from fused_rl.trainers.data.encode import Encoder
from fused_rl.trainers.data.order import foresee
from fused_rl.trainers.data.rows import Rows, load_rows
from fused_rl.trainers.options import InputError, on_hub
from fused_rl.trainers.scorers.builtin import answer_of
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
    assert on_hub(str(tmp_path / name)) == (name == "splits"), "a split is chosen where there are several"


HOSTILE = ["007", "1e5", "NA", "null", "True", "2024-01-05", "1,5", 'a "b"\nc', "1.0"]
IN_A_FOLDER = {
    "train.csv": lambda rows, path: datasets.Dataset.from_list(rows).to_csv(path),
    "train.tsv": lambda rows, path: datasets.Dataset.from_list(rows).to_csv(path, sep="\t"),
    "train.json": lambda rows, path: path.write_text(json.dumps(rows)),
    "train.jsonl": lambda rows, path: tiny.jsonl(path, rows),
    "train.jsonl.gz": lambda rows, path: path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode())),
    "train.parquet": lambda rows, path: datasets.Dataset.from_list(rows).to_parquet(path),
}


@pytest.mark.parametrize("name", IN_A_FOLDER)
@pytest.mark.parametrize("answers", [HOSTILE, ["007", "008"], ["2024-01-05", "2024-01-06"], ["True", "False"]])
def test_no_type_of_an_answer_is_guessed_in_a_folder(answers, name, tmp_path):
    rows = [{"prompt": f"p{i}", "answer": answer} for i, answer in enumerate(answers)]
    (tmp_path / "set").mkdir()
    for part, of_part in (("train", rows), ("test", rows[:1])):
        IN_A_FOLDER[name](of_part, tmp_path / "set" / name.replace("train", part))
    assert load_rows(str(tmp_path / "set")).rows == rows
    assert [answer_of(row, None) for row in load_rows(str(tmp_path / "set"), split="train[1:]").rows] == answers[1:]


def test_what_datasets_guesses_of_a_hubs_csv_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("prompt,answer\na,007\n")
    of_hub = SimpleNamespace(name="of the Hub")  # whose rows are read by `datasets`, as this folder's now are
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *given: of_hub)
    assert load_rows(str(tmp_path / "set")).rows == [{"prompt": "a", "answer": 7}]
    assert "`datasets` made answer of its text, such as 7 of 007; to keep the text" in capsys.readouterr().out


def test_a_template_that_leaves_out_what_a_role_says_is_refused():
    tokenizer = tiny.tokenizer()
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    rows = Rows([{"prompt": said}, {"prompt": "a"}], "d.jsonl")
    assert tokenizer.decode(Encoder(tokenizer).prompt(rows, 0, None)).startswith("<bos><system>s<end>")
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages", "in messages if m['role'] != 'system'")
    for i, told in ((0, None), (1, "s")):
        with pytest.raises(InputError, match=f"line {i + 1}: the chat template leaves out what role 'system' says"):
            Encoder(tokenizer, system_prompt=told).prompt(rows, i, None)
    assert Encoder(tokenizer).prompt(rows, 1, None)


def test_a_saved_folder_without_the_split_is_a_line(tmp_path):
    splits(ROWS, tmp_path / "splits")
    with pytest.raises(InputError, match=r"splits' has no split 'test'; it has train"):
        load_rows(str(tmp_path / "splits"), split="test")


def test_a_file_of_csv_may_begin_with_a_mark_and_have_blank_lines(tmp_path):
    long = 200_000 * "x"
    (tmp_path / "d.csv").write_bytes(f"\ufeffquestion,answer\r\n1,2\r\n\r\n3,\r\n,\r\n{long},4\r\n,,\r\n".encode()[:-4])
    assert load_rows(str(tmp_path / "d.csv")).rows == [
        {"question": "1", "answer": "2"},
        {"question": "3", "answer": None},
        {"question": long, "answer": "4"},
    ]


# Prompts and completions.


@pytest.mark.parametrize("prompt", ["2+3?", [{"role": "user", "content": "2+3?"}]])
def test_a_completion_is_text_or_one_message(prompt):
    tokenizer = tiny.tokenizer()
    message = {"role": "assistant", "content": "5", "tool_calls": None}
    forms = [Rows([{"prompt": prompt, "completion": form}], "d.jsonl") for form in ("5", [message])]
    text, conversation = (Encoder(tokenizer).pair(rows, 0, None, "completion") for rows in forms)
    assert text == conversation
    assert said(tokenizer, [text]) == [("<bos><user>2+3?<end>\n<assistant>", "5<end>")]


def test_text_beside_a_completion_is_no_text_alone():
    rows = Rows([{"text": "2+2?", "completion": "4"}], "d.jsonl")
    with pytest.raises(InputError, match="line 1: the row has text and 'completion', but no prompt; name it with"):
        Encoder(tiny.tokenizer()).pair(rows, 0, None, "completion")


def test_a_text_that_spells_the_beginning_has_one():
    tokenizer = tiny.tokenizer(chat=False, adds_bos=True)
    encoder, rows = Encoder(tokenizer), Rows([{"text": f"{tokenizer.bos_token}ab"}, {"text": ""}], "d.jsonl")
    pair = encoder.pair(rows, 0, None, "completion")
    assert said(tokenizer, [pair]) == [("<bos>", f"ab{tokenizer.eos_token}")]
    with pytest.raises(InputError, match="line 2: column 'text' is empty"):
        encoder.pair(rows, 1, None, "completion")


CONVERSATION = [
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def test_every_turn_of_the_assistant_is_trained_once_where_that_is_asked_for():
    tokenizer = tiny.tokenizer()
    encoder, rows = Encoder(tokenizer), Rows([{"messages": CONVERSATION}], "d.jsonl")
    assert encoder.turns(rows, 0, None) == 2, "the first one answers nothing"
    first, last = said(tokenizer, encoder.pairs(rows, 0, None, "completion", "all"))
    assert first == ("<bos><assistant>hi<end>\n<user>a<end>\n<assistant>", "b<end>")
    assert last == (f"{first[0]}b<end>\n<user>c<end>\n<assistant>", "d<end>")
    assert said(tokenizer, encoder.pairs(rows, 0, None, "completion")) == [last]


def test_a_run_says_which_turns_it_trains(files, tmp_path, capsys):
    rows = Rows([{"messages": CONVERSATION}, {"messages": CONVERSATION[:3]}], "d.jsonl")
    encoder = Encoder(tiny.tokenizer())
    last = sft.encoded(sft_config(files, tmp_path), rows, encoder)
    assert "d.jsonl: of 1 conversations the last turn is trained; --assistant_turns all" in capsys.readouterr().out
    each = sft.encoded(sft_config(files, tmp_path, assistant_turns="all"), rows, encoder)
    assert capsys.readouterr().out == ""
    assert [example.where for example in each] == ["d.jsonl, line 1"] * 2 + ["d.jsonl, line 2"]
    assert last == each[1:]
    # How many they are is not foreseen from the rows, and a conversation that is too long is dropped whole.
    named = tiny.jsonl(tmp_path / "d.jsonl", rows.rows)
    for turns, foreseen in (("last", True), ("all", False)):
        options = {"num_train_epochs": 1, "steps": None, "eval_size": 0, "batch_size": 1, "assistant_turns": turns}
        config = sft_config((files[0], named), tmp_path, **options)
        assert bool(foresee(config, config)[1]) == foreseen
    assert sft.encoded(sft_config(files, tmp_path, assistant_turns="all", max_length=15), rows, encoder) == each[2:]


def test_a_row_of_text_is_trained_after_its_first_token():
    for chat, bos in ((True, False), (False, True)):
        tokenizer = tiny.tokenizer(chat=chat, adds_bos=bos)
        eos = tokenizer.eos_token
        rows = Rows([{"text": "ab"}, {"text": f"<user>a{eos}b{eos}"}, {"text": "a"}, {"text": ""}], "d.jsonl")
        encoder = Encoder(tokenizer)
        pairs = said(tokenizer, [encoder.pair(rows, i, None, "completion") for i in range(3)])
        if bos:
            assert pairs[0] == ("<bos>", f"ab{eos}") and pairs[2] == ("<bos>", f"a{eos}")
        else:
            assert pairs == [("a", f"b{eos}"), ("<user>", f"a{eos}b{eos}"), ("a", eos)]
            with pytest.raises(InputError, match="^d.jsonl, line 4: column 'text' is empty"):
                encoder.pair(rows, 3, None, "completion")
    with pytest.raises(InputError, match="line 1: system_prompt and .* have no meaning for a row of text"):
        Encoder(tiny.tokenizer(), system_prompt="Be brief.").pair(rows, 0, None, "completion")
    both = Rows([{"text": "ab", "question": "a", "completion": "b"}], "d.jsonl")
    assert said(tokenizer, [Encoder(tokenizer).pair(both, 0, None, "completion")])[0][1] == f"b{eos}"


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
