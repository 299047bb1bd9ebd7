"""Aggregations of per-token losses: micro-batches, padding, packing and truncation change nothing."""

import itertools

import pytest
import torch

import fused_rl
from fused_rl.objectives.aggregation import LOSS_AGGS, aggregate
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


def test_aggregations_of_a_worked_example():
    losses = torch.tensor([[1.0, 1, 7, 7], [3, 3, 3, 3]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    options = {"max_length": 8, "group_lengths": torch.tensor([3.0, 3.0])}  # one prompt
    for loss_agg, value in zip(LOSS_AGGS, (14 / 6, 2.0, 7.0, 0.875, 14 / 6, 14.0), strict=True):
        torch.testing.assert_close(aggregate(losses, mask, loss_agg, **options).item(), value)
    two = aggregate(losses, mask, "prompt-mean", group_lengths=torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(two, aggregate(losses, mask, "seq-mean-token-mean"))  # groups of one
    # Twice as many in the whole step.
    per_sequence = {
        "num_tokens": 12,
        "num_sequences": 4,
        **options,
    }
    for loss_agg, value in zip(LOSS_AGGS, (14 / 12, 1.0, 3.5, 0.4375, 14 / 12, 14.0), strict=True):
        torch.testing.assert_close(aggregate(losses, mask, loss_agg, **per_sequence).item(), value)


def test_padding_changes_no_loss_and_no_metric():
    mask, _, advantages, _, drift = batch("partial")
    logprobs = torch.randn(B, T, dtype=F64) - 3
    tensors = {
        "old_logprobs": logprobs + drift[0],
        "ref_logprobs": logprobs + drift[1],
        "entropy": drift[0].abs(),
    }
    options = {
        "advantages": advantages,
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
        "top_entropy": 0.5,
        "max_length": T,
        "group_lengths": GROUP_LENGTHS,
    }

    def pad(tensor, fill):
        return torch.nn.functional.pad(tensor, (0, 100), value=fill)

    for preset in PAPERS:
        want = fused_rl.policy_loss(logprobs, mask=mask, preset=preset, **tensors, **options)
        padded = {name: pad(tensor, torch.nan) for name, tensor in tensors.items()}
        got = fused_rl.policy_loss(
            pad(logprobs, 1.0), mask=pad(mask, False), preset=preset, **padded, **options
        )
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_packing_changes_no_loss_and_no_metric():
    """Four sequences in rows of their own, and the same in one row, in another order of ids."""
    mask, _, advantages, _, drift = batch("partial")
    logprobs = torch.randn(B, T, dtype=F64) - 3
    old = logprobs + drift[0]
    ids = torch.tensor([2, 0, 3, 1])[:, None].expand(B, T)
    packed_advantages = advantages[torch.tensor([1, 3, 0, 2])]
    for preset, loss_agg in itertools.product(PAPERS, LOSS_AGGS):
        options = {"preset": preset, "loss_agg": loss_agg, "max_length": 7}
        want = fused_rl.policy_loss(
            logprobs, old, advantages, mask, **options, group_lengths=GROUP_LENGTHS
        )
        options["group_lengths"] = GROUP_LENGTHS[torch.tensor([1, 3, 0, 2])]
        rows = [t.reshape(1, B * T) for t in (logprobs, old, mask)]
        got = fused_rl.policy_loss(
            *rows[:2], packed_advantages, rows[2], sequence_ids=ids.reshape(1, -1), **options
        )
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_a_sequence_without_a_token_that_counts_is_a_sequence_packed_as_well():
    mask, _, advantages, _, drift = batch("partial")
    mask = mask.clone()
    mask[2] = False
    logprobs = torch.randn(B, T, dtype=F64) - 3
    old = logprobs + drift[0]
    ids = torch.arange(B)[:, None].expand(B, T).reshape(1, -1)
    for loss_agg in ("seq-mean-token-mean", "seq-mean-token-sum"):
        want = fused_rl.policy_loss(logprobs, old, advantages, mask, loss_agg=loss_agg)
        rows = [t.reshape(1, B * T) for t in (logprobs, old, mask)]
        got = fused_rl.policy_loss(
            *rows[:2], advantages, rows[2], sequence_ids=ids, loss_agg=loss_agg
        )
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_truncated_responses_count_as_masked():
    mask, _, advantages, _, drift = batch("partial")
    logprobs = torch.randn(B, T, dtype=F64) - 3
    cut = torch.tensor([False, True, False, False])
    for preset in PAPERS:
        options = {"preset": preset, "group_lengths": GROUP_LENGTHS}
        want = fused_rl.policy_loss(
            logprobs, logprobs + drift[0], advantages, mask & ~cut[:, None], **options
        )
        got = fused_rl.policy_loss(
            logprobs, logprobs + drift[0], advantages, mask, truncated=cut, **options
        )
        torch.testing.assert_close(got, want, rtol=0, atol=0)
