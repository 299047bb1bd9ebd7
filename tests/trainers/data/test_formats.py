"""Every form in which others keep their rows: taken as it is meant, or refused with how to convert it."""

import json
import shutil
from pathlib import Path

import numpy
import pandas
import pytest

from fused_rl.trainers import sft
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data import examples, rows
from fused_rl.trainers.data.encode import Encoder
from fused_rl.trainers.data.reading import chosen_rows
from fused_rl.trainers.data.rows import Rows, load_rows
from fused_rl.trainers.run.parse import parse
from tests.lazy import datasets
from tests.trainers import tiny
from tests.trainers.runs import sft_config

ROWS = [{"question": "a, b?", "answer": "007"}, {"question": 'say "é"\nnow', "answer": "NA"}]


def said(tokenizer, pairs) -> list[tuple[str, str]]:
    return [tuple(map(tokenizer.decode, pair)) for pair in pairs]


# Files and folders.


def splits(rows, path):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(path)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_cells_of_a_csv_file_are_text_as_it_is_written(separator, tmp_path):
    path = tmp_path / ("d.tsv" if separator == "\t" else "d.csv")
    # As a spreadsheet writes it.
    text = "\ufeffprompt,answer,id\r\na,007,NA\r\nb,,\r\n".replace(",", separator)
    path.write_bytes(text.encode())
    rows = [
        {"prompt": "a", "answer": "007", "id": "NA"},
        {"prompt": "b", "answer": None, "id": None},
    ]
    assert list(load_rows(str(path))) == rows


# Prompts and completions.


@pytest.mark.parametrize("prompt", ["2+3?", [{"role": "user", "content": "2+3?"}]])
def test_a_completion_is_text_or_messages_that_may_begin_with_the_prompt(prompt):
    tokenizer = tiny.tokenizer()
    message = {"role": "assistant", "content": "5", "tool_calls": None}
    for completion in ("5", [message], [{"role": "user", "content": "2+3?"}, message]):
        row = {"prompt": prompt, "completion": completion}
        pairs = tiny.pairs(Encoder(tokenizer), row, None, "completion")
        assert said(tokenizer, pairs) == [("<bos><user>2+3?<end>\n<assistant>", "5<end>")]
    row = {"prompt": [{"role": "system", "content": "s"}], "completion": completion}
    pairs = tiny.pairs(Encoder(tokenizer), row, None, "completion")
    assert said(tokenizer, pairs)[0][0] == "<bos><system>s<end>\n<user>2+3?<end>\n<assistant>"


CONVERSATION = [
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def test_a_conversation_that_is_too_long_is_dropped_whole(files, tmp_path):
    rows = Rows([{"messages": CONVERSATION}, {"messages": CONVERSATION[:3]}], "d.jsonl")
    encoder = Encoder(tiny.tokenizer())
    last = sft.encoded(sft_config(files, tmp_path), rows, encoder)
    each = sft.encoded(sft_config(files, tmp_path, assistant_turns="all"), rows, encoder)
    assert [example.where for example in each] == ["d.jsonl, line 1", "d.jsonl, line 2"]
    assert [*last][1:] == each[1:]
    short = sft_config(files, tmp_path, assistant_turns="all", max_length=15)
    assert [*sft.encoded(short, rows, encoder)] == each[1:]


def test_turns_are_one_sequence_in_which_only_the_assistants_tokens_are_trained(files, tmp_path):
    tokenizer, config = tiny.tokenizer(), sft_config(files, tmp_path, assistant_turns="all")
    (whole,) = sft.encoded(config, Rows([{"messages": CONVERSATION}], "x"), Encoder(tokenizer))
    assert tokenizer.decode(whole.prompt) == "<bos><assistant>hi<end>\n<user>a<end>\n<assistant>"
    trained = [i for i, flag in zip(whole.completion, whole.trained, strict=True) if flag]
    assert tokenizer.decode(trained) == "b<end>d<end>"
    assert tokenizer.decode(whole.completion) == "b<end>\n<user>c<end>\n<assistant>d<end>"


def test_a_row_of_text_is_trained_after_its_first_token():
    for chat, bos in ((True, False), (False, True)):
        tokenizer = tiny.tokenizer(chat=chat, adds_bos=bos)
        eos = tokenizer.eos_token
        rows = Rows(
            [{"text": "ab"}, {"text": f"<user>a{eos}b{eos}"}, {"text": "a"}, {"text": ""}],
            "d.jsonl",
        )
        encoder = Encoder(tokenizer)
        pairs = said(
            tokenizer, [tiny.pairs(encoder, rows[i], None, "completion")[0] for i in range(3)]
        )
        if bos:
            assert pairs[0] == ("<bos>", f"ab{eos}") and pairs[2] == ("<bos>", f"a{eos}")
        else:
            assert pairs == [("a", f"b{eos}"), ("<user>", f"a{eos}b{eos}"), ("a", eos)]
            with pytest.raises(InputError, match="^the text is empty"):
                tiny.pairs(encoder, rows[3], None, "completion")
    both = Rows([{"text": "ab", "question": "a", "completion": "b"}], "d.jsonl")
    assert (
        said(tokenizer, tiny.pairs(Encoder(tokenizer), both[0], None, "completion"))[0][1]
        == f"b{eos}"
    )


# Answers.


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
    pairs = said(tokenizer, tiny.pairs(encoder, rows[0], None, "completion"))
    assert pairs == [(f"<bos><user>a<end>\n<assistant>{skipped}", "b<end>")]
    if "think" in skipped:
        row = {"prompt": "a", "completion": "<think>c</think>b"}
        with pytest.raises(InputError, match="does not continue its own generation prompt"):
            tiny.pairs(encoder, row, None, "completion")


# Several files.


def contents(rows) -> list[str]:
    return [row["prompt"] for row in rows]


def test_a_folder_is_read_whole_whatever_its_files_are_called(tmp_path, capsys):
    for name in (
        "more.jsonl",
        "train/a.jsonl",
        "math_test_cases.json",
        "test.jsonl",
        "dev-0.jsonl",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        tiny.jsonl(tmp_path / name, [{"prompt": name}])
    datasets.Dataset.from_list([{"prompt": "parquet"}] * 2).to_parquet(tmp_path / "b.parquet")
    train = contents(load_rows(str(tmp_path)))
    assert train == ["parquet"] * 2 + ["math_test_cases.json", "more.jsonl", "train/a.jsonl"]
    printed = capsys.readouterr().out
    assert f"{tmp_path}: 2 files of other splits than train are not read\n" in printed
    assert f"{tmp_path}/b.parquet: 2 rows\n{tmp_path}/math_test_cases.json: 1 rows\n" in printed
    assert contents(load_rows(str(tmp_path), split="validation")) == ["dev-0.jsonl"]


def test_a_folder_may_hold_what_datasets_saved_and_is_named_as_one(tmp_path):
    for name in "ba":
        splits([{"prompt": name}], tmp_path / "set" / name)
    read = load_rows(str(tmp_path / "set"))
    assert contents(read) == ["a", "b"] and read.where(1) == f"{tmp_path}/set/b, row 1"
    assert read.source == f"{tmp_path}/set" and contents(load_rows(f"{tmp_path}/set/b*")) == ["b"]
    with pytest.raises(InputError, match="set/a has the splits train, and not test"):
        load_rows(str(tmp_path / "set"), split="test")
    (tmp_path / "book.txt").write_text("first line\n")
    shutil.rmtree(tmp_path / "set")
    with pytest.raises(InputError, match="expected files .*; the folder has none"):
        load_rows(str(tmp_path))


def test_several_data_sets_and_patterns_are_read_one_after_the_other(tmp_path):
    names = [tiny.jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}]) for name in "bca"]
    read = load_rows(names)
    assert contents(read) == ["b", "c", "a"]
    assert read.where(1) == f"{tmp_path}/c.jsonl, line 1"
    assert contents(load_rows(f"{tmp_path}/*.jsonl")) == ["a", "b", "c"]
    with pytest.raises(InputError, match="matches no file"):
        load_rows(f"{tmp_path}/*.json")
    config = parse(sft.SFTConfig, ["--model", "m", "--output_dir", "o", "--dataset", *names])
    assert config.dataset == names


def test_rows_in_an_object_are_rows_and_a_conversation_in_one_is_a_row(tmp_path):
    path = tmp_path / "d.json"
    for indent in (1, None):
        wrapper = {"version": 1, "data": [{"prompt": "a"}, {"prompt": "b"}]}
        path.write_text(json.dumps(wrapper, indent=indent))
        assert contents(load_rows(str(path))) == ["a", "b"]
    path.write_text(json.dumps({"messages": CONVERSATION}, indent=1))
    assert list(load_rows(str(path))) == [{"messages": CONVERSATION}]


@pytest.mark.parametrize("block", [3, 16, 1 << 24])
def test_a_list_is_read_in_blocks(block, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", block)
    path, expected = tmp_path / "d.json", [{"prompt": "a\n]é"}, {"prompt": "{", "n": [1, [2]]}]
    path.write_text(json.dumps(expected, indent=2, ensure_ascii=False))
    assert list(load_rows(str(path))) == expected
    path.write_text('[{"prompt": "a"}, {"prompt": ')
    with pytest.raises(InputError, match="fix row 2"):
        load_rows(str(path))


def test_a_large_file_is_encoded_once_with_the_ids_of_a_small_one(files, tmp_path, monkeypatch):
    path = tiny.jsonl(
        tmp_path / "d.jsonl", [{"prompt": f"{i}", "answer": "b"} for i in range(1500)]
    )
    config, encoder = sft_config(files, tmp_path), Encoder(tiny.tokenizer())
    small = sft.encoded(config, load_rows(path), encoder)
    monkeypatch.setattr(rows, "SMALL", 0)
    for module in (rows, examples):  # of a first run: nothing of its path is there
        monkeypatch.setattr(module, "CACHE", tmp_path / "home" / "cache")
    first = sft.encoded(config, load_rows(path), encoder)
    assert [*first] == [*small] and first.digests == small.digests
    # From then on the tokenizer is not asked.
    monkeypatch.setattr(encoder, "demonstrations", None)
    assert [*sft.encoded(config, load_rows(path), encoder)] == [*small]
    tiny.jsonl(tmp_path / "d.jsonl", [{"prompt": "other", "answer": "b"}] * 9)
    with pytest.raises(TypeError):
        sft.encoded(config, load_rows(path), encoder)
    assert len({load_rows(path).subset(range(*ends)).key for ends in ((3,), (4,), (1, 3))}) == 3


def test_cached_ids_are_of_all_that_decides_them():
    """Each option alone, and each part of the tokenizer, has a key of its own."""

    def key(part="name_or_path", value="", **options):
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template += "{{ brief }}"
        setattr(tokenizer, part, value)
        return Encoder(tokenizer, **options).key

    keys = [key(), key(raw_prompt=True), key(system_prompt="a"), key(stop_ids=[2])]
    keys += [key(chat_template_kwargs={"brief": n}) for n in range(2)]
    keys += [key("chat_template", "a"), key("bos_token", "b")]
    assert len({*keys}) == len(keys)


def test_rows_from_python_may_be_of_many_kinds(tmp_path):
    expected = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    table = datasets.Dataset.from_list(expected)
    for given in (
        table,
        datasets.DatasetDict({"train": table, "test": table.select([0])}),
        Path(tiny.jsonl(tmp_path / "d.jsonl", expected)),
        [table.select([0]), tmp_path / "d.jsonl"],
        pandas.DataFrame(expected),
        (row for row in expected),
        [{"prompt": numpy.str_("a"), "n": numpy.int64(1)}, {"prompt": "b", "n": numpy.array(2)}],
    ):
        assert list(chosen_rows("dataset", given, None, None, "train"))[-2:] == expected
    splits = datasets.DatasetDict({"a": table, "b": table})
    for refused, why in (
        (7, ": expected"),
        ({"prompt": "a"}, ": expected"),
        (splits, " has the splits a, b"),
    ):
        with pytest.raises(InputError, match=f"^dataset{why}"):
            chosen_rows("dataset", refused, None, None, "train")
