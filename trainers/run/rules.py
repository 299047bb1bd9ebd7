"""Signs that a run goes wrong, and whether it learned, from what metrics.jsonl and held_out.jsonl have of it.

The conditions read these two files alone. So a reader can check every finding, the doctor comes to the same findings as
the run, and a resumed run repeats none and misses none. None of the thresholds was fitted to runs.
"""

import math
import re
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from fused_rl.objectives.presets import PRESETS
from fused_rl.trainers.run.learned import (
    BESIDE,
    CRITIC,
    FAILED,
    HELD_OUT,
    NOTHING,
    TRAINING,
    WITH_ERROR,
    ByRow,
    Change,
    Figure,
    held_out_change,
    training_change,
)
from fused_rl.trainers.run.metrics import keys_by

# The number of steps that a mean is taken over, because single steps say little.
WINDOW = 10
# Losses that are never negative, so that a multiple of the first one means something.
LOSSES = "train/loss|train/(rm|dpo|kto)/loss|distill/kl"
# The findings which say that the policy went too far.
TOO_FAR = ("exploding", "kl-high", "entropy-collapsed", "clipped")
KEYS = keys_by("meaning")
EVALUATED = {figure.key for figure in HELD_OUT} | {*BESIDE, "eval/kl_exact"}


class Watch:
    """Reads a run's metrics step by step, and reports each condition once, in the step in which it first holds."""

    def __init__(self, config: Mapping[str, object]):
        self.config = config
        self.now: Mapping[str, Any] = {}
        self.values: dict[str, list[float]] = {}
        # The step, the figures and the rows of the first evaluation and of the last one.
        self.evaluations: list[tuple[int, dict[str, float], ByRow]] = []
        # The name of a rule -> its finding: the step, what was seen, and what to change.
        self.found: dict[str, str] = {}

    def see(self, entry: Mapping[str, Any], by_row: ByRow = NOTHING) -> list[str]:
        """Add one entry of metrics.jsonl, and return a line for each condition that holds for the first time.

        `by_row` is the entry of held_out.jsonl for the same step, if that evaluated.
        """
        self.now = entry
        for key, value in entry.items():
            self.values.setdefault(key, []).append(number(value))
        figures = {key: number(entry[key]) for key in EVALUATED if key in entry}
        figures = {key: value for key, value in figures.items() if math.isfinite(value)}
        if figures:
            self.evaluations[1:] = [(entry["step"], figures, by_row)]

        # A run that has recovered is no longer worse, and if it gets worse again, that is a new finding.
        if figures and not held_out_worse(self):
            self.found.pop("held-out-worse", None)
        # A condition that keeps holding is reported only in its first step.
        new = {}
        for rule, (condition, change) in RULES.items():
            seen = None if rule in self.found else condition(self)
            if seen:
                advice = change if isinstance(change, str) else change(self)
                new[rule] = f"step {entry['step']}: {seen}; {advice}"
        self.found |= new
        return [*new.values()]

    def mean(self, key: str, count: int = WINDOW) -> float:
        """Return the mean of the last `count` values of a metric; NaN if there are fewer, or one of them is NaN."""
        values = self.values.get(key, [])[-count:]
        return mean(values) if len(values) == count else math.nan

    def recent(self, key: str) -> float:
        """Return the mean of a metric's last values, of at most two windows of steps; NaN if it has none."""
        values = self.values.get(key, [])[-2 * WINDOW :]
        return mean(values) if values else math.nan

    @property
    def held_out(self) -> Change | None:
        """How the held-out figure changed from the first evaluation to the last; None without two evaluations of it."""
        if len(self.evaluations) < 2 or self.config.get("critic_only"):
            return None
        first, last = self.evaluations
        known = {figure.key: figure for figure in HELD_OUT if figure.key in self.in_both}
        # With one scorer that grades, the score is what the run trains for, and possibly no response ever counts as
        # solved. With several scorers the score also pays for other things, such as the form of an answer, so there the
        # accuracy stays the figure.
        sampled = "eval/accuracy_sampled"
        none_solved = sampled in known and first[1][sampled] == last[1][sampled] == 0
        if "eval/score" in known and (none_solved or (self.grades and len(self.spreads()) < 2)):
            known.pop(sampled, None)
        return self.change_of(next(iter(known.values()))) if known else None

    @property
    def in_both(self) -> set[str]:
        """The keys that both the first evaluation and the last one have."""
        return {key for key in self.evaluations[0][1] if key in self.evaluations[-1][1]}

    def change_of(self, figure: Figure) -> Change:
        """Return how a figure changed that both the first evaluation and the last one have."""
        first, last = self.evaluations
        return held_out_change(figure, first, last, number(self.config.get("eval_size")))

    @property
    def grades(self) -> bool:
        """True if the scorer grades: held-out problems with equally many solved responses have different scores."""
        seen: set[tuple[float, float]] = set()
        for _, _, rows in self.evaluations:
            scores = rows.get("eval/score", [[]])[0]
            solved = rows.get("eval/accuracy_sampled", [[0.0] * len(scores)])[0]
            seen |= {*zip(solved, scores, strict=bool(scores))}
        return len(seen) > len({solved for solved, _ in seen})

    def spreads(self) -> list[float]:
        """Return the standard deviation of each scorer's scores, as a mean over the last steps."""
        return [self.recent(key) for key in self.values if re.fullmatch("rewards/.*/std", key)]

    @property
    def judges_nothing(self) -> bool:
        """True if every scorer has returned None for all responses of the last steps."""
        shares = [key for key in self.values if re.fullmatch("rewards/.*/none", key)]
        return bool(shares) and all(self.recent(key) == 1 for key in shares)

    @property
    def no_condition(self) -> str:
        """The words for a run without findings."""
        shows = [change for change in (self.held_out, self.trained) if change]
        is_known = any(change.verdict != "unknown" for change in shows)
        return "no condition holds" + ("" if is_known else ", and nothing shows whether it learned")

    @property
    def trained(self) -> Change | None:
        """How the figure on training rows changed; None in a run of too few steps to compare."""
        figures = (CRITIC,) if self.config.get("critic_only") else TRAINING
        for figure in figures:
            if figure.key in self.values:
                values = self.values[figure.key]
                # The figure is missing only in the entry of the evaluation before training, which is the first one.
                steps = map(int, self.values["step"][-len(values) :])
                finite = [pair for pair in zip(steps, values, strict=True) if pair[1] == pair[1]]
                return training_change(figure, finite)
        return None

    def learned(self, *, ended: bool = True) -> str:
        """Return a line that says whether the run learned, and by which figure.

        `ended` is False for a run that has not ended yet, of which the line says whether it has learned so far.
        """
        if change := self.held_out:
            answer = ("" if ended else "so far ") + ("yes" if change.learned else "no")
            in_training = ""
            if change.verdict == "unknown":
                answer = "unknown: no error of the figure is known"
                if change.rows == 1:
                    answer = "unknown: one held-out row has no error"
                if trained := self.trained:
                    in_training = f"; in training the {trained.described()}"
            line = f"did it learn? {answer}: held-out {change.described()}"
            return f"{line}{self.beside(change)}{in_training}{self.at_the_cost(change)}"
        none = "no held-out figure was measured twice"
        if self.config.get("critic_only"):
            none = "the critic alone was trained"
        elif self.config.get("eval_size") == 0:
            none = "there are no held-out rows (eval_size 0)"
        if change := self.trained:
            return f"did it learn? {none}; in training the {change.described()}"
        return f"did it learn? Nothing here shows it: {none}, and too few steps to compare"

    def beside(self, change: Change) -> str:
        """Return the other figures of the first and the last evaluation, and how far the policy went."""
        (_, before, _), (_, after, _) = self.evaluations
        others = []
        for key, name in BESIDE.items():
            # If a scorer only says right or wrong, the score equals the accuracy and is not repeated.
            is_new = after.get(key) != change.end or before.get(key) != change.start
            if key in before and key in after and key != change.figure.key and is_new:
                others.append(f"{name} {before[key]:.3g} → {after[key]:.3g}")
        if "eval/kl_exact" in after:
            others.append(f"held-out KL {after['eval/kl_exact']:.3g} nats per response")
        return "".join(f"; {other}" for other in others)

    def at_the_cost(self, change: Change) -> str:
        """Return a hint, if the figure of the run became better while an accuracy beside it fell."""
        fell = []
        for figure in WITH_ERROR:
            is_beside = figure != change.figure and figure.key in self.in_both
            if is_beside and "accuracy" in figure.key and self.change_of(figure).verdict == "fell":
                fell.append(figure.name)
        if not change.learned or not fell:
            return ""
        return f"; but the {' and the '.join(fell)} fell beyond the error: read samples.jsonl"

    def conclude(self) -> list[str]:
        """Return, at the end of a run, the finding "not-learned" with its causes; nothing if the run learned."""
        change = self.held_out or self.trained
        if change is None or change.learned or change.verdict == "unknown":
            return []
        if {"not-learned", "held-out-worse"} & {*self.found}:
            return []
        seen = f"the {change.figure.name} in training"
        if self.held_out:
            seen = f"the held-out {change.figure.name}"
        seen += f" {change.in_words}"
        self.found["not-learned"] = f"step {self.now['step']}: {seen}; {'; '.join(causes(self))}"
        return [self.found["not-learned"]]

    @property
    def has_rewards(self) -> bool:
        """True in a run that samples responses and scores them."""
        return "objective/scores" in self.values

    def in_fp32(self) -> bool:
        """Return True if a second forward pass repeats the first one to fp32 rounding."""
        return self.config.get("dtype") == "float32" or self.config.get("zero_stage") == 0


def number(value: object) -> float:
    """Return a metric as a float; NaN for null, and for anything else that a damaged file may hold."""
    return (
        float(str(value))
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        else math.nan
    )


# The conditions are functions (watch) -> what was seen, in words, or None if the condition does not hold.


def over_ten_steps(pattern: str, beyond: Callable[[float], bool], *, unless: str = ""):
    """Return a condition that holds if the mean of a metric's last ten values is `beyond` a threshold.

    It looks at each metric of the step whose key matches `pattern`, but not in runs that set the option `unless`.
    """

    def condition(watch: Watch) -> str | None:
        if watch.config.get(unless):
            return None
        for key in watch.now:
            if re.fullmatch(pattern, key) and beyond(watch.mean(key)):
                return f"{key} is {watch.mean(key):.3g} over the last ten steps"
        return None

    return condition


def equal_rewards(watch: Watch) -> str | None:
    """Most groups have equal rewards, and so advantages of 0, unless the advantage also compares across groups."""
    # Of responses that nothing was judged of, another finding says so.
    if watch.judges_nothing:
        return None
    # The kind of advantage is the option's, or else the preset's; a run of another trainer has neither.
    advantage = watch.config.get("advantage")
    presets: Mapping[str, Any] = PRESETS
    preset = str(watch.config.get("preset"))
    if advantage is None and preset in presets:
        advantage = presets[preset].advantage

    equal = watch.mean("frac_reward_zero_std", 2 * WINDOW)
    solved = watch.mean("frac_groups_all_solved", 2 * WINDOW)
    seen = f"{equal:.0%} of the groups of the last 20 steps have equal rewards ({solved:.0%} are solved throughout)"
    return seen if equal >= 0.75 and advantage not in ("batch-std", "gdpo") else None


def held_out_worse(watch: Watch) -> str | None:
    """The last held-out figure is worse than the one before training."""
    # Only in the step of an evaluation, so that the finding names the step that it describes.
    change = watch.held_out
    if change is None or watch.evaluations[-1][0] != watch.now["step"]:
        return None
    is_worse = change.verdict not in ("no change", "unknown", change.figure.better)
    return f"held-out {change.described()}" if is_worse else None


def kl_high(watch: Watch) -> str | None:
    """The KL per response token is above 2 nats, or above 1 nat and three times that of the ten steps before."""
    # The metric is per response, and a longer response has more of it although the policy is no further away.
    length = watch.mean("completions/mean_length")
    values = watch.values.get("objective/kl_exact", [])
    if len(values) < WINDOW or not length > 0:
        return None
    now = mean(values[-WINDOW:]) / length
    seen = f"the KL to the starting model is {now:.2g} nats per token, the mean over the last ten steps"
    before = math.inf
    if earlier := values[-2 * WINDOW : -WINDOW]:
        before = mean(earlier) / length
        seen += f"; before that it was {before:.2g}"
    return seen if now > 2 or now > max(1, 3 * before) else None


def entropy_collapsed(watch: Watch) -> str | None:
    """The entropy is below a tenth of its start, unless most problems are solved and little uncertainty is left."""
    start = mean(watch.values.get("policy/entropy_avg", [0])[:WINDOW])
    since = "in the first ten it was"
    # With too large a learning rate it may have collapsed within these ten steps.
    before = watch.values.get("eval/entropy", [0])[0]
    if before > start:
        start, since = before, "before training, on held-out prompts, it was"
    now = watch.mean("policy/entropy_avg")
    solved = []
    for key in ("eval/accuracy_sampled", "frac_groups_all_solved"):
        solved.append(watch.values.get(key, [0])[-1])
    seen = f"policy/entropy_avg is {now:.2g} nats over the last ten steps; {since} {start:.2g}"
    return seen if now < start / 10 and max(solved) <= 0.5 else None


def first_ratio(watch: Watch) -> str | None:
    """The first ratio of a step is not 1: a forward pass should repeat itself, to 1e-6 in fp32 or 5e-2 in bfloat16."""
    # With the sampler's log-probabilities the ratio also holds the difference between two programs, which has a rule of
    # its own (`sampler_differs`).
    if watch.config.get("old_logprobs") == "sampler":
        return None
    off = number(watch.now.get("val/first_ratio", 1)) - 1
    allowed = 1e-6 if watch.in_fp32() else 5e-2
    return f"val/first_ratio is 1{off:+.1e}, not 1" if abs(off) > allowed else None


def not_finite(watch: Watch) -> str | None:
    """A loss or a gradient norm is NaN or infinite in one step, or gradients are 0 over ten steps."""
    for key in (*KEYS["loss"], *KEYS["gradient norm"]):
        if not math.isfinite(number(watch.now.get(key, 1))):
            return f"{key} is not finite"
    norms = "|".join(KEYS["gradient norm"])
    return over_ten_steps(norms, lambda norm: norm == 0)(watch)


def exploding(watch: Watch) -> str | None:
    """A loss is ten times the first one, or a gradient norm is a thousand times the largest one before it."""
    for key in watch.now:
        earlier = [value for value in watch.values[key][:-1] if math.isfinite(value)]
        value = number(watch.now[key])
        if re.fullmatch(LOSSES, key) and earlier and value > 10 * max(earlier[0], 1):
            return f"{key} is {value:.3g}; in the first step it was {earlier[0]:.3g}"
        if key in KEYS["gradient norm"] and math.inf > value > 1000 * max(earlier, default=0) > 0:
            return f"{key} is {value:.3g}; before, it was at most {max(earlier):.3g}"
    return None


def lower_lr(watch: Watch) -> str:
    """Return the advice for a learning rate that is too large, with its value."""
    largest = max(watch.values.get("lr", [math.nan]))
    value = "" if math.isnan(largest) else f" ({largest:.2g})"
    return f"lr{value} is probably too large: try a tenth of it"


def why_worse(watch: Watch) -> str:
    """Return the advice for a held-out figure that got worse."""
    if kl_high(watch) or entropy_collapsed(watch) or "exploding" in watch.found:
        return f"{lower_lr(watch)}, since other signs of it hold as well"
    if watch.has_rewards:
        return "read samples.jsonl: what is rewarded may not be what is evaluated"
    return "lower lr, or take more rows or fewer passes over them"


def sampler_differs(watch: Watch) -> str | None:
    """The sampler's log-probabilities differ from the policy's, unless a lag gives it other weights on purpose."""
    nats = watch.mean("rollout/logprob_diff_abs", 3)
    allowed = 1e-3 if watch.in_fp32() else 0.05
    seen = f"the sampler's log-probabilities are {nats:.2g} nats from the policy's over three steps"
    return seen if nats > allowed and not watch.config.get("lag") else None


# What to change, in words, or a function (watch) -> such words.
Advice = str | Callable[[Watch], str]
RULES: dict[str, tuple[Callable[[Watch], str | None], Advice]] = {
    "first-ratio": (
        first_ratio,
        "the model's forward does not repeat itself: look for dropout, or use float32",
    ),
    "gradient": (
        not_finite,
        "where not finite, lower lr and read the rows; where 0, the rewards are equal or no token of the rows counts",
    ),
    "exploding": (exploding, lower_lr),
    "equal-rewards": (
        equal_rewards,
        "if they are solved, take harder prompts; if not, warm start with sft, or grade the scores more finely",
    ),
    "scores-none": (
        over_ten_steps("rewards/.*/none", lambda share: share == 1),
        "the scorer judges nothing: see that it ends in `return`, and which columns it reads",
    ),
    "length-limit": (
        over_ten_steps("val/stop_rate", lambda share: share < 0.5),
        "most responses reach the length limit: raise max_new_tokens, or warm start with sft so that they end",
    ),
    "held-out-worse": (
        held_out_worse,
        why_worse,
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


def causes(watch: Watch) -> list[str]:
    """Return what may have kept a run from learning, the likeliest cause first.

    Each cause says what shows it and what to change.
    """
    found = []
    change = watch.held_out

    # A learning rate of 0, or one that is too large, explains the run on its own.
    if max(watch.values.get("lr", [1])) == 0 and not watch.config.get("critic_only"):
        return ["lr was 0 in every step, so no weight moved: raise lr"]
    if watch.judges_nothing:
        return ["every scorer returned None for all responses: see that each ends in `return`"]
    if too_far := [rule for rule in TOO_FAR if rule in watch.found]:
        return [f"the run went too far ({', '.join(too_far)}): {lower_lr(watch)}"]

    # There was nothing left to learn, or no signal that separates good responses from bad ones.
    if change and "accuracy" in change.figure.key and change.start >= 0.98:
        found.append("nothing was left to learn: take harder rows")
    elif signal := no_signal(watch):
        found.append(signal)
    silent = bool(found)

    # Training improved, or another held-out figure did, but the held-out figure of the run did not.
    trained = watch.trained
    better = [
        watch.change_of(figure)
        for figure in WITH_ERROR
        if change and figure != change.figure and figure.key in watch.in_both
    ]
    better = [other for other in better if other.learned]
    if better:
        others = ", and ".join(f"the held-out {other.described()}" for other in better)
        found.append(f"but {others}: raise steps, or eval_size, for a smaller error")
    elif change and trained and trained.learned:
        found.append(f"in training the {trained.described()}, {why_not_held_out(watch, change)}")
    # Without a signal in the rewards, a larger learning rate does not help.
    if not silent:
        found += too_small(watch)
    samples = ", and read samples.jsonl" if watch.has_rewards else ""
    return found or [f"raise lr or steps{samples}"]


def why_not_held_out(watch: Watch, change: Change) -> str:
    """Return why a figure became better in training and not on held-out rows, and what to change."""
    trained = watch.trained
    # A held-out change that may be as large as that in training shows no difference between the two kinds of rows.
    if trained and trained.figure.better == change.figure.better and change.may_equal(trained):
        return "which the held-out change equals within the errors: raise steps, or eval_size, for a smaller error"
    remedy = "take more rows or fewer passes"
    if watch.has_rewards:
        return (
            f"so it fits the training rows or exploits the scorer: {remedy}, and read samples.jsonl"
        )
    return f"so it fits the training rows: {remedy}"


def no_signal(watch: Watch) -> str | None:
    """Return why most groups had equal rewards, or all responses had equal scores; None if they had not."""
    equal = watch.recent("frac_reward_zero_std")
    score = watch.recent("objective/scores")
    is_constant = max(watch.spreads(), default=1) < 1e-6
    if is_constant:
        seen = f"all responses had the same score ({score:.3g})"
    elif equal >= 0.75:
        seen = f"{equal:.0%} of the groups had equal rewards"
    else:
        return None
    if watch.recent("frac_groups_all_solved") >= 0.5:
        return f"{seen}, being solved: take harder rows"
    # Responses that were cut at the length limit fail, so they cannot explain a constant score other than that of a
    # failed response.
    if is_constant and round(score, 6) not in FAILED:
        return f"{seen}: look at what the scorer reads and returns"
    if watch.recent("completions/clipped_ratio") >= 0.5:
        return f"{seen}, and most responses were cut: raise max_new_tokens"
    finer = "" if watch.grades else ", or a scorer that grades"
    return f"{seen}: warm start longer with sft, take easier rows{finer}"


def too_small(watch: Watch) -> list[str]:
    """Return what may have kept the weights from moving: the KL coefficient, the learning rate, the number of steps."""
    found = []
    coefficient = number(watch.config.get("kl_coef"))
    moved = watch.recent("objective/kl_exact")
    penalty = abs(watch.recent("objective/non_score_reward"))
    spread = watch.recent("reward_std")
    if coefficient >= 1 or (coefficient > 0 and penalty > spread):
        found.append(f"the KL may outweigh the reward (kl_coef {coefficient:g}): lower kl_coef")
    if moved < 0.01:
        found.append(f"the policy hardly moved ({moved:.2g} nats per response): raise lr or steps")
    elif (trained := watch.trained) and not math.isfinite(moved) and not trained.learned:
        change = "raise lr or steps" if trained.verdict == "no change" else "lower lr"
        found.append(f"in training the {trained.described()}: {change}")
    steps = watch.now["step"]
    if steps < 20:
        made = "1 step was" if steps == 1 else f"{steps} steps were"
        found.append(f"only {made} made: raise steps")
    return found
