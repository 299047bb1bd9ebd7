"""Every trainer with its sequences divided over processes, beside one process: make test-long."""

import os
import shutil

import pytest

from fused_rl.trainers.run import store
from tests.trainers import divided, fake_server
from tests.trainers.runs import assert_equal_runs, assert_same_metrics, on_ranks

pytestmark = pytest.mark.skipif(
    "FUSED_RL_LONG" not in os.environ, reason="it takes ten minutes: make test-long"
)
# (processes, parts of a sequence); of the last one two ranks have a part each of a batch.
DIVISIONS = [(2, 2), (4, 4), (4, 2)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    return divided.make_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("world, parts", DIVISIONS)
def test_runs_are_those_of_one_process(files, tmp_path, world, parts):
    chosen = {
        name: run for name, run in divided.RUNS.items() if name != "distill"
    }  # a teacher's are whole
    divided.compare(files, tmp_path, chosen, world, sequence_parallel=parts)


@pytest.mark.parametrize("name", ["sft", "grpo", "lag", "ppo"])
def test_a_resumed_run_is_the_same_bit_for_bit(files, tmp_path, name):
    """Sampled by the policy itself, so that the generators of a group must have been restored, too."""
    trainer, options = divided.RUNS[name]
    options = options | {"sequence_parallel": 2, "steps": 3, "save_every": 1, "keep_checkpoints": 9}
    options = options | ({} if trainer == "sft" else {"sampler": None})
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    on_ranks(divided.train_all, 4, files, [(str(whole), trainer, options)])
    shutil.copytree(whole, resumed)
    continued = options | {"resume_from": "step-1"}
    on_ranks(divided.train_all, 4, files, [(str(resumed), trainer, continued)])
    assert store.steps_in(resumed / "checkpoints")
    assert_equal_runs(whole, resumed)


@pytest.mark.parametrize("lag", [0, 1])
def test_servers_sample_each_response_once_for_a_group(files, tmp_path, lag):
    # Weights that differ by rounding may sample another token, so they stay as they are.
    options = {"sampler": None, "lag": lag, "temperature": 0.9, "max_prompt_length": 64, "lr": 0.0}
    for processes, parts in ((1, 1), (2, 2)):
        with fake_server.serving("vllm", files["model"]) as fake:
            of_run = options | {"server": [fake.url], "sequence_parallel": parts}
            run = (str(tmp_path / str(processes)), "grpo", of_run)
            on_ranks(divided.train_all, processes, files, [run])
    # The seeds are those of a rank, so the responses are the same.
    assert_same_metrics(tmp_path / "1", tmp_path / "2", rtol=1e-4)
