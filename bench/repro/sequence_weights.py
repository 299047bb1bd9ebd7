"""What a small mismatch between sampler and trainer makes of a sequence's weight, by the length of the sequence.

    python -m bench.repro.sequence_weights     prints two tables, and draws docs/gates.svg

Every token is off by 0.012 nats in the mean, with a deviation of 0.05. The weight of a sequence is its probability
ratio, as a product over its tokens (`sequence-sum`) or as their geometric mean (`sequence`); it is cut, or the sequence
dropped, beyond 2 (`rollout_high`). A gate (`rollout_gate`) drops a sequence by a mean over its tokens; each bound is
about twice what long sequences have. After TRL's issue 5814.
"""

import argparse
import math

import torch

import fused_rl
from bench import plots
from bench.results import table_of
from fused_rl.objectives.surrogates import ROLLOUT_GATES

LENGTHS = (10, 30, 58, 100, 300, 1000, 3000)
SHIFT, SPREAD, BOUND, SEQUENCES = 0.012, 0.05, 2.0, 512
LEVELS = {"product (sequence-sum)": "sequence-sum", "geometric mean (sequence)": "sequence"}
GATES = {"geometric": (1 / 1.025, 1.025), "k1": (0, 0.025), "k3": (0, 0.0026), "tv": (0, 0.03)}


def logprobs(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(SEQUENCES, length) of the trainer, and of the sampler."""
    generator = torch.Generator().manual_seed(length)
    off = SHIFT + SPREAD * torch.randn(SEQUENCES, length, generator=generator).double()
    return off - 1, torch.full_like(off, -1.0)


def weights(length: int) -> dict[str, torch.Tensor]:
    """(SEQUENCES,) of each level."""
    trainer, sampler = logprobs(length)
    mask = torch.ones_like(trainer, dtype=torch.bool)
    found = {}
    for name, level in LEVELS.items():
        found[name] = fused_rl.importance_ratio(trainer, sampler, mask, ratio_level=level)[:, 0]
    return found


def kept(length: int) -> dict[str, float]:
    """The share of sequences within the bounds, of the product and of each gate."""
    product = weights(length)["product (sequence-sum)"]
    inside = {"product": (product >= 1 / BOUND) & (product <= BOUND)}
    for name, (low, high) in GATES.items():
        value = ROLLOUT_GATES[name](*logprobs(length), lambda x: x.mean(1))
        inside[f"{name}, mean"] = (value >= low) & (value <= high)
    return {name: within.double().mean().item() for name, within in inside.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--png", default=plots.DOCS / "gates.svg", help="where to draw")
    args = parser.parse_args()
    lines = []
    for length in LENGTHS:
        cells = {"tokens": length}
        for name, weight in weights(length).items():
            cells |= {
                name: f"{weight.median():.3g}",
                f"cut, {name.partition(' (')[0]}": f"{(weight > BOUND).double().mean():.0%}",
            }
        lines.append(cells)
    print(f"median weight of {SEQUENCES} sequences, and how many lie beyond {BOUND:g}\n")
    print(table_of(lines))

    # What passes a gate.
    shares = {length: kept(length) for length in LENGTHS}
    lines = [
        {"tokens": length} | {name: f"{x:.0%}" for name, x in of.items()}
        for length, of in shares.items()
    ]
    print(f"\nsequences that are kept\n\n{table_of(lines)}")
    figure, (axes,) = plots.column([1], (7, 3.2))
    # Lines that are one have one name.
    curves: dict[str, list[float]] = {}
    for name in shares[LENGTHS[0]]:
        values = [share[name] for share in shares.values()]
        same = next((n for n, v in curves.items() if math.dist(v, values) < 0.02), None)
        curves[f"{same}; {name}" if same else name] = curves.pop(same, values)
    for (colour, marker), (name, values) in zip(plots.LOOKS, curves.items(), strict=False):
        axes.plot(LENGTHS, values, color=colour, marker=marker, label=name)
    axes.set_ylim(-0.05, 1.12)
    axes.set(xscale="log", xlabel="tokens of a response", ylabel="share of responses kept")
    plots.save(figure, args.png)


if __name__ == "__main__":
    main()
