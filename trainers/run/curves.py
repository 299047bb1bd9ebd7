"""What is shown of a run: the columns of the progress bar, and the panels of curves.png."""

from collections.abc import Mapping
from pathlib import Path

from fused_rl.trainers.base.files import unfinished

# Header -> the keys that it may stand for; the first one that a run has is shown.
COLUMNS = {
    "loss": ("train/loss", "train/rm/loss"),
    "reward": ("reward", "objective/scores"),
    "held-out": ("eval/accuracy_greedy", "eval/score", "eval/rm/accuracy", "eval/accuracy"),
    "KL": ("objective/kl_exact",),
    "entropy": ("policy/entropy_avg", "train/entropy"),
    "tokens/s": ("perf/tokens_per_second",),
}
# Title -> the keys that are drawn over the steps; a panel without any of them is left out.
PANELS = {
    "loss": ("train/loss", "eval/loss", "train/rm/loss", "eval/rm/loss"),
    "reward (mean of a step)": ("reward", "objective/scores", "objective/rlhf_reward"),
    "held-out accuracy": ("eval/accuracy_greedy", "eval/accuracy_sampled", "eval/pass_at_k", "eval/accuracy"),
    "accuracy on pairs": ("train/rm/accuracy", "eval/rm/accuracy"),
    "scores": ("train/rm/chosen_rewards", "train/rm/rejected_rewards", "eval/score"),
    "KL to the reference (nats per response)": ("objective/kl", "objective/kl1_avg", "objective/kl_exact"),
    "entropy (nats per token)": ("policy/entropy_avg", "train/entropy"),
    "explained variance of the returns": ("val/var_explained",),
    "groups that teach nothing": ("frac_groups_all_solved", "frac_groups_none_solved", "frac_reward_zero_std"),
    "response length (tokens)": ("completions/mean_length",),
}
IN_A_ROW = 4  # panels


def columns_of(metrics: Mapping[str, float]) -> str:
    """Return the metrics that the progress bar shows, in one line."""
    parts = []
    for header, keys in COLUMNS.items():
        found = [metrics[key] for key in keys if key in metrics]
        if found:
            parts.append(f"{header} {found[0]:.4g}")
    return "  ".join(parts)


def draw_curves(history: list[dict], path: Path) -> None:
    """Write a PNG with one panel per title.

    Args:
        history: the lines of a metrics.jsonl; a key may be missing or None in any of them.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    known = {key for line in history for key, value in line.items() if value is not None}
    panels = {title: known.intersection(keys) for title, keys in PANELS.items() if known.intersection(keys)}
    wide = min(max(len(panels), 1), IN_A_ROW)
    high = max(-(-len(panels) // IN_A_ROW), 1)
    figure = Figure(figsize=(4.5 * wide, 3.2 * high), layout="constrained")
    for number, (title, keys) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(high, wide, number, title=title, xlabel="step")
        axes.grid(alpha=0.3)
        for key in sorted(keys):
            points = [(line["step"], line[key]) for line in history if line.get(key) is not None]
            axes.plot(*zip(*points, strict=True), label=key, marker="o" if len(points) < 20 else None)
        axes.legend(fontsize="small")
    figure.savefig(unfinished(path), dpi=120)
    unfinished(path).replace(path)
