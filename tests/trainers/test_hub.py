"""Pushing the trained model to a fake of the Hub, and logging to a fake of Weights & Biases."""

import functools
import importlib.util
import os
import sys
import types

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError

from fused_rl.trainers import sft
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.run import store
from tests.trainers import tiny


class FakeApi:
    """The used part of `HfApi`; class attributes decide what happens, and `calls` keeps the calls."""

    no_repository = no_upload = None
    private = True
    calls: list

    def create_repo(self, name, *, private, exist_ok):
        if self.no_repository is not None:
            raise self.no_repository
        repository = name if "/" in name else f"me/{name}"
        self.calls.append(("create", repository, private, exist_ok))
        return types.SimpleNamespace(repo_id=repository)

    def model_info(self, repo_id):
        return types.SimpleNamespace(private=self.private)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        if self.no_upload is not None:
            raise self.no_upload
        self.calls.append(("upload", repo_id, set(os.listdir(folder_path)), commit_message))


@pytest.fixture
def api(monkeypatch):
    """The fake in place of the Hub."""
    fake = type("Api", (FakeApi,), {"calls": []})
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    return fake


config_of = functools.partial(
    tiny.config_of, "sft", completion_column="answer", eval_size=0, batch_size=4, steps=1
)


def refused(files, output_dir, message: str, **options) -> None:
    """Training is refused in one line that matches."""
    with pytest.raises(InputError, match=message) as error:
        sft.train(config_of(*files, output_dir, push_to_hub=True, **options))
    store.unlock()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "repository", "private"),
    [
        ({}, "me/run", None),
        ({"hub_model_id": "us/other", "hub_private_repo": True}, "us/other", True),
    ],
)
def test_the_model_is_pushed_when_it_is_saved(
    options, repository, private, files, api, tmp_path, capsys
):
    sft.train(config_of(*files, tmp_path / "run", push_to_hub=True, **options))
    *created, (_, to, names, message) = api.calls
    assert created == [("create", repository, private, True)] * 2 and to == repository
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert message == "fused-rl sft, step 1"
    output = capsys.readouterr().out
    assert output.index("model: ") < output.index(f"pushed the model to {repository}")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            LocalTokenNotFoundError("Token\nis required"),
            "cannot be made: .*Token is required; look",
        ),
        (ConnectionError("Name\nnot known"), "cannot be made: .*Name not known; look at `hf"),
        (None, "me/own is on the Hub already, and public"),
    ],
)
def test_a_repository_that_cannot_be_made_is_refused_before_anything_is_read(
    error, message, files, api, tmp_path
):
    api.no_repository, api.private = error, False
    options = {"hub_model_id": "own", "hub_private_repo": True}
    refused(("no-such-model", files[1]), tmp_path / "run", message, **options)
    assert not (tmp_path / "run").exists()


def test_a_push_that_fails_loses_nothing_and_says_how_to_push(files, api, tmp_path):
    api.no_upload = ConnectionError("the line\nwent dead")
    model = tmp_path / "run" / "model"
    words = f"could not be pushed: .*went dead; push it with: hf upload me/own {model}"
    refused(files, tmp_path / "run", words, hub_model_id="me/own")
    assert tiny.weights(model)


# Weights & Biases.


def test_wandb_gets_what_metrics_jsonl_gets(files, tmp_path, monkeypatch):
    begun, logged, ended = [], [], []
    run = types.SimpleNamespace(
        log=lambda metrics, step: logged.append({"step": step, **metrics}),
        finish=lambda: ended.append(True),
    )
    module = types.ModuleType("wandb")
    module.init = lambda **options: begun.append(options) or run
    module.__spec__ = importlib.util.spec_from_loader("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    sft.train(config_of(*files, tmp_path / "run", wandb_project="p"))
    (options,) = begun
    assert options["project"] == "p" and options["config"]["model"] == files[0] and ended == [True]
    assert logged == tiny.read_metrics(tmp_path / "run")
