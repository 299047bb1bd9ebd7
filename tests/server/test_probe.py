"""A real vLLM that is right passes the probe, and one that a run cannot use is refused."""

import pytest

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from tests.server import models
from tests.trainers import served

pytestmark = pytest.mark.server
RUN = Sampling(0.7, 8, ())


def verify(servers, folders, tmp_path, *, sampling=RUN, flags=()):
    """Publish the policy of the first folder to a server that had the second one's weights, twice."""
    servers.holding(folders[1], *flags)
    policy = served.Policy(folders[0])
    sampler = served.sampler_of(
        [servers(*flags).url], policy, tmp_path / "run", sampling=sampling, longest=300
    )
    sampler.publish(0, policy.save)
    policy.change(1)
    sampler.publish(1, policy.save)


@pytest.mark.parametrize("sampling", [RUN, Sampling(1.0, 8, (5,))], ids=str)
def test_a_server_that_is_right_passes(servers, folders, tmp_path, sampling):
    verify(servers, folders, tmp_path, sampling=sampling)


def test_kept_sets_that_it_cannot_report(servers, folders, tmp_path):
    with pytest.raises(InputError, match="HTTP 403: .*--enable-scale-out"):
        verify(servers, folders, tmp_path, sampling=Sampling(1.0, 8, (), top_p=0.9, top_k=20))


def test_less_room_than_the_run_needs(servers, folders, tmp_path):
    url = servers().url
    with pytest.raises(
        InputError,
        match=f"room for {models.POSITIONS} tokens.*give it a length of 513; start it with",
    ):
        served.sampler_of([url], served.Policy(folders[0]), tmp_path, longest=models.POSITIONS + 1)


def test_raw_log_probabilities(servers, folders, tmp_path):
    with pytest.raises(
        InputError, match="are not the policy's .*--logprobs-mode processed_logprobs"
    ):
        verify(servers, folders, tmp_path, flags=("--logprobs-mode", "raw_logprobs"))
