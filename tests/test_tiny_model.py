"""recipes/tiny_model.py: a folder that trainers take, with the sizes that were asked for."""

import json

import pytest

from fused_rl.recipes import demo, demo_distill, demo_ppo, demo_reward, tiny_model, tool, turns
from fused_rl.trainers.data.encode import Encoder, load_tokenizer
from tests.lazy import transformers
from tests.trainers import tiny

ROWS = [
    {"messages": [{"role": "user", "content": f"how much is {i} + {i}"}], "answer": str(2 * i)}
    for i in range(40)
]


def test_every_text_can_be_spelled_and_the_template_ends_where_it_must(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    words = [
        "--dataset",
        str(tmp_path / "rows.jsonl"),
        "--output_dir",
        str(tmp_path / "model"),
        "--layers",
        "1",
    ]
    tiny_model.main([*words, "--hidden_size", "64", "--max_length", "40"])
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    text = "Ünïcode, 日本 and\n\ttabs 42"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert "how" in {token.strip("Ġ") for token in tokenizer.get_vocab()}, "learned from messages"
    encoder = Encoder(tokenizer, system_prompt="be short")
    ((prompt, completion),) = tiny.pairs(
        encoder, {"prompt": "hi", "completion": "ho"}, None, "completion"
    )
    assert tokenizer.decode(prompt) == "<system>be short<user>hi<assistant>"
    assert tokenizer.decode(completion) == "ho<eos>"

    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    sizes = (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.max_position_embeddings,
    )
    assert sizes == (1, 64, 2, 40) and config.vocab_size == len(tokenizer)
    with pytest.raises(SystemExit, match="model exists; give --output_dir a new folder"):
        tiny_model.main(words)


@pytest.mark.parametrize(
    "recipe", [demo, demo_distill, demo_ppo, demo_reward, tiny_model, tool, turns]
)
def test_help_is_no_error(recipe, capsys):
    with pytest.raises(SystemExit) as ended:
        recipe.main(["--help"])
    assert not ended.value.code and capsys.readouterr().out.startswith("usage: ")
