"""The four calls to a real vLLM: what it samples, takes and tells is what the weights that were pushed give."""

import json
import urllib.request
from pathlib import Path

import pytest
import torch

from fused_rl.trainers.data.encode import load_tokenizer
from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.kinds import connect
from tests.server import models

pytestmark = pytest.mark.server
CLOSE = 1e-4  # nats: fp32 there, fp64 of fp32 weights here
PUSHES = 20
GREEDY = Sampling(0.0, 8, ())
PROMPTS = [list(range(2, 2 + length)) for length in (1, 5, 9, 40)]


@pytest.fixture(scope="module")
def server(servers, folders):
    return servers.holding(folders[0])


@pytest.fixture(scope="module")
def lm(folders):
    return models.load(folders[0])


def test_it_is_known_by_asking(server, folders):
    assert server.kind == "vLLM" and server.wait(5) == models.POSITIONS
    text = "Three plus 4, less 5?"
    assert server.tokens_of(text) == load_tokenizer(folders[0])(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_tells_the_log_probabilities_that_it_draws_from(server, lm, temperature):
    stop = (5, 6, 7)
    sampling = Sampling(temperature, 12, stop)
    finishes = set()
    for number, prompt in enumerate(PROMPTS):
        found = server.sample(prompt, 8, sampling, [8 * number + k for k in range(8)])
        for response in found:
            expected = models.logprobs(lm, prompt, response.ids, temperature)
            torch.testing.assert_close(torch.tensor(response.logprobs).double(), expected, atol=CLOSE, rtol=0)
            stops = [token in stop for token in response.ids]
            assert not any(stops[:-1]) and stops[-1] == (response.finish == "stop")
            assert response.finish == "stop" or len(response.ids) == 12
            finishes.add(response.finish)
        assert len({tuple(response.ids) for response in found}) == 8  # and not clones
        assert server.sample(prompt, 8, sampling, [8 * number + k for k in range(8)]) == found
    assert finishes == {"stop", "length"}


def test_greedy_answers_after_each_of_many_pushes(server, lm, folders, tmp_path):
    """Both ways: its greedy answers are those of the weights, and the weights are what its log-probabilities say."""
    tokenizer = load_tokenizer(folders[0])
    changed = models.load(folders[0])
    seen = set()
    for push in range(1, 1 + PUSHES):
        torch.manual_seed(push)
        for parameter in changed.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1 * parameter.abs().mean())
        changed.save_pretrained(tmp_path / str(push))
        tokenizer.save_pretrained(tmp_path / str(push))
        server.push(tmp_path / str(push), push)
        assert server.version() == push
        for prompt in PROMPTS:
            (response,) = server.sample(prompt, 1, GREEDY, None)
            assert response.ids == models.greedy(changed, prompt, 8), push
            expected = models.logprobs(changed, prompt, response.ids)
            torch.testing.assert_close(torch.tensor(response.logprobs).double(), expected, atol=CLOSE, rtol=0)
        seen.add(tuple(response.ids))
    assert len(seen) > PUSHES / 2  # the weights make a difference


def test_its_digests_change_with_every_weight(server, folders):
    server.push(Path(folders[0]), 0)
    before = server.digests()
    server.push(Path(folders[0]), 1)
    assert server.digests() == before
    server.push(Path(folders[1]), 2)
    after = server.digests()
    assert after.keys() == before.keys()
    norms = {name for name in before if "norm" in name}  # ones, in both
    assert {name for name in before if before[name] == after[name]} == norms


def test_what_it_refuses(server):
    sampling = Sampling(1.0, 4, ())
    with pytest.raises(InputError, match="HTTP 400.*vocab"):
        server.sample([10**6], 1, sampling, [0])
    with pytest.raises(InputError, match=f"more than its {models.POSITIONS} tokens; start it with --max-model-len 514"):
        server.sample([2] * 510, 1, sampling, [0])


def test_somebody_elses_pause_is_waited_for_and_not_resumed(server, servers):
    def told(path):
        with urllib.request.urlopen(urllib.request.Request(f"{servers().url}{path}", b""), timeout=30) as answer:
            return answer.read()

    other = connect(servers().url, seconds=5, timeout=3, tries=1, patience=2, between=0.2)
    told("/pause?mode=wait")
    try:
        with pytest.raises(InputError, match="is paused, and nobody resumed it within 2 s"):
            other.sample([2, 3], 1, Sampling(1.0, 4, ()), [0])
        with urllib.request.urlopen(f"{servers().url}/is_paused", timeout=5) as answer:
            assert json.load(answer)["is_paused"] is True
    finally:
        told("/resume")
    assert len(other.sample([2, 3], 1, Sampling(1.0, 4, ()), [0])) == 1
