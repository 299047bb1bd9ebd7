"""Signs that a run goes wrong, each a row of one table, and whether it learned; docs/doctor.md says what to do.

They are read from metrics.jsonl and held_out.jsonl alone. So a reader can check every finding, the doctor comes to the
same findings as the run, and a resumed run repeats none and misses none. None of the thresholds was fitted to runs.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from fused_rl.objectives.presets import PRESETS

from .learned import (
    CRITIC,
    GREEDY,
    HELD_OUT,
    REWARDS,
    SIDE_FIGURES,
    TRAINING,
    Change,
    Figure,
    held_out_change,
    training_change,
)
from .metrics import EMPTY, ByRow

# Shares of the held-out responses that cast doubt on a figure which became better, if they are as large as this.
DOUBTS = {
    "eval/clipped_ratio": (0.5, "of the responses were cut at max_new_tokens"),
    "eval/commonest_ratio": (0.9, "of the responses are one and the same text"),
}


class Watch:
    """Reads a run's metrics step by step, and reports each condition once, in the step in which it first holds."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        # A second forward pass repeats the first one to 1e-6 in fp32, and to 5e-2 in bfloat16.
        is_fp32 = config.get("dtype") == "float32" or config.get("zero_stage") == 0
        self.rounding = 1e-6 if is_fp32 else 5e-2
        self.values: dict[str, list[float]] = {}
        # The step, the figures and the rows of the first evaluation, of the last but one and of the last one.
        self.evaluations: list[tuple[int, dict[str, float], ByRow]] = []
        # The name of a rule -> its finding: the step, what was seen, and what to change.
        self.reports: dict[str, tuple[int, str, str]] = {}

    def update(self, entry: Mapping[str, Any], by_row: ByRow = EMPTY) -> list[str]:
        """Add one entry of metrics.jsonl, and return a line for each condition that holds for the first time.

        `by_row` is the entry of held_out.jsonl for the same step, if that evaluated.
        """
        now = {key: math.nan if value is None else value for key, value in entry.items()}
        # The KL is per response, and a longer response has more of it although the policy is no further away.
        if now.get("completions/mean_length", 0) > 0 and "objective/kl_exact" in now:
            now[PER_TOKEN] = now["objective/kl_exact"] / now["completions/mean_length"]
        for key, value in now.items():
            self.values.setdefault(key, []).append(value)

        # A condition that keeps holding is reported only in its first step.
        before = {*self.reports}
        for rule in RULES:
            for key in filter(re.compile(rule.keys).fullmatch, now):
                values = self.values[key]
                # NaN if there are fewer, or one of them is NaN.
                window = values[-rule.steps :]
                latest = mean(window) if len(window) == rule.steps else math.nan
                is_excused = rule.unless is not None and rule.unless(self)
                if rule.name in self.reports or is_excused:
                    continue
                if rule.holds(latest, values, self.rounding):
                    steps = "" if rule.steps == 1 else f" over the last {rule.steps} steps"
                    seen = f"{key} is {latest:.3g}{steps}, at first {values[0]:.3g}"
                    self._report(rule.name, seen, rule.advice)

        # A run that has recovered is no longer worse, and if it gets worse again, that is a new finding.
        is_finite = {key: value for key, value in now.items() if math.isfinite(value)}
        figures = {key: value for key, value in is_finite.items() if key.startswith("eval/")}
        if figures:
            self.evaluations[1:] = [*self.evaluations[-1:], (entry["step"], figures, by_row)]
            if not (change := self.held_out) or change.gain >= 0:
                self.reports.pop(WORSE, None)
            elif WORSE not in self.reports:
                seen = f"held-out {change}"
                if (trained := self.trained) and trained.figure in REWARDS and trained.gain > 0:
                    seen += ", while the reward rose: what is rewarded may not be what is evaluated"
                self._report(
                    WORSE, seen, "lower lr, or take more rows; with rewards, read samples.jsonl"
                )
        return [line for name, line in self.findings.items() if name not in before]

    def _report(self, name: str, seen: str, advice: str) -> None:
        """Add a finding of the latest step."""
        self.reports[name] = round(self.values["step"][-1]), seen, advice

    @property
    def findings(self) -> dict[str, str]:
        """All findings by name, causes first; what a cause may explain has no advice of its own."""
        lines: dict[str, str] = {}
        for name in dict.fromkeys([*(rule.name for rule in RULES), WORSE, NOT_LEARNED]):
            if name in self.reports:
                step, seen, advice = self.reports[name]
                if cause := next(filter(CAUSES.__contains__, lines), None):
                    advice = f"perhaps because of {cause}"
                lines[name] = f"step {step}: {name}: {seen}; {advice} (docs/doctor.md#{name})"
        return lines

    @property
    def held_out(self) -> Change | None:
        """How the held-out figure changed from the first evaluation to the last; None without two evaluations of it."""
        if len(self.evaluations) < 2 or self.config.get("critic_only"):
            return None
        (_, first, _), *_, (_, last, _) = self.evaluations
        compared = {figure.key: figure for figure in HELD_OUT if figure.key in first.keys() & last}
        # One scorer's score is what the run trains for, and may grade where the accuracy stays 0. With several scorers
        # the score also pays for other things, such as the form of an answer, so there the accuracy is the figure.
        accuracy, score = "eval/accuracy_sampled", "eval/score"
        if {accuracy, score} <= compared.keys():
            count = sum(bool(re.fullmatch("rewards/.*/std", key)) for key in self.values)
            is_graded = count < 2 and any(
                figures[accuracy] != figures[score] for figures in (first, last)
            )
            if is_graded or first[accuracy] == last[accuracy] == 0:
                del compared[accuracy]
        return self.change_of(next(iter(compared.values()))) if compared else None

    def change_of(self, figure: Figure, since: int = 0) -> Change:
        """Return how a figure changed from one evaluation, the first one by default, to the last one."""
        return held_out_change(figure, self.evaluations[since], self.evaluations[-1])

    @property
    def trained(self) -> Change | None:
        """How the figure on training rows changed; None in a run of too few steps to compare."""
        figures = (CRITIC,) if self.config.get("critic_only") else TRAINING
        for figure in figures:
            if values := self.values.get(figure.key):
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
            answer = "yes" if change.gain > 0 else "no"
            if math.isnan(change.error):
                answer = (
                    "unknown, as the rows of both evaluations are not known or are a single one"
                )
            elif answer == "yes":
                doubts = " and ".join([*self._doubts(change), *self.findings])
                answer += f", but {doubts}" if doubts else ""
                # It goes on if the last two evaluations differ by more than the error and a tenth of all that changed.
                since = -2 if change.figure.key in self.evaluations[-2][1] else 0
                latest = self.change_of(change.figure, since)
                is_much = 10 * abs(latest.end - latest.start) > abs(change.end - change.start)
                goes_on = latest != change and latest.gain > 0 and is_much
                if ended and goes_on and not self.findings:
                    longer = f"--steps {2 * round(self.values['step'][-1])}"
                    if epochs := self.config.get("num_train_epochs"):
                        longer = f"--num_train_epochs {2 * epochs:g}"
                    answer += ", and still improving"
                    # Otherwise there is no checkpoint.
                    if self.config.get("save_every"):
                        answer += f" (--resume {longer} goes on)"
            so_far = "" if ended else "so far "
            return f"did it learn? {so_far}{answer}: held-out {change}{self._other_figures(change)}"
        none = "no held-out figure was measured twice"
        if change := self.trained:
            return f"did it learn? {none}; in training the {change}"
        return f"did it learn? Nothing here shows it: {none}, and too few steps to compare"

    def _doubts(self, change: Change) -> list[str]:
        """Return what else must be known of a run whose figure became better."""
        doubts = []
        for key, (limit, words) in DOUBTS.items():
            if (share := self.values.get(key, [0])[-1]) >= limit:
                doubts.append(f"{share:.0%} {words}")
        if (solved := self.values.get(GREEDY.key, [1])[-1]) < 0.5:
            doubts.append(f"most problems are unsolved (greedy {solved:.0%})")
        for figure in (HELD_OUT[1], GREEDY):
            is_measured = all(figure.key in figures for _, figures, _ in self.evaluations)
            if is_measured and figure != change.figure and self.change_of(figure).gain < 0:
                doubts.append(f"the {figure.name} fell beyond the error")
        return doubts

    def _other_figures(self, change: Change) -> str:
        """Return the other figures of the first and the last evaluation, and how far the policy went."""
        (_, before, _), *_, (_, after, _) = self.evaluations
        figures = []
        for key, name in SIDE_FIGURES.items():
            # If a scorer only says right or wrong, the score equals the accuracy and is not repeated.
            is_new = after.get(key) != change.end or before.get(key) != change.start
            if key in before and key in after and key != change.figure.key and is_new:
                figures.append(f"{name} {before[key]:.3g} → {after[key]:.3g}")
        if "eval/kl_exact" in after:
            figures.append(f"held-out KL {after['eval/kl_exact']:.3g} nats per response")
        return "".join(f"; {figure}" for figure in figures)

    def conclude(self) -> list[str]:
        """Return, at the end of a run, a finding if its figure did not become better; nothing if the run learned."""
        change = self.held_out or self.trained
        if change is None or math.isnan(change.error) or change.gain > 0 or WORSE in self.reports:
            return []
        where = "held-out" if self.held_out else "in training the"
        advice = "another finding may be the cause; if none is, see where to look"
        self._report(NOT_LEARNED, f"{where} {change}", advice)
        return [self.findings[NOT_LEARNED]]


def compares_across_groups(watch: Watch) -> bool:
    """Return True if responses in groups of equal rewards have advantages too, by the option or by the preset's."""
    preset = PRESETS.get(watch.config.get("preset", ""))
    advantage = watch.config.get("advantage") or (preset.advantage if preset else None)
    return advantage in ("batch-std", "gdpo")


def mostly_solved(watch: Watch) -> bool:
    """Return True if most problems are solved, so that little uncertainty is left."""
    keys = ("eval/accuracy_sampled", "frac_groups_all_solved")
    return max(watch.values.get(key, [0])[-1] for key in keys) > 0.5


def ranks_worse(watch: Watch) -> bool:
    """Return True if held-out responses are told apart less often than at first, as with swapped labels."""
    return any(
        values[-1] < values[0]
        for key, values in watch.values.items()
        if re.fullmatch("eval/(dpo|kto)/accuracy", key)
    )


class Rule(NamedTuple):
    """A condition on the mean of a metric's last values."""

    name: str
    keys: str
    """A pattern of keys of metrics.jsonl."""
    steps: int
    """The number of values that the mean is taken over."""
    holds: Callable[[float, Sequence[float], float], bool]
    """(mean, all values so far, what rounding explains) -> True if this is a finding."""
    advice: str
    unless: Callable[[Watch], bool] | None = None


PER_TOKEN = "objective/kl_exact per token"
PER_TOKEN_LOSSES = "train/loss|distill/kl"
# Losses that are never negative, so that a multiple of the first one means something.
PAIR_LOSSES = "train/(rm|dpo|kto)/loss"
NORMS = "optim/.*grad_norm"
WORSE, NOT_LEARNED = "held-out-worse", "not-learned"
# Findings that may explain every later one.
CAUSES = {"scores-none", "learning-rate", "not-finite", "exploding", "kl-high", "entropy-collapsed"}
CAUSES |= {"displaced", "length-limit", "all-solved"}
# In the order of causes: what may explain others comes before them.
RULES = (
    Rule(
        "scores-none",
        "rewards/.*/none",
        10,
        lambda now, *_: now == 1,
        "the scorer judges nothing: see that it ends in `return`, and which columns it reads",
    ),
    Rule(
        "learning-rate",
        "lr",
        10,
        lambda now, *_: now == 0,
        "raise lr, or steps, over which its schedule runs",
        lambda watch: bool(watch.config.get("critic_only")),
    ),
    Rule(
        "not-finite",
        f"{PER_TOKEN_LOSSES}|{PAIR_LOSSES}|loss/.*|{NORMS}",
        1,
        lambda now, *_: not math.isfinite(now),
        "lower lr, and read the rows of that step",
    ),
    # Three nats make a token 20 times less likely.
    Rule(
        "exploding",
        PER_TOKEN_LOSSES,
        1,
        lambda now, values, _: now > values[0] + 3,
        "lr is probably too large: try a tenth of it",
    ),
    Rule(
        "exploding",
        PAIR_LOSSES,
        1,
        lambda now, values, _: now > 10 * max(values[0], 1),
        "lr is probably too large: try a tenth of it",
    ),
    Rule(
        "exploding",
        NORMS,
        1,
        lambda now, values, _: math.inf > now > 1000 * max(values[:-1], default=now) > 0,
        "lr is probably too large: try a tenth of it",
    ),
    # A third of a nat makes each token 1.4 times less likely.
    Rule(
        "displaced",
        "eval/(dpo|kto)/nll",
        1,
        lambda now, values, _: now > values[0] + 0.3,
        "good responses have become less likely: lower lr, or (dpo) add nll_coef",
        ranks_worse,
    ),
    Rule(
        "kl-high",
        PER_TOKEN,
        10,
        lambda now, values, _: now > 2 or now > max(1, 3 * mean(values[-20:-10] or [now])),
        "lower lr or raise kl_coef, and read samples.jsonl",
        mostly_solved,
    ),
    Rule(
        "entropy-collapsed",
        "policy/entropy_avg",
        10,
        lambda now, values, _: now < mean(values[:10]) / 10,
        "lower lr, or raise kl_coef or entropy_coef",
        mostly_solved,
    ),
    # With too large a learning rate the entropy may have collapsed within ten steps.
    Rule(
        "entropy-collapsed",
        "eval/entropy",
        1,
        lambda now, values, _: now < values[0] / 10,
        "lower lr, or raise kl_coef or entropy_coef",
        mostly_solved,
    ),
    Rule(
        "first-ratio",
        "val/first_ratio",
        1,
        lambda now, _, rounding: abs(now - 1) > rounding,
        "the model's forward does not repeat itself: look for dropout, or use float32",
        # The ratio then also holds the difference between two programs, which has a rule of its own.
        lambda watch: watch.config.get("old_logprobs") == "sampler",
    ),
    Rule(
        "sampler-differs",
        "rollout/logprob_diff_abs",
        3,
        lambda now, _, rounding: now > max(1e-3, rounding),
        "compare dtype, temperature and weights of the server (docs/rollouts.md)",
        lambda watch: bool(watch.config.get("lag")),  # other weights on purpose
    ),
    Rule(
        "clipped",
        "policy/clipfrac_avg",
        10,
        lambda now, *_: now > 0.5,
        "lower lr, epochs or minibatches",
    ),
    Rule(
        "length-limit",
        "val/stop_rate",
        10,
        lambda now, *_: now < 0.5,
        "most responses are cut: raise max_new_tokens, or warm start with sft so that they end",
    ),
    Rule(
        "all-solved",
        "frac_groups_all_solved",
        20,
        lambda now, *_: now >= 0.75,
        "little is left to learn: take harder rows",
        compares_across_groups,
    ),
    Rule(
        "same-score",
        "rewards/.*/std",
        10,
        lambda now, values, _: now <= 1e-6 and values[0] <= 1e-6,
        "every response gets the same score: look at what the scorer reads, or warm start longer with sft",
        mostly_solved,
    ),
    Rule(
        "equal-rewards",
        "frac_reward_zero_std",
        20,
        lambda now, *_: now >= 0.75,
        "they teach nothing: change the rows, the warm start, or the scorer",
        compares_across_groups,
    ),
    Rule(
        "idle-critic",
        "val/var_explained",
        10,
        lambda now, *_: now <= 0,
        "raise critic_lr, look at value_clip, or warm it up with critic_only",
    ),
)
