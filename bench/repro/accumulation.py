"""A gradient in micro-batches beside that of the whole batch: means of means, and one denominator for the step.

    python -m bench.repro.accumulation

64 responses of 1 to 200 tokens, one GRPO step in 1, 4 and 16 micro-batches. Dividing each micro-batch by its own count,
and then by their number, gives another loss with every split; dividing by the step's counts gives one. After
ms-swift's issue 10117 and TRL's 5619, where gradients were smaller by the number of accumulation steps.
"""

import torch

import fused_rl
from bench.results import table_of

SEQUENCES, LONGEST = 64, 200
SPLITS = (1, 4, 16)
LOSS_AGGS = ("token-mean", "seq-mean-token-mean")


def batch():
    """logprobs (B, T), old_logprobs, advantages (B,), mask: short responses first, as a sorted batch has them."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(1, LONGEST, SEQUENCES).long()
    mask = torch.arange(LONGEST) < lengths[:, None]
    logprobs = -torch.rand(SEQUENCES, LONGEST, generator=generator).double()
    old_logprobs = logprobs - 0.1 * torch.randn(logprobs.shape, generator=generator)
    return logprobs, old_logprobs, torch.randn(SEQUENCES, generator=generator).double(), mask


def gradient(splits: int, loss_agg: str, own_counts: bool) -> torch.Tensor:
    """(B, T), by the log-probabilities: the sum over micro-batches."""
    logprobs, *given, mask = batch()
    leaf = logprobs.requires_grad_()
    counts = {} if own_counts else {"num_tokens": int(mask.sum()), "num_sequences": SEQUENCES}
    for rows in torch.arange(SEQUENCES).chunk(splits):
        part = [x[rows] for x in (*given, mask)]
        loss, _ = fused_rl.policy_loss(leaf[rows], *part, loss_agg=loss_agg, **counts)
        (loss / splits if own_counts else loss).backward()
    return leaf.grad


def main() -> None:
    lines = []
    for loss_agg in LOSS_AGGS:
        whole = gradient(1, loss_agg, own_counts=False)
        for splits in SPLITS:
            cells = {"loss_agg": loss_agg, "micro-batches": splits}
            for name, own_counts in (("means of means", True), ("the step's counts", False)):
                found = gradient(splits, loss_agg, own_counts)
                cells[f"off, {name}"] = f"{((found - whole).norm() / whole.norm()).item():.1e}"
            lines.append(cells)
    print("relative error of a step's gradient, of the whole batch in one pass\n")
    print(table_of(lines))


if __name__ == "__main__":
    main()
