"""RL losses on (B, T) log-probabilities: ratio level x surrogate x aggregation, each chosen on its own.

A loss is unreduced until it is divided, once, by an explicit denominator. Pass the denominators of the whole optimizer
step (`num_tokens`, `num_sequences`) and the gradients of any split into micro-batches add up to the same sum. The
choices and the known algorithms are in fused_rl/surrogates.py; docs/losses.md shows a loss of your own in five lines.
"""

import warnings
from typing import NamedTuple

import torch

from fused_rl.kl import kl_estimate, tangent_exp
from fused_rl.masked import Sequences, masked_mean
from fused_rl.surrogates import LOSS_AGGS, PRESETS, RATIO_LEVELS, SURROGATES, check_choice, resolve_options

__all__ = [
    "PRESETS",
    "aggregate",
    "entropy_bonus",
    "importance_ratio",
    "policy_loss",
    "preference_loss",
    "value_loss",
]


class _Denominators(NamedTuple):
    num_tokens: int | torch.Tensor
    num_sequences: int | torch.Tensor
    max_length: int

    @classmethod
    def of(cls, sequences, num_tokens=None, num_sequences=None, max_length=None):
        """The given ones; for None those of this batch. At least 1, so that an empty batch is 0 and not nan."""
        num_tokens = sequences.mask.sum() if num_tokens is None else num_tokens
        num_sequences = sequences.count if num_sequences is None else num_sequences
        at_least_1 = (n.clamp(min=1) if isinstance(n, torch.Tensor) else max(n, 1) for n in (num_tokens, num_sequences))
        return cls(*at_least_1, sequences.mask.shape[1] if max_length is None else max_length)


def _aggregate(losses, sequences, loss_agg, denominators):
    if loss_agg == "token-mean":
        return sequences.sum(losses).sum() / denominators.num_tokens
    per_sequence = sequences.mean(losses) if loss_agg == "seq-mean-token-mean" else sequences.sum(losses)
    norm = denominators.max_length if loss_agg == "seq-mean-token-sum-norm" else 1
    return per_sequence.sum() / (denominators.num_sequences * norm)


def _check_shapes(logprobs, mask, sequence_ids, **others):
    if logprobs.dim() != 2 or not logprobs.is_floating_point():
        raise ValueError(
            f"the first tensor must be (B, T) floating point, got {tuple(logprobs.shape)} {logprobs.dtype}"
        )
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool (True where a token counts), got {mask.dtype}; use mask.bool()")
    for name, tensor in {"mask": mask, "sequence_ids": sequence_ids, **others}.items():
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(f"{name} must be (B, T) = {tuple(logprobs.shape)}, got {tuple(tensor.shape)}")


def _per_token(name, tensor, sequences):
    """(B,), or (S,) by id in packed rows, or (B, T) -> (B, T)."""
    if tensor.dim() == 1 and (sequences.ids is not None or tensor.shape[0] == sequences.mask.shape[0]):
        return sequences.expand(tensor)
    if tensor.shape != sequences.mask.shape:
        shapes = f"(B,) or (B, T) with (B, T) = {tuple(sequences.mask.shape)}"
        raise ValueError(f"{name} must be {shapes}, got {tuple(tensor.shape)}")
    return tensor


def importance_ratio(logprobs, old_logprobs, mask, *, ratio_level="token", sequence_ids=None):
    """Probability ratio of each token, or of its sequence, between the policy and the one that sampled.

    Args:
        logprobs: (B, T) floating point, nats.
        old_logprobs: (B, T); a constant.
        mask: (B, T) bool.
        ratio_level: "token"; "sequence", the geometric mean over the sequence (GSPO); "sequence-sum", its product.
        sequence_ids: (B, T) int64 for packed rows, as in `policy_loss`.

    Returns:
        (B, T), at least fp32, differentiable in `logprobs`; 1 where masked at token level. Beyond e^20 it continues as
        the tangent of exp, so that neither it nor its gradient overflows.

    Raises:
        ValueError: shapes or options that do not fit.
    """
    check_choice("ratio_level", ratio_level, RATIO_LEVELS)
    _check_shapes(logprobs, mask, sequence_ids, old_logprobs=old_logprobs)
    log_ratio = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)) - old_logprobs.detach()
    sequences = Sequences(mask, sequence_ids)
    return tangent_exp(RATIO_LEVELS[ratio_level](torch.where(mask, log_ratio, 0), sequences))


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    preset: str | None = None,
    num_tokens: int | torch.Tensor | None = None,
    num_sequences: int | torch.Tensor | None = None,
    max_length: int | None = None,
    ref_logprobs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    sequence_ids: torch.Tensor | None = None,
    **options,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy loss: ratio level x surrogate x aggregation, with a KL term, an entropy bonus and off-policy corrections.

        policy_loss(logprobs, old_logprobs, advantages, mask, preset="grpo", kl_coef=0.04, ref_logprobs=ref)

    Where the mask is False no input has any effect, NaN included. The masks and weights below act on the surrogate; the
    KL term and the entropy bonus stay on every token that counts, and no mask changes a denominator.

    Args:
        logprobs: (B, T) floating point, nats, of the policy.
        old_logprobs: (B, T) of the policy that sampled, or None: `logprobs` themselves, detached. This and all that
            follows but `entropy` is a constant.
        advantages: (B,) per sequence or (B, T) per token.
        mask: (B, T) bool, True where a response token counts.
        preset: a row of `PRESETS`; `options` override it.
        num_tokens: tokens that count in the whole optimizer step, over all micro-batches and ranks (token-mean).
        num_sequences: sequences in the whole optimizer step (the seq-mean aggregations).
        max_length: L of seq-mean-token-sum-norm. For None, all three are those of this batch: B sequences, L = T.
        ref_logprobs: (B, T) of the reference policy, for the KL term and its metrics.
        entropy: (B, T) nats, for the entropy bonus, the top-entropy mask and the metric.
        rollout_logprobs: (B, T) as the inference engine reported them, for `rollout_correction`.
        truncated: (B,) bool, True for responses cut at the length limit: none of their tokens counts.
        sequence_ids: (B, T) int64 in [0, B * T) for packed rows: tokens of one id are one sequence, whatever the row,
            negative: none; `advantages` and `truncated` are then (S,), indexed by id, or (B, T).
        **options: the fields of `PolicyLossOptions`.

    Returns:
        The loss, a scalar in at least fp32, differentiable in `logprobs` and `entropy`; and a dict of detached scalars.
        Metrics use the same denominators: over micro-batches and ranks they add up, as the losses do.

    Raises:
        ValueError: shapes or options that do not fit.
    """
    chosen = resolve_options(preset, options)
    _check_shapes(
        logprobs,
        mask,
        sequence_ids,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        entropy=entropy,
        rollout_logprobs=rollout_logprobs,
    )
    _check_needs(chosen, ref_logprobs, entropy)
    if truncated is not None:
        mask = mask & ~_per_token("truncated", truncated.bool(), Sequences(mask, sequence_ids))
    sequences = Sequences(mask, sequence_ids)
    denominators = _Denominators.of(sequences, num_tokens, num_sequences, max_length)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)

    def clean(tensor):  # where(), not a product: 0 * nan is nan
        return None if tensor is None else torch.where(mask, tensor.to(dtype), 0)

    logprobs, entropy = clean(logprobs), clean(entropy)
    old = logprobs.detach() if old_logprobs is None else clean(old_logprobs.detach())
    ref, rollout = (clean(t if t is None else t.detach()) for t in (ref_logprobs, rollout_logprobs))
    advantages = clean(_per_token("advantages", advantages.detach(), sequences))

    log_ratio = logprobs - old
    level = RATIO_LEVELS[chosen.ratio_level](log_ratio, sequences)
    surrogate = chosen.surrogate if callable(chosen.surrogate) else SURROGATES[chosen.surrogate]
    losses = surrogate(level, advantages, logprobs, sequences, chosen)
    losses = losses * _weights(logprobs.detach(), old, rollout, advantages, entropy, sequences, chosen)
    with torch.no_grad():
        metrics = _policy_metrics(level, log_ratio, advantages, entropy, sequences, denominators, chosen)
        metrics["loss/policy_avg"] = _aggregate(losses, sequences, chosen.loss_agg, denominators)
        if ref is not None:
            metrics |= _kl_metrics(logprobs, ref, old, sequences, denominators, chosen.kl_estimator)
    if chosen.kl_coef:
        losses = losses + chosen.kl_coef * kl_estimate(logprobs, ref, chosen.kl_estimator, old_logprobs=old)
    if chosen.entropy_coef:
        losses = losses - chosen.entropy_coef * entropy
    return _aggregate(losses, sequences, chosen.loss_agg, denominators), metrics


def _check_needs(chosen, ref_logprobs, entropy):
    if chosen.kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef={chosen.kl_coef} needs ref_logprobs")
    needs_entropy = chosen.entropy_coef or chosen.top_entropy is not None or chosen.entropy_threshold is not None
    if needs_entropy and entropy is None:
        raise ValueError("entropy_coef, top_entropy and entropy_threshold need entropy, (B, T)")
    if chosen.kl_coef and chosen.kl_estimator == "k1":
        warnings.warn(
            "k1 as a loss does not hold the policy: its expected gradient is zero. Use kl_estimator='rk3', or put k1 "
            "in the reward",
            stacklevel=3,
        )


@torch.no_grad()
def _weights(logprobs, old, rollout, advantages, entropy, sequences, chosen):
    """(B, T) factor on the surrogate: rollout correction, off-policy sequence mask, top-entropy mask."""
    weights = torch.ones_like(logprobs)
    if rollout is not None and chosen.rollout_correction is not None:
        level, _, how = chosen.rollout_correction.partition("-")
        log_weight = old - rollout
        log_weight = log_weight if level == "token" else sequences.expand(sequences.sum(log_weight))
        weights = tangent_exp(log_weight)
        bounded = weights.clamp(chosen.rollout_low, chosen.rollout_high)
        weights = bounded if how == "truncate" else torch.where(bounded == weights, weights, 0)
    if chosen.off_policy_threshold is not None:
        gap = sequences.expand(sequences.mean((old if rollout is None else rollout) - logprobs))
        weights = torch.where((advantages >= 0) | (gap <= chosen.off_policy_threshold), weights, 0)
    threshold = chosen.entropy_threshold
    if chosen.top_entropy is not None:
        threshold = torch.nanquantile(torch.where(sequences.mask, entropy, torch.nan), 1 - chosen.top_entropy)
    return weights if threshold is None else torch.where(entropy >= threshold, weights, 0)


def _policy_metrics(level, log_ratio, advantages, entropy, sequences, denominators, chosen):
    def token_mean(values):
        return _aggregate(values, sequences, "token-mean", denominators)

    ratio = tangent_exp(level)
    beyond = ((advantages > 0) & (ratio > 1 + chosen.clip_high)) | ((advantages < 0) & (ratio < 1 - chosen.clip_low))
    metrics = {
        "policy/approxkl_avg": token_mean(log_ratio.square() / 2),
        "policy/clipfrac_avg": token_mean(beyond.to(ratio.dtype)),
        "val/ratio": token_mean(ratio),
        "val/ratio_var": token_mean((ratio - masked_mean(ratio, sequences.mask)).square()),
    }
    if entropy is not None:
        metrics["policy/entropy_avg"] = token_mean(entropy)
    return metrics


def _kl_metrics(logprobs, ref, old, sequences, denominators, kl_estimator):
    """Sums per sequence, averaged: the KL optimised (`objective/kl`), and k1 to k4 whatever is optimised."""
    names = {"objective/kl": kl_estimator, **{f"objective/kl{i}_avg": f"k{i}" for i in (1, 2, 3, 4)}}
    estimates = {name: kl_estimate(logprobs, ref, k, old_logprobs=old) for name, k in names.items()}
    return {name: _aggregate(kl, sequences, "seq-mean-token-sum", denominators) for name, kl in estimates.items()}


def aggregate(losses, mask, loss_agg, *, num_tokens=None, num_sequences=None, max_length=None, sequence_ids=None):
    """Reduce per-token losses to a scalar, once; denominators as in `policy_loss`.

    Args:
        losses: (B, T) floating point.
        mask: (B, T) bool.
        loss_agg: token-mean, sum / num_tokens; seq-mean-token-mean, the sum over sequences of their means /
            num_sequences; seq-mean-token-sum, sum / num_sequences; seq-mean-token-sum-norm, the same / max_length.

    Returns:
        A scalar, differentiable; 0, still attached to the graph, where nothing counts.

    Raises:
        ValueError: shapes or options that do not fit.
    """
    check_choice("loss_agg", loss_agg, LOSS_AGGS)
    _check_shapes(losses, mask, sequence_ids)
    sequences = Sequences(mask, sequence_ids)
    return _aggregate(losses, sequences, loss_agg, _Denominators.of(sequences, num_tokens, num_sequences, max_length))


def entropy_bonus(entropy, mask, entropy_coef, *, loss_agg="token-mean", **denominators):
    """-entropy_coef times the aggregated entropy: add it to a loss. Arguments as `aggregate`.

    Args:
        entropy: (B, T) nats, from `token_logprobs`.
        mask: (B, T) bool.
        entropy_coef: weight.

    Returns:
        The loss, a scalar, differentiable in `entropy`; and {"policy/entropy_avg": the token mean}.
    """
    loss = -entropy_coef * aggregate(entropy, mask, loss_agg, **denominators)
    counts = {k: v for k, v in denominators.items() if k in ("num_tokens", "sequence_ids")}
    return loss, {"policy/entropy_avg": aggregate(entropy.detach(), mask, "token-mean", **counts)}


def value_loss(values, old_values, returns, mask, *, value_clip=0.2, num_tokens=None):
    """PPO's clipped value loss, 1/2 max((v - R)^2, (clip(v, v_old +- value_clip) - R)^2), averaged over tokens.

    Args:
        values: (B, T) floating point.
        old_values: (B, T) at the time of the rollout; a constant.
        returns: (B, T); a constant.
        mask: (B, T) bool.
        value_clip: how far from `old_values` the gain may come; None is the plain squared error.
        num_tokens: as in `policy_loss`.

    Returns:
        The loss, a scalar in at least fp32, differentiable in `values`; and the detached metrics loss/value_avg and
        val/clipfrac_avg.

    Raises:
        ValueError: shapes or options that do not fit.

    Source: https://github.com/openai/baselines, ppo2; vwxyzjn/cleanrl, ppo.py.
    """
    _check_shapes(values, mask, None, old_values=old_values, returns=returns)
    if value_clip is not None and value_clip < 0:
        raise ValueError(f"value_clip must be >= 0 or None, got {value_clip}")
    dtype = torch.promote_types(values.dtype, torch.float32)
    v, old, target = (torch.where(mask, t.to(dtype), 0) for t in (values, old_values.detach(), returns.detach()))
    unclipped = clipped = (v - target).square()
    if value_clip is not None:
        clipped = (torch.clamp(v, old - value_clip, old + value_clip) - target).square()
    sequences = Sequences(mask)
    denominators = _Denominators.of(sequences, num_tokens)
    loss = _aggregate(torch.maximum(unclipped, clipped) / 2, sequences, "token-mean", denominators)
    clipfrac = _aggregate((clipped > unclipped).to(dtype), sequences, "token-mean", denominators)
    return loss, {"loss/value_avg": loss.detach(), "val/clipfrac_avg": clipfrac}


def preference_loss(
    chosen_scores, rejected_scores, *, margin=None, label_smoothing=0.0, centering=0.0, num_sequences=None
):
    """Bradley-Terry loss of pairs of scores: -log sigmoid(chosen - rejected - margin), averaged over pairs.

    Args:
        chosen_scores: (B,) floating point.
        rejected_scores: (B,).
        margin: (B,) or a number by which the chosen one should lead (Llama 2, arXiv:2307.09288, eq. 2); a constant.
        label_smoothing: the probability that a label is wrong: (1 - e) l(d) + e l(-d).
        centering: weight of mean((chosen + rejected)^2), which keeps scores around 0 (arXiv:2312.09244).
        num_sequences: pairs in the whole optimizer step; None: B.

    Returns:
        The loss, a scalar in at least fp32, differentiable in both; and detached metrics of this batch.

    Raises:
        ValueError: scores that are not (B,), label_smoothing outside [0, 0.5).
    """
    for name, scores in (("chosen_scores", chosen_scores), ("rejected_scores", rejected_scores)):
        if scores.dim() != 1 or scores.shape != chosen_scores.shape or not scores.is_floating_point():
            shapes = f"{tuple(chosen_scores.shape)} and {tuple(rejected_scores.shape)}"
            raise ValueError(f"{name} must be one score per sequence, (B,) floating point; got {shapes}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    dtype = torch.promote_types(chosen_scores.dtype, torch.float32)
    chosen, rejected = chosen_scores.to(dtype), rejected_scores.to(dtype)
    lead = chosen - rejected - (0 if margin is None else margin)
    log_sigmoid = torch.nn.functional.logsigmoid
    losses = -(1 - label_smoothing) * log_sigmoid(lead) - label_smoothing * log_sigmoid(-lead)
    losses = losses + centering * (chosen + rejected).square()
    loss = losses.sum() / (chosen.numel() if num_sequences is None else num_sequences)
    return loss, _preference_metrics(loss.detach(), chosen.detach(), rejected.detach())


def _preference_metrics(loss, chosen, rejected):
    both = torch.cat([chosen, rejected])
    return {
        "train/rm/loss": loss,
        "train/rm/accuracy": (chosen > rejected).to(loss.dtype).mean(),
        "train/rm/reward_margin": (chosen - rejected).mean(),
        "train/rm/chosen_rewards": chosen.mean(),
        "train/rm/rejected_rewards": rejected.mean(),
        "train/rm/min_reward": both.min(),
        "train/rm/mean_reward": both.mean(),
        "train/rm/max_reward": both.max(),
    }
