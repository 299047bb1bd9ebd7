"""The table of the metrics that a run shows, and the sums of a loss's metrics over micro-batches and ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import torch

from ..base.ranks import gather, global_sum, rank
from ..base.text import InputError

ByRow = Mapping[str, Sequence[Sequence[float]]]
"""The key of a figure -> one list with the sum of each row, and a second one with its weight if that is not 1."""
EMPTY = cast(dict[Any, Any], MappingProxyType({}))
"""The default of a mapping that nobody adds to."""


class Evaluation(NamedTuple):
    """The results of an evaluation, as `Run.log` takes them."""

    metrics: dict[str, float] = EMPTY
    samples: Sequence[dict] = ()
    by_row: ByRow = EMPTY


class Metric(NamedTuple):
    """What curves.png and the screen do with a key of metrics.jsonl."""

    panel: str = ""
    """The title of its panel in curves.png; "" if it is not drawn."""
    column: str = ""
    """Its header on the screen, or ""; of several metrics with one header, the first that a run has is printed."""


KL = "KL to the reference (nats per response)"
WITHOUT_SIGNAL = "groups whose rewards are all equal (share)"
ONE_OUTCOME = "groups all solved, and none solved (share)"
PER_TOKEN, OF_PAIRS, OF_MARKED = "loss (nats per token)", "loss (nats per pair)", "loss (no unit)"
REWARD = "reward (mean of a step)"
ACCURACY = "held-out accuracy (share)"
# How the headers of held-out figures begin. On the screen, headers that follow one another share this word.
HELD_OUT = "held-out "
# Panels and columns appear in the order of this table.
METRICS = {
    "train/loss": Metric(PER_TOKEN, "loss"),
    "train/rm/loss": Metric(OF_PAIRS, "loss"),
    "train/dpo/loss": Metric(OF_PAIRS, "loss"),
    "train/kto/loss": Metric(OF_MARKED, "loss"),
    "distill/kl": Metric(PER_TOKEN, "loss"),
    "eval/loss": Metric(PER_TOKEN),
    "eval/rm/loss": Metric(OF_PAIRS),
    "eval/dpo/loss": Metric(OF_PAIRS),
    "eval/kto/loss": Metric(OF_MARKED),
    "eval/distill/kl": Metric(PER_TOKEN, f"{HELD_OUT}KL/token"),
    "reward": Metric(REWARD, "reward"),
    "objective/scores": Metric(REWARD, "reward"),
    "objective/rlhf_reward": Metric(REWARD),
    "eval/accuracy_greedy": Metric(ACCURACY, f"{HELD_OUT}greedy"),
    "eval/accuracy_sampled": Metric(ACCURACY, f"{HELD_OUT}sampled"),
    "eval/pass_at_k": Metric(ACCURACY),
    "eval/token_accuracy": Metric("held-out token accuracy (share)", f"{HELD_OUT}token accuracy"),
    "train/kto/accuracy": Metric("accuracy on marked responses (share)"),
    "eval/kto/accuracy": Metric("accuracy on marked responses (share)", f"{HELD_OUT}accuracy"),
    "train/rm/accuracy": Metric("accuracy on pairs (share)"),
    "train/dpo/accuracy": Metric("accuracy on pairs (share)"),
    "eval/rm/accuracy": Metric("accuracy on pairs (share)", f"{HELD_OUT}accuracy"),
    "eval/dpo/accuracy": Metric("accuracy on pairs (share)", f"{HELD_OUT}accuracy"),
    "train/rm/chosen_rewards": Metric("scores (mean)"),
    "train/rm/rejected_rewards": Metric("scores (mean)"),
    "train/dpo/chosen_rewards": Metric("scores (mean)"),
    "train/dpo/rejected_rewards": Metric("scores (mean)"),
    "train/kto/desirable_rewards": Metric("scores (mean)"),
    "train/kto/undesirable_rewards": Metric("scores (mean)"),
    "eval/score": Metric("held-out score (mean)", f"{HELD_OUT}score"),
    "perf/tokens_per_second": Metric(column="tokens/s"),
    "objective/kl": Metric(KL),
    "objective/kl1_avg": Metric(KL),
    "objective/kl_exact": Metric(KL, "KL/response"),
    "policy/entropy_avg": Metric("entropy (nats per token)"),
    "train/entropy": Metric("entropy (nats per token)"),
    "val/var_explained": Metric("explained variance of the returns (share)"),
    "frac_reward_zero_std": Metric(WITHOUT_SIGNAL),
    "frac_groups_all_solved": Metric(ONE_OUTCOME),
    "frac_groups_none_solved": Metric(ONE_OUTCOME),
    "completions/mean_length": Metric("response length (tokens)"),
}


def keys_by(field: Literal["panel", "column"]) -> dict[str, list[str]]:
    """Return the keys of `METRICS` by the value of a field, in the order of the table, without those that have none."""
    keys: dict[str, list[str]] = {}
    for key, metric in METRICS.items():
        if value := getattr(metric, field):
            keys.setdefault(value, []).append(key)
    return keys


# The key in metrics.jsonl -> the name among the metrics that a loss returns.
POLICY = {
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
}
# PPO logs the KL of the rollout, before the update, under objective/kl, so the KL of its loss has no key.
PPO = {key: name for key, name in POLICY.items() if name != "kl"}
PPO |= {"loss/value_avg": "value_loss", "val/clipfrac_avg": "value_clipfrac"}


def with_logged_names(table: Mapping[str, str], sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a policy's loss under their keys in metrics.jsonl, with the mean and variance of the ratio.

    Args:
        table: `POLICY` or `PPO`.
        sums: the metrics of the loss by their own names, as means over the tokens of the optimizer step; without a
            token these are the losses alone.
    """
    # A loss need not compute all of them: a surrogate that clips nothing has no clipfrac, for example.
    logged = {key: sums[name] for key, name in table.items() if name in sums}
    logged |= {
        key: value for key, value in sums.items() if key.startswith("surrogate/")
    }  # of a user's surrogate

    # Losses add up the distance of the ratio from 1, because a sum of ratios near 1 would be rounded.
    if "drift" not in sums:
        return logged
    logged["val/ratio"] = 1 + sums["ratio_minus_1"]
    logged["val/first_ratio"] = 1 + sums["drift"]
    logged["val/ratio_var"] = sums["ratio_minus_1_square"] - sums["ratio_minus_1"] ** 2
    return logged


def means_of_updates(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over those updates of a step that have it."""
    values = {}
    for metrics in history:
        for key, value in metrics.items():
            values.setdefault(key, []).append(value)
    means = {key: sum(of_updates) / len(of_updates) for key, of_updates in values.items()}
    # Only in the first update is the policy the one that was sampled.
    return means | {key: values[key][0] for key in ("val/first_ratio",) if key in values}


@dataclass
class Sums:
    """The metrics of one optimizer step, added up over micro-batches and ranks."""

    step: int
    micro_batches: list[tuple[torch.Tensor, Sequence[str]]] = field(default_factory=list)
    names: tuple[str, ...] = ()

    def add(self, metrics: dict[str, torch.Tensor], where: Sequence[str]) -> None:
        """Add the scalars of one micro-batch, each divided by the whole step's count, and where its rows are from."""
        self.names = tuple(metrics)
        values = [value.detach().double() for value in metrics.values()]
        self.micro_batches.append((torch.stack(values), where))

    def over_ranks(self, num_tokens: int = 1) -> dict[str, float]:
        """Return the sums over all micro-batches and ranks, the same on every rank; without tokens only the losses.

        Raises:
            InputError: a sum is NaN or infinite; the message names each rank's first such micro-batch and its rows.
        """
        # This is the one place in a step that waits for the device.
        columns = torch.stack([values for values, _ in self.micro_batches]).cpu()
        total = global_sum(sum(columns, torch.zeros(())))
        if total.isfinite().all():
            # A mean over no token is no 0: it would drag down those of other updates.
            totals = zip(self.names, total.tolist(), strict=True)
            return {name: value for name, value in totals if num_tokens or name.endswith("loss")}

        # Name the first micro-batch of each rank that is NaN or infinite, with the rows that were in it.
        problems = []
        for number, (values, (_, where)) in enumerate(
            zip(columns, self.micro_batches, strict=True), 1
        ):
            bad = [
                name for name, value in zip(self.names, values, strict=True) if not value.isfinite()
            ]
            if bad:
                problem = f"{', '.join(bad)} is NaN or infinite; its rows: {', '.join(dict.fromkeys(where))}"
                problems.append(
                    f"step {self.step}, micro-batch {number} of rank {rank()}: {problem}"
                )
        raise InputError("; ".join(sum(gather(problems[:1]), [])))
