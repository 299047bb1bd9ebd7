"""Weights that a server takes from a folder: pause, read, forget prompts, version, resume, once and not again."""

import pytest
import torch

from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.kinds import connect
from tests.trainers import fake_server, tiny
from tests.trainers.served import DRAWN, PROMPT, QUICK, logprobs, model_of

UPDATE = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}


@pytest.fixture
def other(tmp_path):
    """A folder with other weights."""
    return tiny.model_folder(tmp_path / "other", seed=1)


PUSHED = {
    "vllm": ["/is_paused", "/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"],
    "sglang": ["/is_paused", "/pause_generation", "/update_weights_from_disk", "/continue_generation", "/model_info"],
}
PUSHED["vllm"] += ["/resume", "/weight_info"]


def test_a_push_gives_it_the_weights_and_their_version(fake, server, other, tmp_path):
    prompt = PROMPT * 10
    server.sample(prompt, 1, Sampling(0.0, 5, ()), None)  # what it keeps of this is of the old weights
    before = len(fake.asked)
    assert server.version() is None
    server.push(tmp_path / "other", 7)
    assert [path for path, _ in fake.asked[before + 1 :]] == PUSHED[fake.kind]
    if fake.kind == "vllm":
        expected = {"method": "reload_weights", "kwargs": {"weights_path": other}}
    else:
        expected = {"model_path": other, "flush_cache": True, "weight_version": "7"}
    assert fake.bodies(UPDATE[fake.kind]) == [expected]

    # The new weights, for prompts that were asked before too.
    assert server.version() == 7 and not fake.paused
    (response,) = server.sample(prompt, 1, Sampling(0.0, 5, ()), None)
    assert response.weight_version == 7
    expected = logprobs(model_of(other), prompt, response.ids)
    torch.testing.assert_close(torch.tensor(response.logprobs).double(), expected, atol=1e-5, rtol=0)


def test_a_server_of_an_earlier_version_tells_none_with_its_responses(folder, other, tmp_path):
    with fake_server.serving("vllm", folder, tells_versions=False) as fake:
        server = connect(fake.url, **QUICK)
        server.push(tmp_path / "other", 7)
        assert server.sample(PROMPT, 1, DRAWN, [0])[0].weight_version is None and server.version() == 7


FAILS = {
    "vllm": [
        ("/pause?mode=wait", 404, "HTTP 404.*started with VLLM_SERVER_DEV_MODE=1"),
        ("/pause?mode=wait", "cut", "no answer: IncompleteRead"),  # though it was heard
        ("/collective_rpc", 404, "HTTP 404.*started with VLLM_SERVER_DEV_MODE=1"),
        ("/collective_rpc", 500, "HTTP 500.*did not read the weights in /.*; does it see that folder"),
        ("/collective_rpc", "cut", "no answer: IncompleteRead.*did not read the weights"),
        (
            "/reset_prefix_cache",
            lambda right: {"success": False},
            "did not empty its prefix cache .*--no-enable-prefix",
        ),
        ("/reset_prefix_cache", lambda right: None, "did not empty its prefix cache"),
        ("/update_weight_version", 500, "HTTP 500"),
        ("/resume", 500, "HTTP 500"),
        ("/weight_info", lambda right: {"weight_version": "6"}, "version 7 was pushed, but it says .* are of '6'"),
        ("/weight_info", lambda right: None, "are of None"),
    ],
    "sglang": [
        ("/pause_generation", "close", "no answer"),
        (
            "/update_weights_from_disk",
            lambda right: {"success": False, "message": "no"},
            "did not read .*: no; does",
        ),
        ("/update_weights_from_disk", 500, "HTTP 500"),
        ("/update_weights_from_disk", 404, "HTTP 404.*an SGLang that has /update_weights_from_disk"),
        ("/continue_generation", 500, "HTTP 500"),
        ("/model_info", lambda right: {"weight_version": "6"}, "version 7 was pushed, but it says .* are of '6'"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "path", "wrong", "message"),
    [(kind, *case) for kind, cases in FAILS.items() for case in cases],
    ids=[f"{kind}-{case[0]}-{number}" for kind, cases in FAILS.items() for number, case in enumerate(cases)],
)
def test_a_push_that_fails_is_not_tried_again(folder, other, tmp_path, kind, path, wrong, message):
    with fake_server.serving(kind, folder) as fake:
        server = connect(fake.url, **QUICK)
        fake.script = [(path, wrong)]
        with pytest.raises(InputError, match=message) as refused:
            server.push(tmp_path / "other", 7)
        assert "\n" not in str(refused.value)
        assert len(fake.bodies(UPDATE[kind])) <= 1
        resumed = path in ("/resume", "/continue_generation")  # the call itself that failed
        assert fake.paused == resumed
        refused = "/pause" in path and wrong == 404  # what may be paused then is so for somebody else
        assert bool(fake.bodies("/resume") + fake.bodies("/continue_generation")) != refused


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"ranks": 3},
        {"ranks": [], "success": False},
        {"ranks": [3]},
        {"ranks": [{}]},
        {"ranks": [{"checksums": 3}]},
    ],
    ids=str,
)
def test_digests_in_another_form_are_a_line(fake, server, answer):
    told = {"success": True} | answer if isinstance(answer, dict) else answer
    fake.script = [("/weight_checker", lambda right: told), ("/weights_checker", lambda right: told)]
    with pytest.raises(InputError, match="an answer without (ranks|checksums): "):
        server.digests()


def test_digests_are_of_every_tensor(fake, server, other, tmp_path):
    before = server.digests()
    server.push(tmp_path / "other", 1)
    after = server.digests()
    assert before.keys() == after.keys() and any("qkv_proj" in name for name in after)
    same = {name for name in after if "norm" in name or name.endswith("bias")}  # ones and zeros, in both
    assert {name for name in after if after[name] == before[name]} == same
    fake.flaws = {"mute"}
    assert server.digests() is None
