"""What Python hands to a config in place of a name: functions, rows, and models, which are refused."""

import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from fused_rl.trainers import grpo, reward, sft
from fused_rl.trainers.commands.eval import EvalConfig
from fused_rl.trainers.data.rows import load_rows
from fused_rl.trainers.options.config import InputError, to_yaml
from fused_rl.trainers.options.needs import on_hub
from fused_rl.trainers.run import there
from fused_rl.trainers.scorers.load import load_scorers
from fused_rl.trainers.scorers.options import read
from tests.trainers import tiny

ROOT = Path(__file__).parents[2]
ROWS = [{"question": "1 + 1", "answer": "2"}, {"question": "2 + 2", "answer": "4"}]


def of_length(responses, rows):
    return [float(len(response)) for response in responses]


def config(**options):
    return grpo.GRPOConfig(**{"model": "m", "dataset": "d.jsonl", "output_dir": "o"} | options)


def test_a_function_is_the_name_by_which_it_is_found():
    made = config(verifiers=[of_length, "math"], surrogate=of_length, sampler=of_length)
    name = f"{__name__}:of_length"
    assert (made.verifiers, made.surrogate, made.sampler) == ([name, "math"], name, name)
    assert config(verifiers=of_length).verifiers == [name]
    assert load_scorers(config(verifiers=of_length))[0].function is of_length
    assert dataclasses.replace(made, lr=1.0).verifiers == made.verifiers


class Judge:
    def score(self, responses, rows):
        return of_length(responses, rows)

    __call__ = score


def test_a_function_without_a_name_is_refused():
    def inner(responses, rows):
        return of_length(responses, rows)

    namesake = types.FunctionType(of_length.__code__, globals(), "of_length")
    others = [
        namesake,
        inner,
        lambda responses, rows: [0.0],
        Judge(),
        Judge().score,
        functools.partial(of_length, rows=[]),
    ]
    for function in others:
        with pytest.raises(InputError, match="verifiers: .* is not found by a name.*defined by `def` at the top"):
            config(verifiers=["math", function])
    with pytest.raises(InputError, match="lr=<function of_length.*: expected a finite number"):
        config(lr=of_length)


def test_rows_are_known_by_their_contents_and_are_read_as_they_were_given():
    given = [dict(row) for row in ROWS]
    made = config(dataset=given, eval_dataset=datasets.Dataset.from_list(ROWS[:1]))
    given[0]["answer"] = "3"
    assert load_rows(made.dataset).rows == ROWS
    assert load_rows(made.eval_dataset).rows == ROWS[:1]
    assert load_rows(made.dataset).where(1) == f"{made.dataset}, row 2"
    assert (
        made.dataset == sft.SFTConfig(model="m", dataset=ROWS, output_dir="o").dataset != config(dataset=given).dataset
    )
    assert f"dataset: '{made.dataset}'" in to_yaml(made)
    assert reward.RewardConfig(model="m", dataset="d", output_dir="o", reference_dataset=ROWS).reference_dataset
    assert EvalConfig(model="m", dataset=ROWS).dataset == made.dataset
    assert not on_hub(made.dataset)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), r"several splits \(train\).*dataset\['train'\]"),
        (["a", "b"], "expected a path.*, got a list of other things"),
        (5, "expected a path.*, got int"),
        (datasets.Dataset.from_list(ROWS).to_pandas(), r"got DataFrame; give datasets.Dataset.from_pandas\(rows\)$"),
        (tuple(ROWS), r"got tuple; give list\(rows\)$"),
        ({"question": ["a"]}, r"got dict; give datasets.Dataset.from_dict\(rows\)"),
        ([{1: "a", "question": "b"}], "whose keys are texts, got a list of other things"),
        (datasets.Dataset.from_list(ROWS).with_transform(dict), r"before a transform .*; map\(\) it"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "expected a path.*, got IterableDataset"),
    ],
)
def test_what_holds_no_rows_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        config(dataset=given)


def test_rows_that_differ_within_a_long_array_are_others():
    one, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1.0
    assert len({config(dataset=[{"question": "1 + 1", "image": image}]).dataset for image in (one, other)}) == 2


def test_a_function_of_a_module_that_is_named_like_a_verifier_is_refused(tmp_path, monkeypatch):
    (tmp_path / "format.py").write_text("def boxed(responses, rows):\n    return [1.0] * len(responses)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="format:boxed is also a verifier of ours; rename the module"):
        read(config(verifiers=importlib.import_module("format").boxed))
    del sys.modules["format"]


def test_no_rows_and_rows_of_another_process_are_refused():
    with pytest.raises(InputError, match="has no rows"):
        load_rows(config(dataset=[]).dataset)
    gone = config(dataset="python: 7 rows, 0123456789abcdef")
    with pytest.raises(InputError, match=r"a Python program gave these rows.*to_json"):
        there.check(str(Path.cwd()), None, [gone.dataset])
    with pytest.raises(InputError, match="a Python program gave these rows"):
        load_rows(gone.dataset)


def test_a_model_is_refused_with_what_to_do():
    with pytest.raises(InputError, match=r"^model: got a Linear; .*save_pretrained\), and give that$"):
        config(model=torch.nn.Linear(2, 2))


SCRIPT = """
import sys
from fused_rl.trainers.grpo import GRPOConfig, train

def shorter(responses, rows):
    return [-float(len(response)) for response in responses]{changed}

rows = [{{"question": f"{{i}} + 1", "answer": str(i + 1)}} for i in range(12)]
train(GRPOConfig(
    model="model", dataset=rows, verifiers=shorter, output_dir="run", eval_size=2, steps={steps}, resume={resume},
    prompts_per_step=2, group_size=2, max_new_tokens=4, save_every=1, zero_stage=0, keep_checkpoints=9,
))
"""


def script(folder, *, changed="", **options):
    source = SCRIPT.format(changed=changed, **options)
    (folder / "train.py").write_text(source)
    command = [sys.executable, "train.py"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)


def environment():
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_INTERPRET": "0",
    }


@pytest.mark.slow
def test_a_script_with_functions_and_rows_of_its_own_is_resumed_and_another_function_is_not(tmp_path):
    tiny.model_folder(tmp_path / "model")
    first = script(tmp_path, steps=1, resume=False)
    assert first.returncode == 0, first.stderr
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "- __main__:shorter" in text and "dataset: 'python: 12 rows, " in text
    # The script is another file now, and the function is what it was.
    second = script(tmp_path, steps=2, resume=True)
    assert second.returncode == 0, second.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]
    third = script(tmp_path, steps=3, resume=True, changed="  # another")
    assert "scorers (source files of the functions that score: __main__:shorter)" in third.stderr


def test_a_mapping_in_place_of_a_list_or_a_config_is_told_the_way():
    with pytest.raises(InputError, match=r"verifiers: got a dict; give a list of names and functions: \['math', f\]"):
        config(verifiers={"a": len})
    with pytest.raises(InputError, match=r"train\(\) takes a GRPOConfig, got a dict; give GRPOConfig\(\*\*it\)"):
        grpo.train({"model": "m"})
