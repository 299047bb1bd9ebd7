"""The metrics of losses: added up over micro-batches and ranks, and under the keys that metrics.jsonl has for them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fused_rl.trainers.base.ranks import gather, global_sum, rank
from fused_rl.trainers.base.text import InputError

# Key of metrics.jsonl -> name in the metrics of a loss.
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
# The KL of PPO is that of the rollout, before the update.
PPO = {key: name for key, name in POLICY.items() if name != "kl"}
PPO |= {"loss/value_avg": "value_loss", "val/clipfrac_avg": "value_clipfrac"}


def with_logged_names(table: Mapping[str, str], sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a policy's loss under their keys, and the moments of the ratio."""
    found = {key: sums[name] for key, name in table.items() if name in sums}
    found |= {
        key: value for key, value in sums.items() if key.startswith("surrogate/")
    }  # of a user's surrogate
    found["val/ratio"] = 1 + sums["ratio_minus_1"]
    found["val/first_ratio"] = 1 + sums["drift"]
    found["val/ratio_var"] = sums["ratio_minus_1_square"] - sums["ratio_minus_1"] ** 2
    return found


@dataclass
class Sums:
    """The metrics of one optimizer step, added up over micro-batches and ranks."""

    step: int
    parts: list[tuple[torch.Tensor, Sequence[str]]] = field(default_factory=list)
    names: tuple[str, ...] = ()

    def add(self, metrics: dict[str, torch.Tensor], where: Sequence[str]) -> None:
        """Add the scalars of one micro-batch, each divided by the whole step's count, and where its rows are from."""
        self.names = tuple(metrics)
        values = [value.detach().double() for value in metrics.values()]
        self.parts.append((torch.stack(values), where))

    def over_ranks(self) -> dict[str, float]:
        """Return the sums, the same on every rank; refuse a sum that is NaN or infinite on any of them."""
        columns = torch.stack(
            [values for values, _ in self.parts]
        ).cpu()  # waits for the device once
        total = global_sum(sum(columns))
        if total.isfinite().all():
            return dict(zip(self.names, total.tolist(), strict=True))
        found = []
        for number, (values, (_, where)) in enumerate(
            zip(columns.tolist(), self.parts, strict=True), 1
        ):
            bad = [
                name
                for name, value in zip(self.names, values, strict=True)
                if not math.isfinite(value)
            ]
            if bad:
                rows = ", ".join(dict.fromkeys(where))
                what = f"{', '.join(bad)} {'is' if len(bad) == 1 else 'are'} NaN or infinite"
                found.append(
                    f"step {self.step}, micro-batch {number} of rank {rank()}: {what}; its rows: {rows}"
                )
        raise InputError("; ".join(sum(gather(found[:1]), [])))  # the first one of each rank
