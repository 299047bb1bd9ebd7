"""The trainers are tested on the CPU path: the interpreter would only be slow here, and tests/ covers the kernels."""

import os
import random
from collections import Counter

import pytest

# Of the random moments in test_faults.py, the same for all processes of a session; it is printed at the end.
os.environ.setdefault("FUSED_RL_FAULT_SEED", str(random.SystemRandom().randrange(10**6)))


@pytest.fixture(autouse=True)
def cpu_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture
def tally(request):
    """`tally(kind, outcome)` counts a fault that was tried, for the table at the end of the session."""

    def count(kind: str, outcome: str) -> None:
        request.node.user_properties.append(("fault", (kind, outcome)))

    return count


def pytest_terminal_summary(terminalreporter):
    """How many faults of each kind were tried, and what came of them."""
    reports = sum(terminalreporter.stats.values(), [])
    called = [report for report in reports if getattr(report, "when", None) == "call"]
    properties = sum((report.user_properties for report in called), [])
    outcomes = Counter(tuple(value) for name, value in properties if name == "fault")
    kinds = dict.fromkeys(kind for kind, _ in outcomes)
    for kind in kinds:
        of_kind = {outcome: count for (k, outcome), count in sorted(outcomes.items()) if k == kind}
        said = ", ".join(f"{count} {outcome}" for outcome, count in of_kind.items())
        terminalreporter.write_line(f"{kind}: {sum(of_kind.values())} tried: {said}")
