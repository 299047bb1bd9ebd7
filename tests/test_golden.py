"""The golden run: ten steps of each trainer give the weights and metrics that they gave before."""

import json

import pytest

from tests import digests

STORED = json.loads(digests.STORED.read_text())
# One case of each kind is fast; the others differ from it in the ZeRO stage or in what is sampled.
FAST = {"sft-packed", "reward-zero0", "grpo-zero0", "ppo-zero2"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The models and rows of all cases."""
    folder = tmp_path_factory.mktemp("golden")
    digests.make_files(folder)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in digests.CASES
    ],
)
def test_weights_and_metrics_are_what_they_were(name, files, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    exact = STORED["code_path"] == digests.code_path() and name in STORED["cases"]
    found = digests.of_case(name, files)
    kinds = [
        kind for kind in (("cases",) if exact else ("cases", "elsewhere")) if name in STORED[kind]
    ]
    options = {"exact": exact, "tolerance": digests.tolerance(name)}
    differing = [list(digests.differences(STORED[kind][name], found, **options)) for kind in kinds]
    assert [] in differing, differing
