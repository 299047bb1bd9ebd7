"""What a run makes of its folder when it comes back: other options, damage."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.options import resume
from fused_rl.trainers.options.config import ACTIONS, InputError, names_of
from fused_rl.trainers.options.parse import parse
from fused_rl.trainers.run import checkpoint
from fused_rl.trainers.run import folder as run_folder
from fused_rl.trainers.run.logger import read_metrics
from tests.marks import slow
from tests.trainers import tiny
from tests.trainers.runs import assert_equal_runs, contents, names, refused, resumed, run_config, trainers

# A run knows its config.


def test_what_may_change_on_resume_is_an_option_of_some_trainer():
    options = set().union(*map(names_of, trainers())) - set(ACTIONS)
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
        run_folder.Folder(run_config(files, run, resume=True)).open()


def test_steps_below_those_done_are_refused(files, run):
    refused(run_config(files, run, resume=True, steps=3), "steps=3, but .*step-4 has done 4")


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), slow(3)])
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
            run_folder.Folder(config).open()
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
        (b"../../elsewhere", "latest names '../../elsewhere', which is not there"),
        slow(b"\xff\xfe\x00", "latest is not text"),
        slow("folder", "latest cannot be read: Is a directory"),
        slow(b"step-9", "latest names 'step-9', which is not there"),
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


def test_the_docs_name_every_option_that_may_change():
    told = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert [name for name in sorted(resume.MAY_CHANGE) if f"`{name}`" not in told] == []
