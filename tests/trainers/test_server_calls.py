"""The four calls to a server of both kinds: what is sent, field by field, and every way that an answer goes wrong."""

import threading

import pytest
import torch

from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.kinds import connect
from tests.trainers import fake_server
from tests.trainers.served import DRAWN, PROMPT, QUICK, logprobs, model_of

KINDS = ("vllm", "sglang")
SAMPLE = {"vllm": "/v1/completions", "sglang": "/generate"}
SETS = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
TRUNCATED = Sampling(0.7, 5, (3,), top_p=0.9, top_k=20, min_p=0.01)


SENT = {
    "vllm": {
        "model": "policy",
        "prompt": PROMPT,
        "n": 1,
        "max_tokens": 5,
        "min_tokens": 0,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 42,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": [],
        "stop_token_ids": [3, 260],
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "return_weight_versions": True,
        "echo": False,
        "stream": False,
    },
    "sglang": {
        "input_ids": PROMPT,
        "sampling_params": {
            "n": 1,
            "max_new_tokens": 5,
            "min_new_tokens": 0,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "sampling_seed": 42,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": [],
            "stop_token_ids": [3, 260],
            "ignore_eos": False,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "stream": False,
    },
}


def test_every_option_of_sampling_is_sent(fake, server):
    server.sample(PROMPT, 1, DRAWN, [42])
    (body,) = fake.bodies(SAMPLE[fake.kind])
    assert body == SENT[fake.kind]
    # Greedy: filters of the run are none of its own.
    server.sample(PROMPT, 1, Sampling(0.0, 5, (3, 260), top_p=0.5, top_k=7, min_p=0.1), None)
    greedy = fake.bodies(SAMPLE[fake.kind])[1]
    options = greedy["sampling_params"] if fake.kind == "sglang" else greedy
    changed = {name for name, value in options.items() if value != _options(SENT[fake.kind])[name]}
    assert changed == {"temperature", "sampling_seed" if fake.kind == "sglang" else "seed"}


def test_a_stop_token_stops_and_without_one_nothing_does(fake, server, folder):
    (free,) = server.sample(PROMPT, 1, Sampling(0.0, 8, ()), None)
    fake.tokenizer.eos_token = fake.tokenizer.convert_ids_to_tokens(free.ids[0])
    assert server.sample(PROMPT, 1, Sampling(0.0, 8, ()), None) == [free]
    stop = free.ids[0]
    (stopped,) = server.sample(PROMPT, 1, Sampling(0.0, 8, (stop,)), None)
    assert (stopped.ids, stopped.finish) == ([stop], "stop")
    # As the last of all tokens it is one too.
    (last,) = server.sample(PROMPT, 1, Sampling(0.0, 1, (stop,)), None)
    assert (last.ids, last.finish) == ([stop], "stop")


def _options(body):
    return body.get("sampling_params", body)


def test_truncated_sampling_asks_for_sets(fake, server):
    (response,) = server.sample(PROMPT, 1, TRUNCATED, [42])
    body = fake.bodies(SETS[fake.kind])[-1]
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "stop_token_ids": [3]}
    assert _options(body).items() >= options.items()
    if fake.kind == "vllm":
        assert body.keys() == {"model", "token_ids", "stream", "sampling_params"} and body["token_ids"] == PROMPT
        assert body["sampling_params"].keys() == SENT["vllm"].keys() - {
            *("model", "prompt", "return_token_ids", "return_weight_versions", "echo", "stream")
        }
    else:
        assert body["return_sampling_mask"] is True
    assert len(response.support) == len(response.ids)
    sets = response.support.ids.split(response.support.offsets.diff().tolist())
    assert all(token in kept and 0 < len(kept) <= 20 for token, kept in zip(response.ids, sets, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_what_it_draws_and_tells_is_the_models(server, folder, temperature):
    lm, sampling = model_of(folder), Sampling(temperature, 6, (3,))
    seeds = None if temperature == 0 else [5, 6, 7]
    responses = server.sample(PROMPT, 3, sampling, seeds)
    for response in responses:
        expected = logprobs(lm, PROMPT, response.ids, temperature or 1.0)
        torch.testing.assert_close(torch.tensor(response.logprobs).double(), expected, atol=1e-5, rtol=0)
        assert response.weight_version is None  # "default": no push has named it
    # Each response is drawn with its own seed, whichever else are asked for.
    (alone,) = server.sample(PROMPT, 1, sampling, seeds and seeds[1:2])
    assert alone == responses[1]
    assert len({tuple(response.ids) for response in responses}) == (3 if seeds else 1)


def test_nothing_that_would_be_cut_without_a_word_is_asked(fake, server):
    with pytest.raises(InputError, match="125 tokens and max_new_tokens=5 are more than its 128 tokens; start it w"):
        server.sample([5] * 125, 1, DRAWN, [0])
    assert not fake.bodies(SAMPLE[fake.kind])


def changed(fake, **fields):
    """A function of the fake's right answer."""

    def change(answer):
        if fake.kind == "vllm":
            answer["choices"][0] |= fields
        else:
            ids, told = fields.pop("token_ids", None), answer["meta_info"]
            answer["output_ids"] = answer["output_ids"] if ids is None else ids
            if "finish_reason" in fields:
                told["finish_reason"] = {"type": fields["finish_reason"]}
            if ids is not None:
                told["output_token_logprobs"] = [[-1.0, token, None] for token in ids]
            if "logprobs" in fields:
                told["output_token_logprobs"] = None
        return answer

    return change


UNUSABLE = {
    "abort": ({"finish_reason": "abort", "token_ids": []}, "finish_reason='abort' after 0 tokens; expected stop or le"),
    "error": ({"finish_reason": "error"}, "finish_reason='error' after"),
    "unknown": ({"finish_reason": "repetition"}, "finish_reason='repetition' after"),
    "no reason": ({"finish_reason": None}, "finish_reason=None after"),
    "short": ({"finish_reason": "length", "token_ids": [9, 9]}, "'length' after 2 of max_new_tokens=5 tokens"),
    "stop": (
        {"finish_reason": "stop", "token_ids": [9, 8]},
        r"last token \[8\] is none of the stop tokens \(3, 260",
    ),
    "empty stop": ({"finish_reason": "stop", "token_ids": []}, "none of the stop tokens"),
    "no logprobs": ({"finish_reason": "length", "token_ids": [9] * 5, "logprobs": None}, "no log-probabilities; start"),
    "text": (
        {"finish_reason": "length", "token_ids": "99999"},
        "no list of token ids|an answer without|a form that",
    ),
    "negative": ({"finish_reason": "length", "token_ids": [-1] * 5}, "no list of token ids"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_response_that_is_none_is_refused(fake, server, case):
    fields, message = UNUSABLE[case]
    fake.script = [(SAMPLE[fake.kind], changed(fake, **fields))]
    with pytest.raises(InputError, match=message) as refused:
        server.sample(PROMPT, 1, DRAWN, [0])
    assert str(refused.value).startswith(f"server {fake.url} ({server.kind})") and "\n" not in str(refused.value)
    assert len(fake.bodies(SAMPLE[fake.kind])) == 1  # and not asked for again


@pytest.mark.parametrize("answer", [None, [], {}, {"choices": []}, {"choices": [3]}, {"meta_info": 3}, "x"], ids=str)
def test_an_answer_in_another_form_is_a_line(fake, server, answer):
    fake.script = [(SAMPLE[fake.kind], lambda right: answer)]
    with pytest.raises(InputError, match="an answer without|in a form that is not known") as refused:
        server.sample(PROMPT, 1, DRAWN, [0])
    assert "\n" not in str(refused.value)


def test_a_truncated_response_without_sets_says_what_to_set(fake, server):
    fake.flaws = {"no masks"}
    with pytest.raises(
        InputError, match="no kept sets, though the sampling truncates; start it with --.*this run with --top_k"
    ):
        server.sample(PROMPT, 1, TRUNCATED, [0])


def test_fields_that_are_not_known_are_no_matter(fake, server):
    (expected,) = server.sample(PROMPT, 1, DRAWN, [0])
    fake.script = [(SAMPLE[fake.kind], lambda right: right | {"invented": 1})]
    assert server.sample(PROMPT, 1, DRAWN, [0]) == [expected]


@pytest.mark.parametrize("wrong", [500, 502, "cut", "close"])
def test_no_answer_is_asked_for_again(fake, server, wrong):
    (expected,) = server.sample(PROMPT, 1, DRAWN, [0])
    fake.script = [(SAMPLE[fake.kind], wrong)] * 2
    assert server.sample(PROMPT, 1, DRAWN, [0]) == [expected]
    assert len(fake.bodies(SAMPLE[fake.kind])) == 4
    fake.script = [(SAMPLE[fake.kind], wrong)] * 3
    with pytest.raises(InputError, match=f"server {fake.url}, POST {SAMPLE[fake.kind]}: (HTTP 50|no answer: )"):
        server.sample(PROMPT, 1, DRAWN, [0])
    assert fake.script == []


@pytest.mark.parametrize(
    ("wrong", "message"), [(400, "HTTP 400: .*script says"), (404, "HTTP 404"), ("no json", "no JSON")]
)
def test_what_is_refused_is_not_asked_again(fake, server, wrong, message):
    fake.script = [(SAMPLE[fake.kind], wrong)] * 3
    with pytest.raises(InputError, match=message):
        server.sample(PROMPT, 1, DRAWN, [0])
    assert len(fake.script) == 2


def test_a_server_that_says_nothing_ends_in_an_error(fake):
    server = connect(fake.url, **QUICK)
    server.connection.timeout = 0.3
    fake.script = [(SAMPLE[fake.kind], "hang")] * 3
    said = "no answer: nothing for 0.3 s; is the server up. .where a response takes longer, lower max_new_tokens"
    with pytest.raises(InputError, match=said):
        server.sample(PROMPT, 1, DRAWN, [0])
    assert len(fake.script) == 1  # two of them take twenty minutes, and ranks wait for each other for thirty


@pytest.mark.parametrize("how", ["503", "silence"])
def test_somebody_elses_pause_is_waited_for(folder, monkeypatch, how):
    with fake_server.serving("vllm", folder) as fake:
        server = connect(fake.url, **QUICK | {"patience": 60})
        (expected,) = server.sample(PROMPT, 1, DRAWN, [0])
        fake.paused = how == "503"
        exchange, calls = server.connection._exchange, []

        def silent_at_first(method, path, *args):
            calls.append(path)
            if how == "silence" and calls == ["/v1/completions"]:
                raise TimeoutError
            return exchange(method, path, *args)

        def resumed_by_others(answer):
            fake.paused = False
            return {"is_paused": True}

        # It is asked whether it is paused, says so, and then somebody has resumed it.
        monkeypatch.setattr(server.connection, "_exchange", silent_at_first)
        still = {"is_paused": True}
        fake.script = [("/is_paused", lambda answer: still), ("/is_paused", resumed_by_others)]
        assert server.sample(PROMPT, 1, DRAWN, [0]) == [expected]
        assert fake.script == [] and not fake.bodies("/resume")
        assert calls == ["/v1/completions", *["/is_paused"] * 3, "/v1/completions"]


def test_a_pause_that_nobody_ends_is_an_error_and_stays(folder, tmp_path):
    with fake_server.serving("vllm", folder) as fake:
        server = connect(fake.url, **QUICK)
        fake.paused = True
        for call in (lambda: server.sample(PROMPT, 1, DRAWN, [0]), lambda: server.push(tmp_path, 1)):
            with pytest.raises(InputError, match=f"nobody resumed it within 0 s.*curl -X POST {fake.url}/resume"):
                call()
        assert fake.paused and not fake.bodies("/resume") and not fake.bodies("/pause?mode=wait")


def test_calls_of_many_threads_do_not_meet(fake, server):
    seeds = range(24)
    expected = server.sample(PROMPT, len(seeds), DRAWN, seeds)
    found = {}

    def ask(seed):
        found[seed] = server.sample(PROMPT, 1, DRAWN, [seed])[0]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[seed] for seed in seeds] == expected
