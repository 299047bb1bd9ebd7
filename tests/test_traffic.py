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


def slow(vocab):
    return pytest.param(vocab, marks=pytest.mark.slow)


VOCABULARIES = [32000, 50257, *map(slow, [32064, 128256, 151936, 152064, 256000, 262144])]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_no_more_than_a_twentieth_of_a_row_is_masked(vocab, monkeypatch):
    """Columns past the end are masked in the last windows of a row alone.

    In the backward pass every load has the mask of its row, and those of the end are of single columns.
    """
    from triton.runtime.interpreter import interpreter_builder

    loads = []  # (whether it is masked, bytes per element, bytes)

    def watch(name, masked):
        stock = getattr(interpreter_builder, name)

        def load(ptrs, *mask_and_rest):
            size = ptrs.dtype.element_ty.primitive_bitwidth // 8
            count = mask_and_rest[0].data.sum() if masked else ptrs.data.size
            before = len(loads)
            loaded = stock(ptrs, *mask_and_rest)
            # the interpreter gives a load without a mask one of its own
            loads[before:] = [(masked, size, size * int(count))]
            return loaded

        monkeypatch.setattr(interpreter_builder, name, load)

    watch("create_masked_load", True)
    watch("create_load", False)
    logits, targets = traffic.inputs((1, 1, vocab))
    logits.requires_grad_()
    ref = torch.zeros_like(logits, requires_grad=False)
    logprobs = fused_rl.token_logprobs(logits, targets).logprobs
    for rows, direction in ((0, None), (2, "reverse"), (4, "jensen-shannon")):
        if direction:
            loads.clear()
            fused_rl.token_kl(logits, ref, direction=direction)
        total = sum(count for _, _, count in loads)
        assert total >= 2 * max(rows, 1) * vocab
        assert sum(count for masked, _, count in loads if masked) <= 0.05 * total
    loads.clear()
    logprobs.sum().backward()
    total = sum(count for *_, count in loads)
    assert total >= 2 * vocab
    assert sum(count for _, size, count in loads if size == 2) <= 0.05 * total


def test_half_masked_reads_half():
    logits, targets = traffic.inputs(SHAPE)
    mask = torch.arange(8).expand(1, 8) % 2 == 0
    counts = traffic.count(lambda x: fused_rl.token_logprobs(x, targets, mask=mask)[:2], logits)
    assert counts["forward"][0] == pytest.approx(0.5, abs=2e-3)
    assert counts["backward"] == [pytest.approx(0.5, abs=2e-3), pytest.approx(1.0, abs=2e-3)]
