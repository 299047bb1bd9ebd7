"""`fused-rl tiny-model`: a folder that trainers take, and input that it refuses."""

import json
import re

import pytest
import transformers

from fused_rl.trainers.commands import tiny_model
from fused_rl.trainers.data.encode import Encoder, load_tokenizer
from fused_rl.trainers.data.rows import Rows
from fused_rl.trainers.models import tiny

ROWS = [{"messages": [{"role": "user", "content": f"how much is {i} + {i}"}], "answer": str(2 * i)} for i in range(40)]


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def made(*argv):
    tiny_model.main(["--dataset", "rows.jsonl", "--output_dir", "out/model", *argv])
    return load_tokenizer("out/model")


def test_every_text_can_be_spelled_and_the_template_ends_where_it_must(rows, capsys):
    tokenizer = made("--vocab_size", "300")
    assert "out/model: a Llama with" in capsys.readouterr().out
    text = "Ünïcode, 日本 and\n\ttabs 42"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert "how" in {token.strip("Ġ") for token in tokenizer.get_vocab()}, "learnt from messages"
    assert len(tokenizer) <= 300
    encoder = Encoder(tokenizer, system_prompt="be short")
    prompt, completion = encoder.pair(Rows([{"prompt": "hi", "completion": "ho"}], "r"), 0, None, "completion")
    assert tokenizer.decode(prompt) == "<system>be short<user>hi<assistant>"
    assert tokenizer.decode(completion) == "ho<eos>"


def test_the_model_has_the_sizes_that_were_asked_for_and_the_weights_of_its_seed(rows):
    made("--layers", "1", "--hidden_size", "64", "--max_length", "40")
    model = transformers.AutoModelForCausalLM.from_pretrained("out/model")
    told = model.config
    sizes = (told.num_hidden_layers, told.hidden_size, told.num_attention_heads, told.max_position_embeddings)
    assert sizes == (1, 64, 2, 40)
    tokenizer = load_tokenizer("out/model")
    assert (told.eos_token_id, told.vocab_size) == (tokenizer.eos_token_id, len(tokenizer))
    for seed in (1, 2):
        tiny_model.make(
            tiny_model.TinyModelConfig(
                dataset=ROWS, output_dir=f"of-{seed}", seed=seed, layers=1, hidden_size=64, max_length=40
            )
        )
    weights = [(rows / name / "model.safetensors").read_bytes() for name in ("out/model", "of-1", "of-2")]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--vocab_size", "260"], f"vocab_size=260 has no room .*at least {tiny.SMALLEST_VOCABULARY}"),
        (["--hidden_size", "100"], "hidden_size=100 is no multiple of 32"),
        (["--dataset", "gone.jsonl"], "dataset file gone.jsonl does not exist"),
        (["--dataset", "numbers.jsonl"], "no text in its rows"),
        (["--output_dir", "."], "is there and not empty; delete it yourself, or choose another folder"),
        (["--output_dir", "rows.jsonl"], "is there and not empty"),
        (["--output_dir", "rows.jsonl/model"], "rows.jsonl/model"),
        (["--layer", "2"], "unknown option --layer; did you mean --layers"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_line(argv, message, rows, capsys):
    (rows / "numbers.jsonl").write_text('{"answer": 1}\n')
    before = sorted(rows.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        made(*argv)
    line = f"{stopped.value.code}{capsys.readouterr().err}"
    assert len(line.strip().splitlines()) == 1
    assert re.search(message, line), line
    assert sorted(rows.rglob("*")) == before
