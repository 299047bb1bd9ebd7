"""What a run measures and shows: metrics.jsonl and TensorBoard always, a progress bar, a table of samples, curves.png.

`KEYS` is the one table of metric names: key, unit, definition, how it adds up, and the bare name under which a loss
returns it. `objective/*` are sums over a response, averaged over responses; `policy/*` are means over response tokens.
With truncated sampling every log-probability, entropy and KL, the exact one too, is over what its token was drawn from.
Rank 0 alone writes and prints.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fused_rl.trainers.base.ranks import gather, global_sum, rank
from fused_rl.trainers.options.config import InputError


class Metric(NamedTuple):
    """One key of metrics.jsonl."""

    unit: str
    definition: str
    adds: str
    """How it comes together over micro-batches and ranks. "sum": each part is divided by the whole step's count, and
    the parts are added. "moments": computed from such sums. "min", "max". "whole": computed once, of the whole step.
    Over the optimizer updates of one step all are averaged, but for `lr`, which is the last."""
    of: str | Callable[[dict[str, float]], float] | None = None
    """The bare name of a loss's metric, or a function of several; None where the trainer computes it by itself."""


def explained_variance(sums: dict[str, float]) -> float:
    """1 - Var(R - v) / Var(R) from the moments of `fused_rl.value_loss`, added up; NaN where R is constant."""
    error = sums["value_error_square"] - sums["value_error"] ** 2
    spread = sums["return_square"] - sums["return"] ** 2
    return 1 - error / spread if spread > 0 else float("nan")


# By origin: whoever computes some of these takes the whole table of them.
RUN = {
    "lr": Metric("1", "learning rate of the update", "whole"),
    "optim/grad_norm": Metric("1", "norm of the gradient before clipping", "whole"),
    "perf/tokens_per_second": Metric("1/s", "tokens trained on per second of the whole step", "whole"),
    "time/train": Metric("s", "forward, backward and optimizer", "whole"),
    "time/save": Metric("s", "writing the last checkpoint", "whole"),
}
DEMONSTRATIONS = {
    "train/loss": Metric("nats", "negative log-likelihood per completion token", "sum", "loss"),
    "train/entropy": Metric("nats", "true entropy per completion token", "sum", "entropy"),
    "train/num_tokens": Metric("tokens", "completion tokens in the step", "sum"),
    "eval/loss": Metric("nats", "train/loss on held-out rows", "sum"),
    "eval/accuracy": Metric("1", "fraction of held-out completion tokens that are the most likely ones", "sum"),
}
PAIRS = {
    "loss": Metric("nats", "Bradley-Terry loss of a pair", "sum", "loss"),
    "accuracy": Metric("1", "fraction of pairs whose chosen score is higher", "sum", "accuracy"),
    "reward_margin": Metric("1", "chosen minus rejected score", "sum", "reward_margin"),
    "chosen_rewards": Metric("1", "mean chosen score", "sum", "chosen_rewards"),
    "rejected_rewards": Metric("1", "mean rejected score", "sum", "rejected_rewards"),
    "min_reward": Metric("1", "lowest score", "min", "min_reward"),
    "mean_reward": Metric("1", "mean score", "sum", "mean_reward"),
    "max_reward": Metric("1", "highest score", "max", "max_reward"),
}
REWARD = {f"train/rm/{name}": metric for name, metric in PAIRS.items()} | {
    f"eval/rm/{name}": metric._replace(definition=f"{metric.definition}, of held-out pairs")
    for name, metric in PAIRS.items()
}
ROLLOUT = {
    "episode": Metric("responses", "responses sampled so far", "whole"),
    "time/rollout": Metric("s", "sampling", "whole"),
    "time/score": Metric("s", "the scorers", "whole"),
    "val/num_eos_tokens": Metric("responses", "responses that ended by a stop token", "sum"),
    "val/stop_rate": Metric("1", "the same as a fraction", "sum"),
    "completions/mean_length": Metric("tokens", "response length", "sum"),
    "completions/min_length": Metric("tokens", "shortest response", "min"),
    "completions/max_length": Metric("tokens", "longest response", "max"),
    "completions/clipped_ratio": Metric("1", "fraction of responses cut at max_new_tokens", "sum"),
}
LOSS = {
    "objective/kl": Metric("nats", "KL to the reference by kl_estimator, over the responses trained on", "sum", "kl"),
    "objective/kl1_avg": Metric("nats", "KL estimate k1: log-ratio to the reference", "sum", "kl1"),
    "objective/kl2_avg": Metric("nats", "KL estimate k2: half the square of k1's terms", "sum", "kl2"),
    "objective/kl3_avg": Metric("nats", "KL estimate k3: expm1(-d) + d of k1's terms d", "sum", "kl3"),
    "objective/kl4_avg": Metric("nats", "KL estimate k4: k1's terms times the ratio", "sum", "kl4"),
    "objective/kl_exact": Metric("nats", "exact KL to the reference, before the update", "sum"),
    "objective/entropy": Metric("nats", "sampled negative log-likelihood of the response, before the update", "sum"),
    "objective/non_score_reward": Metric("1", "- objective/kl_coef times objective/kl", "whole"),
    "objective/rlhf_reward": Metric("1", "objective/scores plus objective/non_score_reward", "whole"),
    "objective/scores": Metric("1", "reward from the scorers: weighted sum of their scores", "sum"),
    "objective/kl_coef": Metric("1", "weight of the KL", "whole"),
    "policy/approxkl_avg": Metric("nats", "half the squared log-ratio to the sampling policy", "sum", "approx_kl"),
    "policy/clipfrac_avg": Metric(
        "1", "fraction of tokens that the surrogate clips; none where it clips nothing", "sum", "clipfrac"
    ),
    "policy/entropy_avg": Metric("nats", "true entropy per token, of the distribution sampled from", "sum", "entropy"),
    "loss/policy_avg": Metric("1", "policy surrogate alone, without KL and entropy terms", "sum", "policy_loss"),
    "loss/total_avg": Metric("1", "what is differentiated: surrogate, KL and entropy terms", "sum", "loss"),
    "val/ratio": Metric("1", "mean ratio to the sampling policy", "moments", lambda sums: 1 + sums["ratio_minus_1"]),
    "val/ratio_var": Metric(
        "1",
        "variance of that ratio over the tokens of an update",
        "moments",
        lambda sums: sums["ratio_minus_1_square"] - sums["ratio_minus_1"] ** 2,
    ),
}
# Groups of responses to a prompt, and what they pay for their length.
GROUPS = {
    "reward": Metric("1", "mean of what the scorers give, less the overlong penalty", "sum"),
    "reward_std": Metric("1", "standard deviation within a group, averaged over groups", "sum"),
    "frac_reward_zero_std": Metric("1", "fraction of groups whose rewards are all equal: they teach nothing", "sum"),
    "frac_groups_all_solved": Metric("1", "fraction of groups whose responses are all solved", "sum"),
    "frac_groups_none_solved": Metric("1", "fraction of groups of which no response is solved", "sum"),
    "groups/drawn": Metric("groups", "prompts drawn in the step, refills included", "sum"),
    "groups/trained": Metric("groups", "of these trained on: with drop and refill those with a signal", "sum"),
    "overlong_penalty": Metric("1", "what responses lose for their length, on average", "sum"),
    "objective/non_score_reward": Metric("1", "- objective/kl_coef times objective/kl, - overlong_penalty", "whole"),
}
# A value per token, and what tokens earn.
CRITIC = {
    "objective/kl": Metric("nats", "KL to the reference by the estimator in use, before the update", "sum"),
    "objective/scores": Metric("1", "weighted sum of the scores, with what a missing stop token costs", "sum"),
    "loss/value_avg": Metric("1", "clipped value loss", "sum", "value_loss"),
    "val/clipfrac_avg": Metric("1", "fraction of tokens whose value is clipped", "sum", "value_clipfrac"),
    "val/var_explained": Metric("1", "variance of the returns that the values explain, before the update", "moments"),
    "val/win_rate": Metric("1", "how often a right response to a prompt scores above a wrong one", "sum"),
    "optim/updates": Metric(
        "updates", "optimizer updates made; fewer than planned where target_kl stopped them", "whole"
    ),
    "optim/critic_lr": Metric("1", "learning rate of the critic", "whole"),
    "optim/critic_grad_norm": Metric("1", "norm of the critic's gradient before clipping", "whole"),
    "time/measure": Metric("s", "log-probabilities and values before the update", "whole"),
}
EVALUATION = {
    "eval/accuracy_greedy": Metric("1", "fraction of held-out problems solved by the most likely response", "sum"),
    "eval/accuracy_sampled": Metric("1", "fraction of responses sampled as in training that solve theirs", "sum"),
    "eval/pass_at_k": Metric("1", "fraction of held-out problems that one of k sampled responses solves", "sum"),
    "eval/score": Metric("1", "mean reward of the sampled responses", "sum"),
    "eval/mean_length": Metric("tokens", "length of the sampled responses", "sum"),
    "eval/mean_length_solved": Metric("tokens", "of those that solve their problem; not there without any", "moments"),
    "eval/mean_length_unsolved": Metric("tokens", "of the others; not there without any", "moments"),
    "eval/clipped_ratio": Metric("1", "fraction of the sampled responses cut at max_new_tokens", "sum"),
    "eval/entropy": Metric("nats", "true entropy per token of the sampled responses", "sum"),
    "eval/kl_exact": Metric("nats", "exact KL to the reference over a sampled response", "sum"),
}
# Of each scorer by its name; a scorer that works under no limits has none of verifier/.
SCORERS = {
    "rewards/{name}/mean": Metric("1", "mean score of the samples that the scorer applies to", "moments"),
    "rewards/{name}/std": Metric("1", "standard deviation of these scores", "moments"),
    "verifier/{name}/timeouts": Metric("samples", "broke a limit (CPU, memory) and score 0 for it", "sum"),
    "verifier/{name}/restarts": Metric("1", "processes that died of something else; scored again", "sum"),
    "eval/verifier/{name}/timeouts": Metric("samples", "the same in the evaluation", "sum"),
    "eval/verifier/{name}/restarts": Metric("1", "the same in the evaluation", "sum"),
}
# k is 1, 2, 4, … below eval_samples, and eval_samples.
PASSES = {
    "eval/pass_at_{k}": Metric("1", "probability that k of the sampled responses hold a right one, unbiased", "sum"),
}
PREFIXES = tuple(sorted({key.partition("{")[0] for key in SCORERS | PASSES}))
KEYS = {
    "sft": RUN | DEMONSTRATIONS,
    "reward": RUN | REWARD,
    "grpo": RUN | ROLLOUT | LOSS | GROUPS | EVALUATION,
    "ppo": RUN | ROLLOUT | LOSS | CRITIC | EVALUATION,
}


class Sums:
    """The bare metrics of one optimizer step: of each micro-batch a share, added up over micro-batches and ranks."""

    def __init__(self, step: int):
        self.step, self.parts = step, []
        self.names: tuple[str, ...] = ()

    def add(self, metrics: dict[str, torch.Tensor], where: Sequence[str]) -> None:
        """The scalars of one micro-batch, each divided by the whole step's count, and where its rows are from."""
        self.names = tuple(metrics)
        self.parts.append((torch.stack([value.detach().double() for value in metrics.values()]), where))

    def over_ranks(self) -> dict[str, float]:
        """What they add up to, the same on every rank.

        Raises:
            InputError: on every rank, where one of them is NaN or infinite on any: nothing may be trained on it.
        """
        # From the device at once, when all of the step has been handed to it.
        columns = torch.stack([values for values, _ in self.parts]).cpu()
        self.parts = [(values, where) for values, (_, where) in zip(columns, self.parts, strict=True)]
        total = global_sum(sum(columns))
        if not total.isfinite().all():
            told = [message for message in gather(self._not_finite()) if message is not None]
            raise InputError("; ".join(told))
        return dict(zip(self.names, total.tolist(), strict=True))

    def _not_finite(self) -> str | None:
        """The first micro-batch of this rank that is not finite, in words."""
        for number, (values, where) in enumerate(self.parts, 1):
            bad = [name for name, value in zip(self.names, values.tolist(), strict=True) if not math.isfinite(value)]
            if bad:
                rows = ", ".join(dict.fromkeys(where))
                what = f"{', '.join(bad)} {'is' if len(bad) == 1 else 'are'} NaN or infinite"
                return f"step {self.step}, micro-batch {number} of rank {rank()}: {what}; its rows: {rows}"
        return None


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
