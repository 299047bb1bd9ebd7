"""Peers are called as their packages ask, and what is missing is said."""

import sys

from bench import peers
from tests.bench.cases import one_case


def test_a_peer_that_cannot_run_is_listed_with_the_reason(monkeypatch):
    imported = [name for name in sys.modules if name.partition(".")[0] == "trl"]
    for name in {"trl", *imported}:
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    running, missing = peers.find(peers.LOGPROBS, "cpu", op="token_logprobs")
    assert "plain torch" in [p.name for p in running]
    found = {row["implementation"]: (row["op"], row["status"], row["reason"]) for row in missing}
    assert found["Liger GRPO loss"] == ("token_logprobs", "cannot run", "its Triton kernels need a GPU")
    assert "TRL" in found


def test_a_peer_of_whole_sequences_takes_no_rows(monkeypatch):
    seen = []
    peer = peers.Peer(
        "whole", "0", lambda logits, targets, mask: seen.append((logits.shape, targets.shape)), whole=True
    )
    shifted = one_case(layout="shift", shape=(2, 4, 500))
    shifted.adapted(peer)(shifted.logits[0])
    assert seen == [((2, 4, 500), (2, 3))]
    case = one_case()
    monkeypatch.setattr(peers, "find", lambda *_, **__: ([peer], []))
    found, (missing,) = case.contenders("all")
    assert peer.name not in [other.name for other in found]
    assert (missing["status"], missing["reason"]) == ("cannot run", "takes whole (B, T, V) logits alone")
