"""Aggregations of per-token losses: micro-batches, packing and truncation change nothing."""

import itertools

import pytest
import torch

import fused_rl
from fused_rl.objectives.aggregation import LOSS_AGGS
from tests.papers import F64, GROUP_LENGTHS, PAPERS, B, T, batch

pytestmark = pytest.mark.usefixtures("seeded")


def micro_batches(parts, generator):
    """A random split of the rows, each part cut to its own longest sequence."""
    cuts = torch.randperm(B - 1, generator=generator)[: parts - 1].add(1).sort().values.tolist()
    return [slice(i, j) for i, j in zip([0, *cuts], [*cuts, B], strict=True)]


@pytest.mark.parametrize(
    ("dtype", "tolerance", "parts"), [(F64, 1e-12, 3), (torch.float32, 1e-6, 2)]
)
@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_micro_batches_add_up(loss_agg, parts, dtype, tolerance):
    """Loss, gradient and metrics of the parts, with global denominators, sum to those of the batch without any."""
    generator = torch.Generator().manual_seed(parts)
    for preset, kind in itertools.product(
        ("grpo", "gspo", "vespo", "gmpo"), ("partial", "one-sequence-masked")
    ):
        mask, _, advantages, _, drift = batch(kind)
        leaf = torch.randn(B, T, generator=generator, dtype=dtype).sub(3).requires_grad_()
        tensors = {
            "ref_logprobs": leaf.detach() + drift[1],
            "entropy": torch.rand(B, T, generator=generator),
        }
        old = leaf.detach() + drift[0]
        options = {"preset": preset, "loss_agg": loss_agg, "kl_coef": 0.1}
        options["entropy_coef"] = 0.01
        whole, metrics = fused_rl.policy_loss(
            leaf, old, advantages, mask, **tensors, **options, group_lengths=GROUP_LENGTHS
        )
        options |= {"num_tokens": mask.sum(), "num_sequences": B, "max_length": T}
        total, summed = 0, dict.fromkeys(metrics, 0)
        for rows in micro_batches(parts, generator):
            length = max(1, int((mask[rows].any(0) * torch.arange(1, T + 1)).max()))
            at = (rows, slice(0, length))
            extra = {name: tensor[at] for name, tensor in tensors.items()}
            extra["group_lengths"] = GROUP_LENGTHS[rows]
            loss, part = fused_rl.policy_loss(
                leaf[at], old[at], advantages[rows], mask[at], **extra, **options
            )
            total = total + loss
            summed = {name: summed[name] + part[name] for name in part}
        want, got = (torch.autograd.grad(x, leaf)[0] for x in (whole, total))
        torch.testing.assert_close(total, whole, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance * want.abs().max().item())
        torch.testing.assert_close(summed, metrics, rtol=10 * tolerance, atol=10 * tolerance)


def test_packing_changes_no_loss_and_no_metric():
    """Four sequences in rows of their own, one of which has nothing that counts, and in one row, in another order."""
    mask, _, advantages, _, drift = batch("one-sequence-masked")
    logprobs = torch.randn(B, T, dtype=F64) - 3
    old = logprobs + drift[0]
    ids = torch.tensor([2, 0, 3, 1])[:, None].expand(B, T)
    order = torch.tensor([1, 3, 0, 2])
    rows = [t.reshape(1, B * T) for t in (logprobs, old, mask)]
    for preset, loss_agg in itertools.product(PAPERS, LOSS_AGGS):
        options = {"preset": preset, "loss_agg": loss_agg, "max_length": 7}
        want = fused_rl.policy_loss(
            logprobs, old, advantages, mask, **options, group_lengths=GROUP_LENGTHS
        )
        options |= {"sequence_ids": ids.reshape(1, -1), "group_lengths": GROUP_LENGTHS[order]}
        got = fused_rl.policy_loss(*rows[:2], advantages[order], rows[2], **options)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_truncated_responses_count_as_masked():
    mask, _, advantages, _, drift = batch("partial")
    logprobs = torch.randn(B, T, dtype=F64) - 3
    cut = torch.tensor([False, True, False, False])
    given = logprobs, logprobs + drift[0], advantages
    want = fused_rl.policy_loss(*given, mask & ~cut[:, None], preset="grpo")
    assert fused_rl.policy_loss(*given, mask, truncated=cut, preset="grpo") == want
