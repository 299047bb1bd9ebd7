"""The groups that a step of GRPO trains on: all that are drawn, or those with a signal, refilled on request.

Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): a group whose rewards are all equal has no advantage, so a step
of many such groups is a small one; new prompts are drawn in their place, up to a bound.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fused_rl.trainers.base import engine
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.policy.groups import equal_rewards, group_metrics, groups_per_rank, overlong_penalty
from fused_rl.trainers.policy.policy import Policy, tell_if_all_left_out
from fused_rl.trainers.rollouts.rollout import Prompt, Rollout, Sample, batch_of


@dataclass
class Drawn:
    """What this rank trains on in a step."""

    rollout: Rollout
    """Its rewards are those after the overlong penalty."""
    counts: torch.Tensor
    """(B,) bool: whether the response counts; where it does not, its group only makes the ranks even."""
    metrics: dict[str, float]
    """Of all responses drawn, over all ranks."""


@dataclass
class Group:
    """The responses to one prompt, as they go from rank to rank."""

    samples: list[Sample]
    rewards: torch.Tensor
    """(G,)."""
    solved: torch.Tensor
    """(G,)."""
    has_signal: bool


def draw(policy: Policy, prompts: list[Prompt], more: Callable[[int], list[Prompt]] | None, step: int) -> Drawn:
    """The groups of a step.

    Args:
        policy: the policy.
        prompts: of this rank.
        more: this rank's share of the next so many prompts, for dynamic sampling; rounded up to equal shares.
        step: which step of the run it is.
    """
    config, wanted = policy.config, policy.config.prompts_per_step
    rollout = _rolled_out(policy, prompts)
    if config.zero_variance == "keep":
        everyone = torch.ones(len(rollout.samples), dtype=torch.bool)
        return Drawn(rollout, everyone, _metrics(config, rollout, wanted, step))

    # Until the step is full, or the bound is reached: every rank knows how many are missing, and draws as often.
    rollouts, found = [rollout], _with_signal(config, rollout)
    refills = config.max_refills if config.zero_variance == "refill" else 0
    while found < wanted and len(rollouts) <= refills:
        rollouts.append(_rolled_out(policy, more(wanted - found)))
        found += _with_signal(config, rollouts[-1])
    if refills and found < wanted and engine.rank() == 0:
        tell(
            f"step {step}: {found} of {wanted} groups have rewards that differ after {len(rollouts)} rollouts "
            f"(max_refills={refills}); the step is trained on those"
        )

    everything = _joined(policy, rollouts)
    return _dealt(policy, everything, _metrics(config, everything, min(found, wanted), step))


def _rolled_out(policy: Policy, prompts: list[Prompt]) -> Rollout:
    """Scored responses whose rewards have paid for their length."""
    rollout = policy.roll_out(prompts, policy.sampling, policy.config.group_size)
    return replace(rollout, rewards=rollout.rewards - overlong_penalty(policy.config, rollout.lengths))


def _with_signal(config, rollout: Rollout) -> int:
    """How many groups of all ranks have rewards that differ."""
    return int(engine.global_sum((~equal_rewards(rollout.rewards, config.group_size)).sum()).item())


def _metrics(config, rollout: Rollout, trained: int, step: int) -> dict[str, float]:
    """Of all that was drawn in the step, over all ranks; says so where none of it will be trained on."""
    metrics = group_metrics(config, rollout, step) | {"groups/trained": float(trained)}
    tell_if_all_left_out(config, metrics["val/stop_rate"], step)
    return metrics


def _joined(policy: Policy, rollouts: list[Rollout]) -> Rollout:
    """All rollouts of a step as one."""
    if len(rollouts) == 1:
        return rollouts[0]
    samples = sum((rollout.samples for rollout in rollouts), [])
    names = rollouts[0].scores
    return Rollout(
        samples,
        batch_of(samples, policy.tokenizer.pad_token_id, policy.device),
        {name: torch.cat([rollout.scores[name] for rollout in rollouts]) for name in names},
        torch.cat([rollout.rewards for rollout in rollouts]),
        torch.cat([rollout.solved for rollout in rollouts]),
        _added([rollout.seconds for rollout in rollouts]),
        _added([rollout.incidents for rollout in rollouts]),
    )


def _added(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _dealt(policy: Policy, rollout: Rollout, metrics: dict[str, float]) -> Drawn:
    """This rank's share of the groups with a signal of all ranks.

    All ranks get equally many groups, because they must run the model equally often: what is missing are groups that
    do not count.
    """
    config, size, world = policy.config, policy.config.group_size, engine.world_size()
    equal = equal_rewards(rollout.rewards, size).tolist()
    mine = []
    for i, has_none in enumerate(equal):
        at = slice(i * size, (i + 1) * size)
        mine.append(Group(rollout.samples[at], rollout.rewards[at], rollout.solved[at], not has_none))
    every = sum(engine.gather(mine), [])

    # Those with a signal first, and of them no more than a step has.
    kept = [group for group in every if group.has_signal][: config.prompts_per_step]
    others = [group for group in every if not group.has_signal]
    count = groups_per_rank(config, len(kept), world)
    share = (kept + others)[: count * world][engine.rank() :: world]

    samples = sum((group.samples for group in share), [])
    dealt = Rollout(
        samples,
        batch_of(samples, policy.tokenizer.pad_token_id, policy.device),
        {},
        torch.cat([group.rewards for group in share]),
        torch.cat([group.solved for group in share]),
        {},
    )
    counts = torch.tensor([group.has_signal for group in share]).repeat_interleave(size)
    return Drawn(dealt, counts, metrics)
