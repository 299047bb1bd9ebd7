"""Keys of metrics.jsonl that come from a loss, by the bare names of its metrics. docs/metrics.md describes each key."""

from collections.abc import Callable, Mapping

Key = str | Callable[[Mapping[str, float]], float]
"""The bare name of a loss's metric, or a function of several."""


def explained_variance(sums: Mapping[str, float]) -> float:
    """1 - Var(R - v) / Var(R) from the moments of `fused_rl.value_loss`, added up; NaN where R is constant."""
    error = sums["value_error_square"] - sums["value_error"] ** 2
    spread = sums["return_square"] - sums["return"] ** 2
    return 1 - error / spread if spread > 0 else float("nan")


SFT: dict[str, Key] = {"train/loss": "loss", "train/entropy": "entropy"}
POLICY: dict[str, Key] = {
    "objective/kl": "kl",
    "objective/kl1_avg": "kl1",
    "objective/kl2_avg": "kl2",
    "objective/kl3_avg": "kl3",
    "objective/kl4_avg": "kl4",
    "policy/approxkl_avg": "approx_kl",
    "policy/clipfrac_avg": "clipfrac",
    "policy/entropy_avg": "entropy",
    "loss/policy_avg": "policy_loss",
    "loss/total_avg": "loss",
    "val/ratio": lambda sums: 1 + sums["ratio_minus_1"],
    "val/first_ratio": lambda sums: 1 + sums["drift"],
    "val/ratio_var": lambda sums: sums["ratio_minus_1_square"] - sums["ratio_minus_1"] ** 2,
}
# The KL of PPO is that of the rollout, before the update.
PPO = {key: name for key, name in POLICY.items() if name != "kl"}
PPO |= {"loss/value_avg": "value_loss", "val/clipfrac_avg": "value_clipfrac"}


def keyed(table: Mapping[str, Key], sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a loss under their logged keys, without those that the loss did not return."""
    found = {}
    for key, name in table.items():
        if callable(name):
            found[key] = name(sums)
        elif name in sums:
            found[key] = sums[name]
    return found
