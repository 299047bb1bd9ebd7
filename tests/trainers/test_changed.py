"""A run that is resumed on other rows, another model, template or scorer than it was made with, is told."""

import contextlib
import dataclasses
import shutil
import typing
from pathlib import Path

import pytest

from fused_rl.trainers import grpo, sft
from fused_rl.trainers.data import fingerprints, sources
from fused_rl.trainers.options.config import InputError, names_of
from tests.trainers import tiny
from tests.trainers.runs import contents, refused, run_config, trainers

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
    *("dataset_config", "dataset_split", "eval_dataset_config", "eval_split", "server"),
    *("prompt_column", "completion_column", "answer_column", "chosen_column", "rejected_column", "margin_column"),
}


def test_every_option_that_may_name_something_is_read_or_known_not_to_be():
    """One that is read tells so by `reads`: what it names is summed, and no overwriting deletes it."""
    read, named = set(), set()
    for config_class in trainers():
        kinds = typing.get_type_hints(config_class)
        for name in {name for name in names_of(config_class) if str in (kinds[name], *typing.get_args(kinds[name]))}:
            config = config_class(model="m", dataset="d", output_dir="o")
            listed = name == "verifiers"
            setattr(config, name, ["somewhere:else"] if listed else "somewhere:else")
            named.add(name)
            read |= {name} if any(source.name == "somewhere:else" for source in config.reads()) else set()
    assert named - read == NOT_READ
    functions = {"verifiers", "surrogate", "sampler"}
    assert read == functions | {"model", "critic", "dataset", "eval_dataset", "reference_dataset"}


def test_a_model_on_the_hub_is_known_by_its_commit(files, tmp_path, monkeypatch):
    """Asked for when all else has been read: a name that is on no Hub has been told by then."""
    told, commits = [], iter(["a" * 40, "b" * 40])
    monkeypatch.setattr(sources, "find_adapters", lambda name, revision: told.append((name, revision)))

    def cached_file(name, file, revision):
        return f"/cache/models--{name.replace('/', '--')}/snapshots/{next(commits)}/{file}"

    monkeypatch.setattr("transformers.utils.hub.cached_file", cached_file)
    config = run_config(("org/name", files[1]), tmp_path / "run", revision="main")
    assert sources.of_run(config)[0].name == "org/name" and told == [("org/name", "main")]
    found = [fingerprints.of_sources(sources.of_run(config)) for _ in range(2)]
    assert found == [{"model": {"org/name": "a" * 40}}, {"model": {"org/name": "b" * 40}}]
    assert fingerprints.differing(*found) == {"model": "org/name"}


def test_rows_and_models_that_lie_elsewhere_now_are_the_same_and_others_are_not(files, run, tmp_path, capsys):
    model, dataset = files
    moved = shutil.copytree(model, tmp_path / "moved"), shutil.copy(dataset, tmp_path / "moved.jsonl")
    sft.train(run_config(map(str, moved), run, resume=True, steps=5))
    told = capsys.readouterr().out
    assert f"dataset {dataset} -> {moved[1]}" in told and f"model {model} -> {moved[0]}" in told
    tiny.jsonl(moved[1], tiny.sums(21)[1:])
    refused(run_config(map(str, moved), run, resume=True, steps=6), "--accept_changes rows")
    refused(run_config((model, "other.jsonl"), run, resume=True, steps=6), "dataset .* -> other.jsonl")
