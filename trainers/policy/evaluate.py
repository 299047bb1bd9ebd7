"""Held-out evaluation of a policy, during a run."""

from dataclasses import dataclass

import torch

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.screen import phase, tell
from fused_rl.trainers.policy.policy import Policy, measure
from fused_rl.trainers.rollouts.roll_out import as_rows, drawn_from
from fused_rl.trainers.rollouts.sampling import Sampling, Seeds
from fused_rl.trainers.rollouts.solved import judged, outcome_sums, outcomes, pass_at, why_unknown
from fused_rl.trainers.rollouts.types import Prompt


@dataclass
class HeldOut:
    """This rank's share of the held-out prompts."""

    prompts: list[Prompt]
    """Equally many on every rank, because they must call `generate` equally often."""
    count: int
    """How many of them are this rank's own; those after them only fill the share up, and are not counted."""


def share_of_rank(prompts: list[Prompt]) -> HeldOut:
    """Every prompt is one rank's own; a share that is one short is filled up with the first prompt."""
    mine = prompts[ranks.rank() :: ranks.world_size()]
    size = -(-len(prompts) // ranks.world_size())
    return HeldOut(mine + prompts[:1] * (size - len(mine)), len(mine))


@torch.no_grad()
def evaluate(policy: Policy, held_out: HeldOut) -> tuple[dict[str, float], list[dict]]:
    """Greedy and sampled accuracy on held-out problems, and a few responses; leaves the random state as it was."""
    config = policy.config
    k = config.eval_samples
    count = held_out.count
    greedy_sampling = Sampling(0.0, policy.sampling.max_new_tokens, policy.sampling.stop_ids)
    with phase("sampled responses to held-out prompts"):
        with torch.random.fork_rng():
            torch.manual_seed(config.seed + ranks.rank())
            greedy = policy.roll_out(held_out.prompts, greedy_sampling, 1)
            sampled = policy.roll_out(held_out.prompts, policy.sampling, k, Seeds(config.seed + ranks.rank()))
        parts = torch.arange(len(sampled.samples)).split(config.micro_batch_size)
        measured = measure(policy, sampled.batch, list(parts), exact_kl=policy.has_reference)

    # Over all ranks: problems and tokens are counted, and everything else is divided by them.
    right = sampled.solved.view(-1, k)[:count]
    sums = {
        "eval/accuracy_greedy": greedy.solved[:count].sum(),
        "eval/accuracy_sampled": right.sum() / k,
        "eval/pass_at_k": right.any(1).sum(),
        "eval/score": sampled.rewards[: count * k].sum() / k,
    }
    sums |= {f"eval/{name}": of_problems.sum() for name, of_problems in pass_at(right).items()}
    if measured.kl is not None:
        sums["eval/kl_exact"] = measured.kl[: count * k].sum().cpu() / k
    first = slice(count * k)
    entropy = measured.entropy[first].sum().cpu()
    own = {"entropy": entropy, "problems": torch.tensor(count)}
    own |= outcome_sums(sampled.solved[first], sampled.lengths[first], sampled.stopped[first])
    own["judged"] = torch.cat(
        [judged(policy.scorers, greedy)[:count], judged(policy.scorers, sampled)[: count * k]]
    ).sum()
    totals = ranks.global_sums(sums | own)

    metrics = {name: totals[name] / totals["problems"] for name in sums}
    known = totals["judged"] > 0
    if not known:  # no figure is better than a 0 that nobody measured
        metrics = {name: value for name, value in metrics.items() if name in ("eval/score", "eval/kl_exact")}
        if ranks.rank() == 0:
            tell(why_unknown(policy.scorers, round(totals["problems"] + totals["responses"])))
    metrics["eval/entropy"] = totals["entropy"] / max(totals["tokens"], 1)
    metrics |= {f"eval/{name}": value for name, value in outcomes(totals, known).items()}
    for key, struck in greedy.incidents.items():
        metrics[f"eval/{key}"] = struck + sampled.incidents[key]

    # To look at: always the same held-out problems, and some of what the last step trained on.
    most = config.show_samples - len(policy.shown)
    shown = as_rows("held-out, greedy", drawn_from(greedy, most, config.seed, count), policy.tokenizer)
    return metrics, shown + as_rows("training", policy.shown, policy.tokenizer)
