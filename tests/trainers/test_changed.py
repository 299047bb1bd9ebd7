"""A run that is resumed with other rows, another model or another chat template is refused, unless that is accepted."""

import contextlib
import shutil
from pathlib import Path

import pytest

from fused_rl.trainers import sft
from fused_rl.trainers.base.files import hash_of_model
from tests.trainers import tiny
from tests.trainers.runs import contents, refused, run_config


@contextlib.contextmanager
def edited(path: Path, change):
    """Inside, a file has other bytes."""
    before = path.read_bytes()
    path.write_bytes(change(before))
    try:
        yield
    finally:
        path.write_bytes(before)


def reordered(rows: bytes) -> bytes:
    return b"".join(rows.splitlines(keepends=True)[::-1])


def one_weight_moved(tensors: bytes) -> bytes:
    return tensors[:-1] + bytes([tensors[-1] ^ 1])


def replaced(old: bytes, new: bytes):
    return lambda text: text.replace(old, new, 1)


CHANGED = [
    ("rows.jsonl", reordered, "rows"),
    ("rows.jsonl", replaced(b"Add them", b"Sum them"), "rows"),
    ("model/model.safetensors", one_weight_moved, "model"),
    ("model/config.json", replaced(b'_eps": 1e-06', b'_eps": 2e-06'), "model"),
    ("model/chat_template.jinja", lambda template: template + b"{# another #}", "chat_template"),
]


@pytest.mark.parametrize(("name", "change", "named"), CHANGED)
def test_an_input_that_changed_is_named_on_resume(files, run, name, change, named):
    before, path = contents(run), Path(files[1]).parent / name
    with edited(path, change):
        line = f"not those of .*step-4: {named}; .*--accept_changes"
        refused(run_config(files, run, resume=True, steps=6), line)
    assert contents(run) == before


@pytest.mark.slow
def test_accepted_changes_are_the_inputs_of_the_run_from_then_on(files, run, capsys):
    with edited(Path(files[1]), reordered):
        sft.train(run_config(files, run, resume=True, steps=5, accept_changes=True))
        assert "resume: continues with other inputs: rows" in capsys.readouterr().out
        sft.train(run_config(files, run, resume=True, steps=6))
    refused(run_config(files, run, resume=True, steps=6), "not those of .*step-6: rows;")


def test_rows_and_models_may_lie_elsewhere(files, run, tmp_path):
    model = str(shutil.copytree(files[0], tmp_path / "moved"))
    dataset = shutil.copy(files[1], tmp_path / "moved.jsonl")
    sft.train(run_config((model, str(dataset)), run, resume=True, steps=5))
    other = tiny.jsonl(dataset, tiny.sums(21)[1:])
    refused(run_config((model, other), run, resume=True, steps=6), "step-5: rows;")


def test_the_hash_of_adapters_includes_the_weights_that_they_belong_to(files, tmp_path):
    adapters = sft.train(run_config(files, tmp_path / "run", lora_rank=2, steps=1))
    of_adapters, _, of_base = hash_of_model(adapters).partition(" on ")
    assert of_base == hash_of_model(files[0]) != of_adapters


def test_a_model_on_the_hub_is_known_by_its_commit(monkeypatch):
    snapshot = f"/cache/models--org--name/snapshots/{'a' * 40}"
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: snapshot)
    assert hash_of_model("org/name", "main") == "a" * 40
