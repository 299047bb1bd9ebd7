"""The folder of a run: what a run refuses, moves, writes and deletes there, and how it continues from a checkpoint."""

import contextlib
import errno
import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.files import io_errors_in_a_line, unfinished
from fused_rl.trainers.base.options import changeable
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.run import store
from fused_rl.trainers.run.logger import read_metrics
from fused_rl.trainers.run.parse import parse
from tests.marks import slow
from tests.trainers import tiny
from tests.trainers.runs import (
    assert_equal_runs,
    contents,
    grpo_config,
    names,
    refused,
    resumed,
    run_config,
    trainers,
)

# The folder: nothing of the user's is deleted or replaced.


def test_what_a_run_reads_is_not_moved_away(files, tmp_path, monkeypatch):
    """Its model, also where that is the folder itself, rows, a hook's module, a scorer's
    model; neither by --overwrite nor as what a run without a step has left.
    """
    folder = tmp_path / "run"
    shutil.copytree(files[0], folder)
    shutil.copytree(files[0], folder / "model")
    shutil.copy(files[1], folder / "rows.jsonl")
    (folder / "of_a_run.py").write_text("def hook(step): ...")
    monkeypatch.syspath_prepend(str(folder))
    before, read = contents(folder), "is read, and the run would move it away"
    for model in (folder, folder / "model"):
        refused(run_config((str(model), files[1]), folder, overwrite=True), f"/run.* {read}")
    rows = run_config((files[0], f"{folder}/*.jsonl"), folder, overwrite=True, dry_run=True)
    refused(rows, f"rows.jsonl {read}")
    reward = tiny.reward_folder(folder / "rm", files[0])
    scored = {"verifiers": f"reward_model:{reward}", "overwrite": True, "dry_run": True}
    with pytest.raises(InputError, match=f"/rm {read}"):
        grpo.train(grpo_config(files, folder, **scored))
    shutil.rmtree(reward)
    hooked = run_config(files, folder, overwrite=True, on_step="of_a_run:hook")
    refused(hooked, f"of_a_run.py {read}")
    monkeypatch.delitem(sys.modules, "of_a_run")
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    assert contents(folder) == before

    for path in [*folder.iterdir()]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "config.yaml").write_text("# fused-rl sft")
    shutil.copy(files[1], folder / "samples.jsonl")
    refused(run_config((files[0], f"{folder}/samples.jsonl"), folder), f"samples.jsonl {read}")


def test_overwrite_moves_everything_away_once_all_inputs_are_read(files, run, tmp_path):
    (run / "notes.txt").write_text("mine")
    before = contents(run)
    refused(
        run_config((files[0], str(tmp_path / "none.jsonl")), run, overwrite=True),
        "none.jsonl does not exist",
    )
    assert contents(run) == before
    for number in (1, 2):
        kept = {
            name: content
            for name, content in contents(run).items()
            if not name.startswith("earlier-")
        }
        sft.train(run_config(files, run, overwrite=True, steps=1))
        assert contents(run / f"earlier-{number}") == kept
    assert [entry["step"] for entry in read_metrics(run / "metrics.jsonl")] == [0, 1]


def test_a_run_that_took_no_step_stands_in_nobodys_way(files, run, tmp_path):
    refused(run_config(files, run), "is not empty: continue its run with --resume, move its")
    for name in ("model", "checkpoints"):
        shutil.rmtree(run / name)
    refused(run_config(files, run), "is not empty: move its content away")
    (run / "curves.png").unlink()
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/loss": 3.0}\n')
    (run / "notes.txt").write_text("mine")
    refused(run_config(files, run), "is not empty: move its content away")
    (run / "notes.txt").unlink()
    sft.train(run_config(files, run, steps=1))
    assert (run / "earlier-1" / "config.yaml").exists()


def test_a_checkpoint_that_is_a_link_is_deleted_as_a_link(files, whole, run, tmp_path):
    checkpoints = run / "checkpoints"
    for step in (1, 4):
        (checkpoints / f"step-{step}").rename(tmp_path / f"on-another-disk-{step}")
    (checkpoints / "step-1").symlink_to(tmp_path / "on-another-disk-1")
    # What a run that was killed while it deleted such a link has left.
    (checkpoints / ".unfinished-step-9").symlink_to(tmp_path / "on-another-disk-4")
    sft.train(run_config(files, run, resume=True, keep_checkpoints=1))
    assert names(run) == ["step-4"] and not (checkpoints / "step-4").is_symlink()
    for step in (1, 4):
        assert (tmp_path / f"on-another-disk-{step}" / "manifest.json").exists()


def test_a_run_stays_in_its_folder_where_own_code_changes_the_current_one(
    files, tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    config = run_config(files, "run", steps=2, eval_every=1)
    sft.train(config, on_step=lambda step: os.chdir(tmp_path / "elsewhere"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_disk_that_is_full_at_the_start_is_one_line(files, tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(store, "write_atomically", full)
    refused(run_config(files, tmp_path / "run"), "the run could not be written to .*No space left")


# Writing checkpoints.


class Files:
    """Stands for an engine: its checkpoint is one file of each rank."""

    def __init__(self, size: int = 10):
        self.size = size

    def save_checkpoint(self, folder, tag, save_latest):
        (Path(folder) / tag).mkdir(exist_ok=True)
        torch.save(torch.zeros(self.size), Path(folder) / tag / f"weights-{ranks.rank()}.pt")


def save(files, folder: Path, step: int, size: int = 10, **options):
    output = store.RunFolder(run_config(files, folder, **options))
    output.save({"policy": Files(size)}, step, {"position": 0}, {})
    return output


def test_a_kill_between_the_new_name_and_the_deletion_of_the_old_leaves_both_intact(
    files, run, monkeypatch
):
    """A deleted checkpoint loses its name first; the next run deletes what is left of it."""

    def killed(path):
        os.rename(path, unfinished(path))
        (unfinished(path) / "state.json").unlink()
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(store, "delete", killed)
        save(files, run, 5, keep_checkpoints=2)
    assert names(run) == [".unfinished-step-1", *(f"step-{step}" for step in range(2, 6))]
    shutil.rmtree(run / "checkpoints" / "step-5")
    sft.train(run_config(files, run, resume=True, steps=5, keep_checkpoints=2))
    assert names(run) == ["step-4", "step-5"]


def test_files_are_on_the_disk_before_they_are_named(files, tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename

    def noted(kind, call, path, *rest):
        events.append((kind, Path(path).name))
        return call(*rest)

    monkeypatch.setattr(
        os, "fsync", lambda fd: noted("sync", fsync, os.readlink(f"/proc/self/fd/{fd}"), fd)
    )
    monkeypatch.setattr(os, "rename", lambda a, b: noted("name", rename, b, a, b))
    save(files, tmp_path, 1)
    named = events.index(("name", "step-1"))
    for name in (
        "weights-0.pt",
        "rank-0.pt",
        "state.json",
        "manifest.json",
        "policy",
        ".unfinished-step-1",
    ):
        assert ("sync", name) in events[:named], name
    assert events[named + 1 :] == [("sync", "checkpoints")]


@contextlib.contextmanager
def no_file_above(size: int):
    """As on a full disk, every write beyond `size` bytes of a file fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_error_of_a_save_has_its_own_cause(tmp_path):
    """Those of gloo and NCCL are of another process; no memory, or a slip of ours, is not of the disk."""
    of_gloo = RuntimeError("[/third_party/gloo/pair.cc:553] Connection closed")
    of_nccl = torch.distributed.DistBackendError("NCCL error")
    for error, raised, line in (
        (of_gloo, InputError, "another process of the run"),
        (of_nccl, InputError, "another process of the run"),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "out of memory"),
        (RuntimeError("sizes differ"), RuntimeError, "^sizes differ"),
        (OSError(errno.ENOSPC, "No space left"), InputError, "model could not .*: No space left"),
    ):
        with pytest.raises(raised, match=line), io_errors_in_a_line("model", tmp_path):
            raise error
    with (
        no_file_above(1000),
        pytest.raises(InputError, match="model could not .*is the disk full"),
        io_errors_in_a_line("model", tmp_path),
    ):
        torch.save(torch.zeros(10_000), tmp_path / "weights.pt")


# Resuming with other options.


def test_the_config_of_a_run_is_complete_and_reads_back(files, whole):
    path, config = whole / "config.yaml", run_config(files, whole)
    config.resolve()  # as a run does when it begins, before it writes the file
    assert parse(sft.SFTConfig, ["--config", str(path)]) == config
    assert {"adam_eps", "seed"} < yaml.safe_load(path.read_text()).keys()  # which were not given


CHANGED = [
    ({"seed": 2}, "options: seed 1 -> 2;"),
    ({"weight_decay": 0.1}, "options: weight_decay 0.0 -> 0.1;"),
    ({"eval_size": 2}, "not those of .*: rows; restore them"),
    (
        {"batch_size": 4, "dtype": "float32", "lr": 1.0},
        "options: batch_size 8 -> 4, dtype auto -> float32;",
    ),
    ({"zero_stage": 2}, "options: zero_stage 0 -> 2;"),
    ({"steps": 3}, "steps=3, but .*step-4 has done 4"),
    ({"resume_from": "step-7"}, "'step-7' is not in .*: there is step-1, .*, step-4"),
    ({"resume_from": "../../model"}, "is not in .*: there is step-1"),
]


@pytest.mark.parametrize(("options", "line"), CHANGED)
def test_what_must_not_change_is_named_with_both_values(files, run, options, line, capsys):
    before = contents(run)
    refused(run_config(files, run, **{"resume": True, "steps": 6, **options}), line)
    assert contents(run) == before
    # Nothing was printed as if it had been taken.
    assert not [name for name in options if f"resume: {name}" in capsys.readouterr().out]


# Damage.


def test_damage_in_any_file_of_a_checkpoint_is_named_with_the_other_ones(files, run):
    config = run_config(files, run, resume=True)
    tried = 0
    for path in [path for path in (run / "checkpoints" / "step-4").rglob("*") if path.is_file()]:
        good = path.read_bytes()
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        for bad in (bytes(flipped), good[:-1], good + b"\0", b"", None):
            path.unlink() if bad is None else path.write_bytes(bad)
            # What it names may be another file.
            named = path.name if path.name != "manifest.json" else ""
            refused(config, rf"step-4 is damaged, .*{named}.* an earlier one .--resume_from")
            path.write_bytes(good)
            tried += 1
    assert tried == 20
    for manifest in ('{"policy": 1}', "{}", "[]", "1"):
        (run / "checkpoints" / "step-4" / "manifest.json").write_text(manifest)
        refused(config, "step-4 is damaged")


def test_ranks_share_the_files_of_a_checkpoint_to_verify(files, run, monkeypatch):
    folder = store.RunFolder(run_config(files, run, resume=True))
    verified = []
    monkeypatch.setattr(store, "processes", lambda: 2)
    monkeypatch.setattr(store, "fingerprint", lambda path: verified.append(path) or ())
    for rank in range(2):
        monkeypatch.setattr(store, "process_index", lambda rank=rank: rank)
        with pytest.raises(InputError, match="is damaged"):
            folder.open()
    manifest = json.loads((folder.chosen / "manifest.json").read_text())
    assert sorted(verified) == sorted(folder.chosen / name for name in manifest)


def test_a_damaged_line_of_the_metrics_is_reported_and_no_other_is_lost(files, run, capsys):
    path = run / "metrics.jsonl"
    good = path.read_bytes().splitlines(keepends=True)
    bad = [b'{"step": 1, "lr": \xff}\n', b"\0\0\0\n", b'{"step": 99, "lo']
    path.write_bytes(good[0] + bad[0] + good[1] + bad[1] + b"".join(good[2:]) + bad[2])
    assert read_metrics(path) == [json.loads(line) for line in good]
    messages = capsys.readouterr().out.splitlines()
    assert messages == [
        f"{path}, line {number} is damaged and left out" for number in (2, 4, len(good) + 3)
    ]
    sft.train(run_config(files, run, resume_from="step-3"))
    assert [entry["step"] for entry in tiny.read_metrics(run)] == [0, 1, 2, 3, 4]


def test_a_resumed_run_moves_later_checkpoints_and_its_model_away(files, whole, run):
    """Whoever put a file into them, finds it there; a damaged later checkpoint is in nobody's way."""
    (run / "critic").mkdir()  # as PPO saves one
    for model in ("model", "critic"):
        (run / model / "notes.txt").write_text("mine")
    (run / "checkpoints" / "step-4" / "state.json").write_bytes(b"")
    sft.train(run_config(files, run, resume_from="step-2"))
    assert_equal_runs(whole, run)
    for model in ("model", "critic"):
        assert (run / "earlier-1" / model / "notes.txt").read_text() == "mine"
    assert names(run / "earlier-1") == ["step-3", "step-4"]


def test_what_may_change_on_resume_is_documented():
    names = set().union(*map(changeable, trainers()))
    assert names > {"lr", "output_dir"} and not names & {"seed", "batch_size", "zero_stage"}
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("stage", [0, slow(2), slow(3)])
def test_new_options_are_used_from_the_next_step_on(files, tmp_path, stage):
    base = tmp_path / "base"
    options = {"zero_stage": stage, "lr_schedule": "constant", "steps": 3, "weight_decay": 0.1}
    sft.train(run_config(files, base, **options))

    def last(name: str, value: float):
        folder = resumed(files, tmp_path / name, base, 2, **(options | {name: value}))
        return tiny.weights(folder / "model")

    still, decayed, other = last("lr", 0.0), last("weight_decay", 0.5), last("adam_beta2", 0.5)
    made = tiny.weights(base / "model")
    assert any((made[name] != other[name]).any() for name in made)
    # Decoupled weight decay takes lr x decay of the weights before the step, which are those of lr = 0.
    for name, weight in made.items():
        decay = 0.4 if weight.dim() > 1 else 0.0
        lost = 1e-3 * decay * still[name]
        torch.testing.assert_close(weight - decayed[name], lost, atol=3e-7, rtol=0)


def test_a_longer_run_continues_with_the_schedule_of_its_new_length(files, whole, tmp_path):
    longer = resumed(files, tmp_path / "longer", whole, 4, steps=8, lr=2e-3, warmup_steps=1)
    rates = [entry["lr"] for entry in tiny.read_metrics(longer)[1:]]
    # Linear, to 0 after update 8, from the first one.
    left = [2e-3 * (8 - update) / 7 for update in range(4, 8)]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, *left])
