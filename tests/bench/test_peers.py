"""Peers are called as their packages ask, and what is missing is said."""

import sys

from bench import peers


def test_a_peer_that_cannot_run_is_listed_with_the_reason(monkeypatch):
    imported = [name for name in sys.modules if name.partition(".")[0] == "trl"]
    for name in {"trl", *imported}:
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    running, missing = peers.find(peers.LOGPROBS, "cpu", op="token_logprobs")
    assert "plain torch" in [p.name for p in running]
    found = {row["implementation"]: (row["op"], row["status"], row["reason"]) for row in missing}
    assert found["Liger GRPO loss"] == (
        "token_logprobs",
        "cannot run",
        "its Triton kernels need a GPU",
    )
    assert "TRL" in found
