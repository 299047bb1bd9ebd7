"""Models and tokenizers that cannot be trained as they are: each is refused in a line that names what is wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.rows import load_rows
from fused_rl.trainers.models import reward_model
from fused_rl.trainers.options.config import InputError
from tests.trainers import tiny
from tests.trainers.runs import grpo_config, sft_config


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    tiny.model_folder(folder / "model")
    tiny.jsonl(folder / "rows.jsonl", tiny.sums(12))
    return folder


@pytest.fixture
def folder(good, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(good / "model", tmp_path / "model")


def load(folder):
    config = grpo.GRPOConfig(model=str(folder), dataset="", output_dir="", zero_stage=0)
    return tiny.load_lm(config, trainable=False)


def change_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def lack_a_layer(folder):
    change_weights(folder, lambda w: [w.pop(k) for k in list(w) if k.startswith("model.layers.1.mlp")])


def lack_the_head(folder):
    change_weights(folder, lambda w: w.pop("lm_head.weight"))


def have_a_score(folder):
    change_weights(folder, lambda w: w.update({"score.weight": torch.ones(1, 16)}))


def hold_nan(folder):
    change_weights(folder, lambda w: w["model.layers.0.mlp.up_proj.weight"][3, 2].fill_(float("nan")))


def be_of_another_shape(folder):
    change_config(folder, intermediate_size=48)


def be_cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def have_no_config(folder):
    (folder / "config.json").unlink()


def have_a_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")


def be_of_no_known_type(folder):
    change_config(folder, model_type="qwen99")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lack_a_layer, r"3 missing weights for Qwen2ForCausalLM: model.layers.1.mlp.down_proj.weight"),
        (lack_the_head, r"1 missing weights for Qwen2ForCausalLM: lm_head.weight"),
        (have_a_score, r"1 unexpected weights for Qwen2ForCausalLM: score.weight"),
        (hold_nan, r"1 weights hold NaN or infinite values, among them model.layers.0.mlp.up_proj.weight"),
        (be_of_another_shape, r"damaged: \w+"),
        (be_cut, r"damaged: \w+"),
        (have_no_config, r"neither a local folder with a model nor on the Hub"),
        (have_a_config_that_is_no_json, r"neither a local folder with a model nor on the Hub, or it is damaged"),
        (be_of_no_known_type, r"qwen99"),
    ],
)
def test_a_spoilt_model_is_refused_in_a_line(spoil, message, folder):
    spoil(folder)
    with pytest.raises(InputError, match=message) as refused:
        load(folder)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


def test_a_model_in_which_a_token_sees_its_successors_is_refused(tmp_path):
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16, initializer_range=0.5)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="is not causal: a token's logits change with the tokens after it"):
        load(tmp_path / "bert")


def test_an_encoder_decoder_is_refused(tmp_path):
    import transformers

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    with pytest.raises(InputError, match="t5"):
        load(tmp_path / "t5")


@pytest.mark.parametrize("read", [load, lambda folder: reward_model.RewardModel.from_pretrained(folder)])
def test_code_of_a_model_is_refused_and_nobody_is_asked(read, folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("asked whether to run the model's code"))
    change_config(folder, model_type="mine", auto_map=dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "mine.M"))
    (folder / "mine.py").write_text("raise SystemExit('executed')")
    with pytest.raises(InputError, match="contains custom code"):
        read(folder)


def test_a_folder_without_a_tokenizer_is_refused(folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    with pytest.raises(InputError, match="comes without a tokenizer"):
        encode.load_tokenizer(str(folder))


def test_a_name_that_nobody_has_is_one_line(tmp_path):
    for call in (encode.load_tokenizer, load_rows):
        with pytest.raises(InputError) as refused:
            call(str(tmp_path / "nobody"))
        assert "nobody" in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 600


def test_tokens_without_an_embedding_are_refused(good, folder, tmp_path):
    change_config(folder, vocab_size=100)
    cut = {"model.embed_tokens.weight", "lm_head.weight"}
    change_weights(folder, lambda w: w.update({k: w[k][:100].clone() for k in cut}))
    with pytest.raises(InputError, match=r"the tokenizer has \d+ tokens, but the model embeds 100"):
        sft.train(sft_config((str(folder), str(good / "rows.jsonl")), tmp_path / "run"))


def test_an_added_token_that_the_data_uses_needs_an_embedding(good, folder, tmp_path):
    tokenizer = encode.load_tokenizer(str(folder))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    sft.train(sft_config((str(folder), str(good / "rows.jsonl")), tmp_path / "unused", steps=1))
    rows = tiny.jsonl(tmp_path / "new.jsonl", [*tiny.sums(9), {"question": "a<new>b", "answer": "c"}, *tiny.sums(5)])
    with pytest.raises(InputError, match=r"new.jsonl, line 10: token '<new>' has id \d+, but the model embeds"):
        sft.train(sft_config((str(folder), rows), tmp_path / "run"))


def test_more_tokens_than_positions_are_refused_with_their_row(good, tmp_path):
    rows = tiny.jsonl(tmp_path / "long.jsonl", [*tiny.sums(9), {"question": "9" * 110, "answer": "#### 1"}])
    files = (str(good / "model"), rows)
    with pytest.raises(InputError, match=r"long.jsonl, line 10: up to \d+ tokens, but the model has 128"):
        grpo.train(grpo_config(files, tmp_path / "run", max_new_tokens=20))
