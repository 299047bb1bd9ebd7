"""What sick runs look like: one table of rules over a run's metrics, for the run itself, `fused-rl doctor` and reports.

    watch = Watch("grpo", config)
    for entry in entries:              # of metrics.jsonl, or as they are made
        for finding in watch.see(entry):
            print(finding.told())

What a rule has seen follows from the entries alone, so a resumed run goes on where it was.
"""

import bisect
import math
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import NamedTuple

from fused_rl.presets import PRESETS
from fused_rl.trainers.metrics.bands import MARGIN, UNITS, in_unit, widest
from fused_rl.trainers.metrics.table import KEYS, POLICIES, row_of

GRADIENTS = ("optim/grad_norm", "optim/critic_grad_norm")
WINDOW = 10  # steps in a row, of what chance or a warm-up may bring for a few


class Rule(NamedTuple):
    """One thing that goes wrong."""

    name: str
    trainers: tuple[str, ...]
    metrics: tuple[str, ...]
    """Rows of the table; each key of them is looked at for itself."""
    left: Callable[["Watch", str], str | None]
    """(what was seen, key) -> the healthy values that the last one is not of, in words; None where it is of them."""
    means: str
    """What it mostly is."""
    change: str
    """What to do about it."""
    patience: int = 1
    """So many steps in a row that have the metric."""


class Finding(NamedTuple):
    """A rule that fits a run."""

    rule: Rule
    key: str
    step: int
    """Where it began."""
    value: float
    """Then."""
    healthy: str
    """In words."""

    def told(self) -> str:
        """In a line."""
        value = f"{self.value:.4g}"
        if value == "1" and self.value != 1:
            value = f"1{self.value - 1:+.1e}"
        since = f"since step {self.step} {self.key} is {value}, and healthy is {self.healthy}"
        return f"{since}: {self.rule.means}; {self.rule.change}"


class Watch:
    """Reads a run's metrics step by step, and finds what is wrong, each thing once."""

    def __init__(self, trainer: str, config: Mapping[str, object]):
        self.trainer, self.config = trainer, config
        self.rules = [rule for rule in RULES if trainer in rule.trainers]
        self.now: dict[str, object] = {}
        """The last entry."""
        self.values: dict[str, list[float]] = {}
        """Of each metric, without those that are not finite."""
        self.steps: dict[str, list[int]] = {}
        """Of each value of these."""
        self.outside: dict[tuple[str, str], tuple[Finding, int]] = {}
        """Of each rule and key that is outside now: since when, and for how many steps."""
        self.found: list[Finding] = []
        self.looked_at: set[str] = set()

    def see(self, entry: Mapping[str, object]) -> list[Finding]:
        """One entry of metrics.jsonl; returns what it shows for the first time."""
        self.now = entry
        for key in entry.keys() - {"step"}:
            if math.isfinite(self.value(key)):
                self.values.setdefault(key, []).append(self.value(key))
                self.steps.setdefault(key, []).append(entry["step"])
        new = []
        for rule in self.rules:
            for key in self._keys(rule):
                new += self._look(rule, key)
        self.found += new
        return new

    def _keys(self, rule: Rule) -> list[str]:
        """Of the last entry, those that a rule looks at."""
        named = [metric for metric in rule.metrics if "{" in metric]
        keys = [metric for metric in rule.metrics if metric in self.now]
        return keys + [key for key in self.now if named and row_of(self.trainer, key) in named]

    def _look(self, rule: Rule, key: str) -> list[Finding]:
        """The finding, in the step that makes it one."""
        self.looked_at.add(key)
        healthy = rule.left(self, key)
        if healthy is None:
            self.outside.pop((rule.name, key), None)
            return []
        now = Finding(rule, key, self.now["step"], self.value(key), healthy)
        first, count = self.outside.get((rule.name, key), (now, 0))
        self.outside[rule.name, key] = first, count + 1
        known = any(finding.rule is rule and finding.key == key for finding in self.found)
        return [first] if count + 1 == rule.patience and not known else []

    def value(self, key: str) -> float:
        """The last entry's; NaN where it has none, or none that is a number."""
        value = self.now.get(key)
        try:
            return float(value) if isinstance(value, (int, float)) else math.nan
        except OverflowError:
            return math.inf

    def option(self, name: str) -> float:
        """A number of the config; 0 where it has none: a config.yaml may have been written by hand."""
        value = self.config.get(name)
        return value if isinstance(value, (int, float)) else 0

    def upto(self, key: str, step: int) -> list[float]:
        """The last `WINDOW` values of a metric up to a step; the first ones where there are not as many."""
        end = bisect.bisect_right(self.steps.get(key, []), step)
        return self.values.get(key, [])[max(0, end - WINDOW) : max(end, WINDOW)]


def examine(trainer: str, config: Mapping[str, object], history: Iterable[Mapping[str, object]]) -> Watch:
    """What the whole of a run shows, by the step in which it began; of a trainer without rules nothing."""
    watch = Watch(trainer, config)
    for entry in history if trainer in KEYS else ():
        watch.see(entry)
    watch.found.sort(key=lambda finding: (finding.step, RULES.index(finding.rule)))
    return watch


# When a metric is outside: by what it means, or by what was measured.


def unless(outside: Callable[[float], bool], healthy: str, *, option: str = "", has: object = None):
    """Outside by its value alone; with `option` only in runs whose option has this value."""

    def left(watch: Watch, key: str) -> str | None:
        asked = not option or watch.config.get(option) == has
        return healthy if asked and outside(watch.value(key)) else None

    return left


def band(edge: str, above: Callable[["Watch"], float] | None = None):
    """Beyond an edge of the measured band, "low" or "high", by more than the margin; and in itself `above` a value."""

    def left(watch: Watch, key: str) -> str | None:
        measured, now = widest(key), watch.value(key)
        if measured is None or math.isnan(now) or (above is not None and now <= above(watch)):
            return None
        value = now if math.isinf(now) else in_unit(key, watch.values)
        low, high = measured.low / MARGIN, measured.high * MARGIN
        if value is None or (value >= low if edge == "low" else value <= high):
            return None
        one = now / value if value and math.isfinite(now) else 1.0
        least, limit = ("at least", low) if edge == "low" else ("at most", high)
        of_band = f"{limit:.2g} {UNITS[key].words}".rstrip()
        return f"{least} {of_band}" if one == 1 else f"{least} {limit * one:.4g} ({of_band})"

    return left


def nothing_counts(watch: Watch) -> bool:
    """Whether no response of the step is trained on; its means are then 0."""
    all_cut = watch.value("val/stop_rate") == 0 and bool(watch.config.get("mask_truncated"))
    return watch.value("groups/trained") == 0 or all_cut


def entropy_gone(watch: Watch, key: str) -> str | None:
    """Below the band, and not because most problems are solved: then little is left to learn."""
    solved = [watch.value("frac_groups_all_solved"), *watch.values.get("eval/accuracy_sampled", [])[-1:]]
    return None if any(part > 0.5 for part in solved) or nothing_counts(watch) else band("low")(watch, key)


def clipped_above(watch: Watch) -> float:
    """The norm from which on gradients are clipped: smaller ones do no harm, whatever they were before."""
    return watch.option("max_grad_norm") or 1.0


def loss_rises(watch: Watch, key: str) -> str | None:
    """Half a nat above its beginning, on the same held-out rows or over ten steps; or far above its first value."""
    values = watch.values.get(key, [])
    if any(finding.rule.name == "overfitted" and finding.key == key for finding in watch.found):
        return None
    compared = [(1, 1, 0.5)] if key.startswith("eval/") else [(WINDOW, WINDOW, 0.5), (1, 5, 5.0)]
    for first, last, by in compared:
        highest = median(values[:first]) + by if len(values) >= first + last else math.inf
        now = median(values[-last:]) if values else 0.0
        if now > highest:
            return f"at most {highest:.3g}" + (f" (the median of {last} steps is {now:.3g})" if last > 1 else "")
    return None


def overfitted(watch: Watch, key: str) -> str | None:
    """A fifth of a nat above its lowest value, on the same held-out rows, while the loss of training fell further."""
    values, steps = watch.values.get(key, []), watch.steps.get(key, [])
    if not values or values[-1] <= min(values) + 0.2:
        return None
    lowest = values.index(min(values))
    train, then = key.replace("eval/", "train/"), steps[lowest]
    learnt = lowest and median(watch.upto(train, steps[-1])) < median(watch.upto(train, then))
    return f"at most {values[lowest] + 0.2:.3g} (it was {values[lowest]:.3g} in step {then})" if learnt else None


def still(watch: Watch, key: str) -> str | None:
    """Less than any step shows, though there are gradients and a learning rate; a reference may follow the policy."""
    steps = watch.value("optim/grad_norm") > 0 and watch.value("lr") > 0 and not watch.config.get("ref_sync_every")
    return "above 1e-09" if steps and watch.value(key) <= 1e-9 else None


def outweighed(watch: Watch, key: str) -> str | None:
    """More than ten times what scores, or their spread, ever were."""
    scales = [watch.values.get("objective/scores", [])]
    scales += [values for name, values in watch.values.items() if name.startswith("rewards/") and name[-4:] == "/std"]
    largest = max((abs(value) for values in scales for value in values), default=0.0)
    return f"at least {-10 * largest:.3g}" if largest and watch.value(key) < -10 * largest else None


def all_alike(watch: Watch, key: str) -> str | None:
    """Every scorer gave one score to all responses, and no missing stop token cost some of them a part of it."""
    spreads = [watch.value(name) for name in watch.now if row_of(watch.trainer, name) == "rewards/{name}/std"]
    for_eos = watch.config.get("missing_eos_penalty") or watch.config.get("missing_eos_score") is not None
    ended = watch.value("val/stop_rate") in (0, 1) or not for_eos
    return "not the same for all responses" if spreads and not any(spreads) and ended else None


def no_signal(watch: Watch, key: str) -> str | None:
    """Every group's rewards are equal, and compared within the group."""
    preset = PRESETS.get(str(watch.config.get("preset")))
    advantage = watch.config.get("advantage") or (preset and preset.advantage)
    return "below 1" if watch.value(key) == 1 and advantage != "batch-std" else None


def dead_critic(watch: Watch, key: str) -> str | None:
    """No gradient, and not because nothing at all is trained on."""
    return "above 0" if watch.value(key) == 0 and not nothing_counts(watch) else None


def ratio_off(watch: Watch, key: str) -> str | None:
    """Further from 1 than rounding: in fp32 a pass repeats itself to 1e-6, in bfloat16 to some hundredths."""
    allowed = 1e-6 if _is_fp32(watch) else 5e-2
    return f"1 within {allowed:g}" if abs(watch.value(key) - 1) > allowed else None


def _is_fp32(watch: Watch) -> bool:
    return watch.config.get("dtype") == "float32" or watch.config.get("zero_stage") == 0


def _not_the_policys(watch: Watch, value: float) -> str | None:
    """More than docs/rollouts.md allows a server."""
    allowed = 1e-3 if _is_fp32(watch) else 0.05
    return f"at most {allowed:g} nats" if value > allowed else None


def raw(watch: Watch, key: str) -> str | None:
    """From the first rollout on, when the weights were those that a run begins with; with `lag` too."""
    return _not_the_policys(watch, watch.value(key)) if _off_at_first(watch, key) else None


def stale(watch: Watch, key: str) -> str | None:
    """Only after updates; what is drawn ahead is of other weights by intention, but not of the first ones for long."""
    as_meant = _off_at_first(watch, key) or (watch.option("lag") and not _of_the_first_weights(watch))
    return None if as_meant else _not_the_policys(watch, watch.value(key))


def _of_the_first_weights(watch: Watch) -> bool:
    """Whether who draws is half as far from the policy as the model that it began as, or further, and that is far.

    Drawn ahead by `lag` 1 to 4 it was at most 0.07 times as far from step 5 * (lag + 1) on, with weights that never
    arrive 0.7 to 1.2 times.
    """
    now, begun = watch.now["step"], 5 * (watch.option("lag") + 1)
    keys = ("rollout/kl_k3", "objective/kl_exact", "completions/mean_length")
    if now < begun or watch.config.get("ref_sync_every") or not watch.values.keys() >= set(keys):
        return False
    of_sampler, of_start, length = (median(watch.upto(key, now)) for key in keys)
    return of_start > 0.05 * length and of_sampler * length > of_start / 2


def _off_at_first(watch: Watch, key: str) -> bool:
    return _not_the_policys(watch, watch.values.get(key, [math.nan])[0]) is not None


def no_learning_rate(watch: Watch, key: str) -> str | None:
    """In runs that do not train the critic alone."""
    return "above 0" if watch.value(key) == 0 and not watch.config.get("critic_only") else None


def outwitted(watch: Watch, key: str) -> str | None:
    """Since an evaluation scores and lengths have risen, and held-out accuracy is not above its median so far."""
    measured, lengths, scores = widest("completions/mean_length"), "completions/mean_length", "objective/scores"
    seen = lengths in watch.values and len(watch.values.get(scores, [])) >= 2 * WINDOW
    if measured is None or math.isnan(watch.value(key)) or not seen:
        return None
    now, before = watch.now["step"], watch.values[key][:-1]
    if not before or watch.value(key) > median(before):
        return None
    for step, accuracy in zip(watch.steps[key][:-1], watch.values[key], strict=False):
        longer = median(watch.upto(lengths, now)) > MARGIN * measured.high * median(watch.upto(lengths, step))
        paid = min(watch.upto(scores, now)) > median(watch.upto(scores, step))
        if longer and paid and watch.value(key) <= accuracy:
            return f"above {accuracy:.4g}, of step {step}, while scores and lengths rise"
    return None


def accuracy_lost(watch: Watch, key: str) -> str | None:
    """Below its highest by more than chance among so many problems, sampled by half of it, while a score rises."""
    held_out = ("eval/score", "eval/accuracy_greedy", "eval/accuracy_sampled")
    problems, values = watch.option("eval_size"), [watch.values.get(name, []) for name in held_out]
    if math.isnan(watch.value(key)) or len({len(each) for each in values}) > 1:
        return None
    best = values[1].index(max(values[1]))
    then, allowed = watch.steps[key][best], max(0.1, 1.5 / math.sqrt(problems if problems > 1 else 100))
    score, greedy, sampled = (each[-1] - each[best] for each in values)
    paid = [median(watch.upto("objective/scores", step) or [0.0]) for step in (then, watch.now["step"])]
    lost = greedy < -allowed and sampled < -allowed / 2 and (score > 0 or paid[1] > paid[0])
    return f"at least {values[1][best] - allowed:.3g} (it was {values[1][best]:.3g} in step {then})" if lost else None


def one_score(watch: Watch, key: str) -> str | None:
    """The highest score is the lowest, but for rounding."""
    spread = watch.value(key) - watch.value("train/rm/min_reward")
    return "above that of the lowest response" if spread <= 1e-8 * max(1.0, abs(watch.value(key))) else None


def never_above_chance(watch: Watch, key: str) -> str | None:
    """By more than twice the standard error of so many pairs; in the second half of the run at all."""
    pairs, step = watch.option("eval_size"), watch.now["step"]
    late = 2 * step > (watch.option("steps") or math.inf)
    allowed = 0.5 if late else 0.5 - 1 / math.sqrt(pairs if pairs > 1 else 100)
    below = watch.value(key) < allowed or (late and watch.value(key) == allowed)
    return "above 0.5, which is chance" if step and below else None


RULES = (  # of those that begin together the cause stands before what it brings about
    # What is trained on.
    Rule(
        "nothing-trained",
        POLICIES,
        ("val/stop_rate",),
        unless(lambda value: value == 0, "above 0", option="mask_truncated", has=True),
        "every response was cut at max_new_tokens, and mask_truncated leaves all of them out: nothing is trained",
        "raise --max_new_tokens, or warm start with sft so that responses end",
    ),
    Rule(
        "cut-responses",
        POLICIES,
        ("val/stop_rate",),
        band("low"),
        f"for {WINDOW} steps most responses were cut at max_new_tokens, before their answer",
        "raise --max_new_tokens, or warm start with sft so that responses end; see that --model has the EOS of its "
        "template",
        WINDOW,
    ),
    Rule(
        "silent-scorer",
        POLICIES,
        ("rewards/{name}/none",),
        unless(lambda value: value == 1, "below 1"),
        f"the scorer returned None for every response of {WINDOW} steps: it judges nothing",
        "see that a function of your own ends in a `return` (without one Python returns None); look at the columns "
        "that it reads and at the form of the answers, or choose another one: --verifiers",
        WINDOW,
    ),
    Rule(
        "no-signal",
        ("grpo",),
        ("frac_reward_zero_std",),
        no_signal,
        f"for {WINDOW} steps all rewards of every group were equal, so that nothing is learnt: prompts too hard or too "
        "easy, or a scorer that judges all alike",
        "read the responses in samples.jsonl, and look at what judges them, at temperature, top_k and group_size; "
        "where no response is right, warm start with sft",
        WINDOW,
    ),
    Rule(
        "equal-scores",
        ("ppo",),
        ("objective/scores",),
        all_alike,
        f"for {WINDOW} steps every scorer gave all responses one score, so that nothing but the KL is learnt",
        "read the responses in samples.jsonl, and look at what judges them and at temperature; where no response is "
        "right, warm start with sft",
        WINDOW,
    ),
    Rule(
        "no-learning-rate",
        tuple(KEYS),
        ("lr",),
        no_learning_rate,
        f"for {WINDOW} steps the learning rate was 0: nothing is learnt",
        "raise --lr, or --steps, to which --lr_schedule is stretched",
        WINDOW,
    ),
    Rule(
        "stands-still",
        POLICIES,
        ("objective/kl_exact",),
        still,
        f"after {WINDOW} steps the policy is the model that it began as, though there are gradients: steps are too "
        "small for its weights",
        "raise --lr",
        WINDOW,
    ),
    Rule(
        "scores-outweighed",
        POLICIES,
        ("objective/non_score_reward",),
        outweighed,
        f"for {WINDOW} steps the KL, or length, cost ten times what scorers ever paid: the task is not learnt",
        "lower --kl_coef, or --overlong_factor; see that the scores have the scale of 1",
        WINDOW,
    ),
    Rule(
        "below-chance",
        ("reward",),
        ("eval/rm/accuracy",),
        never_above_chance,
        "twice held-out pairs were told apart no better than by chance: chosen and rejected swapped in one of the "
        "files, or nothing is learned",
        "read some rows of both; then raise --lr or --steps",
        2,
    ),
    # The policy.
    Rule(
        "ratio-off",
        POLICIES,
        ("val/first_ratio",),
        ratio_off,
        "the forward of the update does not repeat the one before it (dropout? a non-deterministic kernel?), so "
        "clipping and advantages act on the wrong ratios",
        "see what fused-rl doctor --null says; use --dtype float32, or a model without randomness in its forward",
    ),
    Rule(
        "steps-too-far",
        POLICIES,
        ("policy/approxkl_avg",),
        band("high"),
        "the updates of a step go too far from the policy that sampled",
        "lower --lr (it may be 100 times too high), --epochs or --minibatches; in ppo give --target_kl",
        3,
    ),
    Rule(
        "entropy-gone",
        POLICIES,
        ("policy/entropy_avg",),
        entropy_gone,
        "responses are all alike, and teach nothing",
        "lower --lr, raise --kl_coef or --entropy_coef, and sample at temperature 1; read samples.jsonl",
        WINDOW,
    ),
    Rule(
        "entropy-rises",
        POLICIES,
        ("policy/entropy_avg",),
        band("high", lambda _: 0.5),
        "responses become noise",
        "lower --lr or --entropy_coef; read samples.jsonl",
        WINDOW,
    ),
    Rule(
        "kl-runs-away",
        POLICIES,
        ("objective/kl_exact",),
        band("high"),
        "the policy is far from the model that it began as; scores that rise with it are mostly a scorer outwitted",
        "raise --kl_coef or lower --lr, and read the responses in samples.jsonl",
        3,
    ),
    Rule(
        "outwitted-scorer",
        POLICIES,
        ("eval/accuracy_sampled",),
        outwitted,
        "the scorer pays for length, and not for right answers",
        "judge what is right (--verifiers), with weight 0 to watch it alone; take length out of the score, or give "
        "--overlong_buffer; raise --kl_coef",
    ),
    Rule(
        "accuracy-lost",
        POLICIES,
        ("eval/accuracy_greedy",),
        accuracy_lost,
        "scores rise while fewer held-out problems are solved: not what is right pays, or rows are learnt by heart",
        "let right answers pay (--verifier_weights) or raise --kl_coef; where they do, give more rows or fewer --steps",
    ),
    # The critic.
    Rule(
        "dead-critic",
        ("ppo",),
        ("optim/critic_grad_norm",),
        dead_critic,
        "the critic has no gradient: its value loss is 0, every response is empty, or value_clip holds every token",
        "look at loss/value_avg, completions/mean_length and val/clipfrac_avg",
    ),
    Rule(
        "idle-critic",
        ("ppo",),
        ("val/var_explained",),
        unless(lambda value: value <= 0, "above 0"),
        f"for {WINDOW} steps the critic was no better than a constant, and adds noise to the advantages",
        "look at critic_lr, at value_clip (smaller than the rewards' scale?), and warm it up first: --critic_only N, "
        "then --critic OUTPUT_DIR/critic",
        WINDOW,
    ),
    # Who draws.
    Rule(
        "raw-logprobs",
        POLICIES,
        ("rollout/logprob_diff_abs",),
        raw,
        "the sampler tells log-probabilities that are not the policy's: raw ones, of before the temperature or the "
        "kept sets, or those of another dtype",
        "start vLLM with --logprobs-mode processed_logprobs, and give both sides one --dtype and an fp32 head",
        3,
    ),
    Rule(
        "stale-logprobs",
        POLICIES,
        ("rollout/logprob_diff_abs",),
        stale,
        "the sampler's log-probabilities were the policy's when the run began, and are not now: it has stale weights, "
        "or keeps prompts of before the last ones",
        "see that its `publish` brings every tensor and empties its cache",
        3,
    ),
    # Any training.
    Rule(
        "not-finite",
        tuple(KEYS),
        ("train/loss", "train/rm/loss", "loss/total_avg", "loss/value_avg", *GRADIENTS),
        unless(lambda value: not math.isfinite(value), "a number"),
        "a loss or gradient is not finite",
        "lower --lr, look for extreme rows or scores, and go on from a checkpoint before: --resume_from",
    ),
    Rule(
        "loss-rises",
        ("sft", "reward"),
        ("train/loss", "train/rm/loss", "eval/loss", "eval/rm/loss"),
        loss_rises,
        "the loss is above that of the model as it began",
        "lower --lr (it may be 100 times too high), and give --warmup_steps; where the held-out loss alone rises, rows "
        "are learnt by heart: fewer --steps",
    ),
    Rule(
        "overfitted",
        ("sft", "reward"),
        ("eval/loss", "eval/rm/loss"),
        overfitted,
        "the held-out loss rises while that of training falls: rows are learnt by heart",
        "fewer --steps, more rows, or a lower --lr; the checkpoint of its lowest value is better: --save_every",
        2,
    ),
    Rule(
        "gradient-grows",
        tuple(KEYS),
        GRADIENTS,
        band("high", clipped_above),
        "gradients are far above what they were: steps are too large, or rows are unlike those before",
        "lower --lr, or --critic_lr where it is the critic's; --max_grad_norm bounds one step, not many",
        WINDOW,
    ),
    Rule(
        "one-score",
        ("reward",),
        ("train/rm/max_reward",),
        one_score,
        f"for {WINDOW} steps the model gave all responses one score: it tells nothing apart",
        "look for weights that have gone to 0 (--weight_decay, --lr), and begin again from --model",
        WINDOW,
    ),
)
