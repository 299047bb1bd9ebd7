"""A real model whose head is tied to its embedding is refused by a vLLM that would keep the head of its start."""

import os

import pytest

from fused_rl.trainers import grpo
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.run import store
from tests.trainers import runs

pytestmark = pytest.mark.server
CLOSE = 1e-4  # nats: fp32 there, fp64 of fp32 weights here
# At this rate three steps move log-probabilities by far more.
OPTIONS = {"steps": 3, "lr": 1e-4, "micro_batch_size": 8, "eval_size": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def model() -> str:
    """The folder of SmolLM2-135M-Instruct."""
    return os.environ["FUSED_RL_REAL_MODEL"]


def config_of(model, rows, output, url, **options):
    return runs.grpo_config(
        (model, rows), output, server=[url], max_prompt_length=128, **OPTIONS | options
    )


def test_a_server_that_would_keep_the_head_is_refused_before_the_first_step(
    model, rows, servers, tmp_path
):
    url = servers("--model", model).url
    with pytest.raises(InputError, match="would keep the old LM head.*serve it on a GPU"):
        grpo.train(config_of(model, rows, tmp_path / "run", url))
    store.unlock()
    assert not (tmp_path / "run").exists()
