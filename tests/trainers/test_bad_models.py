"""Models and tokenizers that cannot be trained as they are: each is refused in a line that names what is wrong."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base.files import hash_of_model, is_missing_path
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.rows import load_rows
from tests.trainers import tiny
from tests.trainers.runs import grpo_config, sft_config


@pytest.fixture
def spoilt(files, tmp_path):
    """A copy of the model to spoil, and the rows."""
    return str(shutil.copytree(files[0], tmp_path / "model")), files[1]


def test_an_added_token_that_the_data_uses_needs_an_embedding(spoilt, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(spoilt[0])
    sft.train(sft_config(spoilt, tmp_path / "unused", steps=1))
    rows = tiny.sums(15)
    rows[9]["question"] = "a<new>b"
    line = r"new.jsonl, line 10: token '<new>' has id \d+, but the model embeds"
    with pytest.raises(InputError, match=line):
        files = spoilt[0], tiny.jsonl(tmp_path / "new.jsonl", rows)
        sft.train(sft_config(files, tmp_path / "run"))


def test_a_model_without_tokenizer_config_is_one_line(spoilt, tmp_path):
    Path(spoilt[0], "tokenizer_config.json").unlink()
    line = "ids up to 263, but the model embeds 263: is tokenizer_config.json missing"
    with pytest.raises(InputError, match=line):
        grpo.train(grpo_config(spoilt, tmp_path / "run"))


@contextlib.contextmanager
def unprivileged():
    """Root may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_what_may_not_be_read_is_a_line_that_names_it(files):
    with tempfile.TemporaryDirectory() as name:  # pytest's own is closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        model = shutil.copytree(files[0], folder / "model")
        rows = Path(shutil.copy(files[1], folder / "rows.jsonl"))
        closed = folder / "closed"
        closed.mkdir()
        for path, read, what in (
            (rows, load_rows, rows),
            (closed, load_rows, closed / "rows.jsonl"),
            (closed, encode.load_tokenizer, closed / "model"),
            (model / "model.safetensors", hash_of_model, model),
        ):
            mode = path.stat().st_mode
            path.chmod(0)
            line = f"{path}.* cannot be read: Permission denied"
            with unprivileged(), pytest.raises(InputError, match=line):
                read(str(what))
            path.chmod(mode)


def test_a_path_is_told_from_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    for name in ("./none", "../none", "/none", "a/b/c", "runs/modle", "runs/model/none", "none/"):
        assert is_missing_path(name), name
    for name in ("gpt2", "org/name", "Qwen/Qwen2.5-0.5B", "runs", "runs/model", "./runs"):
        assert not is_missing_path(name), name
