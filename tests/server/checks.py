"""The ten checks, as the trainer makes them, of a policy that is the model of a folder."""

from pathlib import Path

import pytest

from fused_rl.trainers.options.errors import InputError
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.servers.digests import tensors_of
from fused_rl.trainers.servers.inference import Server
from fused_rl.trainers.servers.verify import Expected, Verifier, scored
from tests.trainers import served


def expected_of(folder: str, **other) -> Expected:
    """The policy of a folder, sampled at temperature 0.7."""
    return served.Policy(folder).expected(**{"sampling": Sampling(0.7, 8, ())} | other)


def verified(server: Server, expected: Expected, *pushed: str | Path) -> None:
    """Before, and after the push of each folder, which is step 0, 1, …"""
    verifier = Verifier(server, expected)
    verifier.before_pushes()
    for step, folder in enumerate(pushed):
        server.push(Path(folder), step)
        probes = verifier.after_push(Path(folder), step, tensors_of(Path(folder)))
        verifier.judge(probes, *scored(probes, expected.score), step)


def refused(message: str, server: Server, expected: Expected, *pushed: str | Path) -> None:
    """One of the checks finds it, and says so in a line."""
    with pytest.raises(InputError, match=message) as error:
        verified(server, expected, *pushed)
    assert "\n" not in str(error.value)
