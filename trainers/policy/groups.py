"""Groups of responses to one prompt: their rewards and advantages, and which groups GRPO trains on.

A group whose rewards are all equal has advantages of 0, so a step with many such groups learns little. With dynamic
sampling (DAPO, arXiv:2503.14476, section 3.2) new prompts are sampled in their place, up to a bound. The algorithm that
trains on the groups is in grpo.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch

import fused_rl
from fused_rl.objectives.advantages import ResponseAdvantage

from ..base import ranks
from ..base.options import NonNegativeInt, Requirement
from ..base.text import InputError
from ..rollouts.roll_out import rollout_metrics
from ..rollouts.types import Prompt, Rollout, Scorer
from .balance import groups_of, with_groups
from .options import LossConfig, RolloutConfig
from .policy import Policy

ADVANTAGES = get_args(ResponseAdvantage)
MAX_REFILLS = 3  # further rollouts in a step, each of as many prompts as groups are missing


class GroupConfig(LossConfig, RolloutConfig):
    """How the scores of a group become rewards and advantages, and which groups are trained on."""

    advantage: ResponseAdvantage | None = None
    """How rewards become advantages (docs/losses.md); None is the preset's."""
    zero_variance: Literal["keep", "drop", "refill"] = "keep"
    """Groups with equal rewards have no signal. keep counts them in the loss's denominators; drop leaves them out;
    refill also samples new prompts in their place (dynamic sampling, DAPO), in at most three further rollouts."""
    overlong_buffer: NonNegativeInt = 0
    """Length, at the end of max_new_tokens, over which the reward falls by 1 (DAPO, eq. 13); 0 for no penalty."""
    share_prompts: bool | None = None
    """Compute a prompt once for several of its responses, where that is cheaper; minibatches are then of whole groups,
    otherwise of responses drawn at random. None shares where the model's attention and minibatches allow it."""

    needs: ClassVar = (
        Requirement(
            "zero_variance",
            lambda config: advantage_of(config) not in ("batch-std", "gdpo"),
            "has no meaning with advantage=batch-std or gdpo, where groups of equal rewards teach too; leave it out, "
            "or choose --advantage group-mean-batch-std",
        ),
        Requirement(
            "advantage",
            lambda config: (
                config.advantage != "gdpo"
                or (not config.overlong_buffer and config.kl_in == "loss")
            ),
            "is of the scorers' rewards alone: give no overlong_buffer, and --kl_in loss",
        ),
        Requirement(
            "lag",
            lambda config: config.zero_variance != "refill",
            "draws before refills are known; drop one of them",
        ),
    )


def advantage_of(config: GroupConfig) -> ResponseAdvantage:
    """Return the kind of advantage that the option names, or else that of the preset.

    Raises:
        InputError: the preset's advantage needs a critic.
    """
    advantage = config.advantage or fused_rl.PRESETS[config.preset].advantage
    if advantage == "gae":
        raise InputError(
            f"preset={config.preset} takes its advantages from {advantage}, which needs a critic; grpo has none: "
            f"choose --advantage {' or '.join(ADVANTAGES)}, or another preset"
        )
    return advantage


def overlong_penalty(config: GroupConfig, lengths: torch.Tensor) -> torch.Tensor:
    """Return what is subtracted from the reward of a long response: (B,) fp32, 0 or more.

    This is the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13); `lengths` (B,) are in tokens.
    """
    if not config.overlong_buffer:
        return torch.zeros(len(lengths))
    beyond = lengths - (config.max_new_tokens - config.overlong_buffer)
    return beyond.clamp(min=0).float() / config.overlong_buffer


def spread(rewards: torch.Tensor) -> dict[str, float]:
    """Return the standard deviation of rewards (N, k), and the share of the N groups whose k rewards are equal."""
    metrics = {"score_std": rewards.std(correction=0).item()}
    k = rewards.shape[1]
    if k > 1:
        equal = equal_rewards(rewards.flatten(), k)
        metrics["frac_reward_zero_std"] = equal.double().mean().item()
    return metrics


def equal_rewards(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return which groups have no signal, (B / G,) bool, from rewards (B,) in which a group's are neighbours.

    The rewards are compared, because the rounded standard deviation of equal rewards need not be 0.
    """
    groups = rewards.view(-1, group_size)
    return (groups == groups[:, :1]).all(1)


def advantages_of(
    config: GroupConfig,
    rewards: torch.Tensor,
    included: torch.Tensor,
    rollout: Rollout,
    scorers: Sequence[Scorer],
) -> torch.Tensor:
    """Return the advantage of each response, (B,), with statistics over all ranks where the advantage has any.

    Args:
        config: the options, which name the kind of advantage.
        rewards: (B,), in which the responses of a group are neighbours.
        included: (B,) bool on the CPU, the same within a group; the advantages of other responses are 0.
        rollout: has the lengths for opo, and the scores for gdpo, in which a scorer that does not apply scores 0.
        scorers: the scorers whose scores gdpo uses.
    """
    # Responses that do not count are left out before means and deviations are taken, which they would change.
    rows = included.nonzero()[:, 0].to(rewards.device, non_blocking=True)
    advantage = advantage_of(config)
    # Statistics of a batch are over all ranks, so the number of processes changes no advantage.
    options = {"group_size": config.group_size, "process_group": ranks.all_ranks()}
    # OPO weights rewards by length (arXiv:2505.23585); GDPO normalises the scores of each scorer (arXiv:2601.05242).
    compared = rewards
    if advantage == "opo":
        options["lengths"] = rollout.lengths.to(rewards.device)[rows]
    elif advantage == "gdpo":
        scores = [rollout.scores[scorer.name].nan_to_num() for scorer in scorers]
        compared = torch.stack(scores).to(rewards.device)
        options["weights"] = rewards.new_tensor([scorer.weight for scorer in scorers])
    advantages = fused_rl.response_advantages(compared[..., rows], advantage, **options)
    return torch.zeros_like(rewards, dtype=advantages.dtype).index_copy(0, rows, advantages)


def keeps_groups(config: GroupConfig, world: int) -> bool:
    """Return True if every minibatch consists of whole groups, as is needed to share their prompts."""
    # Otherwise two updates would share some group, and each would compute its prompt again.
    return (
        config.share_prompts is not False
        and config.prompts_per_step // world % config.minibatches == 0
    )


def group_metrics(config: GroupConfig, rollout: Rollout, step: int) -> dict[str, float]:
    """Return the metrics of all responses of a step over all ranks; rewards are those after the overlong penalty."""
    size = config.group_size
    rewards = rollout.rewards.double().view(-1, size)
    solved = rollout.solved.view(-1, size)
    group_columns = {
        "reward_std": rewards.std(1),
        "frac_reward_zero_std": equal_rewards(rewards, size),
        "frac_groups_all_solved": solved.all(1),
        "frac_groups_none_solved": ~solved.any(1),
    }
    columns = {
        "reward": rewards,
        "overlong_penalty": overlong_penalty(config, rollout.batch.response_lengths),
    }
    columns |= {name: values.repeat_interleave(size) for name, values in group_columns.items()}
    metrics = rollout_metrics(rollout, columns, step)
    metrics["groups/sampled"] = float(len(rewards) * ranks.world_size())
    return metrics | {"objective/scores": metrics["reward"] + metrics["overlong_penalty"]}


@dataclass
class Groups:
    """The groups of a step that this rank trains on."""

    rollout: Rollout
    """The groups' responses; their rewards are after the overlong penalty."""
    included: torch.Tensor
    """(B,) bool, False for responses whose group is there only to give every rank the same number of groups."""
    metrics: dict[str, float]
    """The metrics of all responses that were sampled, over all ranks."""


def collect(
    config: GroupConfig,
    policy: Policy,
    prompts: list[Prompt],
    draw_more: Callable[[int], list[Prompt]] | None,
    step: int,
) -> Groups:
    """Sample and score the groups of a step, and choose those that are trained on.

    Args:
        config: the options of groups.
        policy: the policy to sample.
        prompts: this rank's prompts of the step.
        draw_more: returns this rank's share of a number of further prompts, for refills; None without refills.
        step: the number of the step.
    """
    wanted = config.prompts_per_step
    refills = MAX_REFILLS if config.zero_variance == "refill" else 0

    # Sample until the step is full or the bound is reached. The groups are counted over all ranks, so that all of them
    # sample equally often.
    rollouts = []
    with_signal = 0
    while not rollouts or (with_signal < wanted and len(rollouts) <= refills):
        sampled_prompts = draw_more(wanted - with_signal) if rollouts and draw_more else prompts
        rollout = policy.roll_out(sampled_prompts, policy.sampling, config.group_size)
        rewards = rollout.rewards - overlong_penalty(config, rollout.batch.response_lengths)
        rollouts.append(replace(rollout, rewards=rewards))
        differ = ~equal_rewards(rewards, config.group_size)
        with_signal += int(ranks.global_sum(differ.sum()).item())

    # Metrics are those of all that was sampled, even if a part of it is left out of the update.
    size = config.group_size
    sampled = rollouts[0]
    if len(rollouts) > 1:
        seconds = sampled.seconds
        incidents = sampled.incidents
        of_all_rollouts = replace(
            sampled,
            seconds={name: sum(rollout.seconds[name] for rollout in rollouts) for name in seconds},
            incidents={
                name: sum(rollout.incidents[name] for rollout in rollouts) for name in incidents
            },
            logged=sum((rollout.logged for rollout in rollouts), []),
        )
        groups = sum((groups_of(rollout, size) for rollout in rollouts), [])
        sampled = with_groups(policy, of_all_rollouts, groups)
    metrics = group_metrics(config, sampled, step)
    # A group without a signal has advantage 0, and still counts in the loss's denominators. Otherwise only groups with
    # a signal count. They are divided again, because all ranks need equally many passes.
    trained = wanted
    if config.zero_variance != "keep":
        trained = min(with_signal, wanted)
        sources = _with_signal(config, sampled.rewards)
        groups = ranks.exchange(groups_of(sampled, size), sources)
        sampled = with_groups(policy, sampled, groups)
    metrics["groups/trained"] = float(trained)
    return Groups(sampled, included_of(config, sampled.rewards), metrics)


def included_of(config: GroupConfig, rewards: torch.Tensor) -> torch.Tensor:
    """Return which responses count, (B,) bool, from their rewards: all, or those whose group has a signal."""
    counts = ~equal_rewards(rewards, config.group_size) | (config.zero_variance == "keep")
    return counts.repeat_interleave(config.group_size)


def _with_signal(config: GroupConfig, rewards: torch.Tensor) -> ranks.Sources:
    """Return the groups that each rank trains on if only those with a signal count, equally many on all ranks.

    Groups without a signal fill up the last places.
    """
    # One rank may have many groups with a signal and another few, so all of them are pooled.
    size = config.group_size
    pool = []
    for rank, is_equal in enumerate(ranks.gather(equal_rewards(rewards, size).tolist())):
        pool += [(without, rank, number) for number, without in enumerate(is_equal)]
    kept = min(sum(not without for without, _, _ in pool), config.prompts_per_step)

    # The number of groups is the smallest that holds them, divides over the ranks, and divides into minibatches.
    world = ranks.world_size()
    group_multiple = config.minibatches if keeps_groups(config, world) else 1
    response_multiple = config.minibatches // math.gcd(config.minibatches, size)
    multiple = world * math.lcm(group_multiple, response_multiple)
    count = multiple * max(1, math.ceil(kept / multiple))
    # The groups with a signal come first.
    chosen = [(rank, number) for _, rank, number in sorted(pool)[:count]]
    return [chosen[rank::world] for rank in range(world)]
