"""Advantages: group-relative for GRPO, generalised advantage estimation for PPO."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from fused_rl.base.backend import backend_of
from fused_rl.base.checks import (
    NonNegative,
    check_choice,
    check_device,
    check_finite,
    check_flag,
    check_floating,
    check_mask,
    check_process_group,
    check_range,
    check_shape,
    check_tensor,
    described,
)
from fused_rl.base.graphs import skips_dispatcher
from fused_rl.base.masked import global_moments, whiten
from fused_rl.objectives.options import (
    RangedOptions,
    arguments_of,
    check_names,
    check_ranges,
    functions_named,
)

Baseline = Literal["mean", "leave-one-out"]
_ALONE = "group_size=1 has no other response to compare with; use group_size >= 2"


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    baseline: Baseline = "mean",
    normalize: bool = True,
    eps: float = 1e-4,
    std_floor: float = 0.0,
) -> Tensor:
    """Advantage of each response over the others to the same prompt.

    Args:
        rewards: (B,) floating point, B a multiple of `group_size`; the responses to one prompt are adjacent.
        group_size: G, responses per prompt.
        baseline: "mean" of the group, or "leave-one-out": the mean of the other G - 1 responses (RLOO).
        normalize: divide by the group's standard deviation (unbiased) plus `eps`, as GRPO does (arXiv:2402.03300);
            False is Dr. GRPO (arXiv:2503.20783).
        eps: added to the standard deviation.
        std_floor: a standard deviation below this value is replaced by it, so that small differences stay small.

    Returns:
        (B,) in at least fp32, not differentiable. Exactly 0 in a group whose rewards are all equal.

    Raises:
        ValueError: shapes or options that do not fit, `eps` or `std_floor` without `normalize`; on CPU, or with
            FUSED_RL_CHECKED=1 in the environment, rewards that are not finite.
    """
    _check_rewards(rewards, group_size)
    check_choice("baseline", baseline, get_args(Baseline))
    check_flag("normalize", normalize)
    check_range("eps", eps, "a finite number, 0 or more")
    check_range("std_floor", std_floor, "a finite number, 0 or more")
    # What divides by nothing has no use for a deviation's options.
    for name, is_set in (("eps", eps != 1e-4), ("std_floor", std_floor != 0)):
        if is_set and not normalize:
            raise ValueError(
                f"{name} has no meaning with normalize=False, which divides by nothing; leave it out"
            )
    if group_size == 1 and (normalize or baseline == "leave-one-out"):
        raise ValueError(_ALONE)

    # Unequal rewards in a group are compared in at least fp32, which bf16 would round to steps of 0.4 %.
    groups = _groups_of(rewards, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    # A reward less the mean of the others is that reward less the mean of all, times G / (G - 1).
    if baseline == "leave-one-out":
        centred = centred * (group_size / (group_size - 1))
    # Of an empty batch torch would warn that it has no deviation.
    if normalize and len(groups):
        deviation = groups.std(1, keepdim=True).clamp(min=std_floor)
        centred = centred / (deviation + eps)
    return _zero_where_equal(groups, centred)


def _groups_of(rewards, group_size):
    groups = rewards.detach().view(-1, group_size)
    return groups if groups.dtype == torch.float64 else groups.float()


def _zero_where_equal(groups, advantages):
    # Equality, not a small deviation: the rounded mean of equal rewards can differ from them in the last bit.
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return torch.where(equal, 0, advantages).view(-1)


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions(RangedOptions):
    """The options that only some advantages read, which `reads` names."""

    std_floor: NonNegative = 0.0
    """A standard deviation of rewards below this value is replaced by it, so that small differences stay small."""


class Responses(NamedTuple):
    """The responses of a batch, as an advantage sees them."""

    rewards: Tensor
    """(B,), the responses to one prompt adjacent; (K, B) for gdpo. Detached."""
    groups: Tensor
    """(P, G), the same in at least fp32."""
    group_size: int
    lengths: Tensor | None
    """(B,) tokens of each response."""
    weights: Tensor | None
    """(K,) of the rewards."""
    process_group: torch.distributed.ProcessGroup | None
    options: AdvantageOptions


class ResponseAdvantageFunction(Protocol):
    """The responses of a batch -> (B,), in at least fp32, with what `reads` says of it."""

    reads: tuple[str, ...]

    def __call__(self, responses: Responses, /) -> Tensor: ...


def reads(*options: str) -> Callable[[Callable[[Responses], Tensor]], ResponseAdvantageFunction]:
    """Decorator for an advantage: those of `AdvantageOptions` that it reads. The others have no meaning beside it."""

    def declared(advantage: Any) -> ResponseAdvantageFunction:
        advantage.reads = options
        return advantage

    return declared


def within_groups(advantage):
    """Decorator for an advantage (P, G) that compares the responses of a group: 0 where their rewards are equal."""

    @functools.wraps(advantage)
    def flat(responses):
        if responses.group_size == 1:
            raise ValueError(_ALONE)
        return _zero_where_equal(responses.groups, advantage(responses))

    return flat


@reads("std_floor")
def _group_std(responses):
    """GRPO (arXiv:2402.03300): reward less the group's mean, over the group's standard deviation."""
    floor = responses.options.std_floor
    return group_advantages(responses.rewards, responses.group_size, std_floor=floor)


@reads()
def _group_mean(responses):
    """Dr. GRPO (arXiv:2503.20783): reward less the group's mean."""
    return group_advantages(responses.rewards, responses.group_size, normalize=False)


@reads()
def _leave_one_out(responses):
    """RLOO (arXiv:2402.14740): reward less the mean of the group's others."""
    options = {"baseline": "leave-one-out", "normalize": False}
    return group_advantages(responses.rewards, responses.group_size, **options)


@reads("std_floor")
def _batch_std(responses):
    """REINFORCE++ (arXiv:2501.03262): rewards of all prompts and ranks, whitened together."""
    floor = responses.options.std_floor
    return _whitened(responses.rewards, floor, responses.process_group)


@reads("std_floor")
def _group_mean_batch_std(responses):
    """arXiv:2508.08221: reward less the group's mean, over the standard deviation of all prompts' rewards."""
    centred = _group_mean(responses)
    # The deviation of all prompts: a group of nearly equal rewards is not blown up to that of the others.
    everyone = torch.ones_like(responses.rewards, dtype=torch.bool)
    _, variance = global_moments(responses.rewards, everyone, responses.process_group)
    deviation = variance.sqrt().clamp(min=responses.options.std_floor)
    return centred / (deviation + 1e-4).to(centred.dtype)


@reads("std_floor")
def _gdpo(responses):
    """GDPO (arXiv:2601.05242): each of K rewards as group-std, then their weighted sum as batch-std."""
    rewards, weights = responses.rewards, responses.weights
    check_shape("weights", weights, "the first dimension of rewards", rewards.shape[:1])
    # Each reward is divided by its own deviation first: otherwise the widest would drown the others.
    normal = [_group_std(responses._replace(rewards=reward)) for reward in rewards]
    summed = (weights[:, None] * torch.stack(normal)).sum(0)
    return _whitened(summed, 0.0, responses.process_group)


@reads()
@within_groups
def _maxrl(responses):
    """MaxRL (arXiv:2602.02710): over the group's mean in place of its deviation; 0 where the mean is not positive."""
    # The mean of rewards of 0 and 1 is the success rate: rare successes weigh as much as its inverse.
    mean = responses.groups.mean(1, keepdim=True)
    return torch.where(mean > 0, (responses.groups - mean) / mean, 0)


@reads()
@within_groups
def _opo(responses):
    """OPO (arXiv:2505.23585): the baseline is the mean weighted by length."""
    # Long responses vary the gradient more, so the baseline of least variance leans towards them.
    check_shape("lengths", responses.lengths, "rewards", responses.rewards.shape)
    lengths = responses.lengths.view(responses.groups.shape)
    weights = lengths / lengths.sum(1, keepdim=True).clamp(min=1)
    return responses.groups - (weights * responses.groups).sum(1, keepdim=True)


@reads("std_floor")
@within_groups
def _pass_at_k(responses):
    """Pass@k (arXiv:2503.19595): the best response alone, by what it is above the second, over the deviation."""
    groups = responses.groups
    deviation = groups.std(dim=1, keepdim=True).clamp(min=responses.options.std_floor)
    # Only the best response changes whether one of the group passes.
    highest, indices = groups.topk(2, dim=1)
    lead = (highest[:, :1] - highest[:, 1:]) / (deviation + 1e-4)
    return torch.zeros_like(groups).scatter(1, indices[:, :1], lead)


def _whitened(rewards, std_floor, process_group):
    everyone = torch.ones_like(rewards, dtype=torch.bool)
    whitened = whiten(rewards, everyone, std_floor=std_floor, process_group=process_group)
    # Equality, as in a group, of all ranks: the largest of r and of -r. A rank without rewards takes part with -inf.
    nothing = rewards.new_full((1,), -torch.inf)
    most = torch.cat([rewards, nothing]).max()
    least = torch.cat([-rewards, nothing]).max()
    extremes = torch.stack([most, least])
    if process_group is not None:
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group=process_group)
    highest, lowest = extremes[0], -extremes[1]
    return torch.where(highest == lowest, 0, whitened)


# What a preset's `advantage` may be. All but "gae", which is per token, are functions of a response's reward: each name
# is that of a function above.
ResponseAdvantage = Literal[
    "group-std",
    "group-mean",
    "leave-one-out",
    "batch-std",
    "group-mean-batch-std",
    "gdpo",
    "maxrl",
    "opo",
    "pass-at-k",
]
Advantage = ResponseAdvantage | Literal["gae"]
RESPONSE_ADVANTAGES: dict[ResponseAdvantage, ResponseAdvantageFunction] = functions_named(
    ResponseAdvantage, globals()
)
ADVANTAGES: tuple[Advantage, ...] = (*RESPONSE_ADVANTAGES, "gae")


@dataclass(frozen=True, kw_only=True)
class ResponseAdvantagesArguments(AdvantageOptions):
    """The arguments of `response_advantages`, for type checkers."""

    rewards: Tensor = field(kw_only=False)
    advantage: Advantage = field(kw_only=False)
    group_size: int
    process_group: torch.distributed.ProcessGroup | None = None
    lengths: Tensor | None = None
    weights: Tensor | None = None


@arguments_of(ResponseAdvantagesArguments)
def response_advantages(
    rewards: Tensor,
    advantage: Advantage,
    *,
    group_size: int,
    process_group: torch.distributed.ProcessGroup | None = None,
    lengths: Tensor | None = None,
    weights: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Advantage of each response by the name that a preset gives it: `PRESETS[preset].advantage`.

    Args:
        rewards: (B,) floating point, with the responses to one prompt adjacent; for "gdpo" (K, B), K rewards of each.
        advantage: "group-std", reward less the group's mean over its standard deviation (GRPO); "group-mean", without
            the division (Dr. GRPO); "leave-one-out", reward less the mean of the group's others (RLOO); "batch-std",
            rewards of all prompts whitened together (REINFORCE++, arXiv:2501.03262), as `whiten` does;
            "group-mean-batch-std", reward less the group's mean, over the standard deviation of all prompts' rewards
            (arXiv:2508.08221); "gdpo", each reward as "group-std", then their weighted sum as "batch-std" (GDPO,
            arXiv:2601.05242); "maxrl", reward less the group's mean over that mean (arXiv:2602.02710);
            "opo", reward less the group's mean weighted by length (arXiv:2505.23585); "pass-at-k", of the best response
            alone, its reward less the second best, over the group's deviation (arXiv:2503.19595).
        group_size: G, responses per prompt. B must be a multiple of it, also for "batch-std", which does not compare
            groups.
        process_group: the ranks over which advantages of the whole batch are computed, all of which must call this;
            None means this rank alone.
        lengths: (B,) tokens of each response; "opo" needs it, and no other advantage reads it.
        weights: (K,) of the rewards; "gdpo" needs it, and no other advantage reads it.
        **options: fields of `AdvantageOptions`: std_floor, for an advantage that divides by a standard deviation.

    Returns:
        (B,) in at least fp32, not differentiable. Exactly 0 where all rewards that are compared are equal.

    Raises:
        ValueError: "gae" and names that are not in `ADVANTAGES`; rewards that do not fit; an option that the advantage
            does not read; and as `group_advantages`.
    """
    check_choice("advantage", advantage, ADVANTAGES)
    # The one name that is per token: a preset may have it, this function may not.
    if advantage == "gae":
        raise ValueError('advantage="gae" is per token: use fused_rl.gae with a critic\'s values')
    for name, tensor in (("lengths", lengths), ("weights", weights)):
        if tensor is not None:
            check_tensor(name, tensor, " or None")
    _check_rewards(rewards, group_size, "(K, B)" if advantage == "gdpo" else "(B,)")
    check_process_group(process_group)
    # An option that the advantage does not read is a mistake, not a wish.
    function = RESPONSE_ADVANTAGES[advantage]
    chosen = _chosen_options(options, advantage, function)

    rewards = rewards.detach()
    groups = _groups_of(rewards, group_size)
    return function(Responses(rewards, groups, group_size, lengths, weights, process_group, chosen))


def _chosen_options(options, advantage, function):
    """Return the options, checked: an option that the advantage does not read has no meaning."""
    check_names(options, AdvantageOptions)
    chosen = AdvantageOptions(**options)
    check_ranges(chosen)
    for name, value in options.items():
        if name not in function.reads and value != getattr(AdvantageOptions, name):
            raise ValueError(
                f"{name}={value} has no meaning with advantage={advantage}, which does not read it; leave it out"
            )
    return chosen


def _check_rewards(rewards, group_size, shape="(B,)"):
    check_floating("rewards", rewards, shape)
    if not isinstance(group_size, Integral) or isinstance(group_size, bool):
        raise ValueError(
            f"group_size must be a whole number, responses per prompt, got {described(group_size)}"
        )
    # Neighbours are a group, so a number of rewards that does not divide would mix two prompts.
    count = rewards.shape[-1]
    if group_size < 1 or count % group_size:
        raise ValueError(f"{count} rewards do not divide into groups of group_size={group_size}")
    check_finite("rewards", rewards, "score the response, or leave its group out")


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) over the tokens that count.

    With the sequence of positions where `mask` is True, and values and advantages of 0 beyond its end,

        advantage_t = r_t + gamma value_{t+1} - value_t + gamma gae_lambda advantage_{t+1},

    so masked positions, also in the middle, have the same effect as if they were not there. Sums are fp64.

    Args:
        rewards: (B, T) floating point.
        values: (B, T) floating point, the value function before each token.
        mask: (B, T) bool, True where a token counts; other rewards and values, NaN included, have no effect.
        gamma: discount, 0 to 1.
        gae_lambda: 1 is the Monte-Carlo return less the value, 0 the one-step error; 0 to 1.

    Returns:
        `(advantages, returns)`, both (B, T), in the wider dtype of rewards and values, at least fp32, not
        differentiable, exactly 0 where the mask is False. returns = advantages + values.

    Raises:
        ValueError: a shape, dtype or device that does not fit; gamma or gae_lambda outside [0, 1].
    """
    check_floating("rewards", rewards, "(B, T)")
    check_floating("values", values, "(B, T)")
    check_shape("values", values, "rewards", rewards.shape)
    check_mask(mask, "rewards", rewards.shape, rewards.device)
    check_device("values", values, rewards.device, "rewards")
    check_range("gamma", gamma, "a number from 0 to 1")
    check_range("gae_lambda", gae_lambda, "a number from 0 to 1")
    inputs = rewards.detach(), values.detach(), mask, float(gamma), float(gae_lambda)
    return _gae(*inputs) if skips_dispatcher(*inputs[:3]) else torch.ops.fused_rl.gae(*inputs)


def _gae_dtype(rewards, values):
    return torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)


def _gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    dtype = _gae_dtype(rewards, values)
    # A row's tokens lie side by side in memory, as the kernel reads them.
    rows = (x if x.stride(1) == 1 else x.contiguous() for x in (rewards, values, mask))
    return backend_of(rewards.device).gae.gae(*rows, gamma, gae_lambda, dtype)


_operator = torch.library.custom_op("fused_rl::gae", _gae, mutates_args=())


@_operator.register_fake
def _gae_fake(rewards, values, mask, gamma, gae_lambda):
    # Shapes and dtypes alone, for torch.compile.
    dtype = _gae_dtype(rewards, values)
    return tuple(torch.empty(rewards.shape, dtype=dtype, device=rewards.device) for _ in range(2))
