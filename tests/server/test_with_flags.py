"""Servers of their own: one that is started wrong, one that dies."""

import os
import signal
import threading
import time
import urllib.request

import pytest

from bench import vllm_server
from fused_rl.trainers import grpo
from fused_rl.trainers.options.config import InputError
from tests.server.checks import expected_of, refused
from tests.server.test_training import Recording, grpo_config
from tests.trainers import tiny

pytestmark = pytest.mark.server


def test_raw_log_probabilities(servers, folders, rows, tmp_path):
    """Right at temperature 1, and off by as much as the temperature does elsewhere: the run does not begin."""
    server = servers.holding(folders[0], "--logprobs-mode", "raw_logprobs")
    of_the_model = "of the model, and not of what was drawn from; start it with --logprobs-mode processed_logprobs"
    refused(of_the_model, server, expected_of(folders[0]), folders[0])
    config = grpo_config(folders[0], rows, tmp_path / "run", steps=3, server=[server.url], temperature=0.7)
    with pytest.raises(InputError, match=of_the_model):
        grpo.train(config)


def test_a_worker_that_dies_in_mid_request_ends_the_run_in_a_line(servers, folders, rows, tmp_path):
    serving = servers("--seed", "1")  # of its own

    class Killed(Recording):
        def sample(self, prompts, sampling):
            if len(self.drawn) == 2:
                threading.Thread(target=kill_at_work, args=(serving,)).start()
            return super().sample(prompts, sampling)

    config = grpo_config(folders[0], rows, tmp_path / "run", steps=5, server=[serving.url], max_new_tokens=200)
    began = time.monotonic()
    with pytest.raises(InputError) as error:
        grpo.train(config, sampler=lambda built, tokenizer: Killed(built))
    servers.stop()
    assert time.monotonic() - began < 300  # and not the ten minutes of a silent server
    line = str(error.value)
    assert "\n" not in line and serving.url in line
    assert len(tiny.read_metrics(tmp_path / "run")) == 2  # nothing of what was learnt is lost


def kill_at_work(serving: vllm_server.Serving) -> None:
    """The worker gets a SIGKILL once it has a request."""
    while not running(serving):
        time.sleep(0.01)
    worker = vllm_server.members(serving.group)[-1]
    os.kill(int(worker.split()[0]), signal.SIGKILL)


def running(serving: vllm_server.Serving) -> bool:
    with urllib.request.urlopen(f"{serving.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line.split()[-1] for line in lines if line.startswith("vllm:num_requests_running")]
    return float(counts[0]) > 0
