"""The loss of pairs of scores: of reward models, and of policies that learn from preferences directly."""

import torch
from torch import Tensor

from fused_rl.base.checks import (
    check_choice,
    check_count,
    check_floating,
    check_like,
    check_range,
)
from fused_rl.objectives.aggregation import divisor

LOSSES = {  # of the lead of the chosen score
    "sigmoid": lambda lead: -torch.nn.functional.logsigmoid(lead),
    "hinge": lambda lead: torch.relu(1 - lead),
    "squared": torch.square,
}


def preference_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    loss_type: str = "sigmoid",
    margin: float | Tensor | None = None,
    label_smoothing: float = 0.0,
    centering: float = 0.0,
    num_sequences: int | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of pairs of scores, of the lead d = chosen - rejected - margin, averaged over pairs.

    Args:
        chosen_scores: (B,) floating point.
        rejected_scores: (B,).
        loss_type: "sigmoid", -log sigmoid(d), of Bradley and Terry; "hinge", max(0, 1 - d) (arXiv:2305.10425, eq. 6);
            "squared", d^2 (IPO, arXiv:2310.12036, eq. 17, whose margin is 1 / (2 tau)).
        margin: (B,) or a number by which the chosen one should lead (Llama 2, arXiv:2307.09288, eq. 2); a constant.
        label_smoothing: the probability that a label is wrong: (1 - e) l(d) + e l(-d).
        centering: weight of mean((chosen + rejected)^2), which keeps scores around 0 (arXiv:2312.09244).
        num_sequences: pairs in the whole optimizer step; None: B.

    Returns:
        The loss, a scalar in at least fp32, differentiable in both; and a dict of detached scalars. Sums over pairs /
        num_sequences, which over micro-batches and ranks add up: `loss`; `accuracy`, of chosen > rejected, a tie half;
        `reward_margin`, of chosen - rejected; `chosen_rewards`, `rejected_rewards`; `mean_reward`, the mean of these
        two. `min_reward` and `max_reward` are those of this batch and reduce by min and max.

    Raises:
        ValueError: scores that are not (B,), an unknown loss_type, label_smoothing outside [0, 0.5).
    """
    check_floating("chosen_scores", chosen_scores, "(B,)")
    check_like("rejected_scores", rejected_scores, "chosen_scores", chosen_scores)
    if isinstance(margin, Tensor):
        check_like("margin", margin, "chosen_scores", chosen_scores)
        margin = margin.detach()
    elif margin is not None:
        check_range("margin", margin, "a finite number", ", a tensor (B,) or None")
    check_choice("loss_type", loss_type, LOSSES)
    check_count("num_sequences", num_sequences, torch.ones_like(chosen_scores, dtype=torch.bool))
    check_range("label_smoothing", label_smoothing, "a number from 0 to below 0.5")
    check_range("centering", centering, "a finite number, 0 or more")
    dtype = torch.promote_types(chosen_scores.dtype, torch.float32)
    chosen = chosen_scores.to(dtype)
    rejected = rejected_scores.to(dtype)
    lead = chosen - rejected
    if margin is not None:
        lead = lead - margin

    # conservative labels as in cDPO, https://ericmitchell.ai/cdpo.pdf
    losses = (1 - label_smoothing) * LOSSES[loss_type](lead)
    losses = losses + label_smoothing * LOSSES[loss_type](-lead)
    losses = losses + centering * (chosen + rejected).square()
    num_sequences = divisor(chosen.numel() if num_sequences is None else num_sequences)
    loss = losses.sum() / num_sequences
    return loss, _preference_metrics(
        loss.detach(), chosen.detach(), rejected.detach(), num_sequences
    )


def _preference_metrics(loss, chosen, rejected, num_sequences):
    per_pair = {
        "accuracy": torch.heaviside(chosen - rejected, chosen.new_full((), 0.5)),
        "reward_margin": chosen - rejected,
        "chosen_rewards": chosen,
        "rejected_rewards": rejected,
        "mean_reward": (chosen + rejected) / 2,
    }
    sums = {name: values.sum() / num_sequences for name, values in per_pair.items()}
    both = torch.cat([chosen, rejected])
    extremes = {  # of no pair what changes no minimum and no maximum
        "min_reward": both.amin() if len(both) else both.new_tensor(torch.inf),
        "max_reward": both.amax() if len(both) else both.new_tensor(-torch.inf),
    }
    return {"loss": loss, **sums, **extremes}
