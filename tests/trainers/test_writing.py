"""Checkpoints as they are written: pruned, on the disk before they have a name, on a full disk, by two ranks."""

import contextlib
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from fused_rl.trainers import sft
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.files import whole_folder
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.run import checkpoint
from fused_rl.trainers.run import folder as run_folder
from tests.distributed import run_distributed
from tests.trainers.runs import assert_equal_runs, contents, names, refused, run_config

# Writing checkpoints.


class Files:
    """Stands for an engine: its checkpoint is one file of each rank."""

    def __init__(self, size: int = 10):
        self.size = size

    def save_checkpoint(self, folder, tag, save_latest):
        (Path(folder) / tag).mkdir(exist_ok=True)
        torch.save(torch.zeros(self.size), Path(folder) / tag / f"weights-{ranks.rank()}.pt")


def save(files, folder: Path, step: int, size: int = 10, **options):
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    checkpoints = checkpoint.Checkpoints(run_config(files, folder, **options))
    checkpoints.save({"policy": Files(size)}, step, {"position": 0})


def test_pruning_leaves_what_was_just_written_and_takes_what_lies_beyond_it(files, tmp_path):
    for step in (2, 4, 6):
        save(files, tmp_path, step)
    (tmp_path / "checkpoints" / "step-1.tmp" / "policy").mkdir(parents=True)  # half deleted, or half written
    save(files, tmp_path, 3, keep_checkpoints=1)  # a run that continued from step 2
    assert names(tmp_path) == ["latest", "step-3"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-3"
    for step in (4, 5, 6):
        save(files, tmp_path, step, keep_checkpoints=2)
    assert names(tmp_path) == ["latest", "step-5", "step-6"]


def test_a_checkpoint_that_is_half_deleted_has_lost_its_name(files, tmp_path, monkeypatch):
    save(files, tmp_path, 1)

    def killed(path, *_, **__):
        (Path(path) / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        save(files, tmp_path, 2, keep_checkpoints=1)
    assert names(tmp_path) == ["latest", "step-1.tmp", "step-2"]
    save(files, tmp_path, 3)
    assert names(tmp_path) == ["latest", "step-2", "step-3"]


def test_files_are_on_the_disk_before_they_are_named(files, tmp_path, monkeypatch):
    events, fsync, rename, replace = [], os.fsync, os.rename, os.replace

    def noted(kind, call, path, *rest):
        events.append((kind, Path(path).name))
        return call(*rest)

    monkeypatch.setattr(os, "fsync", lambda fd: noted("sync", fsync, os.readlink(f"/proc/self/fd/{fd}"), fd))
    monkeypatch.setattr(os, "rename", lambda a, b: noted("name", rename, b, a, b))
    monkeypatch.setattr(os, "replace", lambda a, b: noted("name", replace, b, a, b))
    save(files, tmp_path, 1)
    named = events.index(("name", "step-1"))
    for name in ("weights-0.pt", "rng-0.pt", "state.json", "config.yaml", "manifest.json.tmp", "policy", "step-1.tmp"):
        assert ("sync", name) in events[:named], name
    assert events[named + 1] == ("sync", "checkpoints")
    assert events.index(("name", "latest")) > named
    with whole_folder(tmp_path / "model") as unfinished:
        (unfinished / "weights").write_text("w")
    expected = [("sync", "weights"), ("sync", "model.tmp"), ("name", "model"), ("sync", tmp_path.name)]
    assert events[-4:] == expected


@contextlib.contextmanager
def no_file_above(size: int):
    """As on a full disk, every write beyond `size` bytes of a file fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_is_one_line_and_leaves_nothing_half_written(files, tmp_path):
    save(files, tmp_path, 1)
    before = contents(tmp_path)
    message = r"checkpoint step-2 could not be written to .*checkpoints: .*MB free there"
    with no_file_above(100_000), pytest.raises(InputError, match=message) as error:
        save(files, tmp_path, 2, size=100_000)
    assert "\n" not in str(error.value) and contents(tmp_path) == before
    assert names(tmp_path) == ["latest", "step-1"]


def test_a_run_on_a_full_disk_stops_with_one_line_and_goes_on_when_there_is_room(files, whole, run):
    with no_file_above(40_000):
        refused(run_config(files, run, resume_from="step-2"), "checkpoint step-3 could not be written")
    assert names(run) == ["latest", "step-1", "step-2"]
    sft.train(run_config(files, run, resume=True))
    assert_equal_runs(whole, run)
    shutil.rmtree(run / "model")
    with no_file_above(20_000):
        refused(run_config(files, run, resume=True), "(curves.png|model) could not be written")
    assert not (run / "model").exists() and not list(run.rglob("*.tmp*"))
    sft.train(run_config(files, run, resume=True))
    assert_equal_runs(whole, run)


def test_a_folder_that_cannot_be_used_is_one_line(files, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")
    refused(run_config(files, tmp_path / "file"), "output_dir=.*file cannot be used: File exists")
    refused(run_config(files, tmp_path / "file" / "run"), "output_dir=.* cannot be used: Not a directory")
    assert (tmp_path / "file").read_text() == "kept"

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    refused(run_config(files, tmp_path / "new"), "cannot be used: Read-only file system")


def on_two_ranks(rank, world, files, folder) -> list[str]:
    """What each rank is told of a checkpoint whose files are damaged in turn, and of a folder that cannot be used."""
    folder, told = Path(folder), []
    save(files, folder, 4)
    for name in ("policy/weights-0.pt", "policy/weights-1.pt", "rng-0.pt", "rng-1.pt"):
        path = folder / "checkpoints" / "step-4" / name
        good = path.read_bytes()
        ranks.barrier()
        if rank == 0:
            path.write_bytes(good[:-1])
        ranks.barrier()
        told.append(checkpoint.damage(folder / "checkpoints" / "step-4"))
        ranks.barrier()
        if rank == 0:
            path.write_bytes(good)
    ranks.barrier()
    told.append(checkpoint.damage(folder / "checkpoints" / "step-4"))
    try:
        run_folder.Folder(run_config(files, folder / "checkpoints" / "latest")).open()
    except InputError as error:
        told.append(str(error))
    return told


def test_all_ranks_write_one_manifest_and_are_told_the_same(files, tmp_path):
    first, second = run_distributed(on_two_ranks, 2, files, str(tmp_path))
    assert first == second
    *damaged, whole, unusable = first
    named = ["weights-0.pt is damaged", "weights-1.pt is damaged", "rng-0.pt is damaged", "rng-1.pt is damaged"]
    assert all(words in told for words, told in zip(named, damaged, strict=True))
    assert whole is None and "cannot be used: File exists" in unusable
