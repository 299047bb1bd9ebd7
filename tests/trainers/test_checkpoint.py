"""What a run leaves in its folder, and what it makes of it when it comes back: other options, damage, other runs."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
import torch
import yaml

from fused_rl.trainers import cli, grpo, sft
from fused_rl.trainers.base import ranks, written
from fused_rl.trainers.base.files import whole_folder
from fused_rl.trainers.data import fingerprints, sources
from fused_rl.trainers.models import language_model
from fused_rl.trainers.options.config import ACTIONS, InputError, RunConfig, names_of, parse
from fused_rl.trainers.run import checkpoint, lock, resume
from fused_rl.trainers.run.logger import read_metrics
from tests.distributed import run_distributed
from tests.trainers import tiny


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model folder and a gsm8k-like file."""
    folder = tmp_path_factory.mktemp("files")
    return tiny.model_folder(folder / "model"), tiny.jsonl(folder / "rows.jsonl", tiny.sums(20))


def run_config(files, output_dir, **options) -> sft.SFTConfig:
    model, dataset = files
    defaults = {"completion_column": "answer", "eval_size": 4, "steps": 4, "batch_size": 8, "lr": 1e-3}
    defaults |= {"save_every": 1, "keep_checkpoints": 9, "zero_stage": 0}
    return sft.SFTConfig(model=model, dataset=dataset, output_dir=str(output_dir), **tiny.settled(defaults | options))


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """A run of four steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")  # as conftest.py does for a test
        sft.train(run_config(files, folder))
    return folder


@pytest.fixture
def run(whole, tmp_path):
    """A copy of it, for a test to change."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def refused(config, message: str) -> str:
    """Training is refused in one line that matches; returns it."""
    with pytest.raises(InputError, match=message) as error:
        sft.train(config)
    lock.release()  # as the command does when it ends
    line = str(error.value)
    assert "\n" not in line
    return line


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_equal_runs(a: Path, b: Path):
    a_weights, b_weights = tiny.weights(a / "model"), tiny.weights(b / "model")
    assert all(torch.equal(a_weights[name], b_weights[name]) for name in a_weights | b_weights)
    assert tiny.untimed(tiny.read_metrics(a)) == tiny.untimed(tiny.read_metrics(b))


# A run knows its config.


def trainers() -> list[type[RunConfig]]:
    for module in cli.COMMANDS.values():
        importlib.import_module(module)
    found, classes = [], RunConfig.__subclasses__()
    while classes:
        config_class = classes.pop()
        classes += config_class.__subclasses__()
        found += [config_class] if "command" in vars(config_class) else []
    return found


def test_what_may_change_on_resume_is_an_option_of_some_trainer():
    options = {name for config_class in trainers() for name in names_of(config_class)} - set(ACTIONS)
    assert {config_class.command for config_class in trainers()} >= {"sft", "reward", "grpo", "ppo"}
    assert options > resume.MAY_CHANGE


def test_the_config_of_a_run_and_of_its_checkpoints_is_complete_and_reads_back(files, whole):
    config = run_config(files, whole)
    for path in (whole / "config.yaml", whole / "checkpoints" / "step-2" / "config.yaml"):
        assert yaml.safe_load(path.read_text()).keys() == set(names_of(sft.SFTConfig)) - set(ACTIONS)
        assert parse(sft.SFTConfig, ["--config", str(path)], "fused-rl sft") == config


# Resuming with other options.


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 2}, ["seed 1 -> 2"]),
        ({"batch_size": 4, "dtype": "float32", "lr": 1.0}, ["batch_size 8 -> 4", "dtype auto -> float32"]),
        ({"zero_stage": 2}, ["zero_stage 0 -> 2"]),
        ({"model": "other/model", "dataset": "other.jsonl"}, ["model .* -> other/model", "dataset .* -> other.jsonl"]),
    ],
)
def test_what_must_not_change_is_named_with_both_values_and_a_remedy(files, run, options, named):
    before = contents(run)
    changed = run_config(files, run, resume=True, steps=6)
    for name, value in options.items():
        setattr(changed, name, value)
    line = refused(changed, "was made with other options")
    for words in named:
        assert len(line.split("options: ")[1].split(";")[0].split(", ")) == len(named)
        refused(changed, words)
    assert "--config" in line and "--overwrite" in line and "lr" not in line.split(";")[0]
    assert contents(run) == before


def test_another_trainer_is_refused_in_the_folder(files, run):
    model, dataset = files
    with pytest.raises(InputError, match="command sft -> grpo"):
        grpo.train(grpo.GRPOConfig(model=model, dataset=dataset, output_dir=str(run), resume=True))


def test_the_number_of_processes_is_named(files, run, monkeypatch):
    monkeypatch.setattr(checkpoint, "world_size", lambda: 2)
    monkeypatch.setattr(checkpoint.ranks, "gather", lambda part: [part])
    with pytest.raises(InputError, match="processes 1 -> 2"):
        checkpoint.open_run(run_config(files, run, resume=True))


def test_rows_that_changed_are_counted(files, run, tmp_path):
    with Path(files[1]).open() as rows, (tmp_path / "rows.jsonl").open("w") as fewer:
        fewer.writelines(rows.readlines()[:-1])
    config = run_config(files, run, resume=True, steps=6, eval_size=3)
    refused(config, "there are 17 rows to train on, and the checkpoint's run had 16")


def test_steps_below_those_done_are_refused(files, run):
    refused(run_config(files, run, resume=True, steps=3), "steps=3, but .*step-4 has done 4")


def resumed(files, folder: Path, whole: Path, step: int, **options) -> Path:
    """The run, continued from a step with other options."""
    shutil.copytree(whole, folder)
    sft.train(run_config(files, folder, resume_from=f"step-{step}", **options))
    return folder


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_new_options_of_the_optimizer_are_used_from_the_next_step_on(files, tmp_path, capsys, stage):
    options = {"zero_stage": stage, "lr_schedule": "constant", "steps": 3, "max_grad_norm": 0.0}
    sft.train(run_config(files, tmp_path / "base", **options))
    capsys.readouterr()

    def last_step(name: str, **changed) -> tuple[dict, dict, dict]:
        """Weights, second moments and metrics after step 3, of which only that one was made with `changed`."""
        folder = resumed(files, tmp_path / name, tmp_path / "base", 2, **(options | changed))
        return tiny.weights(folder / "model"), second_moments(folder, 3), tiny.read_metrics(folder)[-1]

    before = second_moments(tmp_path / "base", 2)
    same, same_moments, _ = last_step("same")
    assert "resume: lr" not in capsys.readouterr().out
    for name, weight in tiny.weights(tmp_path / "base" / "model").items():
        assert torch.equal(same[name], weight)

    # No step at all: only the new learning rate says so.
    still, _, metrics = last_step("lr", lr=0.0)
    assert "resume: lr 0.001 -> 0.0" in capsys.readouterr().out and metrics["lr"] == 0

    # Decoupled weight decay takes lr x decay of the weights before the step, which are those of lr = 0.
    decayed, _, _ = last_step("decay", weight_decay=0.5)
    for name in same:
        torch.testing.assert_close(same[name] - decayed[name], 1e-3 * 0.5 * still[name], atol=3e-7, rtol=0)

    # v' = beta2 v + (1 - beta2) g²: both runs saw the same gradient.
    _, moments, _ = last_step("beta2", adam_beta2=0.5)
    for name, v in before.items():
        square = (same_moments[name] - 0.999 * v) / (1 - 0.999)
        torch.testing.assert_close((moments[name] - 0.5 * v) / 0.5, square, rtol=1e-2, atol=1e-5)
        assert square.max() > 1e-4


def second_moments(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every `exp_avg_sq` in a checkpoint of DeepSpeed, by where it is."""
    found = {}

    def visit(value, where):
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            visit(inner, f"{where}/{key}")
        if where.endswith("/exp_avg_sq"):
            found[where] = value

    for path in (folder / "checkpoints" / f"step-{step}" / "policy").glob("*states.pt"):
        visit(torch.load(path, weights_only=False), path.name)
    assert found
    return found


def test_a_longer_run_goes_on_with_the_schedule_of_its_new_length(files, whole, tmp_path, capsys):
    longer = resumed(files, tmp_path / "longer", whole, 4, steps=8, lr=2e-3, warmup_steps=1)
    out = capsys.readouterr().out
    assert "resume: steps 4 -> 8" in out and "resume: lr 0.001 -> 0.002" in out and "warmup_steps 0 -> 1" in out
    rates = [entry["lr"] for entry in tiny.read_metrics(longer)[1:]]
    left = [2e-3 * (8 - update) / 7 for update in range(4, 8)]  # linear, to 0 after update 8, from the first one
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, *left])


def test_zero_1_and_2_continue_each_others_runs(files, tmp_path):
    sft.train(run_config(files, tmp_path / "base", zero_stage=1))
    assert_equal_runs(tmp_path / "base", resumed(files, tmp_path / "two", tmp_path / "base", 2, zero_stage=2))


# Damage.


def damage_each(folder: Path):
    """(file, damaged) of every file of a checkpoint: a bit flipped, cut, gone."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        good = path.read_bytes()
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        for bad in (bytes(flipped), good[:-1], None):
            path.unlink() if bad is None else path.write_bytes(bad)
            yield path
            path.write_bytes(good)


def test_damage_in_any_file_of_a_checkpoint_is_named_with_the_newest_whole_one(files, run):
    config = run_config(files, run, resume=True)
    (run / "checkpoints" / "step-3" / "rng-0.pt").write_bytes(b"")
    tried = 0
    for path in damage_each(run / "checkpoints" / "step-4"):
        with pytest.raises(InputError) as error:
            checkpoint.open_run(config)
        line = str(error.value)
        assert str(path) in line and "continue from it with --resume_from step-2" in line and "\n" not in line
        assert path.name == "manifest.json" or ("expected" in line and "bytes with CRC" in line)
        tried += 1
    assert tried == 15
    for step, manifest in ((1, "{}"), (2, "[" * 100_000)):
        (run / "checkpoints" / f"step-{step}" / "manifest.json").write_text(manifest)
    (run / "checkpoints" / "step-4" / "state.json").write_bytes(b"")
    refused(config, "state.json is damaged.*no other checkpoint is whole: start anew with --overwrite")
    refused(run_config(files, run, resume_from="step-7"), "'step-7' is not in .*: there is step-1, .*, step-4")


def test_a_run_goes_on_from_the_checkpoint_that_is_asked_for_and_forgets_what_came_after(files, whole, run, capsys):
    (run / "checkpoints" / "step-4" / "policy" / "mp_rank_00_model_states.pt").write_bytes(b"")
    sft.train(run_config(files, run, resume_from="step-2", keep_checkpoints=9, save_every=0, steps=2))
    assert f"resume: from {run / 'checkpoints' / 'step-2'}, which is whole" in capsys.readouterr().out
    assert [entry["step"] for entry in tiny.read_metrics(run)] == [0, 1, 2]
    assert names(run) == ["latest", "step-1", "step-2"]  # which a schedule wrote
    shutil.rmtree(run)
    shutil.copytree(whole, run)
    sft.train(run_config(files, run, resume_from="step-2"))
    assert_equal_runs(whole, run)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "latest is empty"),
        (None, "latest cannot be read: No such file"),
        (b"\xff\xfe\x00", "latest is not text"),
        ("folder", "latest cannot be read: Is a directory"),
        (b"step-9", "latest names 'step-9', which is not there"),
        (b"../../elsewhere", "latest names '../../elsewhere', which is not there"),
    ],
)
def test_a_latest_that_names_nothing_is_told_with_the_newest_whole_checkpoint(files, run, content, problem):
    latest = run / "checkpoints" / "latest"
    latest.unlink()
    if content == "folder":
        latest.mkdir()
    elif content is not None:
        latest.write_bytes(content)
    refused(run_config(files, run, resume=True), f"{problem}.*--resume_from step-4")
    (run / "checkpoints" / "step-2.tmp").mkdir()
    sft.train(run_config(files, run, resume_from="step-4"))
    assert latest.read_text() == "step-4" and not (run / "checkpoints" / "step-2.tmp").exists()


def test_a_damaged_line_of_the_metrics_is_told_and_no_other_is_lost(files, run, capsys):
    path = run / "metrics.jsonl"
    good = path.read_bytes().splitlines(keepends=True)
    bad = [b"3\n", b'{"step": 1, "lr": \xff}\n', b"\0\0\0\n", b'{"loss": 1}\n', b'{"step": "x"}\n', b"\n"]
    more = b'{"step": true}\n' + b"[" * 100_000 + b"\n"
    path.write_bytes(b"".join(a + b for a, b in zip(good, bad, strict=False)) + more + b'{"step": 99, "lo')
    assert read_metrics(path) == [json.loads(line) for line in good]
    told = capsys.readouterr().out.splitlines()
    assert told == [f"{path}, line {number} is damaged and left out" for number in (2, 4, 6, 8, 10, 11, 12, 13)]
    (run / "samples.jsonl").write_bytes(b'{"step": 1}\nnull\n{"step": 2}\n')
    sft.train(run_config(files, run, resume_from="step-3"))
    assert [entry["step"] for entry in tiny.read_metrics(run)] == [0, 1, 2, 3, 4]
    assert (run / "samples.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


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
    checkpoint.save({"policy": Files(size)}, run_config(files, folder, **options), folder, step, {"position": 0})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


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
        checkpoint.open_run(run_config(files, folder / "checkpoints" / "latest"))
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


# What a run is made of.


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


CHANGED = [
    ("rows.jsonl", reordered, "rows"),
    ("rows.jsonl", lambda rows: rows.replace(b"Add them", b"Sum them", 1), "rows"),
    ("model/model.safetensors", one_weight_moved, "model"),
    ("model/config.json", lambda text: text.replace(b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 2e-06'), "model"),
    ("model/chat_template.jinja", lambda template: template + b"{# another #}", "chat_template"),
]


@pytest.mark.parametrize(("name", "change", "named"), CHANGED)
def test_what_is_no_longer_what_it_was_is_named_on_resume(files, run, name, change, named):
    before, path = contents(run), Path(files[1]).parent / name
    with edited(path, change):
        assert path.read_bytes() != b"" and contents(run) == before
        line = refused(run_config(files, run, resume=True, steps=6), f"not what .*step-4 was made with: {named} ")
        assert line.endswith(f"(--accept_changes {named}), or start anew: --overwrite") and contents(run) == before


def test_accepted_changes_go_on_and_are_what_the_run_is_made_of_from_then_on(files, run, capsys):
    with edited(Path(files[1]), reordered):
        unchanged = run_config(files, run, resume=True, steps=5, accept_changes="rows, model")
        refused(unchanged, "accept_changes: model has not changed since .*step-4")
        sft.train(run_config(files, run, resume=True, steps=5, accept_changes=["rows"]))
        assert "resume: rows (contents) is another than before" in capsys.readouterr().out
        sft.train(run_config(files, run, resume=True, steps=6))
    refused(run_config(files, run, resume=True, steps=6), "step-6 was made with: rows ")


def test_held_out_rows_may_change_and_are_told(files, run, capsys):
    held_out = tiny.jsonl(run / "held_out.jsonl", tiny.sums(3))
    sft.train(run_config(files, run, resume=True, steps=5, eval_dataset=held_out, accept_changes=["rows"]))
    assert "resume: held_out (contents, count 4 -> 3) is another than before" in capsys.readouterr().out


def test_the_source_of_a_scorer_is_part_of_a_run(files, tmp_path, monkeypatch):
    judge = tmp_path / "judge_of_a_run.py"
    judge.write_text("def score(responses, rows):\n    return [float(len(r)) for r in responses]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4, "eval_size": 0, "zero_stage": 0}
    options |= {"model": files[0], "dataset": files[1], "output_dir": str(tmp_path / "run"), "minibatches": 1}
    options |= {"verifiers": "judge_of_a_run:score", "steps": 1, "max_prompt_length": 64}
    grpo.train(grpo.GRPOConfig(**options))
    judge.write_text(judge.read_text().replace("float(len(r))", "-float(len(r))"))
    with pytest.raises(InputError, match="made with: scorers .*judge_of_a_run:score.*--accept_changes scorers"):
        grpo.train(grpo.GRPOConfig(**options | {"resume": True, "steps": 2}))


def test_a_checkpoint_without_fingerprints_goes_on_with_a_line():
    found, where = {"rows": {"count": "3", "contents": "a"}}, Path("run/checkpoints/step-1")
    (line,) = fingerprints.check_resumed(found, None, [], where)
    assert "does not say" in line
    with pytest.raises(InputError, match="does not say"):
        fingerprints.check_resumed(found, None, ["rows"], where)
    assert fingerprints.check_resumed(found, found, [], where) == []


def test_adapters_and_what_they_belong_to_are_summed_apart(files, tmp_path):
    config = run_config(files, tmp_path / "run", lora_rank=2, steps=1)
    on_them = dataclasses.replace(config, model=sft.train(config), lora_rank=0, output_dir=str(tmp_path / "more"))
    alone, both = (fingerprints.of_sources(sources.of_run(of)) for of in (config, on_them))
    assert both["model"] == alone["model"] and alone.keys() == {"model"}
    assert both["adapters"].keys() == {"adapter_config.json", "adapter_model.safetensors"}


# Options of text that name nothing that is read.
NOT_READ = {
    *("output_dir", "resume_from", "accept_changes", "wandb_project", "trackio_project", "hub_model_id"),
    *("revision", "attn_implementation", "lora_targets", "preset", "advantage", "system_prompt", "stop_token"),
    *("dataset_config", "dataset_split", "eval_dataset_config", "eval_split"),
    *("prompt_column", "completion_column", "answer_column", "chosen_column", "rejected_column", "margin_column"),
}


def test_every_option_that_may_name_something_is_read_or_known_not_to_be():
    """One that is read tells so by `reads`: what it names is summed, and no overwriting deletes it."""
    read, named = set(), set()
    for config_class in trainers():
        kinds = typing.get_type_hints(config_class)
        for name in {name for name in names_of(config_class) if str in (kinds[name], *typing.get_args(kinds[name]))}:
            config = config_class(model="m", dataset="d", output_dir="o")
            setattr(config, name, "somewhere:else")
            named.add(name)
            read |= {name} if any(source.name == "somewhere:else" for source in config.reads()) else set()
    assert named - read == NOT_READ
    assert read == {"model", "critic", "dataset", "eval_dataset", "reference_dataset", "verifiers", "surrogate"}


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


def test_overwrite_never_deletes_what_the_run_reads(files, run, monkeypatch):
    shutil.copy(files[1], run / "checkpoints" / "rows.jsonl")
    rows = str(run / "checkpoints" / "rows.jsonl")
    before = contents(run)
    monkeypatch.chdir(run.parent)
    for config in (
        run_config((str(run / "model"), files[1]), run, overwrite=True),
        run_config(("run/model", files[1]), run, overwrite=True),
        run_config((files[0], rows), run, overwrite=True),
        run_config(files, run, overwrite=True, eval_dataset=rows),
    ):
        refused(config, "overwrite would delete .*(model=|dataset=|eval_dataset=).*lies there")
    assert contents(run) == before
    refused(run_config(files, run, overwrite=True, resume=True), "give one of them")
    refused(run_config(files, run, overwrite=True), "no run wrote checkpoints/rows.jsonl")
    assert contents(run) == before
    Path(rows).unlink()
    assert sft.train(run_config(files, run, overwrite=True, steps=1)) == str(run / "model")
    assert names(run) == ["latest", "step-1"]


def test_a_folder_with_anything_that_a_run_would_delete_holds_a_run(files, tmp_path):
    shutil.copytree(files[0], tmp_path / "run" / "model")
    before = contents(tmp_path)
    refused(run_config(files, tmp_path / "run"), r"already holds a run \(model\)")
    assert contents(tmp_path) == before


# The end of a run.


def test_a_run_that_dies_between_its_last_step_and_its_model_finishes_when_resumed(files, whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def dies(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(language_model, "save_lm", dies)
        sft.train(run_config(files, folder, save_every=0))
    assert names(folder) == ["latest", "step-4"]
    sft.train(run_config(files, folder, save_every=0, resume=True))
    assert_equal_runs(whole, folder)
    assert not (folder / "checkpoints").exists()
    refused(run_config(files, folder, resume=True), f"no checkpoint in .*trained model is {folder / 'model'}")


def test_a_signal_while_the_model_is_saved_does_not_keep_it_from_being_saved(files, whole, tmp_path, monkeypatch):
    save_lm = language_model.save_lm

    def told_to_stop(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        save_lm(*args, **options)

    monkeypatch.setattr(language_model, "save_lm", told_to_stop)
    sft.train(run_config(files, tmp_path / "run", save_every=0))
    assert_equal_runs(whole, tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# Beside a run that lives.


@pytest.fixture(scope="module")
def living(files, tmp_path_factory):
    """(process, folder, command) of a run in another process that has made a few steps, and makes many more."""
    folder = tmp_path_factory.mktemp("living") / "run"
    command = [sys.executable, "-m", "fused_rl.trainers.sft", "--model", files[0], "--dataset", files[1]]
    command += ["--completion_column", "answer", "--eval_size", "0", "--steps", "100000", "--batch_size", "2"]
    command += ["--output_dir", str(folder), "--save_every", "2", "--zero_stage", "0"]
    told = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")  # a run here may have set the last
    environment = {name: value for name, value in os.environ.items() if name not in told}
    environment |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    while process.poll() is None and not (folder / "checkpoints" / "latest").exists():
        time.sleep(0.05)
    yield process, folder
    process.kill()
    process.wait()


def listeners(pid: int) -> list[str]:
    """The addresses, as /proc/net writes them, on which a process waits for connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                found.append(local.split(":")[0])
    return found


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def test_a_run_of_one_process_can_be_reached_by_nobody(living):
    process, _ = living
    assert process.poll() is None
    assert set(listeners(process.pid)) <= set(LOOPBACK)


def test_a_second_run_in_the_folder_is_told_who_is_there_and_a_killed_one_leaves_no_lock(files, living):
    process, folder = living
    for options in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(InputError, match=f"is in use by process {process.pid} on "):
            checkpoint.open_run(run_config(files, folder, **options))
    process.kill()
    process.wait()
    with pytest.raises(InputError, match="already holds a run"):
        checkpoint.open_run(run_config(files, folder))
    lock.release()
    assert not (folder / ".lock").exists()


def test_a_run_that_never_began_leaves_no_folder(tmp_path):
    (tmp_path / "new").mkdir()
    lock.take(tmp_path / "new")
    lock.release()
    assert not (tmp_path / "new").exists()


def test_a_run_that_was_refused_can_be_tried_again_in_the_same_process(files, tmp_path):
    for _ in range(2):
        with pytest.raises(InputError, match="nobody"):
            sft.train(run_config((str(tmp_path / "nobody"), files[1]), tmp_path / "new"))


def test_the_docs_name_every_option_that_may_change():
    told = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert [name for name in sorted(resume.MAY_CHANGE) if f"`{name}`" not in told] == []


def test_a_model_on_the_hub_is_known_by_its_commit(files, tmp_path, monkeypatch):
    """Asked for when all else has been read: a name that is on no Hub has been told by then."""
    told, commits = [], iter(["a" * 40, "b" * 40])
    monkeypatch.setattr(sources, "find_adapters", lambda name, revision: told.append((name, revision)))

    def cached_file(name, file, revision):
        return f"/cache/models--{name.replace('/', '--')}/snapshots/{next(commits)}/{file}"

    monkeypatch.setattr("transformers.utils.hub.cached_file", cached_file)
    config = run_config(("org/name", files[1]), tmp_path / "run", revision="main")
    assert sources.of_run(config, hub=False) == sources.of_run(config)[1:] and told == [("org/name", "main")]
    found = [fingerprints.of_sources(sources.of_run(config)) for _ in range(2)]
    assert found == [{"model": {"org/name": "a" * 40}}, {"model": {"org/name": "b" * 40}}]
    assert fingerprints.differing(*found) == {"model": "org/name"}


def test_a_run_in_the_folder_of_its_model_starts_anew_and_leaves_the_model(files, run):
    model, dataset = files
    shutil.copytree(model, run, dirs_exist_ok=True)
    for _ in range(2):
        sft.train(run_config((str(run), dataset), run, steps=1, overwrite=True))
    assert (run / "model.safetensors").read_bytes() == (Path(model) / "model.safetensors").read_bytes()
    assert [entry["step"] for entry in tiny.read_metrics(run)] == [0, 1]


def test_a_run_starts_anew_from_its_own_config_and_from_no_other_in_its_folder(files, run):
    own, options = run / "config.yaml", ["--overwrite", "--steps", "1"]
    for _ in range(2):
        sft.main(["--config", str(own), "--output_dir", str(run), *options])
    assert [entry["step"] for entry in tiny.read_metrics(run)] == [0, 1]
    kept = run / "checkpoints" / "step-1" / "config.yaml"
    with pytest.raises(SystemExit, match="overwrite would delete .*--config .*step-1"):
        sft.main(["--config", str(kept), "--output_dir", str(run), *options])


def test_rows_and_models_that_lie_elsewhere_now_are_the_same_and_others_are_not(files, run, tmp_path, capsys):
    model, dataset = files
    moved = shutil.copytree(model, tmp_path / "moved"), shutil.copy(dataset, tmp_path / "moved.jsonl")
    sft.train(run_config(map(str, moved), run, resume=True, steps=5))
    told = capsys.readouterr().out
    assert f"dataset {dataset} -> {moved[1]}" in told and f"model {model} -> {moved[0]}" in told
    tiny.jsonl(moved[1], tiny.sums(21)[1:])
    refused(run_config(map(str, moved), run, resume=True, steps=6), "--accept_changes rows")
    refused(run_config((model, "other.jsonl"), run, resume=True, steps=6), "dataset .* -> other.jsonl")


def test_a_dry_run_is_the_commands_and_no_training(files, tmp_path):
    refused(run_config(files, tmp_path / "run", dry_run=True), "dry_run.* fused-rl sft … --dry_run")
    assert not (tmp_path / "run").exists()
