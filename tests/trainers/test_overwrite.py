"""What a run may delete: what a run wrote, and nothing that this one reads or that somebody else put there."""

import importlib.util
import json
import shutil

from fused_rl.trainers import sft
from fused_rl.trainers.base import written
from tests.trainers.runs import contents, refused, run_config

# Overwriting.


def test_a_run_lists_every_file_that_it_wrote(files, whole, run):
    written.check(whole, written.there(whole), "")
    (run / "notes.txt").write_text("mine")
    sft.train(run_config(files, run, overwrite=True, steps=1, save_every=0))
    listed = json.loads((run / written.LIST).read_text())["written"]
    assert {name for name in contents(run) if name not in listed} - {"notes.txt", written.LIST} == {
        name for name in contents(run) if name.startswith("tensorboard/")
    }
    assert (run / "notes.txt").read_text() == "mine" and not (run / "checkpoints").exists()


def test_a_run_that_goes_on_replaces_no_model_of_others(files, run):
    (run / "model" / "notes.txt").write_text("mine")
    refused(run_config(files, run, resume=True, steps=5), "no run wrote model/notes.txt")
    (run / written.LIST).unlink()  # as in a run of an earlier version
    sft.train(run_config(files, run, resume_from="step-3"))
    written.check(run, written.there(run), "")


def test_overwrite_deletes_nothing_before_all_input_is_read(files, run, monkeypatch):
    before = contents(run)
    for dataset, options in (
        ("typo.jsonl", {}),
        (files[1], {"completion_column": "typo"}),
        (files[1], {"eval_size": 99}),
    ):
        refused(run_config((files[0], dataset), run, overwrite=True, **options), "typo|eval_size=99")
        assert contents(run) == before
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(run_config(files, run, overwrite=True, wandb_project="p"), "wandb is not installed")
    assert contents(run) == before


def test_a_folder_with_anything_that_a_run_would_delete_holds_a_run(files, tmp_path):
    shutil.copytree(files[0], tmp_path / "run" / "model")
    before = contents(tmp_path)
    refused(run_config(files, tmp_path / "run"), r"already holds a run \(model\)")
    assert contents(tmp_path) == before


def test_only_ways_on_that_there_are_are_named(files, run, tmp_path):
    refused(run_config(files, run), "already holds a run .*; continue it with --resume or replace it: --overwrite$")
    shutil.rmtree(run / "checkpoints")  # as of a run that ended in its first step
    refused(run_config(files, run), "; it left no checkpoint to resume; replace it with --overwrite, or choose another")
    refused(run_config(files, run, resume=True), "there is no checkpoint in .*; replace the run with --overwrite$")
    refused(run_config(files, tmp_path / "new", resume=True), "no checkpoint in .*new/checkpoints; start without --res")
    sft.train(run_config(files, run, overwrite=True, steps=1))


def test_a_dry_run_is_the_commands_and_no_training(files, tmp_path):
    refused(run_config(files, tmp_path / "run", dry_run=True), "dry_run.* fused-rl sft … --dry_run")
    assert not (tmp_path / "run").exists()
