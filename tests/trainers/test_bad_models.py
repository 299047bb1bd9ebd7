"""Models and tokenizers that cannot be trained as they are: each is refused in a line that names what is wrong."""

import shutil

import pytest

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data import encode
from tests.trainers import tiny
from tests.trainers.runs import grpo_config, sft_config


@pytest.fixture
def spoilt(files, tmp_path):
    """A copy of the model to spoil, and the rows."""
    return shutil.copytree(files[0], tmp_path / "model"), files[1]


def test_an_added_token_that_the_data_uses_needs_an_embedding(spoilt, tmp_path):
    folder = str(spoilt[0])
    tokenizer = encode.load_tokenizer(folder)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    sft.train(sft_config((folder, spoilt[1]), tmp_path / "unused", steps=1))
    rows = tiny.jsonl(
        tmp_path / "new.jsonl",
        [*tiny.sums(9), {"question": "a<new>b", "answer": "c"}, *tiny.sums(5)],
    )
    with pytest.raises(
        InputError, match=r"new.jsonl, line 10: token '<new>' has id \d+, but the model embeds"
    ):
        sft.train(sft_config((folder, rows), tmp_path / "run"))


def test_a_model_without_tokenizer_config_is_one_line(spoilt, tmp_path):
    (spoilt[0] / "tokenizer_config.json").unlink()
    with pytest.raises(
        InputError,
        match=r"ids up to 263, but the model embeds 263: is tokenizer_config.json missing",
    ):
        grpo.train(grpo_config(map(str, spoilt), tmp_path / "run"))
