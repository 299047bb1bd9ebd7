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


def test_counts_of_eager_operators_are_those_of_their_operands():
    # fp32 log-softmax of bf16 logits: the cast reads 1 and writes 2, log_softmax reads 2 and writes 2 (multiples of the
    # bf16 logits); backward: log_softmax 2 + 2 read and 2 written, cast 2 read and 1 written.
    logits, _ = traffic.inputs(SHAPE)
    counts = traffic.count(lambda x: (torch.log_softmax(x.float(), -1),), logits)
    assert counts["forward"] == [3, 4]
    assert counts["backward"] == [6, 3]


def test_a_copy_inside_our_operator_counts():
    # A last dimension whose stride is not 1 is copied: 1 read and 1 write more than for contiguous rows.
    logits, targets = traffic.inputs(SHAPE)
    turned = torch.empty_strided(logits.shape, (8 * 50257, 1, 8), dtype=logits.dtype).copy_(logits)
    with traffic.counted() as total:
        fused_rl.token_logprobs(turned, targets)
    size = logits.numel() * logits.element_size()
    assert [b / size for b in total] == [pytest.approx(2, abs=2e-3), pytest.approx(1, abs=2e-3)]
