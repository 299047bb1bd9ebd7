"""Bytes that our ops move, in multiples of the logits' size: 1 read forward, 1 read and 1 write backward, no more."""

import pytest
import torch

import fused_rl
from bench import traffic

SHAPE = (1, 8, 50257)  # B, T, V
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="bytes are counted in Triton's interpreter"
)


@pytest.mark.slow  # fast: half of the rows, below, and of divergences the segments in tests/test_kl.py
@pytest.mark.parametrize("what", traffic.ours())
def test_ours_move_no_more_than_the_floor(what):
    # At a vocabulary that 16 does not divide, token_kl asks for each 16 bytes twice, of which the cache has the second.
    shape = (1, 8, 50256) if what == "token_kl" else SHAPE
    run, forward, backward = traffic.ours(shape)[what]
    logits, targets = traffic.inputs(shape)
    counts = traffic.count(lambda x: run(x, targets), logits)
    # What is kept per row (a target, five numbers) is below 0.001 of a row of 50257 bf16 logits; a loss is some 60
    # small operators on (B, T), which the vocabulary makes vanish.
    # And some 120 bytes per target.
    slack = 2e-2 if "policy_loss" in what or "8 targets" in what else 2e-3
    assert sum(counts["forward"]) == pytest.approx(forward, abs=slack)
    assert sum(counts["backward"]) == pytest.approx(backward, abs=slack)


def test_half_masked_reads_half():
    logits, targets = traffic.inputs(SHAPE)
    mask = torch.arange(8).expand(1, 8) % 2 == 0
    counts = traffic.count(lambda x: fused_rl.token_logprobs(x, targets, mask=mask)[:2], logits)
    assert counts["forward"][0] == pytest.approx(0.5, abs=2e-3)
    assert counts["backward"] == [pytest.approx(0.5, abs=2e-3), pytest.approx(1.0, abs=2e-3)]
