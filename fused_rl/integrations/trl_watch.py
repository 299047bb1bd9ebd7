"""A callback that reads TRL's logs, says each sign of trouble once, and sums up the run.

    GRPOTrainer(..., callbacks=[Watch()])

No bound was fitted to runs.
"""

import math
from collections.abc import Callable
from statistics import mean

from transformers import TrainerCallback

# The number of logs that a mean is over.
WINDOW = 10
# In nats per token; rounding to 16 bits makes less than 0.05.
MISMATCH = "sampling/sampling_logp_difference/mean"
# TRL's key -> whether its mean (now, at first) is a sign of trouble, and what to do.
FINDINGS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    MISMATCH: (
        lambda now, first: now > 0.05,
        "sampler and trainer differ: compare dtype, temperature and weights",
    ),
    "entropy": (
        lambda now, first: now < first / 10,
        "entropy collapsed: lower learning_rate, or raise beta",
    ),
    "kl": (
        lambda now, first: now > 2 or now > max(1, 3 * first),
        "far from the reference: lower learning_rate",
    ),
    "frac_reward_zero_std": (
        lambda now, first: now >= 0.75,
        "most groups have equal rewards: change the prompts",
    ),
    "completions/clipped_ratio": (lambda now, first: now > 0.5, "raise max_completion_length"),
    "clip_ratio/region_mean": (
        lambda now, first: now > 0.5,
        "most tokens are clipped: lower learning_rate",
    ),
    "grad_norm": (
        lambda now, first: now == 0 or not math.isfinite(now),
        "look at the rewards, and at learning_rate",
    ),
}
SUMMARY = (MISMATCH, "entropy", "kl")


class Watch(TrainerCallback):
    """Reports once for each row of `FINDINGS`, and at the end the sampler's mismatch, entropy and KL.

    Args:
        report: takes each line; only the main process reports.
    """

    def __init__(self, report: Callable[[str], None] = print):
        self.report = report
        self.values: dict[str, list[float]] = {}
        self.reported: set[str] = set()

    def on_log(self, args, state, control, logs=None, **_):
        for key, (holds, advice) in FINDINGS.items():
            # An evaluation logs other keys, and not every trainer has all of them.
            value = (logs or {}).get(key)
            if value is None:
                continue
            self.values.setdefault(key, []).append(float(value))
            now, first = self._means(key)
            # A mean over a few logs is mostly noise, and a finding is reported once.
            is_new = key not in self.reported and len(self.values[key]) >= WINDOW
            if state.is_world_process_zero and is_new and holds(now, first):
                self.reported.add(key)
                self.report(
                    f"step {state.global_step}: {key} is {now:.3g}, at first {first:.3g}; {advice}"
                )

    def on_train_end(self, args, state, control, **_):
        for key in filter(self.values.get, SUMMARY if state.is_world_process_zero else ()):
            now, first = self._means(key)
            self.report(f"{key}: {first:.3g} at first, {now:.3g} at the end")

    def _means(self, key):
        return mean(self.values[key][-WINDOW:]), mean(self.values[key][:WINDOW])
