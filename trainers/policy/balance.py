"""Responses dealt over ranks by tokens before they are trained on, because every rank waits for the slowest one.

Each rank samples and scores its own prompts. Then whole groups change places with groups that are trained on in the
same updates. So each update has the responses that it had, as many on every rank, and only the order of sums changes.
"""

from dataclasses import replace
from typing import Any

import numpy
import torch

from ..base import ranks
from ..rollouts.roll_out import batch_of
from ..rollouts.types import Rollout, Sample
from .policy import Policy, plan

Group = tuple[list[Sample], torch.Tensor]
"""G samples, and their rewards, whether they are solved, and the scores of each scorer, (2 + scorers, G) fp32."""


def deal(tokens: list[int], updates: list[list[int]]) -> tuple[ranks.Sources, dict[str, float]]:
    """Return the groups that each rank gets, as many as it had, and `perf/rank_imbalance`. All ranks must call this.

    Args:
        tokens: those of each group of this rank.
        updates: for each group the numbers of the updates in which it is trained on, once for each response.
    """
    # The longest group first, on the rank with the fewest tokens in its updates: (world, N), (world, N, K).
    tokens_of, updates_of = map(numpy.array, zip(*ranks.gather((tokens, updates)), strict=True))
    sources = numpy.full((*tokens_of.shape, 2), -1)
    load = numpy.zeros((len(tokens_of), updates_of.max() + 1))
    for group in sorted(numpy.ndindex(tokens_of.shape), key=lambda place: -tokens_of[place]):
        is_free = (updates_of == updates_of[group]).all(2) & (sources[..., 0] < 0)
        load_here = load[:, updates_of[group]].sum(1, keepdims=True)
        emptiest = numpy.where(is_free, load_here, numpy.inf).argmin()
        place = numpy.unravel_index(emptiest, tokens_of.shape)
        sources[place] = group
        numpy.add.at(load[place[0]], updates_of[group], tokens_of[group])
    imbalance = load.max(0).sum() / load.mean(0).sum()
    return sources.tolist(), {"perf/rank_imbalance": float(imbalance)}


def groups_of(rollout: Rollout, size: int) -> list[Group]:
    """Return the groups of `size` responses of a rollout."""
    values = torch.stack([rollout.rewards, rollout.solved, *rollout.scores.values()])
    groups = []
    for number, of_group in enumerate(values.split(size, 1)):
        # A view would be sent with all that it is a view of.
        groups.append((rollout.samples[number * size :][:size], of_group.clone()))
    return groups


def with_groups(policy: Policy, rollout: Rollout, groups: list[Group]) -> Rollout:
    """Return a rollout of other groups; seconds, incidents and what scorers logged stay those of `rollout`."""
    samples = sum((group_samples for group_samples, _ in groups), [])
    rewards, solved, *scores = torch.cat([values for _, values in groups], 1)
    # The batch is built again, because it is padded to its longest response.
    return replace(
        rollout,
        samples=samples,
        batch=batch_of(samples, policy.tokenizer.pad_token_id, policy.device),
        scores=dict(zip(rollout.scores, scores, strict=True)),
        rewards=rewards,
        solved=solved.bool(),
    )


def plan_balanced(
    policy: Policy[Any], rollout: Rollout, together: int = 1
) -> tuple[Rollout, list[list[torch.Tensor]], dict[str, float]]:
    """Plan a step's updates and deal its groups over the ranks, if there are several.

    Args:
        policy: the policy.
        rollout: the responses that this rank sampled.
        together: so many neighbouring responses stay in one minibatch.

    Returns:
        The rollout to train on, the CPU indices of each micro-batch of each update, and metrics.
    """
    config, metrics = policy.config, {}
    lengths = rollout.batch.prompt_lengths + rollout.batch.response_lengths
    minibatches = plan(config, len(lengths), together)
    if ranks.world_size() > 1:
        updates = lengths.new_empty(len(lengths), config.epochs)
        for number, rows in enumerate(minibatches):
            updates[rows, number // config.minibatches] = number
        tokens = lengths.view(-1, config.group_size).sum(1).tolist()
        sources, metrics = deal(tokens, updates.view(len(tokens), -1).tolist())
        groups = groups_of(rollout, config.group_size)
        rollout = with_groups(policy, rollout, ranks.exchange(groups, sources))
    micro_batches = [policy.divide(rollout.batch, rows, together=together) for rows in minibatches]
    return rollout, micro_batches, metrics
