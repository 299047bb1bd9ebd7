"""bench/repro/stale_server.py: what its committed results show; the server itself is asked by hand."""

import pytest

from bench import results
from bench.repro import stale_server


@pytest.fixture
def rows():
    return results.load(stale_server.RESULTS)["rows"]


def test_the_committed_results_are_of_every_trap(rows):
    shown = {row["trap"] for row in rows}
    assert shown == {trap.name for trap in stale_server.TRAPS} | set(stale_server.IN_TOKENS)
    stale_server.check(rows)
    lines = stale_server.table(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert not any("127.0.0.1" in line for line in lines)
