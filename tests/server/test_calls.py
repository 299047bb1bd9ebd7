"""Calls to a real vLLM: what it samples, loads and reports is what the weights give that were pushed."""

from types import SimpleNamespace

import pytest
import torch

from fused_rl.trainers.data.batch import make_batch
from fused_rl.trainers.data.encode import load_tokenizer
from fused_rl.trainers.policy import teacher
from fused_rl.trainers.rollouts.sampling import Sampling
from tests.server import models
from tests.trainers import served

pytestmark = pytest.mark.server
CLOSE = 1e-4  # nats: fp32 there, fp64 of fp32 weights here
PUSHES = 20
GREEDY = Sampling(0.0, 8, ())
PROMPTS = [list(range(2, 2 + length)) for length in (1, 5, 9, 40)]


@pytest.fixture
def server(servers, folders):
    return servers.holding(folders[0])


@pytest.fixture(scope="module")
def lm(folders):
    return models.load(folders[0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_reports_the_log_probabilities_that_it_samples_from(server, lm, temperature):
    stop = (5, 6, 7)
    sampling = Sampling(temperature, 12, stop)
    finishes = set()
    for number, prompt in enumerate(PROMPTS):
        seeds = range(8 * number, 8 * number + 8)
        found = served.sampled(server, prompt, sampling, *seeds)
        for response in found:
            expected = served.logprobs(lm, prompt, response.ids, temperature)
            torch.testing.assert_close(
                torch.tensor(response.logprobs).double(), expected, atol=CLOSE, rtol=0
            )
            stops = [token in stop for token in response.ids]
            assert not any(stops[:-1]) and stops[-1] == (response.finish == "stop")
            finishes.add(response.finish)
        assert len({tuple(response.ids) for response in found}) == 8  # and not clones
        assert served.sampled(server, prompt, sampling, *seeds) == found
    assert finishes == {"stop", "length"}


def test_greedy_answers_after_each_of_many_pushes(server, lm, folders, tmp_path):
    """Greedy answers and log-probabilities are those of the weights that were pushed."""
    tokenizer = load_tokenizer(folders[0])
    changed = models.load(folders[0])
    seen = set()
    for push in range(1, 1 + PUSHES):
        torch.manual_seed(push)
        for parameter in changed.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1 * parameter.abs().mean())
        changed.save_pretrained(tmp_path / str(push))
        tokenizer.save_pretrained(tmp_path / str(push))
        server.http.run([server.push(tmp_path / str(push))])
        for prompt in PROMPTS:
            (response,) = served.sampled(server, prompt, GREEDY, None)
            assert response.ids == models.greedy(changed, prompt, 8), push
            expected = served.logprobs(changed, prompt, response.ids)
            torch.testing.assert_close(
                torch.tensor(response.logprobs).double(), expected, atol=CLOSE, rtol=0
            )
        seen.add(tuple(response.ids))
    assert len(seen) > PUSHES / 2  # the weights make a difference


def test_a_teacher_tells_its_likeliest_tokens(server, lm, folders):
    """The run's tokenizer is compared with the server's, and each response token has the 20 likeliest in its place."""
    config = SimpleNamespace(model=folders[0], teachers={"": server.url}, teacher_top_k=20)
    config.server_api_key_env, config.server_timeout, config.dry_run = None, 60.0, False
    policy = SimpleNamespace(tokenizer=load_tokenizer(folders[0]), config=config)
    (served_teacher,) = teacher.load_teachers(config, policy).values()
    responses = [[7, 8, 9], [4], [30, 31]]
    ids, logprobs = served_teacher.read({}, make_batch(PROMPTS[1:], responses, 0, "cpu"))
    assert len(ids) == 6
    for prompt, response in zip(PROMPTS[1:], responses, strict=True):
        logits = lm(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).topk(20)
        torch.testing.assert_close(
            logprobs[: len(response)].double(), expected.values.double(), atol=CLOSE, rtol=0
        )
        assert (
            ids[: len(response)] == expected.indices
        ).double().mean() > 0.9  # two may be as likely
        ids, logprobs = ids[len(response) :], logprobs[len(response) :]
