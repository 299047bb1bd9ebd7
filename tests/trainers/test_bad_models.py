"""Models and tokenizers that cannot be trained as they are: each is refused in a line that names what is wrong."""

import shutil

import pytest

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.data import encode
from fused_rl.trainers.options import InputError
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


def test_an_added_token_that_the_data_uses_needs_an_embedding(good, folder, tmp_path):
    tokenizer = encode.load_tokenizer(str(folder))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    sft.train(sft_config((str(folder), str(good / "rows.jsonl")), tmp_path / "unused", steps=1))
    rows = tiny.jsonl(tmp_path / "new.jsonl", [*tiny.sums(9), {"question": "a<new>b", "answer": "c"}, *tiny.sums(5)])
    with pytest.raises(InputError, match=r"new.jsonl, line 10: token '<new>' has id \d+, but the model embeds"):
        sft.train(sft_config((str(folder), rows), tmp_path / "run"))


def test_a_model_without_tokenizer_config_is_one_line(good, folder, tmp_path):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=r"ids up to 263, but the model embeds 263: is tokenizer_config.json missing"):
        grpo.train(grpo_config((str(folder), str(good / "rows.jsonl")), tmp_path / "run"))
