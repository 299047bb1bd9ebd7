"""Twelve signs that a run goes wrong, each of which a reader can check in metrics.jsonl.

The conditions read logged metrics alone, so a resumed run repeats no finding and misses none. No number here was fitted
to runs: a run without findings may still learn nothing, which held-out accuracy shows.
"""

import math
import re
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from fused_rl.objectives.presets import PRESETS
from fused_rl.trainers.run.metrics import keys_by

# Steps that a mean is taken over: single steps say little.
WINDOW = 10
KEYS = keys_by("meaning")


class Watch:
    """Reads a run's metrics step by step, and reports each condition once, in the step in which it first holds."""

    def __init__(self, config: Mapping[str, object]):
        self.config = config
        self.now: Mapping[str, Any] = {}
        self.values: dict[str, list[float]] = {}
        # (step, metric, accuracy) of each evaluation.
        self.held_out: list[tuple[int, str, float]] = []
        # Rule -> step, what is seen, what to change.
        self.found: dict[str, str] = {}

    def see(self, entry: Mapping[str, Any]) -> list[str]:
        """Add one entry of metrics.jsonl; return a line for each condition that holds for the first time."""
        self.now = entry
        for key, value in entry.items():
            self.values.setdefault(key, []).append(number(value))
        accuracies = [key for key in KEYS["held-out accuracy"] if key in entry]
        for key in accuracies[:1]:
            self.held_out.append((entry["step"], key, number(entry[key])))

        # A condition that goes on holding is reported in the first step alone.
        new = {}
        for rule, (condition, change) in RULES.items():
            seen = None if rule in self.found else condition(self)
            if seen:
                new[rule] = f"step {entry['step']}: {seen}; {change}"
        self.found |= new
        return [*new.values()]

    def mean(self, key: str, count: int = WINDOW) -> float:
        """The mean of the last `count` values; NaN where there are fewer, or one is not a number."""
        values = self.values.get(key, [])[-count:]
        return mean(values) if len(values) == count else math.nan

    def learned(self, problems: int = 0) -> str:
        """Return a line of held-out accuracy at the start and now, ± the standard error over `problems`, and the KL."""
        if len(self.held_out) < 2:
            return "held-out: no two evaluations of accuracy, so nothing here shows whether the run learned"
        (first, key, start), (last, _, now) = self.held_out[0], self.held_out[-1]
        figures = []
        for accuracy in (start, now):
            known = problems and key != "eval/token_accuracy"  # which is over tokens
            error = f" ± {math.sqrt(accuracy * (1 - accuracy) / problems):.2g}" if known else ""
            figures.append(f"{accuracy:.3g}{error}")
        # Where there is a reference, how far the policy went for that.
        kl = [
            f"; KL {value:.3g} nats per response"
            for value in self.values.get("eval/kl_exact", [])[-1:]
        ]
        return f"held-out: {key} {figures[0]} at step {first}, {figures[1]} at step {last}{''.join(kl)}"

    def in_fp32(self) -> bool:
        """Return True if a second forward pass repeats the first one to fp32 rounding."""
        return self.config.get("dtype") == "float32" or self.config.get("zero_stage") == 0


def number(value: object) -> float:
    """A metric as a float; NaN for null and for what a damaged file may hold."""
    return (
        float(str(value))
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        else math.nan
    )


def too_easy_or_too_hard(accuracy: float, size: int) -> str | None:
    """Return a line if at most a quarter of the groups of `size` can have right and wrong answers before training."""
    # The share of groups with both kinds is concave in the accuracy, so questions of unequal difficulty have fewer.
    share = 1 - accuracy**size - (1 - accuracy) ** size
    seen = f"{accuracy:.1%} of the sampled answers are correct: at most {share:.0%} of groups of {size} teach anything"
    remedy = "train SFT longer, pick easier rows, or use a scorer that grades"
    if accuracy > 0.5:
        remedy = "pick harder rows"
    return f"{seen}; {remedy}" if share < 0.25 else None


# The conditions: (watch) -> what is seen, in words, or None.


def over_ten_steps(pattern: str, beyond: Callable[[float], bool], *, unless: str = ""):
    """A condition on the mean of the last ten values of each metric whose name matches; not in runs with an option."""

    def condition(watch: Watch) -> str | None:
        if watch.config.get(unless):
            return None
        for key in watch.now:
            if re.fullmatch(pattern, key) and beyond(watch.mean(key)):
                return f"{key} is {watch.mean(key):.3g} over the last ten steps"
        return None

    return condition


def equal_rewards(watch: Watch) -> str | None:
    """Groups of equal rewards have advantages of 0, but with batch-std, which compares across groups."""
    # The option, else the preset's; a run of another trainer has neither.
    advantage = watch.config.get("advantage")
    presets: Mapping[str, Any] = PRESETS
    preset = str(watch.config.get("preset"))
    if advantage is None and preset in presets:
        advantage = presets[preset].advantage

    equal = watch.mean("frac_reward_zero_std", 2 * WINDOW)
    solved = watch.mean("frac_groups_all_solved", 2 * WINDOW)
    seen = f"{equal:.0%} of the groups of the last 20 steps have equal rewards ({solved:.0%} are solved throughout)"
    return seen if equal >= 0.75 and advantage not in ("batch-std", "gdpo") else None


def accuracy_lost(watch: Watch) -> str | None:
    """The last held-out accuracy against the one before training; one standard error is allowed."""
    # Only in the step of an evaluation, else the step of the finding would not be that of what it shows.
    if len(watch.held_out) < 2 or watch.held_out[-1][0] != watch.now["step"]:
        return None
    (_, key, start), (_, _, now) = watch.held_out[0], watch.held_out[-1]
    problems = max(number(watch.config.get("eval_size")), 1)
    error = math.sqrt(max(start * (1 - start), 0) / problems)
    seen = f"{key} is {now:.3g}; before training it was {start:.3g} (standard error {error:.2g})"
    return seen if now < start - error else None


def kl_high(watch: Watch) -> str | None:
    """Nats per response token: above 2, or above 1 and three times as many as ten steps before."""
    # The metric is per response, and long responses have more of it without being further away.
    length = watch.mean("completions/mean_length")
    values = watch.values.get("objective/kl_exact", [])
    if len(values) < WINDOW or not length > 0:
        return None
    now = mean(values[-WINDOW:]) / length
    before = mean(values[-2 * WINDOW : -WINDOW] or values) / length
    seen = f"the KL to the starting model is {now:.2g} nats per token; ten steps before it was {before:.2g}"
    return seen if now > 2 or now > max(1, 3 * before) else None


def entropy_collapsed(watch: Watch) -> str | None:
    """A tenth of its start; not where most problems are solved, as little is left to be unsure about."""
    start = mean(watch.values.get("policy/entropy_avg", [0])[:WINDOW])
    now = watch.mean("policy/entropy_avg")
    solved = []
    for key in ("eval/accuracy_sampled", "frac_groups_all_solved"):
        solved.append(watch.values.get(key, [0])[-1])
    seen = f"policy/entropy_avg is {now:.2g} nats over the last ten steps; in the first ten it was {start:.2g}"
    return seen if now < start / 10 and max(solved) <= 0.5 else None


def first_ratio(watch: Watch) -> str | None:
    """In fp32 a pass repeats itself to 1e-6, in bfloat16 to some hundredths."""
    # Against the sampler's log-probabilities the ratio differs by what two programs differ, which another rule reads.
    if watch.config.get("old_logprobs") == "sampler":
        return None
    off = number(watch.now.get("val/first_ratio", 1)) - 1
    allowed = 1e-6 if watch.in_fp32() else 5e-2
    return f"val/first_ratio is 1{off:+.1e}, not 1" if abs(off) > allowed else None


def not_finite(watch: Watch) -> str | None:
    """A loss or gradient that is no number, in one step; or gradients of 0 in ten."""
    for key in (*KEYS["loss"], *KEYS["gradient norm"]):
        if not math.isfinite(number(watch.now.get(key, 1))):
            return f"{key} is not finite"
    norms = "|".join(KEYS["gradient norm"])
    return over_ten_steps(norms, lambda norm: norm == 0)(watch)


def sampler_differs(watch: Watch) -> str | None:
    """With lag the sampler has other weights on purpose."""
    nats = watch.mean("rollout/logprob_diff_abs", 3)
    allowed = 1e-3 if watch.in_fp32() else 0.05
    seen = f"the sampler's log-probabilities are {nats:.2g} nats from the policy's over three steps"
    return seen if nats > allowed and not watch.config.get("lag") else None


RULES: dict[str, tuple[Callable[[Watch], str | None], str]] = {
    "first-ratio": (
        first_ratio,
        "the model's forward does not repeat itself: look for dropout, or use float32",
    ),
    "gradient": (
        not_finite,
        "where not finite, lower lr and read the rows; where 0, look at the rewards",
    ),
    "equal-rewards": (
        equal_rewards,
        "solved: take harder prompts; else warm start with sft, or a finer scorer",
    ),
    "scores-none": (
        over_ten_steps("rewards/.*/none", lambda share: share == 1),
        "the scorer judges nothing: see that it ends in `return`, and which columns it reads",
    ),
    "length-limit": (
        over_ten_steps("val/stop_rate", lambda share: share < 0.5),
        "most responses reach the length limit: raise max_new_tokens, or warm start with sft so that they end",
    ),
    "accuracy-lost": (
        accuracy_lost,
        "read samples.jsonl: what is rewarded may not be what is evaluated",
    ),
    "kl-high": (kl_high, "lower lr or raise kl_coef, and read samples.jsonl"),
    "entropy-collapsed": (entropy_collapsed, "lower lr, or raise kl_coef or entropy_coef"),
    "clipped": (
        over_ten_steps("policy/clipfrac_avg", lambda share: share > 0.5),
        "lower lr, epochs or minibatches",
    ),
    "idle-critic": (
        over_ten_steps("val/var_explained", lambda share: share <= 0),
        "the critic explains nothing: raise critic_lr, look at value_clip, or warm it up with critic_only",
    ),
    "learning-rate": (
        over_ten_steps("lr", lambda lr: lr == 0, unless="critic_only"),
        "raise lr, or steps",
    ),
    "sampler-differs": (
        sampler_differs,
        "compare dtype, temperature and weights of the server (docs/rollouts.md)",
    ),
}
