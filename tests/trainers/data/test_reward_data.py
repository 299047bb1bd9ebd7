"""The rows of the reward trainer, to the token."""

import json

import pytest

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data import encode, preferences
from fused_rl.trainers.data.rows import Rows, load_rows
from tests.trainers.reward_runs import make_config, make_model

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
TURNS = [USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
ONE, SEVERAL = (
    "<user>hi<eos>\n<assistant>",
    "<user>hi<eos>\n<assistant>a<eos>\n<user>b<eos>\n<assistant>",
)
# Each form of the Hub: a row without its rejected side, what the model must read, and if there is a chat template.
FORMS = [
    ({"prompt": "hi", "chosen": "yo"}, ("hi", "yo<eos>"), False),
    ({"prompt": "hi", "chosen": "yo"}, (ONE, "yo<eos>"), True),
    ({"question": "hi", "chosen": "yo"}, (ONE, "yo<eos>"), True),
    ({"prompt": TURNS, "chosen": "yo"}, (SEVERAL, "yo<eos>"), True),
    ({"chosen": "human: hi assistant: yo"}, ("human: hi assistant: ", "yo<eos>"), False),
    ({"chosen": "hi yo<eos>"}, ("hi ", "yo<eos>"), True),
    ({"prompt": "hi", "chosen": [ASSISTANT]}, (ONE, "yo<eos>"), True),
    ({"prompt": "hi", "chosen": [ASSISTANT]}, ("hi", "yo<eos>"), False),
    ({"prompt": [USER], "chosen": [ASSISTANT]}, (ONE, "yo<eos>"), True),
    ({"prompt": [USER], "chosen": [*TURNS[1:], ASSISTANT]}, (SEVERAL, "yo<eos>"), True),
    ({"chosen": [*TURNS, ASSISTANT]}, (SEVERAL, "yo<eos>"), True),
    ({"prompt": "hi", "chosen": [USER, ASSISTANT]}, (ONE, "yo<eos>"), True),
]


def read(config, tokenizer, rows: Rows):
    return preferences.pairs_of(config, rows, encode.Encoder.of(config, tokenizer))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_the_hubs_forms_are_read_to_the_token(form, suffix, tmp_path):
    row, (prompt, response), chat = form
    row["rejected"] = json.loads(json.dumps(row["chosen"]).replace("yo", "no"))
    path = tmp_path / f"data.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row) + "\n\n" + json.dumps({**row, "margin": 2}) + "\n")
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([{**row, "margin": None}, {**row, "margin": 2.0}]), path
        )
    tokenizer = encode.load_tokenizer(make_model(tmp_path / "model", chat=chat))
    pairs = read(make_config(tmp_path), tokenizer, load_rows(str(path)))
    assert [p.margin for p in pairs] == [0, 2]
    assert pairs[1].where == f"{path}, " + ("line 3" if suffix == "jsonl" else "row 2")

    def ids(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    for pair in pairs:
        assert pair.chosen == (ids(prompt), ids(response))
        assert pair.rejected == (ids(prompt), ids(response.replace("yo", "no")))
        assert pair.chosen[1][-1] == pair.rejected[1][-1] == tokenizer.eos_token_id


def test_a_beginning_of_sequence_is_written_once(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = encode.load_tokenizer(make_model(tmp_path / "model"))
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    rows = [
        {"prompt": "hi", "chosen": "yo", "rejected": "no"},
        {"chosen": "hi yo", "rejected": "hi no"},
    ]
    for pair in read(make_config(tmp_path), tokenizer, Rows(rows, "x")):
        whole = [*pair.chosen[0], *pair.chosen[1]]
        assert (
            whole[0] == bos and whole.count(bos) == 1 and whole[-1] == eos and whole.count(eos) == 1
        )


def test_truncation_keeps_eos_or_drops_the_pair_and_says_so(tmp_path, capsys):
    rows = [
        {"prompt": "a", "chosen": "bcdef", "rejected": "b"},  # 6 tokens with its EOS: one too many
        {"prompt": "abcdefg", "chosen": "bcde", "rejected": "c"},  # 7 and 5: fit
        {"prompt": "a", "chosen": "bcdef", "rejected": "bcdeg"},  # cut, its sides are the same
        # The prompt does not fit, and is never cut.
        {
            "prompt": "abcdefgh",
            "chosen": "b",
            "rejected": "c",
        },
        {"prompt": "a", "chosen": "b", "rejected": "b"},
    ]
    tokenizer = encode.load_tokenizer(make_model(tmp_path / "model", pad_is_eos=True))
    limits = {"max_prompt_length": 7, "max_response_length": 5}

    def responses(too_long):
        config = make_config(tmp_path, too_long=too_long, **limits)
        pairs = read(config, tokenizer, Rows(rows, "x"))
        return [tokenizer.decode(pair.chosen[1]) for pair in pairs]

    assert responses("drop") == ["bcde<eos>"]
    output = capsys.readouterr().out
    assert (
        "x: dropped 4 of 5 pairs: 1 with a prompt longer than max_prompt_length=7 (the longest has 8 tokens), "
        "2 with a response longer than max_response_length=5 (the longest has 6 tokens), "
        "1 whose two sides are the same tokens" in output
    )
    assert responses("truncate") == ["bcde<eos>", "bcde<eos>"]
    output = capsys.readouterr().out
    assert "dropped 3 of 5 pairs: 1 with a prompt longer" in output
    assert "2 whose two sides are the same tokens" in output
    assert "cut 3 of 10 responses to max_response_length" in output


def test_a_margin_column_that_is_named_exists_and_the_usual_one_need_not(tmp_path):
    tokenizer = encode.load_tokenizer(make_model(tmp_path / "model"))
    rows = Rows([{"prompt": "a", "chosen": "b", "rejected": "c"}], "x")
    # As a run's config.yaml repeats it.
    usual = make_config(tmp_path, margin_column="margin")
    assert [pair.margin for pair in read(usual, tokenizer, rows)] == [0.0]
    other = make_config(tmp_path, margin_column="lead")
    with pytest.raises(InputError, match="x: no row has the column 'lead' of --margin_column"):
        read(other, tokenizer, rows)
