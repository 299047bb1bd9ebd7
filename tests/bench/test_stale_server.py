"""bench/repro/stale_server.py: what its committed results show; the server itself is asked by hand."""

import copy

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


@pytest.mark.parametrize("change", [{"said": "all checks pass"}, {"max_abs": 1e-4}])
def test_a_trap_that_is_missed_or_harmless_is_refused(rows, change):
    changed = copy.deepcopy(rows)
    sprung = next(row for row in changed if not row["trap"].startswith("none"))
    sprung |= change
    with pytest.raises(AssertionError):
        stale_server.check(changed)
