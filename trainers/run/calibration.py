"""How a reward model's scores lie: whether the margin between two says how often the better response wins."""

import math
from pathlib import Path

import torch

MARGIN_BINS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, math.inf)


def calibration(scores: torch.Tensor) -> list[dict[str, float]]:
    """By bins of the margin |chosen - rejected|: how often the higher score is right, and how often it should be.

    Args:
        scores: (N, 2) of chosen and rejected, in the scale of the training loss.

    Returns:
        One row per bin that holds a pair: its bounds, pairs, mean predicted probability, observed accuracy.
    """
    margin = (scores[:, 0] - scores[:, 1]).double()
    rows = []
    for low, high in zip(MARGIN_BINS, MARGIN_BINS[1:], strict=False):
        inside = margin[(margin.abs() >= low) & (margin.abs() < high)]
        if len(inside):
            predicted = inside.abs().sigmoid().mean().item()
            observed = (inside > 0).double().mean().item()
            rows.append({"low": low, "high": high, "pairs": len(inside), "predicted": predicted, "observed": observed})
    return rows


def draw_scores(scores: torch.Tensor, bins: list[dict[str, float]], path: Path) -> None:
    """Write a PNG of scores (N, 2), chosen and rejected, and of their calibration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    histogram, reliability = figure.subplots(1, 2)
    edges = torch.linspace(scores.min().item(), scores.max().item() + 1e-6, 41).tolist()
    for column, side in enumerate(("chosen", "rejected")):
        histogram.hist(scores[:, column].tolist(), bins=edges, alpha=0.6, label=side)
    histogram.set(title="held-out scores", xlabel="score", ylabel="responses")
    histogram.legend()
    reliability.plot([0.5, 1], [0.5, 1], color="grey", linewidth=1)
    reliability.plot([row["predicted"] for row in bins], [row["observed"] for row in bins], marker="o")
    reliability.set(title="calibration by margin", xlabel="predicted", ylabel="observed: chosen scores higher")
    figure.savefig(path.with_suffix(".tmp.png"), dpi=120)
    path.with_suffix(".tmp.png").replace(path)
