"""Advantages: group-relative for GRPO, generalised advantage estimation for PPO."""

import torch

__all__ = ["group_advantages"]


def group_advantages(
    rewards: torch.Tensor,
    group_size: int,
    *,
    baseline: str = "mean",
    normalize: bool = True,
    eps: float = 1e-4,
) -> torch.Tensor:
    """Advantage of each response over the others to the same prompt.

    Args:
        rewards: (B,) floating point, B a multiple of `group_size`; the responses to one prompt are adjacent.
        group_size: G, responses per prompt.
        baseline: "mean" of the group, or "leave-one-out": the mean of the other G - 1 responses (RLOO).
        normalize: divide by the group's standard deviation (unbiased) plus `eps`, as GRPO does (arXiv:2402.03300);
            False is Dr. GRPO (arXiv:2503.20783).
        eps: added to the standard deviation.

    Returns:
        (B,) in at least fp32, not differentiable. Exactly 0 in a group whose rewards are all equal.

    Raises:
        ValueError: shapes or options that do not fit.
    """
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be (B,) floating point, got {tuple(rewards.shape)} {rewards.dtype}")
    if group_size < 1 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards do not divide into groups of group_size={group_size}")
    if baseline not in ("mean", "leave-one-out"):
        raise ValueError(f'baseline must be "mean" or "leave-one-out", got {baseline!r}')
    if group_size == 1 and (normalize or baseline == "leave-one-out"):
        raise ValueError("group_size=1 has no other response to compare with; use group_size >= 2")
    groups = rewards.detach().view(-1, group_size)
    groups = groups if groups.dtype == torch.float64 else groups.float()
    centred = groups - groups.mean(1, keepdim=True)
    if baseline == "leave-one-out":
        centred = centred * (group_size / (group_size - 1))
    if normalize:
        centred = centred / (groups.std(1, keepdim=True) + eps)
    # Equality, not a small deviation: the rounded mean of equal rewards can differ from them in the last bit.
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return torch.where(equal, 0, centred).view(-1)
