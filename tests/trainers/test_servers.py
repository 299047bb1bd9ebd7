"""Inference servers of both kinds: calls, weight updates, the probe, whole runs, with scripted faults."""

import copy
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fused_rl.trainers import grpo
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.policy import policy as policies
from fused_rl.trainers.rollouts.mismatch import check_bound
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.run import store
from fused_rl.trainers.servers import published
from fused_rl.trainers.servers.inference import Http
from tests.marks import SLOW
from tests.trainers import fake_server, runs, served, tiny

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


# What goes wrong with a request for a response, the line, and how often it may before it ends the run.
FAULTS = [
    (500, "HTTP 500: .*as the script says.{2}$", 3),
    ("close", "no answer: .*is the server up", 3),
    (400, "HTTP 400: .*as the script says.*must serve the model that is trained", 1),
    (b"<html>", "the answer is not JSON: <html>", 1),
    (lambda right: {}, "an answer of an unknown form", 1),
    (cut_to([], "abort"), "ended by 'abort' after 0 of 5 tokens, at no stop token", 1),
    (cut_to([9, 9], "length"), "ended by 'length' after 2 of 5.*has no room; start it w", 1),
]


@pytest.mark.parametrize(("wrong", "message", "times"), FAULTS)
def test_faults_of_one_answer(fake, server, wrong, message, times):
    (expected,) = served.sampled(server, PROMPT, SAMPLING, 0)
    fake.script = [(SAMPLE[fake.kind], wrong)] * (times - 1)  # repeated as often
    assert served.sampled(server, PROMPT, SAMPLING, 0) == [expected] and fake.script == []
    fake.script = [(SAMPLE[fake.kind], wrong)] * (times + 1)  # and no more often
    with pytest.raises(InputError, match=message) as refused:
        served.sampled(server, PROMPT, SAMPLING, 0)
    assert len(fake.script) == 1
    assert fake.url in str(refused.value) and "\n" not in str(refused.value)


def test_a_silent_server_ends_in_an_error(fake):
    server = served.connected(fake, timeout=0.5)
    fake.script = [(SAMPLE[fake.kind], "hang")] * 2
    with pytest.raises(InputError, match="no answer: ReadTimeout.*--server_timeout 0.5"):
        served.sampled(server, PROMPT, SAMPLING, 0)


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


def with_card(**changed):
    return lambda answer: {"data": [answer["data"][0] | changed]}


# The kind of a server, what is wrong with it, options of the sampler, and the line.
REFUSED = [
    ("vllm", {"script": [("/is_paused", 404)]}, {}, "calls that load weights.*VLLM_SERVER_DEV_MO"),
    ("vllm", {"paused": True}, {}, "is paused or asleep.*POST .*/wake_up"),
    ("vllm", {"script": [("/v1/models", 404)]}, {}, "/v1/models: HTTP 404"),
    ("vllm", {"script": [("/v1/models", with_card(owned_by="l"))]}, {}, "neither vLLM nor SGLang"),
    ("vllm", {}, {"longest": 129}, "room for 128 tokens, but .* are 129 together; .* length of"),
    ("sglang", {}, {"sleeps": True}, "is for vLLM"),
    ("vllm", {"can_sleep": False}, {"sleeps": True}, "start .* --enable-sleep-mode"),
]


@pytest.mark.parametrize(("kind", "wrong", "options", "message"), REFUSED)
def test_a_server_that_cannot_serve_is_refused_when_the_run_begins(
    kind, wrong, options, message, folder, tmp_path
):
    with fake_server.serving(kind, folder) as fake:
        vars(fake).update(copy.deepcopy(wrong))
        with pytest.raises(InputError, match=message):
            served.sampler_of([fake.url], served.Policy(folder), tmp_path, **options)
        assert fake.bodies(SAMPLE[kind]) == []


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
        (lambda right: {"success": False}, "'success': False.*did not load the weights"),
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
    assert "HTTP 410" not in str(refused.value) and fake.script == []


# Sleep.


def test_a_server_sleeps_until_new_weights_come(folders, tmp_path, monkeypatch):
    """And wakes into a GPU from which the trainer's cache has gone."""
    policy, emptied = served.Policy(folders[1]), []
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
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append({*fake.asleep}))
        sampler.publish(1, policy.save)  # the probe verifies the weights
        assert emptied == [{"weights", "kv_cache"}]
        assert [path for path, _ in fake.calls[before:]][:5] == [
            "/wake_up?tags=weights",
            "/collective_rpc",
            "/wake_up?tags=kv_cache",
            "/reset_prefix_cache",
            "/resume",
        ]
        assert not fake.asleep and not fake.paused
        sampler.publish(2, policy.save)  # as it is awake, it is paused

        # The next run wakes a server whose update has failed.
        for path in ("/sleep?level=2", "/wake_up?tags=weights", "/collective_rpc"):
            fake.script = [(path, 500)]
            with pytest.raises(InputError, match="HTTP 500"):
                sampler.rest()
                sampler.publish(3, policy.save)
        assert fake.asleep
        served.sampler_of([fake.url], policy, tmp_path, sleeps=True).publish(3, policy.save)
        assert not fake.asleep and not fake.paused


# Where weights are published.


def test_weights_go_to_shared_memory_where_all_servers_are_here(folder, tmp_path, monkeypatch):
    lm = tiny.load_lm(served.GRPOConfig(model=folder, dataset="", output_dir="")).base
    memory, run, other = (tmp_path / name for name in ("memory", "run", "other"))
    for made in (memory, run, other):
        made.mkdir()
    monkeypatch.setattr(published, "SHARED_MEMORY", memory)
    size = sum(weight.numel() * 4 for weight in lm.parameters())
    usage = SimpleNamespace(free=3 * size)
    monkeypatch.setattr(published.shutil, "disk_usage", lambda path: usage)
    names = "127.0.0.1:8000", "LOCALHOST:1", socket.gethostname(), "[::1]:8"
    here = [f"http://{name}" for name in names]

    def folder_of(servers=here, folder=None, output_dir=run):
        return published.folder_of(servers, folder, output_dir, lm)

    found = folder_of()
    assert found.parent == memory and found == folder_of()
    assert found != folder_of(output_dir=other)
    # What a killed run has left there goes first.
    (found / "step-3").mkdir()
    folder_of()
    assert found.is_dir() and list(found.iterdir()) == []

    # Machines of one image may share a disk, and number their folders alike.
    with monkeypatch.context() as patch:
        patch.setattr(published.socket, "gethostname", lambda: "another")
        assert folder_of(here[:1]).name != found.name
    there = folder_of(["http://10.0.0.1"], str(tmp_path / "given"))
    assert there == tmp_path / "given" / found.name

    # Otherwise weights stay in the run's folder: for another machine, without room, without shared memory.
    inside = run / "published"
    assert folder_of([*here, "http://10.0.0.1"]) == inside
    usage.free = 2 * size
    assert folder_of() == inside
    usage.free = 3 * size
    (other / "kept").touch()
    found.symlink_to(other)  # somebody else's
    assert folder_of() == inside and (other / "kept").exists()
    monkeypatch.setattr(published, "SHARED_MEMORY", tmp_path / "none")
    assert folder_of() == inside


# The probe.

QUERIES = "model.layers.0.self_attn.q_proj.weight"
RUN = Sampling(0.9, 1, ())
FOUND = {
    "raw": "not the policy's .*raw log-probabilities; start it with ",
    "warm": "not the policy's .*weights, temperature, dtype",
    "deaf": "not the policy's .*weights, temperature, dtype",
    "stale": "only after the long prompt, which is cached: start it with --.*cac",
    "unseeded": "one seed gave two different responses; start it with",
    "unfinished": "a response ended by 'length' after 2 of 16 tokens",
    "partial": "not the policy's",
    "no sets": "no kept sets, which top_p, top_k and min_p need; start it with ",
}
QUICK = {"stale", "raw", "unseeded", "no sets"}
FLAWS = [flaw if flaw in QUICK else pytest.param(flaw, marks=SLOW) for flaw in FOUND]


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=SLOW)])
@pytest.mark.parametrize("flaw", FLAWS)
def test_the_probe_detects(kind, flaw, folders, tmp_path):
    policy, sampling = served.Policy(folders[1]), TRUNCATED if flaw == "no sets" else RUN
    with fake_server.serving(kind, folders[0], max_model_len=512) as fake:
        sampler = served.sampler_of([fake.url], policy, tmp_path, sampling=sampling)
        for step in range(2):
            policy.change(step)
            sampler.publish(step, policy.save)
        policy.change(2)
        policy.left_out, fake.flaws = (QUERIES,) if flaw == "partial" else (), {flaw}
        with pytest.raises(InputError, match=f"server {fake.url} .*{FOUND[flaw]}") as refused:
            sampler.publish(2, policy.save)
        assert "\n" not in str(refused.value)


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
        monkeypatch.setattr(ranks, "process_index", lambda rank=rank: rank)
        for fake in pair:
            fake.calls.clear()
        first = sampler.sample(PROMPTS, sampling)
        sent = [body["prompt"] for body in pair[0].bodies("/v1/completions")]
        assert sorted(sent) == shares[rank]
        sent = [body["input_ids"] for body in pair[1].bodies("/generate")]
        assert sorted(sent) == shares[1 - rank]
    assert sampler.sample(PROMPTS, sampling) == first


def test_an_update_that_fails_cancels_the_others_and_keeps_the_last_folder(pair, folder, tmp_path):
    policy = served.Policy(folder)
    sampler = served.sampler_of([fake.url for fake in pair], policy, tmp_path)
    sampler.publish(0, policy.save)
    (tmp_path / "published" / "mine").mkdir()
    pair[0].script = [(UPDATE["vllm"], "hang")]
    pair[1].script = [(UPDATE["sglang"], 500)]
    with pytest.raises(InputError, match="HTTP 500"):
        sampler.publish(1, policy.save)
    assert not pair[0].paused
    names = lambda: sorted(path.name for path in (tmp_path / "published").iterdir())  # noqa: E731
    assert names() == ["mine", "step-0", "step-1"]
    sampler.publish(2, policy.save)
    assert names() == ["mine", "step-2"]


# Whole runs.

SMALL = {"save_every": 1, "max_prompt_length": 64}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"server_sleeps": True, "eval_size": 2}, {"lora_rank": 4}])
def test_a_run_learns_from_what_its_server_sampled(files, tmp_path, monkeypatch, options):
    """And lets it sleep while the policy is trained, and leaves nothing where weights are published."""
    monkeypatch.setenv("SERVER_KEY", "sk-secret")
    run, memory, asleep = tmp_path / "run", tmp_path / "memory", []
    take_step = policies.Policy.optimizer_step

    def stepped(self, step):
        asleep.append(bool(fake.asleep))
        return take_step(self, step)

    monkeypatch.setattr(policies.Policy, "optimizer_step", stepped)
    with fake_server.serving("vllm", files[0], key="sk-secret") as fake:
        given = options | {"server": [fake.url], "server_api_key_env": "SERVER_KEY"}
        given |= {"published_dir": str(memory), "steps": 2}
        grpo.train(runs.grpo_config(files, run, **SMALL, **given))
    assert asleep == ["server_sleeps" in options] * 4  # two minibatches in each step
    steps = [row for row in tiny.read_metrics(run) if "rollout/logprob_diff_max" in row]
    assert [row["rollout/weight_version"] for row in steps] == [0, 1]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in steps)
    folder, found = fake.loaded[-1]
    assert folder.name == "step-2" and folder.parent.parent == memory
    assert list(memory.iterdir()) == []
    if "lora_rank" in options:  # merged into what is published
        assert found.keys() == tiny.weights(Path(files[0])).keys()
    else:  # what was published last is the trained model
        model = tiny.weights(run / "model")
        assert model.keys() == found.keys()
        assert all(torch.equal(model[name], found[name]) for name in model)
    assert not any(b"sk-secret" in content for content in runs.contents(run).values())


@pytest.mark.slow
def test_responses_that_a_step_measures_otherwise_end_the_run(files, tmp_path):
    """The probe of a server passes, and then it samples otherwise."""
    with fake_server.serving("vllm", files[0]) as fake:
        draw = fake.draw

        def later(ids, chosen, most):
            # A rollout's responses; the probe's are longer.
            fake.flaws = {"warm"} if most == 6 else set()
            return draw(ids, chosen, most)

        fake.draw = later
        config = runs.grpo_config(files, tmp_path / "run", server=[fake.url], eval_size=0, **SMALL)
        with pytest.raises(InputError, match="of this step's responses are .* nats off the policy"):
            grpo.train(config)
    store.unlock()


def test_a_difference_of_log_probabilities_has_a_bound():
    for value, exact in ((9e-4, True), (0.04, False)):
        check_bound({"rollout/logprob_diff_abs": value}, exact)
    for value, exact in ((2e-3, True), (0.06, False), (float("nan"), False)):
        with pytest.raises(InputError, match="nats off"):
            check_bound({"rollout/logprob_diff_abs": value}, exact)


def trained_on_rank(rank, world, files, folder, url):
    """Return what a rank is told when the run ends with an error."""
    options = {"eval_size": 0, "zero_stage": 2, "max_prompt_length": 64}
    init = Http.__init__

    def quick(self, *args, **more):
        init(self, *args, **more)
        self.pause = 0.0

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Http, "__init__", quick)
            grpo.train(runs.grpo_config(files, folder, server=[url], **options))
    except InputError as error:
        return str(error)
    finally:
        store.unlock()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["/collective_rpc", "/v1/completions"])
def test_ranks_fail_together(files, tmp_path, wrong):
    with fake_server.serving("vllm", files[0]) as fake:
        reset, resets = fake.reset, []

        def later():
            reset()
            resets.append(1)
            if len(resets) == 2:  # in the second update
                fake.script = [(wrong, 500)] * 50

        fake.reset = later
        found = runs.on_ranks(trained_on_rank, 2, files, tmp_path / "run", fake.url)
    assert all(f"POST {fake.url}{wrong}: HTTP 500" in said for said in found), found
