"""The table of releases has those that `make test-releases` runs and the patches know."""

import importlib

import pytest

from fused_rl.integrations.patching import PATCHES
from tests.releases import __main__ as releases


def test_the_table_has_every_release_that_is_run():
    assert list(releases.rows()) == [
        f"{release.host} {release.version}" for release in releases.RELEASES
    ]


@pytest.mark.parametrize("host", ["trl", "verl", "openrlhf", "transformers"])
def test_every_minor_version_that_a_patch_knows_is_run(host):
    importlib.import_module(f"fused_rl.integrations.{host}")
    run = {release.version for release in releases.RELEASES if release.host == host}
    minors = {tuple(map(int, version.split(".")[:2])) for version in run}
    (major,) = {version[0] for version in minors}
    known = {(major, n) for n in range(100) if PATCHES[host].knows(f"{major}.{n}.0")}
    assert known == minors and all(map(PATCHES[host].knows, run))
