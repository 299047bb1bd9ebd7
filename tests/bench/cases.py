"""What the tests of the benchmark measure."""

from bench import run
from bench.cases.case import Spec
from bench.cases.logprobs import LogprobsCase


def one_case(layout="rows", shape=(6, 500), fraction=0.0):
    return LogprobsCase(Spec(shape, "bf16", fraction, layout), "cpu")


def checked(case, peer):
    """Errors of one pass."""
    once = run.run_once(case, peer)
    return case.errors(peer, once.outputs, once.gradient)


def contend(monkeypatch, case, *found):
    monkeypatch.setattr(case, "contenders", lambda wanted: (list(found), []))
