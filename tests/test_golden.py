"""The golden run: ten steps of a trainer give the weights and metrics that they gave before."""

import pytest

from tests import digests

FAST = {"sft-packed", "reward-zero0", "grpo-zero0", "ppo-zero2"}
CASES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in digests.CASES
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The models and rows of all cases."""
    folder = tmp_path_factory.mktemp("golden")
    digests.make_files(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_weights_and_metrics_are_what_they_were(name, files, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert digests.unlike_stored(name, digests.of_case(name, files)) == []
