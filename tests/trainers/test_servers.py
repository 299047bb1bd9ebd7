"""Calls to inference servers of both kinds, weight updates and the probe: against fakes with scripted faults."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers import published
from tests.marks import SLOW
from tests.trainers import fake_server, served, tiny

PROMPT = [1, 70, 71]
SAMPLING, GREEDY = Sampling(0.7, 5, (3, 260)), Sampling(0.0, 5, ())
TRUNCATED = Sampling(0.7, 5, (3,), top_p=0.9, top_k=20, min_p=0.01)
SAMPLE = {"vllm": "/v1/completions", "sglang": "/generate"}
UPDATE = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}

# Payloads, field by field.
SHARED = {"n": 1, "temperature": 0.7, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
SHARED |= {"stop_token_ids": [3, 260]}
VLLM = SHARED | {"max_tokens": 5, "top_k": 0, "seed": 42, "ignore_eos": True, "logprobs": 0}
SGLANG = SHARED | {
    "max_new_tokens": 5,
    "top_k": -1,
    "sampling_seed": 42,
    "ignore_eos": False,
    "no_stop_trim": True,
}
CUT = {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "stop_token_ids": [3]}
COMPLETION = {"model": "policy", "prompt": PROMPT, "return_token_ids": True}
GENERATED = {"input_ids": PROMPT, "return_logprob": True}
SENT = {
    ("vllm", SAMPLING): ("/v1/completions", COMPLETION | VLLM),
    ("vllm", TRUNCATED): (
        "/inference/v1/generate",
        {"model": "policy", "token_ids": PROMPT, "sampling_params": VLLM | CUT},
    ),
    ("sglang", SAMPLING): ("/generate", GENERATED | {"sampling_params": SGLANG}),
    ("sglang", TRUNCATED): (
        "/generate",
        GENERATED | {"sampling_params": SGLANG | CUT, "return_sampling_mask": True},
    ),
}


@pytest.mark.parametrize("sampling", [SAMPLING, TRUNCATED], ids=["all", "truncated"])
def test_every_option_of_sampling_is_sent(fake, server, sampling):
    (response,) = served.sampled(server, PROMPT, sampling, 42)
    assert fake.calls[-1] == SENT[fake.kind, sampling]
    if sampling.truncates:
        sets = response.support.ids.split(response.support.offsets.diff().tolist())
        assert all(
            token in kept and 0 < len(kept) <= 20
            for token, kept in zip(response.ids, sets, strict=True)
        )


def test_responses_and_log_probabilities_are_the_models(fake, server):
    for sampling, seeds in ((SAMPLING, [5, 6, 7]), (GREEDY, [None] * 3)):
        responses = served.sampled(server, PROMPT, sampling, *seeds)
        for response in responses:
            expected = served.logprobs(fake.lm, PROMPT, response.ids, sampling.temperature or 1.0)
            torch.testing.assert_close(
                torch.tensor(response.logprobs).double(), expected, atol=1e-5, rtol=0
            )
        assert served.sampled(server, PROMPT, sampling, seeds[1]) == responses[1:2]
        assert len({tuple(response.ids) for response in responses}) == (
            3 if sampling.temperature else 1
        )


def test_stop_tokens_alone_end_a_response(fake, server):
    (free,) = served.sampled(server, PROMPT, GREEDY, None)
    fake.eos = free.ids[0]  # the model's own end of sequence
    assert served.sampled(server, PROMPT, GREEDY, None) == [free]
    for longest in (8, 1):  # in the last place too
        (stopped,) = served.sampled(server, PROMPT, Sampling(0.0, longest, (free.ids[0],)), None)
        assert (stopped.ids, stopped.finish) == (free.ids[:1], "stop")


def test_the_longest_response_fits(fake, server):
    assert server.room == (126 if fake.kind == "sglang" else 128)
    (response,) = served.sampled(server, [5] * (server.room - 5), GREEDY, None)
    assert (len(response.ids), response.finish) == (5, "length")


def test_calls_share_connections(fake, server):
    for _ in range(3):
        served.sampled(server, PROMPT, SAMPLING, *range(8))
    assert fake.connections <= 10


def cut_to(ids, finish):
    """Return a function that ends an answer early."""

    def change(answer):
        if "choices" in answer:
            answer["choices"][0] |= {"token_ids": ids, "finish_reason": finish}
        else:
            answer["output_ids"] = ids
            answer["meta_info"]["finish_reason"] = {"type": finish}
        return answer

    return change


# What goes wrong with a request for a response -> the line; how often it may go wrong before it ends the run.
FAULTS = {
    "500": (500, "HTTP 500: .*as the script says", 3),
    "close": ("close", "no answer: .*is the server up", 3),
    "400": (400, "HTTP 400: .*as the script says", 1),
    "html": (b"<html>", "the answer is not JSON: <html>", 1),
    "empty": (lambda right: {}, "an answer of an unknown form", 1),
    "abort": (
        cut_to([], "abort"),
        "a response ended by 'abort' after 0 of 5 tokens, at no stop token",
        1,
    ),
    "short": (
        cut_to([9, 9], "length"),
        "a response ended by 'length' after 2 of 5.*has no room; start it w",
        1,
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_of_one_answer(fake, server, case):
    wrong, message, times = FAULTS[case]
    (expected,) = served.sampled(server, PROMPT, SAMPLING, 0)
    fake.script = [(SAMPLE[fake.kind], wrong)] * (times - 1)  # repeated as often
    assert served.sampled(server, PROMPT, SAMPLING, 0) == [expected] and fake.script == []
    fake.script = [(SAMPLE[fake.kind], wrong)] * (times + 1)  # and no more often
    with pytest.raises(InputError, match=message) as refused:
        served.sampled(server, PROMPT, SAMPLING, 0)
    assert (
        len(fake.script) == 1 and fake.url in str(refused.value) and "\n" not in str(refused.value)
    )


def test_a_silent_server_ends_in_an_error(fake):
    server = served.connected(fake, timeout=0.5)
    fake.script = [(SAMPLE[fake.kind], "hang")] * 2
    with pytest.raises(
        InputError, match=r"no answer: ReadTimeout.*is the server up.*--server_timeout 0.5\)"
    ):
        served.sampled(server, PROMPT, SAMPLING, 0)


def test_a_failure_cancels_the_other_calls(fake, server):
    fake.script = [(SAMPLE[fake.kind], "hang"), (SAMPLE[fake.kind], 400)]
    with pytest.raises(InputError, match="HTTP 400"):
        served.sampled(server, PROMPT, SAMPLING, 0, 1)  # without waiting 20 s for the first one


def test_a_paused_server_is_waited_for(fake, server, capsys):
    (expected,) = served.sampled(server, PROMPT, SAMPLING, 0)
    fake.script = [(SAMPLE[fake.kind], 503)] * 9
    assert served.sampled(server, PROMPT, SAMPLING, 0) == [expected]
    assert capsys.readouterr().out.count("it is loading or paused; trying again for 20 s") == 1
    fake.paused, server.http.timeout = True, 0.5
    with pytest.raises(InputError, match="HTTP 503: .*paused"):
        served.sampled(server, PROMPT, SAMPLING, 0)


# Who is there.


def test_a_server_that_is_loading_is_waited_for(fake):
    fake.script = [("/v1/models", "close")] * 5 + [("/health", 503), ("/ready", 503)] * 5
    assert served.connected(fake).kind.lower() == fake.kind


def test_a_server_of_another_model_is_named(folder, tmp_path):
    """In every error: it may lack tokens, or have other weights."""
    with fake_server.serving("vllm", folder) as fake:
        fake.script = [("/v1/models", lambda right: with_root(right, "org/other"))]
        server = served.connected(fake)
        with pytest.raises(
            InputError,
            match="HTTP 400.*out of vocabulary.*vLLM with org/other.* must serve the model that is trained",
        ):
            served.sampled(server, [10**6], SAMPLING, 0)
        fake.script = [("/v1/models", lambda right: with_root(right, "org/other"))]
        sampler = served.sampler_of([fake.url], served.Policy(folder), tmp_path)
        fake.flaws = {"warm"}
        with pytest.raises(InputError, match="vLLM with org/other.*not the policy's"):
            sampler.publish(0, sampler.probe.model.save)


def with_root(answer, name):
    return {"data": [answer["data"][0] | {"root": name}]}


def test_a_server_that_cannot_be_updated_is_refused_when_the_run_begins(folder, tmp_path):
    policy = served.Policy(folder)
    with fake_server.serving("vllm", folder) as fake:
        fake.script = [("/is_paused", 404)]
        with pytest.raises(
            InputError,
            match="none of the calls that load weights.*start it with VLLM_SERVER_DEV_MO",
        ):
            served.sampler_of([fake.url], policy, tmp_path)
        fake.paused = True
        with pytest.raises(InputError, match=f"is paused or asleep.*POST {fake.url}/wake_up"):
            served.sampler_of([fake.url], policy, tmp_path)
        assert fake.bodies("/v1/completions") == []


@pytest.mark.parametrize("status", [403, 404])
def test_kept_sets_that_a_server_refuses_have_a_remedy(fake, server, status):
    path = "/inference/v1/generate" if fake.kind == "vllm" else "/generate"
    fake.script = [(path, status)]
    with pytest.raises(InputError, match=f"HTTP {status}.*; kept sets need --"):
        served.sampled(server, PROMPT, TRUNCATED, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (404, "/v1/models: HTTP 404"),
        (
            lambda right: {"data": [right["data"][0] | {"owned_by": "llamacpp"}]},
            "is neither vLLM nor SGLang",
        ),
    ],
)
def test_what_is_no_inference_server_is_refused(fake, wrong, message):
    fake.script = [("/v1/models", wrong)]
    with pytest.raises(InputError, match=message):
        served.connected(fake)


def test_a_key_is_sent_and_never_shown(folder):
    with fake_server.serving("vllm", folder, key="sk-right") as fake:
        assert served.sampled(served.connected(fake, key="sk-right"), PROMPT, SAMPLING, 0)
        with pytest.raises(InputError, match=r"HTTP 401.*Bearer \*\*\*") as refused:
            served.connected(fake, key="sk-wrong")
        assert "sk-wrong" not in str(refused.value)


# Weights.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The servers' weights at first, and the policy's."""
    folder = tmp_path_factory.mktemp("models")
    return [tiny.model_folder(folder / str(seed), seed=seed) for seed in (0, 1)]


UPDATED = {
    "vllm": [
        ("/pause?mode=wait", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "FOLDER"}}),
        ("/reset_prefix_cache", None),
        ("/resume", {}),
    ],
    "sglang": [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", {"model_path": "FOLDER", "flush_cache": True}),
        ("/continue_generation", {}),
    ],
}


def test_an_update_gives_a_server_the_weights(fake, server, folders):
    before = len(fake.calls)
    server.http.run([server.push(Path(folders[1]))])
    assert str(fake.calls[before:]).replace(folders[1], "FOLDER") == str(UPDATED[fake.kind])
    assert not fake.paused and torch.equal(
        fake.lm.lm_head.weight, tiny.weights(Path(folders[1]))["lm_head.weight"]
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (404, "HTTP 404.*did not load the weights: it must see /.*; start it with"),
        (500, "HTTP 500.*did not load the weights"),
        (
            lambda right: {"success": False, "message": "no"},
            "'success': False.*did not load the weights",
        ),
    ],
)
def test_an_update_that_fails_is_not_repeated(fake, server, folders, wrong, message):
    """And its own error is the one that is shown, whether or not the server resumes after it."""
    fake.script = [(UPDATE[fake.kind], wrong)]
    with pytest.raises(InputError, match=message):
        server.http.run([server.push(Path(folders[1]))])
    assert len(fake.bodies(UPDATE[fake.kind])) <= 1 and not fake.paused
    fake.script = [(UPDATE[fake.kind], wrong), (server.resume, 410)]
    with pytest.raises(InputError, match=message) as refused:
        server.http.run([server.push(Path(folders[1]))])
    assert "410" not in str(refused.value) and fake.script == []


# Sleep.


def test_a_server_sleeps_until_new_weights_come(folders, tmp_path):
    policy = served.Policy(folders[1])
    with fake_server.serving("vllm", folders[0]) as fake:
        sampler = served.sampler_of([fake.url], policy, tmp_path, sleeps=True)
        sampler.publish(0, policy.save)
        sampler.rest()
        assert fake.asleep == {"weights", "kv_cache"}
        sampler.http.timeout = 0.5
        with pytest.raises(InputError, match="HTTP 503"):
            sampler.sample([PROMPT], GREEDY)
        before = len(fake.calls)
        policy.change(1)
        sampler.publish(1, policy.save)  # the probe verifies the weights
        paths = [path for path, _ in fake.calls[before:]]
        assert paths[:5] == [
            "/wake_up?tags=weights",
            "/collective_rpc",
            "/wake_up?tags=kv_cache",
            "/reset_prefix_cache",
            "/resume",
        ]
        assert not fake.asleep and not fake.paused
        sampler.publish(2, policy.save)  # as it is awake, it is paused

        # One that cannot fall asleep, or get its memory back, says so: the folder is not the cause.
        fake.script = [("/sleep?level=2", 500)]
        with pytest.raises(InputError, match="HTTP 500.*did not fall asleep: its log"):
            sampler.rest()
        sampler.rest()
        for tag in ("weights", "kv_cache"):
            fake.script = [(f"/wake_up?tags={tag}", 500)]
            with pytest.raises(InputError, match="did not wake.*lower its --gpu-memory-util") as no:
                sampler.publish(3, policy.save)
            assert "published_dir" not in str(no.value) and fake.asleep

        # One whose update fails stays asleep, and the next run wakes it.
        fake.script = [("/collective_rpc", 500)]
        with pytest.raises(InputError, match="HTTP 500.*did not load the weights"):
            sampler.publish(3, policy.save)
        assert fake.paused and fake.asleep == {"kv_cache"}
        served.sampler_of([fake.url], policy, tmp_path, sleeps=True).publish(3, policy.save)
        assert not fake.asleep and not fake.paused


def test_the_trainers_cache_is_empty_before_a_server_wakes(folders, tmp_path, monkeypatch):
    policy = served.Policy(folders[1])
    asleep = []
    with fake_server.serving("vllm", folders[0]) as fake:
        sampler = served.sampler_of([fake.url], policy, tmp_path, sleeps=True)
        sampler.publish(0, policy.save)
        sampler.rest()
        emptied = lambda: asleep.append((sorted(fake.asleep), len(list(tmp_path.glob("*/step-1")))))  # noqa: E731
        monkeypatch.setattr(torch.cuda, "empty_cache", emptied)
        sampler.publish(1, policy.save)
    assert asleep == [(["kv_cache", "weights"], 1)]


def test_servers_that_cannot_sleep_are_refused(folder, tmp_path):
    policy = served.Policy(folder)
    for kind, message in (("sglang", "is for vLLM"), ("vllm", "start .* --enable-sleep-mode")):
        with fake_server.serving(kind, folder) as fake:
            fake.can_sleep = False
            with pytest.raises(InputError, match=message):
                served.sampler_of([fake.url], policy, tmp_path, sleeps=True)
            # One that sleeps needs no such flag, and a server that says nothing of itself may have it.
            fake.script = [("/server_info?config_format=json", 404)]
            if kind == "vllm":
                served.sampler_of([fake.url], policy, tmp_path, sleeps=True)


# Where weights are published.


def test_weights_go_to_shared_memory_where_all_servers_are_here(folder, tmp_path, monkeypatch):
    lm = tiny.load_lm(served.GRPOConfig(model=folder, dataset="", output_dir="")).base
    memory, run, other = (tmp_path / name for name in ("memory", "run", "other"))
    for made in (memory, run, other):
        made.mkdir()
    monkeypatch.setattr(published, "SHARED_MEMORY", memory)
    size = sum(weight.numel() * 4 for weight in lm.parameters())
    free = [3 * size]
    usage = lambda path: SimpleNamespace(free=free[0])  # noqa: E731
    monkeypatch.setattr(published.shutil, "disk_usage", usage)
    here = [
        "http://127.0.0.1:8000",
        "http://LOCALHOST:1",
        f"http://{socket.gethostname()}",
        "http://[::1]:8",
    ]

    found = published.folder_of(here, None, run, lm)
    assert found.parent == memory and found == published.folder_of(here, None, run, lm)
    assert found != published.folder_of(here, None, other, lm)
    # What a killed run has left there goes first.
    (found / "step-3").mkdir()
    published.folder_of(here, None, run, lm)
    assert found.is_dir() and list(found.iterdir()) == []

    # Machines of one image may share a disk, and number their folders alike.
    with monkeypatch.context() as patch:
        patch.setattr(published.socket, "gethostname", lambda: "another")
        assert published.folder_of(here[:1], None, run, lm).name != found.name

    # Otherwise weights stay in the run's folder: without room, for another machine, without shared memory.
    free[0] = 2 * size
    assert published.folder_of(here, None, run, lm) == run / "published"
    free[0] = 3 * size
    assert published.folder_of([*here, "http://10.0.0.1"], None, run, lm) == run / "published"
    given = published.folder_of(["http://10.0.0.1"], str(tmp_path / "given"), run, lm)
    assert given == tmp_path / "given" / found.name
    # And with what somebody else has put there, which stays.
    (other / "kept").touch()
    found.symlink_to(other)
    assert published.folder_of(here, None, run, lm) == run / "published"
    assert list(other.iterdir()) == [other / "kept"]
    monkeypatch.setattr(published, "SHARED_MEMORY", tmp_path / "none")
    assert published.folder_of(here, None, run, lm) == run / "published"


# A tied head.


def test_a_tied_head_is_refused_by_a_vllm_on_a_cpu_alone(tmp_path):
    folder = tiny.model_folder(tmp_path / "tied", tie=True)
    policy = served.Policy(folder)
    with fake_server.serving("vllm", folder, device="cpu") as fake:
        with pytest.raises(InputError, match="would keep the old LM head.*serve it on a GPU"):
            served.sampler_of([fake.url], policy, tmp_path / "run")
        assert fake.bodies("/collective_rpc") == []
    with fake_server.serving("vllm", folder, device="cuda") as fake:
        sampler = served.sampler_of([fake.url], policy, tmp_path / "run")
        for step in range(2):
            policy.change(step)
            sampler.publish(step, policy.save)  # the probe verifies the head


# The probe.

QUERIES = "model.layers.0.self_attn.q_proj.weight"
RUN = Sampling(0.9, 1, ())
FOUND = {
    "raw": "not the policy's .*raw log-probabilities; start it with .*(--logprobs-mode proc|ORIGINAL_LOGPROB unset)",
    "warm": "not the policy's .*weights, temperature, dtype",
    "deaf": "not the policy's .*weights, temperature, dtype",
    "stale": "only after the long prompt, which is cached: start it with --.*cac",
    "unseeded": "one seed gave two different responses; start it with",
    "unfinished": "a response ended by 'length' after 2 of 16 tokens",
    "partial": "not the policy's",
}


FAST = [("vllm", None, 2), ("vllm", "stale", 2), ("vllm", "raw", 0), ("vllm", "unseeded", 0)]
MORE = [("sglang", flaw, 0) for flaw in (None, *FOUND)]
MORE += [("vllm", flaw, 2) for flaw in ("warm", "deaf", "unfinished", "partial")]


@pytest.mark.parametrize(
    ("kind", "flaw", "begins"), [*FAST, *(pytest.param(*case, marks=SLOW) for case in MORE)]
)
def test_the_probe_detects(kind, flaw, begins, folders, tmp_path):
    policy = served.Policy(folders[1])
    with fake_server.serving(kind, folders[0], max_model_len=512) as fake:
        sampler = served.sampler_of([fake.url], policy, tmp_path, sampling=RUN)
        for step in range(3):
            if step == begins and flaw == "partial":
                policy.left_out = (QUERIES,)
            elif step == begins and flaw is not None:
                fake.flaws = {flaw}
            policy.change(step)
            if flaw is not None and step == begins:
                with pytest.raises(
                    InputError, match=f"server {fake.url} .*{FOUND[flaw]}"
                ) as refused:
                    sampler.publish(step, policy.save)
                assert "\n" not in str(refused.value)
                return
            sampler.publish(step, policy.save)
        assert flaw is None


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=SLOW)])
def test_the_probe_of_truncated_sampling(kind, folders, tmp_path):
    policy = served.Policy(folders[1])
    with fake_server.serving(kind, folders[0]) as fake:
        sampler = served.sampler_of([fake.url], policy, tmp_path, sampling=TRUNCATED)
        sampler.publish(0, policy.save)
        fake.flaws = {"no sets"}
        with pytest.raises(
            InputError, match="no kept sets, which top_p, top_k and min_p need; start it with "
        ):
            sampler.publish(1, policy.save)


@pytest.mark.slow
def test_in_16_bits_a_larger_difference_on_average_is_allowed(folders, tmp_path, monkeypatch):
    policy = served.Policy(folders[1])
    with fake_server.serving("vllm", folders[0]) as fake:
        draw, off = fake.draw, [0.04]
        lower = lambda found: found | {"logprobs": [value - off[0] for value in found["logprobs"]]}  # noqa: E731
        monkeypatch.setattr(fake, "draw", lambda *args: lower(draw(*args)))
        sampler = served.sampler_of([fake.url], policy, tmp_path, exact=False)
        sampler.publish(0, policy.save)
        off[0] = 0.06
        with pytest.raises(
            InputError,
            match=r"mean -0.06, mean of sizes 0.06, .*allowed: 0.05 on average, in 16 bits",
        ):
            sampler.publish(1, policy.save)
        with pytest.raises(InputError, match="allowed: 0.001 at most, in fp32"):
            served.sampler_of([fake.url], policy, tmp_path).publish(2, policy.save)


# The sampler.

PROMPTS = [[1, 70, 71]] * 2 + [[1, 80]] * 2 + [[1, 90, 91]] * 2 + [[1, 60]] * 2


@pytest.fixture
def pair(folder):
    """A server of each kind."""
    with fake_server.serving("vllm", folder) as one, fake_server.serving("sglang", folder) as other:
        yield [one, other]


def test_prompts_go_to_the_servers_in_turn_and_a_rollout_repeats(
    pair, folder, tmp_path, monkeypatch
):
    policy = served.Policy(folder)
    sampler = served.sampler_of([fake.url for fake in pair], policy, tmp_path)
    sampler.publish(4, policy.save)
    sampling = Sampling(0.9, 5, (3,), seeds=tuple(range(100, 108)))
    shares = [sorted(PROMPTS[:2] + PROMPTS[4:6]), sorted(PROMPTS[2:4] + PROMPTS[6:])]
    for rank in (1, 0):  # each begins with another server
        monkeypatch.setattr(ranks, "process", lambda rank=rank: rank)
        for fake in pair:
            fake.calls.clear()
        first = sampler.sample(PROMPTS, sampling)
        sent = [body["prompt"] for body in pair[0].bodies("/v1/completions")]
        assert sorted(sent) == shares[rank]
        sent = [body["input_ids"] for body in pair[1].bodies("/generate")]
        assert sorted(sent) == shares[1 - rank]
    assert sampler.sample(PROMPTS, sampling) == first


@pytest.mark.slow
def test_the_last_folder_stays_until_all_servers_have_the_next(pair, folder, tmp_path):
    policy = served.Policy(folder)
    sampler = served.sampler_of([fake.url for fake in pair], policy, tmp_path)
    sampler.publish(0, policy.save)
    (tmp_path / "published" / "mine").mkdir()
    pair[1].script = [("/update_weights_from_disk", 500)]
    with pytest.raises(InputError, match="HTTP 500"):
        sampler.publish(1, policy.save)
    assert sorted(path.name for path in (tmp_path / "published").iterdir()) == [
        "mine",
        "step-0",
        "step-1",
    ]
    sampler.publish(2, policy.save)
    assert sorted(path.name for path in (tmp_path / "published").iterdir()) == ["mine", "step-2"]


def test_a_cancelled_update_resumes_its_server(pair, folder, tmp_path):
    policy = served.Policy(folder)
    sampler = served.sampler_of([fake.url for fake in pair], policy, tmp_path)
    pair[0].script, pair[1].script = (
        [("/collective_rpc", "hang")],
        [("/update_weights_from_disk", 500)],
    )
    with pytest.raises(InputError, match="HTTP 500"):
        sampler.publish(0, policy.save)
    assert not pair[0].paused


def test_a_server_with_too_little_room_is_refused(pair, folder, tmp_path):
    with pytest.raises(
        InputError, match="room for 126 tokens, but .* are 127 together; give it a length of 129;"
    ):
        served.sampler_of([fake.url for fake in pair], served.Policy(folder), tmp_path, longest=127)
