"""What a server gets wrong without an error, each made on purpose on a real vLLM, and detected by the probe."""

from pathlib import Path

import pytest

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from tests.server import models
from tests.trainers import served

pytestmark = pytest.mark.server
LACKING = "model.layers.1.mlp.down_proj.weight"
RUN = Sampling(0.7, 8, ())
OTHER = "log-probabilities after step 1 are not the policy's"


def verify(servers, folders, tmp_path, *, sampling=RUN, flags=(), wrong=None):
    """Publish the policy of the first folder to a server that had the second one's weights; `wrong` comes between."""
    servers.holding(folders[1], *flags)
    policy = served.Policy(folders[0])
    sampler = served.sampler_of([servers(*flags).url], policy, tmp_path / "run", sampling=sampling, longest=300)
    sampler.publish(0, policy.save)
    policy.change(1)
    if wrong is not None:
        wrong(sampler, policy)
    sampler.publish(1, policy.save)


def altered(**fields):
    """Return a fault: requests have other fields than the trainer sent; None leaves one out."""

    def alter(sampler, policy):
        call = sampler.http.call

        async def changed(method, url, body=None, **options):
            if body is not None and "prompt" in body:
                body = {name: value for name, value in (body | fields).items() if value is not None}
            return await call(method, url, body, **options)

        sampler.http.call = changed

    return alter


def forgetful(sampler, policy):
    """The prefix cache survives an update."""
    call = sampler.http.call

    async def kept(method, url, body=None, **options):
        if url.endswith("/reset_prefix_cache"):
            return {"success": True}
        return await call(method, url.replace("mode=wait", "mode=wait&clear_cache=false"), body, **options)

    sampler.http.call = kept


def partial(sampler, policy):
    """The folder lacks a tensor: the server keeps its old one."""
    policy.left_out = (LACKING,)


def deaf(sampler, policy):
    """The server loads another folder."""
    call = sampler.http.call

    async def elsewhere(method, url, body=None, **options):
        if body and body.get("method") == "reload_weights":
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(sampler.elsewhere)}}
        return await call(method, url, body, **options)

    sampler.http.call, sampler.elsewhere = elsewhere, Path(policy.folder)


FAULTS = {
    "stale cache": (forgetful, "only after the long prompt, which is cached: .*--no-enable-prefix-caching"),
    "a tensor is missing": (partial, OTHER),
    "other weights": (deaf, OTHER),
    "another temperature": (altered(temperature=0.9), OTHER),
    "seeds that are not read": (altered(seed=None), "one seed gave two different responses"),
}


@pytest.mark.parametrize("sampling", [RUN, Sampling(1.0, 8, (5,))], ids=str)
def test_a_server_that_is_right_passes(servers, folders, tmp_path, sampling):
    verify(servers, folders, tmp_path, sampling=sampling)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_detected(servers, folders, tmp_path, fault):
    wrong, message = FAULTS[fault]
    with pytest.raises(InputError, match=message) as error:
        verify(servers, folders, tmp_path, wrong=wrong)
    assert "\n" not in str(error.value)


def test_kept_sets_that_it_cannot_report(servers, folders, tmp_path):
    with pytest.raises(InputError, match="HTTP 403: .*--enable-scale-out"):
        verify(servers, folders, tmp_path, sampling=Sampling(1.0, 8, (), top_p=0.9, top_k=20))


def test_less_room_than_the_run_needs(servers, folders, tmp_path):
    url = servers().url
    with pytest.raises(InputError, match=f"room for {models.POSITIONS} tokens.*give it a length of 513; start it with"):
        served.sampler_of([url], served.Policy(folders[0]), tmp_path, longest=models.POSITIONS + 1)


def test_raw_log_probabilities(servers, folders, tmp_path):
    with pytest.raises(InputError, match="are not the policy's .*--logprobs-mode processed_logprobs"):
        verify(servers, folders, tmp_path, flags=("--logprobs-mode", "raw_logprobs"))
