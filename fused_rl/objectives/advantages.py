"""Advantages: group-relative for GRPO, generalised advantage estimation for PPO."""

from collections.abc import Callable
from numbers import Integral
from typing import Literal, get_args

import torch
from torch import Tensor

from fused_rl.base.backend import backend_of
from fused_rl.base.checks import (
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
from fused_rl.base.masked import global_moments, whiten

# What a preset's `advantage` may be. All but "gae", which is per token, are functions of a response's reward.
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
Baseline = Literal["mean", "leave-one-out"]
_ALONE = "group_size=1 has no other response to compare with; use group_size >= 2"
ADVANTAGES = (*get_args(ResponseAdvantage), "gae")


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
        std_floor: a standard deviation below this counts as this, so that small differences stay small.

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
    for name, given in (("eps", eps != 1e-4), ("std_floor", std_floor != 0)):
        if given and not normalize:
            raise ValueError(
                f"{name} has no meaning with normalize=False, which divides by nothing; leave it out"
            )
    if group_size == 1 and (normalize or baseline == "leave-one-out"):
        raise ValueError(_ALONE)

    groups = _groups_of(rewards, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    if (
        baseline == "leave-one-out"
    ):  # r less the mean of the others is that less the mean of all, times G / (G - 1)
        centred = centred * (group_size / (group_size - 1))
    if normalize and len(groups):  # of nothing torch warns that it has no deviation
        centred = centred / (groups.std(1, keepdim=True).clamp(min=std_floor) + eps)
    return _zero_where_equal(groups, centred)


def _groups_of(rewards, group_size):
    groups = rewards.detach().view(-1, group_size)
    return groups if groups.dtype == torch.float64 else groups.float()


def _zero_where_equal(groups, found):
    # Equality, not a small deviation: the rounded mean of equal rewards can differ from them in the last bit.
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return torch.where(equal, 0, found).view(-1)


# Advantages of groups: rewards (P, G), lengths (P, G), scale (P, 1) -> (P, G).


def _maxrl(rewards, lengths, scale):
    """MaxRL (arXiv:2602.02710): over the group's mean in place of its deviation; 0 where the mean is not positive."""
    mean = rewards.mean(1, keepdim=True)
    return torch.where(mean > 0, (rewards - mean) / mean, 0)


def _opo(rewards, lengths, scale):
    """OPO (arXiv:2505.23585): the baseline is the mean weighted by length."""
    weights = lengths / lengths.sum(1, keepdim=True).clamp(min=1)
    return rewards - (weights * rewards).sum(1, keepdim=True)


def _pass_at_k(rewards, lengths, scale):
    """Pass@k (arXiv:2503.19595): the best response alone, by what it is above the second, over the deviation."""
    highest, places = rewards.topk(2, dim=1)
    return torch.zeros_like(rewards).scatter(
        1, places[:, :1], (highest[:, :1] - highest[:, 1:]) / scale
    )


_OF_GROUPS: dict[str, Callable] = {"maxrl": _maxrl, "opo": _opo, "pass-at-k": _pass_at_k}


def response_advantages(
    rewards: Tensor,
    advantage: Advantage,
    *,
    group_size: int,
    std_floor: float = 0.0,
    process_group: torch.distributed.ProcessGroup | None = None,
    lengths: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Advantage of each response by the name that a preset gives it: `PRESETS[preset].advantage`.

    Args:
        rewards: (B,) floating point; the responses to one prompt are adjacent. For "gdpo" (K, B), K rewards of each.
        advantage: "group-std", reward less the group's mean over its standard deviation (GRPO); "group-mean", without
            the division (Dr. GRPO); "leave-one-out", reward less the mean of the group's others (RLOO); "batch-std",
            rewards of all prompts whitened together (REINFORCE++, arXiv:2501.03262), as `whiten` does;
            "group-mean-batch-std", reward less the group's mean, over the standard deviation of all prompts' rewards
            (arXiv:2508.08221); "gdpo", each reward as "group-std", then their weighted sum as "batch-std" (GDPO,
            arXiv:2601.05242); "maxrl", reward less the group's mean over that mean (arXiv:2602.02710);
            "opo", reward less the group's mean weighted by length (arXiv:2505.23585); "pass-at-k", of the best response
            alone, its reward less the second best, over the group's deviation (arXiv:2503.19595).
        group_size: G, responses per prompt; B is a multiple of it for all, though "batch-std" compares no groups.
        std_floor: a standard deviation below this counts as this; refused where none is divided by.
        process_group: the ranks whose rewards those of the batch take together, all of which call; None: this rank's.
        lengths: (B,) tokens of each response, which "opo" alone reads and needs.
        weights: (K,) of the rewards, which "gdpo" alone reads and needs.

    Returns:
        (B,) in at least fp32, not differentiable. Exactly 0 where all rewards that are compared are equal.

    Raises:
        ValueError: "gae" and names that are not in `ADVANTAGES`; rewards that do not fit; as `group_advantages`.
    """
    check_choice("advantage", advantage, ADVANTAGES)
    for name, given in (("lengths", lengths), ("weights", weights)):
        if given is not None:
            check_tensor(name, given, " or None")
    if advantage == "gdpo":
        return _gdpo(rewards, weights, group_size, std_floor, process_group)
    _check_rewards(rewards, group_size)
    check_range("std_floor", std_floor, "a finite number, 0 or more")
    check_process_group(process_group)
    if std_floor and advantage in ("group-mean", "leave-one-out", "maxrl", "opo"):
        raise ValueError(
            f"std_floor has no meaning with advantage={advantage}, which divides by nothing; leave it out"
        )
    if advantage == "gae":
        raise ValueError('advantage="gae" is per token: use fused_rl.gae with a critic\'s values')
    if advantage == "batch-std":
        return _batch_advantages(rewards, std_floor, process_group)
    if advantage in _OF_GROUPS:
        if group_size == 1:
            raise ValueError(_ALONE)
        if advantage == "opo":
            check_shape("lengths", lengths, "rewards", rewards.shape)
        groups = _groups_of(rewards, group_size)
        lengths = None if lengths is None else lengths.view(-1, group_size)
        scale = groups.std(dim=1, keepdim=True).clamp(min=std_floor) + 1e-4
        return _zero_where_equal(groups, _OF_GROUPS[advantage](groups, lengths, scale))
    baseline, normalize = (
        "leave-one-out" if advantage == "leave-one-out" else "mean",
        advantage == "group-std",
    )
    floor = {"std_floor": std_floor} if normalize else {}
    found = group_advantages(rewards, group_size, baseline=baseline, normalize=normalize, **floor)
    if advantage == "group-mean-batch-std":
        everyone = torch.ones_like(rewards, dtype=torch.bool)
        _, variance = global_moments(rewards.detach(), everyone, process_group)
        found = found / (variance.sqrt().clamp(min=std_floor) + 1e-4).to(found.dtype)
    return found


def _gdpo(rewards, weights, group_size, std_floor, process_group):
    """(K, B), (K,) -> (B,)."""
    check_floating("rewards", rewards, "(K, B)")
    check_shape("weights", weights, "the first dimension of rewards", rewards.shape[:1])
    found = [group_advantages(of_one, group_size, std_floor=std_floor) for of_one in rewards]
    return _batch_advantages((weights[:, None] * torch.stack(found)).sum(0), 0.0, process_group)


def _check_rewards(rewards, group_size):
    check_floating("rewards", rewards, "(B,)")
    if not isinstance(group_size, Integral) or isinstance(group_size, bool):
        raise ValueError(
            f"group_size must be a whole number, responses per prompt, got {described(group_size)}"
        )
    if group_size < 1 or rewards.numel() % group_size:
        raise ValueError(
            f"{rewards.numel()} rewards do not divide into groups of group_size={group_size}"
        )
    check_finite("rewards", rewards, "score the response, or leave its group out")


def _batch_advantages(rewards, std_floor, process_group):
    rewards = rewards.detach()
    everyone = torch.ones_like(rewards, dtype=torch.bool)
    whitened = whiten(rewards, everyone, std_floor=std_floor, process_group=process_group)
    # Equality, as in a group; a rank without rewards takes part with -inf.
    nothing = rewards.new_full((1,), -torch.inf)
    most = torch.cat([rewards, nothing])
    least = torch.cat([-rewards, nothing])
    extremes = torch.stack([most.max(), least.max()])
    if process_group is not None:
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group=process_group)
    highest, lowest = extremes[0], -extremes[1]
    return torch.where(highest == lowest, 0, whitened)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) over the tokens that count.

    With the sequence of positions where `mask` is True, and values and advantages of 0 beyond its end,

        advantage_t = r_t + gamma value_{t+1} - value_t + gamma gae_lambda advantage_{t+1},

    so masked positions, also in the middle, are as if they were not there. Sums are fp64.

    Args:
        rewards: (B, T) floating point.
        values: (B, T) floating point, the value function before each token.
        mask: (B, T) bool, True where a token counts; rewards and values elsewhere, NaN included, reach nothing.
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
    return _gae(rewards.detach(), values.detach(), mask, float(gamma), float(gae_lambda))


def _gae_dtype(rewards, values):
    return torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)


@torch.library.custom_op("fused_rl::gae", mutates_args=())
def _gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    dtype = _gae_dtype(rewards, values)
    rows = (x if x.stride(1) == 1 else x.contiguous() for x in (rewards, values, mask))
    return backend_of(rewards.device).gae.gae(*rows, gamma, gae_lambda, dtype)


@_gae.register_fake
def _gae_fake(rewards, values, mask, gamma, gae_lambda):
    dtype = _gae_dtype(rewards, values)
    return tuple(torch.empty(rewards.shape, dtype=dtype, device=rewards.device) for _ in range(2))
