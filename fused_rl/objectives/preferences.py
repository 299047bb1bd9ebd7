"""Losses of scores: of pairs, for reward models and policies, and of single responses that are good or bad."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fused_rl.base.checks import (
    check_choice,
    check_count,
    check_device,
    check_floating,
    check_like,
    check_process_group,
    check_range,
    check_shape,
    described,
)
from fused_rl.objectives.aggregation import divisor
from fused_rl.objectives.estimators import sigmoid


class PairLoss(NamedTuple):
    """A loss of pairs."""

    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The lead of the chosen score and both scores, (B,) each -> (B,)."""
    transform: Callable[[Tensor], Tensor] = lambda scores: scores
    """Applied to the scores before one leads."""
    has_margin: bool = True
    is_even: bool = False
    """The loss of -lead is that of the lead, so exchanging the two changes nothing."""


def _sigmoid(lead, chosen, rejected):
    """Bradley and Terry; DPO (arXiv:2305.18290, eq. 7)."""
    return -logsigmoid(lead)


def _hinge(lead, chosen, rejected):
    """SLiC (arXiv:2305.10425, eq. 6)."""
    return torch.relu(1 - lead)


def _squared(lead, chosen, rejected):
    """IPO (arXiv:2310.12036, eq. 17), whose margin is 1 / (2 tau)."""
    return lead.square()


def _log_odds(logprobs):
    """ORPO's scores (arXiv:2403.07691, eq. 7): log(p / (1 - p)) of p = exp(logprobs)."""
    # Odds of certainty are infinite, and their gradient NaN: p = 1 counts as the number below it.
    below_1 = torch.where(logprobs == 0, -torch.finfo(logprobs.dtype).tiny, logprobs)
    return below_1 - torch.log(-torch.expm1(below_1))


def _apo_zero(lead, chosen, rejected):
    """APO-zero (arXiv:2408.06266, eq. 7) plus 1: the chosen score rises above 0, the rejected one falls below."""
    return sigmoid(-chosen) + sigmoid(rejected)


def _apo_down(lead, chosen, rejected):
    """APO-down (arXiv:2408.06266, eq. 8) plus 1: both scores fall, the rejected one further."""
    return sigmoid(chosen) + sigmoid(-lead)


PreferenceLoss = Literal["sigmoid", "hinge", "squared", "orpo", "apo-zero", "apo-down"]
PREFERENCE_LOSSES: dict[PreferenceLoss, PairLoss] = {
    "sigmoid": PairLoss(_sigmoid),
    "hinge": PairLoss(_hinge),
    "squared": PairLoss(_squared, is_even=True),
    "orpo": PairLoss(_sigmoid, transform=_log_odds),
    "apo-zero": PairLoss(_apo_zero, has_margin=False),
    "apo-down": PairLoss(_apo_down, has_margin=False),
}


def preference_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    loss_type: PreferenceLoss = "sigmoid",
    margin: float | Tensor | None = None,
    label_smoothing: float = 0.0,
    centering: float = 0.0,
    num_sequences: int | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of pairs of scores, w chosen and l rejected, averaged over pairs.

    With the lead d = w - l - margin,

        "sigmoid"   -log sigmoid(d)                Bradley and Terry, DPO
        "hinge"     max(0, 1 - d)                  arXiv:2305.10425, eq. 6
        "squared"   d^2                            IPO, arXiv:2310.12036, eq. 17, whose margin is 1 / (2 tau)
        "orpo"      -log sigmoid(d) of log-odds    arXiv:2403.07691, eq. 7: d of log(p / (1 - p)) with p = exp(score)
        "apo-zero"  sigmoid(-w) + sigmoid(l)       arXiv:2408.06266, eq. 7 plus 1: w rises above 0, l falls below
        "apo-down"  sigmoid(w) + sigmoid(l - w)    arXiv:2408.06266, eq. 8 plus 1: both fall, l further

    Args:
        chosen_scores: (B,) floating point; for "orpo" a response's mean log-probability per token, at most 0.
        rejected_scores: (B,).
        loss_type: a name of the table.
        margin: (B,) or a number by which the chosen score should lead (Llama 2, arXiv:2307.09288, eq. 2). It is a
            constant, and "apo-zero" and "apo-down" do not have one.
        label_smoothing: the probability e that a label is wrong: (1 - e) of the loss, and e of that of the pair
            exchanged, which for "squared" is the same.
        centering: weight of mean((chosen + rejected)^2), which keeps scores around 0 (arXiv:2312.09244).
        num_sequences: pairs in the whole optimizer step; None means B.

    Returns:
        The loss, a scalar in at least fp32, differentiable in both scores; and a dict of detached scalars. These are
        sums over pairs / num_sequences, which add up over micro-batches and ranks: `loss`; `accuracy`, of chosen >
        rejected, where a tie counts half; `reward_margin`, of chosen - rejected; `chosen_rewards` and
        `rejected_rewards`; `mean_reward`, the mean of these two. `min_reward` and `max_reward` are those of this batch
        and reduce by min and max.

    Raises:
        ValueError: scores that are not (B,), an unknown loss_type, a margin or label_smoothing for a loss_type that has
            none, or label_smoothing outside [0, 0.5).
    """
    check_floating("chosen_scores", chosen_scores, "(B,)")
    check_like("rejected_scores", rejected_scores, "chosen_scores", chosen_scores)
    if isinstance(margin, Tensor):
        check_like("margin", margin, "chosen_scores", chosen_scores)
        margin = margin.detach()
    elif margin is not None:
        check_range("margin", margin, "a finite number", ", a tensor (B,) or None")
    check_choice("loss_type", loss_type, PREFERENCE_LOSSES)
    # A loss that judges both scores against the reference has no lead that a margin could move.
    loss, transform, has_margin, is_even = PREFERENCE_LOSSES[loss_type]
    if margin is not None and not has_margin:
        raise ValueError(f"margin has no meaning with loss_type={loss_type}; leave it out")
    check_count("num_sequences", num_sequences, torch.ones_like(chosen_scores, dtype=torch.bool))
    check_range("label_smoothing", label_smoothing, "a number from 0 to below 0.5")
    if label_smoothing and is_even:
        raise ValueError(f"label_smoothing has no effect with loss_type={loss_type}; leave it out")
    check_range("centering", centering, "a finite number, 0 or more")
    dtype = torch.promote_types(chosen_scores.dtype, torch.float32)
    chosen = chosen_scores.to(dtype)
    rejected = rejected_scores.to(dtype)

    # The lead, in at least fp32: bf16 scores around 10 are 0.06 apart.
    lead = transform(chosen) - transform(rejected)
    if margin is not None:
        lead = lead - margin

    # Conservative labels as in cDPO, https://ericmitchell.ai/cdpo.pdf: a wrong label exchanges the two.
    losses = (1 - label_smoothing) * loss(lead, chosen, rejected)
    # A term that is switched off is not computed: 0 * inf would be NaN.
    if label_smoothing:
        losses = losses + label_smoothing * loss(-lead, rejected, chosen)
    if centering:
        losses = losses + centering * (chosen + rejected).square()

    # Reduced once, over the pairs of the whole step.
    count = divisor(chosen.numel() if num_sequences is None else num_sequences)
    total = losses.sum() / count
    metrics = _preference_metrics(chosen.detach(), rejected.detach(), count)
    return total, {"loss": total.detach(), **metrics}


def _preference_metrics(chosen, rejected, count):
    per_pair = {
        # A tie is half right: before the first step all are ties.
        "accuracy": torch.heaviside(chosen - rejected, chosen.new_full((), 0.5)),
        "reward_margin": chosen - rejected,
        "chosen_rewards": chosen,
        "rejected_rewards": rejected,
        "mean_reward": (chosen + rejected) / 2,
    }
    sums = {name: values.sum() / count for name, values in per_pair.items()}
    both = torch.cat([chosen, rejected])
    # Without a pair: what changes no minimum and no maximum of others.
    extremes = {
        "min_reward": both.amin() if len(both) else both.new_tensor(torch.inf),
        "max_reward": both.amax() if len(both) else both.new_tensor(-torch.inf),
    }
    return sums | extremes


def unpaired_preference_loss(
    scores: Tensor,
    desirable: Tensor,
    *,
    baseline: float | Tensor,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    num_sequences: int | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Kahneman-Tversky loss of single responses that are marked good or bad, averaged over responses.

    With s the score of a response and z the baseline (arXiv:2402.01306, eq. 8),

        desirable_weight (1 - sigmoid(s - z)) for a desirable one, undesirable_weight (1 - sigmoid(z - s)) for others.

    Args:
        scores: (N,) floating point, beta (log pi - log pi_ref) of each response, summed over its tokens.
        desirable: (N,) bool, True for a good response.
        baseline: the score with which all scores are compared, a number or (), usually `kl_baseline` of mismatched
            responses; a constant. With 0 the loss is the unpaired form of APO-zero (arXiv:2408.06266).
        desirable_weight: weight of good responses.
        undesirable_weight: weight of the other responses. The paper keeps the ratio of the two sums of weights between
            1 and 4/3.
        num_sequences: responses in the whole optimizer step; None means N.

    Returns:
        The loss, a scalar in at least fp32, differentiable in `scores`; and a dict of detached scalars, which are sums
        over responses / num_sequences and add up over micro-batches and ranks: `loss`; `accuracy`, of scores on the
        right side of the baseline, where a score on it counts half; `desirable`, the fraction of good responses;
        `desirable_rewards` and `undesirable_rewards`, the scores of the good and of the other responses. The mean score
        of the good responses is desirable_rewards / desirable, and that of the others is undesirable_rewards / (1 -
        desirable).

    Raises:
        ValueError: scores and labels that are not (N,), a weight or baseline that is not a finite number.
    """
    check_floating("scores", scores, "(N,)")
    check_shape("desirable", desirable, "scores", scores.shape)
    if desirable.dtype != torch.bool:
        raise ValueError(
            f"desirable must be bool, True for a good response, got {described(desirable)}; compare the labels"
        )
    check_device("desirable", desirable, scores.device, "scores")
    # A constant of the step: a gradient through it would tie all responses together.
    if isinstance(baseline, Tensor):
        check_floating("baseline", baseline)
        check_shape("baseline", baseline, "one number", ())
        baseline = baseline.detach()
    else:
        check_range("baseline", baseline, "a finite number", ", or a tensor of one, ()")
    check_range("desirable_weight", desirable_weight, "a finite number, 0 or more")
    check_range("undesirable_weight", undesirable_weight, "a finite number, 0 or more")
    check_count("num_sequences", num_sequences, torch.ones_like(desirable))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    count = divisor(scores.numel() if num_sequences is None else num_sequences)

    # A bad response shall fall below the baseline as a good one shall rise above it.
    sign = torch.where(desirable, scores.new_ones(()), -1)
    lead = sign * (scores - baseline)
    weights = torch.where(desirable, scores.new_full((), desirable_weight), undesirable_weight)
    # sigmoid(-x) is 1 - sigmoid(x), and keeps its digits where that is near 0.
    loss = (weights * sigmoid(-lead)).sum() / count

    # Sums of either kind over all responses: a micro-batch may have none of one, and means would not add up.
    scores = scores.detach()
    per_response = {
        "accuracy": torch.heaviside(lead.detach(), lead.new_full((), 0.5)),
        "desirable": desirable.to(scores.dtype),
        "desirable_rewards": torch.where(desirable, scores, 0),
        "undesirable_rewards": torch.where(desirable, 0, scores),
    }
    sums = {name: values.sum() / count for name, values in per_response.items()}
    return loss, {"loss": loss.detach(), **sums}


@torch.no_grad()
def kl_baseline(
    scores: Tensor, *, process_group: torch.distributed.ProcessGroup | None = None
) -> Tensor:
    """Baseline of `unpaired_preference_loss`: the mean score of mismatched responses, at least 0.

    A mismatched response is one to another prompt, such as that of the next row. Its score is that of the policy that
    is trained, measured without gradients. Over a step, the mean estimates the KL to the reference (arXiv:2402.01306,
    section 4.2).

    Args:
        scores: (N,) floating point, beta (log pi - log pi_ref) of each mismatched response.
        process_group: if given, the mean is over all its ranks, all of which must call this; a rank may have no
            response.

    Returns:
        (), at least fp32, not differentiable; 0 where there is no response.

    Raises:
        ValueError: scores that are not (N,).
    """
    check_floating("scores", scores, "(N,)")
    check_process_group(process_group)
    # fp64: however the responses are divided over ranks, the sum is the same.
    total_and_count = torch.stack(
        [scores.double().sum(), scores.new_full((), len(scores), dtype=torch.float64)]
    )
    if process_group is not None:
        torch.distributed.all_reduce(total_and_count, group=process_group)
    # Ranks may hold different numbers of responses, so the mean is of all of them and not of the ranks' means.
    total, count = total_and_count
    mean = total / count.clamp(min=1)
    return mean.clamp(min=0).to(torch.promote_types(scores.dtype, torch.float32))
