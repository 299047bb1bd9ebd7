"""The one table of metric names: whose they are, and of each key unit, definition, healthy values, what others mean.

docs/metrics.md is made of it (`python -m bench docs`), and so are TensorBoard's descriptions. `objective/*` are sums
over a response, averaged over responses; `policy/*` are means over response tokens. With truncated sampling every
log-probability, entropy and KL, the exact one too, is over what its token was drawn from.
"""

import re
from typing import NamedTuple

from fused_rl.trainers.metrics.metric import Metric
from fused_rl.trainers.metrics.responses import EVALUATION, GROUPS, PASSES, ROLLOUT, SAMPLER, SCORERS
from fused_rl.trainers.metrics.updates import CRITIC, DEMONSTRATIONS, LOSS, REWARD, RUN


class Origin(NamedTuple):
    """Whoever computes some of these metrics takes the whole table of them."""

    title: str
    trainers: tuple[str, ...]
    metrics: dict[str, Metric]


POLICIES = ("grpo", "ppo")
# A key that stands in two of them is described by the later one.
ORIGINS = (
    Origin("Every run", ("sft", "reward", *POLICIES), RUN),
    Origin("Demonstrations", ("sft",), DEMONSTRATIONS),
    Origin("Pairs", ("reward",), REWARD),
    Origin("Rollouts", POLICIES, ROLLOUT),
    Origin("Policy loss and KL", POLICIES, LOSS),
    Origin("Groups", ("grpo",), GROUPS),
    Origin("Critic", ("ppo",), CRITIC),
    Origin("Evaluation on held-out rows", POLICIES, EVALUATION),
)
# Keys with a name or number in them, which a run may have or not.
NAMED = (
    Origin("Of each scorer", POLICIES, SCORERS),
    Origin("pass@k, in an evaluation", POLICIES, PASSES),
    Origin("Of a sampler that is not the policy itself", POLICIES, SAMPLER),
)


def _of(trainer: str, origins: tuple[Origin, ...]) -> dict[str, Metric]:
    found = {}
    for origin in origins:
        found |= origin.metrics if trainer in origin.trainers else {}
    return found


KEYS = {trainer: _of(trainer, ORIGINS) for trainer in ("sft", "reward", *POLICIES)}


def row_of(trainer: str, key: str) -> str | None:
    """The key of the table that describes `key`: itself, or `rewards/{name}/mean` of `rewards/math/mean`; or None."""
    if key in KEYS[trainer]:
        return key
    for named in _of(trainer, NAMED):
        pattern = re.sub(r"\\\{\w+\\\}", ".+", re.escape(named))
        if re.fullmatch(pattern, key, re.DOTALL):
            return named
    return None


def sentences(metric: Metric) -> list[str]:
    """What a metric is, which values are healthy, and what others mean, in Markdown."""
    said = [f"{in_markdown(metric.definition)} ({metric.unit})"]
    said += [f"Healthy: {in_markdown(metric.healthy)}"] if metric.healthy else []
    said += [f"Otherwise: {in_markdown(metric.outside)}"] if metric.outside else []
    return said


def in_markdown(text: str) -> str:
    """With the names of options and metrics as code."""
    return re.sub(r"--\w+|\b\w+/[\w*]+(?:\.\w+)?|\b\w+_[\w*]+", r"`\g<0>`", text)


def description(trainer: str, key: str) -> str:
    """What a key means, in Markdown, for whoever looks at its curve; "" where the table has none."""
    metric = (KEYS[trainer] | _of(trainer, NAMED)).get(row_of(trainer, key))
    if metric is None:
        return ""
    return ". ".join(sentences(metric))


def keyed(table: dict[str, Metric], sums: dict[str, float], prefix: str = "") -> dict[str, float]:
    """The keys of `table` that come from a loss's bare metrics; with `prefix` only those that begin with it.

    What a loss does not return, the KL to a reference that it was not given, has no key.
    """
    found = {}
    for key, metric in table.items():
        absent = isinstance(metric.of, str) and metric.of not in sums
        if metric.of is None or absent or not key.startswith(prefix):
            continue
        found[key] = metric.of(sums) if callable(metric.of) else sums[metric.of]
    return found
