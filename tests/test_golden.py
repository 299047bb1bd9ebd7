"""The golden run: ten steps of a trainer give the weights and metrics that they gave before.

These are one case of each kind. Those of all ZeRO stages and samplers are in tests/trainers/test_resume.py, which then
continues the same run.
"""

import pytest

from tests import digests


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The models and rows of all cases."""
    folder = tmp_path_factory.mktemp("golden")
    digests.make_files(folder)
    return folder


@pytest.mark.parametrize("name", ["sft-packed", "reward-zero0", "grpo-zero0", "ppo-zero2"])
def test_weights_and_metrics_are_what_they_were(name, files, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert digests.unlike_stored(name, digests.of_case(name, files)) == []
