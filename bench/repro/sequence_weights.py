"""What a small mismatch between sampler and trainer makes of a sequence's weight, by the length of the sequence.

    python -m bench.repro.sequence_weights     prints the table

Every token is off by 0.012 nats in the mean, with a deviation of 0.05. The weight of a sequence is its probability
ratio, as a product over its tokens (`sequence-sum`) or as their geometric mean (`sequence`); it is cut, or the sequence
dropped, beyond 2 (`rollout_high`). After TRL's issue 5814.
"""

import torch

import fused_rl
from bench import results

LENGTHS = (10, 30, 58, 100, 300, 1000, 3000)
SHIFT, SPREAD, BOUND, SEQUENCES = 0.012, 0.05, 2.0, 512
LEVELS = {"product (sequence-sum)": "sequence-sum", "geometric mean (sequence)": "sequence"}


def weights(length: int) -> dict[str, torch.Tensor]:
    """(SEQUENCES,) of each level."""
    generator = torch.Generator().manual_seed(length)
    off = SHIFT + SPREAD * torch.randn(SEQUENCES, length, generator=generator).double()
    mask = torch.ones_like(off, dtype=torch.bool)
    rollout_logprobs = torch.full_like(off, -1.0)
    found = {}
    for name, level in LEVELS.items():
        ratio = fused_rl.importance_ratio(rollout_logprobs + off, rollout_logprobs, mask, ratio_level=level)
        found[name] = ratio[:, 0]
    return found


def main() -> None:
    found = {length: weights(length) for length in LENGTHS}
    lines = []
    for length, of_level in found.items():
        cells = {"tokens": length}
        for name, weight in of_level.items():
            cells |= {
                name: f"{weight.median():.3g}",
                f"cut, {name.partition(' (')[0]}": f"{(weight > BOUND).double().mean():.0%}",
            }
        lines.append(cells)
    print(f"median weight of {SEQUENCES} sequences, and how many lie beyond {BOUND:g}\n")
    print(results.table_of(lines))


if __name__ == "__main__":
    main()
