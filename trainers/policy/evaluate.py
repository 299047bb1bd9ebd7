"""Held-out evaluation of a policy during a run, and what `fused-rl eval` shares with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..base import ranks
from ..base.screen import phase, print_rank0
from ..rollouts.roll_out import means_of, right_answer, sample_rows_of
from ..rollouts.sampling import Sampling, Seeds
from ..rollouts.solved import has_verdict, outcome_sums, outcomes, pass_at
from ..rollouts.types import Prompt, Rollout, Sample, Scorer
from ..run.metrics import EMPTY, Evaluation
from .before_update import measure
from .groups import spread
from .options import SamplingRunConfig
from .policy import SHOWN, Policy


@dataclass
class HeldOut:
    """This rank's share of the held-out prompts."""

    prompts: list[Prompt]
    """Equally many on every rank, because all ranks must call `generate` equally often."""
    count: int
    """The number of them that belong to this rank; those after them only fill the share up, and are not counted."""


def held_out_share(prompts: Sequence[Prompt]) -> HeldOut:
    """Return this rank's share of the prompts, each of which belongs to one rank; a short share is filled up."""
    count = len(range(ranks.rank(), len(prompts), ranks.world_size()))
    return HeldOut([prompts[i] for i in ranks.share_of_rank(len(prompts))], count)


@torch.no_grad()
def evaluate(
    policy: Policy[SamplingRunConfig],
    held_out: HeldOut,
    further: Callable[[list[Sample], int], tuple[dict[str, float], torch.Tensor]] | None = None,
    *,
    print_signal: bool = False,
) -> Evaluation:
    """Measure greedy and sampled accuracy on held-out problems, and choose a few responses to show.

    The random state stays as it was. All ranks must call this.

    Args:
        policy: the policy.
        held_out: this rank's problems.
        further: (N samples, count) -> more metrics of the sampled responses, of which the first `count` are counted,
            and (N, 2) a sum and a weight of each response for the figure `distill/kl`.
        print_signal: True to print the signal that training will have.
    """
    config = policy.config
    k = config.eval_samples
    seed = config.seed + ranks.rank()
    count = held_out.count
    greedy_sampling = Sampling(0.0, policy.sampling.max_new_tokens, policy.sampling.stop_ids)
    with phase("sampled responses to held-out prompts"):
        # Each evaluation draws the same random numbers, and takes none of those of training.
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            greedy = policy.roll_out(held_out.prompts, greedy_sampling, 1)
            sampled = policy.roll_out(held_out.prompts, policy.sampling, k, Seeds(seed))
        # Greedy responses are no sample of the policy, so entropy and KL are measured on the sampled ones.
        rows = policy.divide(sampled.batch, torch.arange(len(sampled.samples)))
        has_reference = policy.reference is not None
        measured = measure(policy, sampled.batch, rows, exact_kl=has_reference)

    first = slice(count * k)
    sums = {"entropy": measured.entropy[first].sum().cpu()}
    if measured.kl is not None:
        sums["kl_exact"] = measured.kl[first].sum().cpu() / k
    results = results_of(policy.scorers, greedy, sampled, count, sums)
    figures, by_row = results.figures, results.by_row
    if further is not None:
        further_figures, response_sums = further(sampled.samples, count * k)
        figures |= further_figures
        problem_sums = ranks.gather_rows(response_sums.view(-1, k, 2).sum(1)[:count])
        by_row["distill/kl"] = problem_sums.T.tolist()
    metrics = {f"eval/{name}": value for name, value in figures.items()}
    if print_signal:
        limit = policy.sampling.max_new_tokens
        say_signal(results, policy.scorers, sampled.samples[0], limit, config.group_size)

    # The responses to show are of the same held-out problems each time, and of some that the last step trained on.
    num_shown = SHOWN - len(policy.sample_rows)
    rows = sample_rows_of(
        "held-out, greedy",
        greedy,
        range(count),
        num_shown,
        config.seed,
        policy.tokenizer,
        policy.scorers,
    )
    by_row = {f"eval/{name}": columns for name, columns in by_row.items() if name in figures}
    return Evaluation(metrics, rows + policy.sample_rows, by_row)


class Results(NamedTuple):
    """What the responses of all ranks say."""

    figures: dict[str, float]
    totals: dict[str, float]
    """The sums of `solved_sums`."""
    by_row: dict[str, list[list[float]]]
    """The figures of each problem, as in `ByRow`."""
    counts: list[int]
    """How many sampled responses consist of the same tokens, for each of these."""


def results_of(
    scorers: Sequence[Scorer],
    greedy: Rollout,
    sampled: Rollout,
    count: int,
    sums: dict[str, torch.Tensor] = EMPTY,
) -> Results:
    """Return the figures over all ranks, of one greedy and k neighbouring sampled responses to each problem.

    Problems after the first `count` only fill this rank's share up, and would count twice. `sums` are further ones.
    """
    totals = ranks.global_sums(solved_sums(scorers, greedy, sampled, count) | sums)
    figures = solved_metrics(scorers, totals)
    if "entropy" in sums and totals["tokens"]:
        figures["entropy"] = totals["entropy"] / totals["tokens"]
    if "kl_exact" in sums:
        figures["kl_exact"] = totals["kl_exact"] / totals["problems"]
    # Responses are counted by a hash that is the same on every rank.
    problems = len(greedy.samples)
    hashes = [hash(tuple(sample.response.ids)) % 2**48 for sample in sampled.samples]
    hashes = ranks.gather_rows(torch.tensor(hashes).view(problems, -1)[:count])
    counts = hashes.unique(return_counts=True)[1].tolist()
    figures["commonest_ratio"] = max(counts) / totals["responses"]
    figures |= {key: struck + sampled.incidents[key] for key, struck in greedy.incidents.items()}
    figures |= means_of(greedy.logged + sampled.logged, figures)
    if not scorers:
        return Results(figures, totals, {}, counts)
    rewards = ranks.gather_rows(sampled.rewards.view(problems, -1)[:count])
    by_row = rows_of(greedy, sampled, count, rewards)
    return Results(figures | spread(rewards), totals, by_row, counts)


def say_signal(
    results: Results,
    scorers: Sequence[Scorer],
    one: Sample,
    limit: int,
    group_size: int | None = None,
) -> None:
    """Print the signal that training will have, with one of the responses, which are cut at `limit` tokens."""
    if ranks.process_index() == 0:
        from . import signal

        figures, totals, _, counts = results
        k = round(totals["responses"] / totals["problems"])
        answer = right_answer(one.row, one.prompt, scorers)
        signal.say(figures, totals, k, one.text, answer, limit, counts, group_size or signal.GROUP)


def rows_of(
    greedy: Rollout, sampled: Rollout, count: int, rewards: torch.Tensor
) -> dict[str, list[list[float]]]:
    """Return the figures of each problem over all ranks, as in `ByRow`.

    `count` of this rank's problems count; `rewards` (N, k) are those of the k sampled responses to all N problems.
    """
    right = sampled.solved.view(len(greedy.samples), -1)[:count].double().mean(1)
    solved = ranks.gather_rows(torch.stack([greedy.solved[:count], right], 1))
    greedy_solved, sampled_solved = solved.T.tolist()
    return {
        "accuracy_greedy": [greedy_solved],
        "accuracy_sampled": [sampled_solved],
        "pass_at_k": [[float(share > 0) for share in sampled_solved]],
        "score": [rewards.mean(1).tolist()],
    }


def solved_sums(
    scorers: Sequence[Scorer], greedy: Rollout, sampled: Rollout, count: int
) -> dict[str, torch.Tensor]:
    """Return sums over the first `count` problems, which have one greedy and k neighbouring sampled responses each."""
    k = len(sampled.samples) // len(greedy.samples)
    right = sampled.solved.view(-1, k)[:count]
    first = slice(count * k)
    sums = {
        "accuracy_greedy": greedy.solved[:count].sum(),
        "accuracy_sampled": right.sum() / k,
        "pass_at_k": right.any(1).sum(),
        "score": sampled.rewards[first].sum() / k,
        "problems": torch.tensor(count),
        "judged": has_verdict(scorers, greedy)[:count].sum()
        + has_verdict(scorers, sampled)[first].sum(),
    }
    sums |= {f"none/{name}": scores[first].isnan().sum() for name, scores in sampled.scores.items()}
    sums |= {name: values.sum() for name, values in pass_at(right).items()}
    return sums | outcome_sums(
        sampled.solved[first], sampled.lengths[first], sampled.stopped[first]
    )


def solved_metrics(scorers: Sequence[Scorer], totals: dict[str, float]) -> dict[str, float]:
    """Return accuracy, pass@k, score and lengths from the sums of `solved_sums` over all ranks.

    There is no accuracy if no scorer says what is solved; 0 would look like a policy that fails everything.
    """
    is_judged = totals["judged"] > 0
    judges = [scorer.name for scorer in scorers if scorer.solved_at is not None]
    names = ["score"] if scorers else []
    if is_judged:
        names += [name for name in totals if name.startswith(("accuracy_", "pass_at_"))]
    elif judges:
        count = round(totals["problems"] + totals["responses"])
        print_rank0(
            f"solved: {' and '.join(judges)} returned None for all {count} responses (is a `return` missing?)"
        )
    elif scorers:
        print_rank0(
            "solved: no scorer here says what is solved; --solved_at says from which score on"
        )
    return {name: totals[name] / totals["problems"] for name in names} | outcomes(totals, is_judged)
