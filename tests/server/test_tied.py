"""A real model whose head is tied to its embedding, behind a vLLM that would keep the head that it was started with."""

import os

import pytest
import torch

from fused_rl.trainers import grpo
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.run import store
from fused_rl.trainers.servers.published import write_untied
from tests.server import models
from tests.trainers import runs, served

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
    with pytest.raises(InputError, match="would keep the old LM head.*published MODEL FOLDER"):
        grpo.train(config_of(model, rows, tmp_path / "run", url))
    store.unlock()
    assert not (tmp_path / "run").exists()


def test_three_updates_reach_a_server_that_sleeps_meanwhile(model, rows, servers, tmp_path):
    """In the end the server's log-probabilities are those of the trained model in fp64, not those before."""
    write_untied(model, tmp_path / "untied")
    serving = servers("--model", str(tmp_path / "untied"))
    trained = grpo.train(config_of(model, rows, tmp_path / "run", serving.url, server_sleeps=True))
    server = served.connected(serving)
    prompt = list(range(100, 140))
    before, after = (models.load(folder).double() for folder in (model, trained))
    (response,) = served.sampled(server, prompt, Sampling(1.0, 32, ()), 1)
    reported = torch.tensor(response.logprobs).double()
    expected = served.logprobs(after, prompt, response.ids)
    torch.testing.assert_close(reported, expected, atol=CLOSE, rtol=0)
    assert (expected - served.logprobs(before, prompt, response.ids)).abs().max() > 100 * CLOSE
    # The trained model itself has one weight for both.
    assert after.lm_head.weight is after.model.embed_tokens.weight
