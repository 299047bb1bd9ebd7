"""What the responses to one prompt are worth beside each other: GRPO's options for rewards and advantages, and both.

The algorithm is in grpo.py, the sampling of the groups in drawing.py.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

import fused_rl
from fused_rl.trainers.base import engine
from fused_rl.trainers.options.config import InputError, NonNegative, NonNegativeInt, Options, Positive, PositiveInt
from fused_rl.trainers.options.needs import Needs
from fused_rl.trainers.policy.options import PolicyConfig
from fused_rl.trainers.rollouts.rollout import Rollout, rollout_metrics

ADVANTAGES = tuple(name for name in fused_rl.ADVANTAGES if name != "gae")
DIVIDED = ("group-std", "batch-std", "group-mean-batch-std")  # by a standard deviation


@dataclass(kw_only=True)
class GroupConfig(Options):
    """How the scores of a group become rewards and advantages, and which groups are trained on."""

    group_size: PositiveInt = 8
    """Responses per prompt."""
    advantage: Literal["group-std", "group-mean", "leave-one-out", "batch-std", "group-mean-batch-std"] | None = None
    """Reward less the group's mean, divided by its standard deviation or not; less the mean of the others in the
    group; whitened over the whole batch; or less the group's mean, divided by the batch's standard deviation. None is
    the preset's."""
    std_floor: NonNegative = 0.0
    """A standard deviation below this counts as this, where the advantage divides by one."""
    zero_variance: Literal["keep", "drop", "refill"] = "keep"
    """Groups whose rewards are all equal teach nothing. keep counts them in the loss's denominators; drop leaves them
    out; refill also draws new prompts in their place (dynamic sampling, DAPO)."""
    max_refills: PositiveInt = 3
    """With refill: at most so many further rollouts in a step, each of as many prompts as groups are missing."""
    overlong_buffer: NonNegativeInt = 0
    """Over the last so many of max_new_tokens the reward falls linearly (DAPO, eq. 13); 0 is no such penalty."""
    overlong_factor: Positive = 1.0
    """What a response of max_new_tokens loses."""


GROUP_NEEDS = (
    Needs(
        "std_floor",
        lambda config: advantage_of(config) in DIVIDED,
        f"has no meaning with this advantage, which divides by no standard deviation; leave it out, or choose "
        f"--advantage {' or '.join(DIVIDED)}",
    ),
    Needs(
        "zero_variance",
        lambda config: advantage_of(config) != "batch-std",
        "has no meaning with advantage=batch-std, which compares with the whole batch, so that groups of equal rewards "
        "teach too; leave it out, or choose --advantage group-mean-batch-std",
    ),
    Needs(
        "max_refills",
        lambda config: config.zero_variance == "refill",
        "has no meaning without --zero_variance refill; give it, or leave max_refills out",
    ),
    Needs(
        "overlong_factor",
        lambda config: config.overlong_buffer > 0,
        "has no meaning without --overlong_buffer; give it, or leave overlong_factor out",
    ),
    Needs(
        "overlong_buffer",
        lambda config: config.overlong_buffer <= config.max_new_tokens,
        "is more than max_new_tokens: even an empty response would lose some of its reward; choose a smaller one",
    ),
)


def advantage_of(config: PolicyConfig) -> str:
    """The advantage that the option names, else the preset's; refuses what needs a critic."""
    advantage = config.advantage or fused_rl.PRESETS[config.preset].advantage
    if advantage not in ADVANTAGES:
        raise InputError(
            f"preset={config.preset} takes its advantages from {advantage}, which needs a critic; grpo has none: "
            f"choose --advantage {' or '.join(ADVANTAGES)}, or another preset"
        )
    return advantage


def overlong_penalty(config: GroupConfig, lengths: torch.Tensor) -> torch.Tensor:
    """(B,) fp32, 0 or more, of responses of `lengths` (B,): soft overlong punishment (arXiv:2503.14476, eq. 13)."""
    if not config.overlong_buffer:
        return torch.zeros(len(lengths))
    beyond = lengths - (config.max_new_tokens - config.overlong_buffer)
    return config.overlong_factor * beyond.clamp(min=0).float() / config.overlong_buffer


def equal_rewards(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """(B,) -> (B / G,) bool: groups without a signal. Equality: a rounded deviation of equal rewards need not be 0."""
    groups = rewards.view(-1, group_size)
    return (groups == groups[:, :1]).all(1)


def advantages_of(config: PolicyConfig, rewards: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(B,) of `rewards` (B,) over all ranks; 0 where `counts` (B,), which is that of whole groups, is False."""
    found = fused_rl.response_advantages(
        rewards[counts],
        advantage_of(config),
        group_size=config.group_size,
        std_floor=config.std_floor,
        process_group=engine.all_ranks(),
    )
    return torch.zeros_like(rewards, dtype=found.dtype).masked_scatter(counts, found)


def keeps_groups(config: PolicyConfig, world: int) -> bool:
    """Whether every minibatch is of whole groups, as it is where prompts may be shared."""
    return config.share_prompts is not False and config.prompts_per_step // world % config.minibatches == 0


def groups_per_rank(config: PolicyConfig, groups: int, world: int) -> int:
    """The fewest groups per rank that hold `groups` over all ranks, and that divide into the minibatches."""
    whole = config.minibatches if keeps_groups(config, world) else 1
    multiple = math.lcm(whole, config.minibatches // math.gcd(config.minibatches, config.group_size))
    return multiple * max(1, math.ceil(groups / (world * multiple)))


def group_metrics(config: PolicyConfig, rollout: Rollout, step: int) -> dict[str, float]:
    """What all responses of a step were like, over all ranks; `rollout.rewards` are those after the penalty."""
    groups = rollout.solved.view(-1, config.group_size)
    penalties = overlong_penalty(config, rollout.lengths)
    columns = {
        "frac_groups_all_solved": groups.all(1).double().mean(),
        "frac_groups_none_solved": (~groups.any(1)).double().mean(),
        "overlong_penalty": penalties.double().mean(),
        "groups/drawn": torch.tensor(float(len(groups))),
    }
    totals = engine.global_sum(torch.stack([value.double() for value in columns.values()]))
    means = totals / engine.world_size()
    metrics = rollout_metrics(rollout, config.group_size, step) | dict(zip(columns, means.tolist(), strict=True))
    return metrics | {
        "groups/drawn": totals[-1].item(),
        "objective/scores": metrics["reward"] + metrics["overlong_penalty"],
    }
