"""RL losses on (B, T) log-probabilities: ratio level x surrogate x aggregation, each chosen on its own.

A loss is not reduced until it is divided, once, by an explicit denominator. If the denominators are those of the whole
optimizer step (`num_tokens`, `num_sequences`), the gradients of any split into micro-batches add up to the same sum.
The metrics, which are detached scalars under bare names, add up in the same way. The ratio levels and surrogates are in
surrogates.py, and the options and the known algorithms are in presets.py.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fused_rl.base.checks import check_choice, check_range, check_tensors
from fused_rl.objectives.aggregation import LossAgg, TokenBatch, aggregate, without_impossible
from fused_rl.objectives.estimators import Estimates, tangent_exp, tangent_expm1
from fused_rl.objectives.options import arguments_of
from fused_rl.objectives.presets import (
    BOUNDS,
    PolicyLossOptions,
    Preset,
    PresetName,
    option_beyond_a_token,
    resolve_options,
    surrogate_of,
)
from fused_rl.objectives.surrogates import (
    RATIO_LEVELS,
    NoSequences,
    RatioLevel,
    by_token,
    entropy_gate,
    evaluate,
    off_policy_gate,
    rollout_weights,
)


def importance_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    ratio_level: RatioLevel = "token",
    sequence_ids: Tensor | None = None,
) -> Tensor:
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
    batch = TokenBatch("logprobs", logprobs, mask, sequence_ids=sequence_ids)
    # Masked tokens have log-ratio 0, so they move no sequence's ratio.
    log_ratio = batch.tokens("logprobs", logprobs) - batch.constant("old_logprobs", old_logprobs)
    return tangent_exp(RATIO_LEVELS[ratio_level](log_ratio, batch.sequences))


@dataclass(frozen=True, kw_only=True)
class _LossArguments(PolicyLossOptions):
    """The keywords of both policy losses, whose options are those of `PolicyLossOptions`."""

    preset: PresetName | Preset | None = None
    options: PolicyLossOptions | None = None
    num_tokens: int | Tensor | None = None
    num_sequences: int | Tensor | None = None
    max_length: int | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    truncated: Tensor | None = None
    sequence_ids: Tensor | None = None
    group_lengths: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyLossArguments(_LossArguments):
    """The arguments of `policy_loss`, for type checkers."""

    logprobs: Tensor = field(kw_only=False)
    old_logprobs: Tensor | None = field(kw_only=False)
    advantages: Tensor = field(kw_only=False)
    mask: Tensor = field(kw_only=False)
    entropy: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyTokenLossArguments(_LossArguments):
    """The arguments of `policy_token_loss`, for type checkers."""

    old_logprobs: Tensor | None = field(kw_only=False)
    advantages: Tensor = field(kw_only=False)
    mask: Tensor = field(kw_only=False)


@arguments_of(PolicyLossArguments)
def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    preset: PresetName | Preset | None = None,
    options: PolicyLossOptions | None = None,
    num_tokens: int | Tensor | None = None,
    num_sequences: int | Tensor | None = None,
    max_length: int | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    truncated: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    group_lengths: Tensor | None = None,
    **changes: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss: ratio level x surrogate x aggregation, with a KL term, an entropy bonus and off-policy corrections.

        policy_loss(logprobs, old_logprobs, advantages, mask, preset="grpo", kl_coef=0.04, ref_logprobs=ref)

    Where the mask is False no input has any effect, NaN included. The masks and weights below act only on the
    surrogate: the KL term and the entropy bonus are of every token that counts, and no mask changes a denominator. A
    token that counts and has log-probability -inf, because it is banned, makes the loss NaN or inf. Mask it, or pass
    `skip_impossible=True`.

    Args:
        logprobs: (B, T) floating point, nats, of the policy.
        old_logprobs: (B, T) of the policy that sampled; None means `logprobs` themselves, detached. This argument and
            all that follow are constants, except `entropy`.
        advantages: (B,) per sequence or (B, T) per token. With ratio_level="sequence" and (B, T), the gradient is that
            of GSPO-token (arXiv:2507.18071, eq. 13): each token is weighted by its own advantage, as in the value.
        mask: (B, T) bool, True where a response token counts.
        preset: a row of `PRESETS`, or its name.
        options: `PolicyLossOptions` instead of a preset.
        num_tokens: tokens that count in the whole optimizer step, over all micro-batches and ranks (token-mean): a
            number or a tensor (); 0 only where none counts.
        num_sequences: sequences in the whole optimizer step (the seq-mean aggregations).
        max_length: L of seq-mean-token-sum-norm. If these three are None, they are those of this batch, with B
            sequences and L = T.
        ref_logprobs: (B, T) of the reference policy, for the KL term and its metrics.
        entropy: (B, T) nats, for the entropy bonus, the top-entropy mask and the metric.
        rollout_logprobs: (B, T) as the inference engine reported them, for `rollout_correction`.
        truncated: (B,) bool, True for responses that were cut at the length limit, none of whose tokens then count.
        sequence_ids: (B, T) int64 in [0, B * T) for packed rows. Tokens with the same id are one sequence, in whichever
            row they are, and tokens with a negative id are in none. `advantages`, `truncated` and `group_lengths` are
            then (S,), indexed by id, or (B, T).
        group_lengths: (B,) for prompt-mean: the mean number of tokens that count over the responses to the same prompt.
        **changes: fields of `PolicyLossOptions`, which override the preset or the options.

    Returns:
        The loss, a scalar in at least fp32, differentiable in `logprobs` and `entropy`; and a dict of detached scalars,
        which are divided by the same denominators and so add up over micro-batches and ranks as the losses do. A token
        mean is a sum over the tokens that count / num_tokens:

        - `loss`, the whole loss; `policy_loss`, the surrogate alone, aggregated like the loss;
        - `approx_kl`, token mean of (logprobs - old_logprobs)^2 / 2, nats;
        - `clipfrac`, the fraction of what the surrogate's bounds change, if it has bounds: for "clip", ratios beyond
          the bound on the side of the advantage or beyond `delta`; for "cispo", weights; for "geo-mean", log-ratios;
        - `ratio_minus_1`, `ratio_minus_1_square`, fp64: token means of r - 1 and (r - 1)^2, r at the ratio level, from
          which the ratio's mean and variance follow: E[(r - 1)^2] - E[r - 1]^2;
        - `entropy`, token mean, where it is given;
        - with `ref_logprobs`, sums over a sequence's tokens / num_sequences: `kl` by `kl_estimator`; `kl1` to `kl4`.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit; an option that the loss does not read, such as
            `clip_high` with a surrogate that does not clip; a surrogate of yours that does not return (B, T) losses in
            their dtype; on CPU, or with FUSED_RL_CHECKED=1, advantages that are not finite.
    """
    chosen = resolve_options(preset, changes, options)
    _check_needs(chosen, ref_logprobs, entropy, rollout_logprobs)
    # Before the batch counts tokens: what is left out leaves its denominators as well.
    if chosen.skip_impossible:
        mask = without_impossible(mask, logprobs, old_logprobs, ref_logprobs, rollout_logprobs)

    # All of it (B, T) in one dtype, 0 where nothing counts; only logprobs and entropy carry gradients.
    counts = num_tokens, num_sequences, max_length
    batch = TokenBatch("logprobs", logprobs, mask, truncated, sequence_ids, *counts, group_lengths)
    logprobs = batch.tokens("logprobs", logprobs)
    old = logprobs.detach()
    if old_logprobs is not None:
        old = batch.constant("old_logprobs", old_logprobs)
    if entropy is not None:
        entropy = batch.tokens("entropy", entropy)
    ref = batch.optional("ref_logprobs", ref_logprobs)
    rollout = batch.optional("rollout_logprobs", rollout_logprobs)
    token_advantages = batch.advantages(advantages)

    # The ratio at its level, and the surrogate of each token.
    log_ratio = logprobs - old
    level = RATIO_LEVELS[chosen.ratio_level](log_ratio, batch.sequences)
    # A sequence's ratio would give every token the gradient of the whole sequence's advantages.
    if chosen.ratio_level == "sequence" and advantages.dim() == 2:
        level = by_token(level, log_ratio)
    surrogate, surrogate_metrics = evaluate(
        surrogate_of(chosen), level, token_advantages, logprobs, batch.sequences, chosen
    )

    # Masks and weights act on the surrogate alone: a token that is dropped still pays its KL and earns its entropy.
    behaviour = old if rollout is None else rollout
    weights = rollout_weights(old, rollout, batch.sequences, chosen)
    weights = weights * off_policy_gate(
        logprobs, behaviour, token_advantages, batch.sequences, chosen
    )
    weights = weights * entropy_gate(entropy, batch.mask, chosen)
    if isinstance(weights, Tensor):
        surrogate = surrogate * weights

    # Reduced once, over the denominators of the whole step.
    estimates = None if ref is None else Estimates(logprobs, ref, chosen.kl_estimator, old)
    losses = _regularised(surrogate, estimates, entropy, chosen)
    loss = batch.aggregate(losses, chosen.loss_agg)

    # Detached scalars, which add up over micro-batches and ranks as the loss does.
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "policy_loss": batch.aggregate(surrogate, chosen.loss_agg),
        }
        per_token = _ratio_metrics(level, log_ratio, token_advantages, logprobs, entropy, chosen)
        per_token |= {f"surrogate/{name}": values for name, values in surrogate_metrics.items()}
        metrics |= batch.sums(per_token, "token-mean")
        if estimates is not None:
            metrics |= batch.sums(_kl_metrics(estimates), "seq-mean-token-sum")
    return loss, metrics


def _check_needs(chosen, ref_logprobs, entropy, rollout_logprobs):
    """Check that the inputs of each option are given, and that every given option is read."""
    # Options that need an input.
    if chosen.kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef={chosen.kl_coef} needs ref_logprobs")
    needs_entropy = (
        chosen.entropy_coef
        or chosen.top_entropy is not None
        or chosen.entropy_threshold is not None
    )
    if needs_entropy and entropy is None:
        raise ValueError("entropy_coef, top_entropy and entropy_threshold need entropy, (B, T)")

    # Options that mean nothing without an input: beside their defaults they must have been given.
    tensors = {"ref_logprobs": ref_logprobs, "rollout_logprobs": rollout_logprobs}
    readers = {
        "ref_logprobs": ("kl_estimator",),
        "rollout_logprobs": (*BOUNDS, *chain(*BOUNDS.values())),
    }
    for needed, names in readers.items():
        for name in names:
            value = getattr(chosen, name)
            is_default = value is None or value == getattr(PolicyLossOptions, name)
            if tensors[needed] is None and not is_default:
                raise ValueError(
                    f"{name}={value} has no meaning without {needed}; give these, or leave it out"
                )
    # A warning, not an error: papers compare with it (docs/losses.md, "In training").
    if chosen.kl_coef and chosen.kl_estimator == "k1":
        advice = "Use kl_estimator='rk3', or put k1 in the reward"
        warnings.warn(
            f"k1 as a loss does not hold the policy: its expected gradient is zero. {advice}",
            stacklevel=3,
        )


def _regularised(surrogate, estimates, entropy, chosen):
    # A term that is switched off is not computed: 0 * inf would be NaN.
    terms = 0
    if chosen.kl_coef:
        terms = chosen.kl_coef * estimates.chosen
    if chosen.entropy_coef:
        terms = terms - chosen.entropy_coef * entropy
    return surrogate + terms if isinstance(terms, Tensor) else surrogate


def _ratio_metrics(level, log_ratio, advantages, logprobs, entropy, chosen):
    # fp64, and less 1: a variance of 1e-8 around a mean of 1 would drown in E[r^2] - E[r]^2.
    ratio_minus_1 = tangent_expm1(level.double())
    metrics = {
        "approx_kl": log_ratio.square() / 2,
        "ratio_minus_1": ratio_minus_1,
        "ratio_minus_1_square": ratio_minus_1.square(),
    }
    # A surrogate without bounds has no fraction of clipped tokens, not one of 0.
    clipped = getattr(surrogate_of(chosen), "clipped", None)
    if clipped is not None:
        metrics["clipfrac"] = clipped(level, advantages, logprobs, chosen).to(level.dtype)
    if entropy is not None:
        metrics["entropy"] = entropy
    return metrics


def _kl_metrics(estimates):
    """The KL optimised, `kl`, and k1 to k4 whatever is optimised."""
    metrics = {"kl": estimates.chosen, "kl1": estimates.k1, "kl2": estimates.k2}
    return metrics | {"kl3": estimates.k3, "kl4": estimates.ratio * estimates.k1}


@arguments_of(PolicyTokenLossArguments)
def policy_token_loss(
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    preset: PresetName | Preset | None = None,
    options: PolicyLossOptions | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    truncated: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    num_tokens: int | Tensor | None = None,
    num_sequences: int | Tensor | None = None,
    max_length: int | None = None,
    group_lengths: Tensor | None = None,
    **changes: Any,
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """`policy_loss` for `linear_token_loss`: a function of single tokens, and what it needs per token.

        token_loss, per_token = policy_token_loss(old_logprobs, advantages, mask, preset="dapo", num_tokens=n)
        loss, logprobs, entropy = linear_token_loss(hidden, weight, targets, token_loss, *per_token, mask=mask)

    The arguments are those of `policy_loss`. For the metrics, call `policy_loss` with the logprobs and the entropy that
    are returned above. With `skip_impossible`, tokens that only the policy itself gives a probability of 0 are still
    counted here.

    Returns:
        The function of (logprobs, entropy, *per_token), and the tuple of (B, T) tensors it takes, `ref_logprobs` last.

    Raises:
        ValueError: as `policy_loss`, and also where a token's loss depends on the rest of its sequence or batch: for a
            ratio level other than token, a surrogate that `needs_sequences`, off_policy_threshold and top_entropy. Use
            `linear_token_logprobs` and `policy_loss` for these.
    """
    check_tensors(mask=mask)
    # What looks beyond a token is refused here, not approximated.
    chosen = resolve_options(preset, changes, options)
    name = option_beyond_a_token(chosen)
    if name is not None:
        raise ValueError(
            f"{name}={getattr(chosen, name)!r} needs more than one token at a time: use linear_token_logprobs and "
            "policy_loss (for top_entropy, entropy_threshold)"
        )
    # The entropy comes with each token, so it is there.
    _check_needs(chosen, ref_logprobs, True, rollout_logprobs)
    if chosen.skip_impossible:
        mask = without_impossible(mask, old_logprobs, ref_logprobs, rollout_logprobs)
    # The log-probabilities do not exist yet; they will be fp32, as every op's are.
    like = torch.empty(mask.shape, dtype=torch.float32, device=mask.device)
    counts = num_tokens, num_sequences, max_length
    batch = TokenBatch("mask", like, mask, truncated, sequence_ids, *counts, group_lengths)
    old = batch.optional("old_logprobs", old_logprobs)
    ref = batch.optional("ref_logprobs", ref_logprobs)
    rollout = batch.optional("rollout_logprobs", rollout_logprobs)

    # What a token needs of its batch, in a tensor each: its share of the sum, and what its sequence weighs.
    shares = batch.shares(chosen.loss_agg) / batch.denominator(chosen.loss_agg)
    inputs = {
        "advantages": batch.advantages(advantages),
        "shares": torch.where(batch.mask, shares, 0),
        "old": old,
    }
    if rollout is not None:
        if old is None:
            raise ValueError(
                "rollout_logprobs need old_logprobs: the policy's own, of the same tokens"
            )
        weights = rollout_weights(old, rollout, batch.sequences, chosen)
        inputs["weights"] = weights * torch.ones_like(old)
    inputs["ref"] = ref
    per_token = {name: tensor for name, tensor in inputs.items() if tensor is not None}

    def token_loss(logprobs, entropy, *tensors):
        token = dict(zip(per_token, tensors, strict=True))
        # Only here is it known which tokens the policy itself gives no probability.
        if chosen.skip_impossible:
            is_possible = logprobs.detach() != -torch.inf
            logprobs = torch.where(is_possible, logprobs, 0)
            token["shares"] = torch.where(is_possible, token["shares"], 0)
        old = token.get("old", logprobs.detach())
        arguments = logprobs - old, token["advantages"], logprobs, NoSequences(), chosen
        surrogate, _ = evaluate(surrogate_of(chosen), *arguments)
        weights = token.get("weights", 1) * entropy_gate(entropy, None, chosen)
        if isinstance(weights, Tensor):
            surrogate = surrogate * weights
        estimates = None
        if ref is not None:
            estimates = Estimates(logprobs, token["ref"], chosen.kl_estimator, old)
        return token["shares"] * _regularised(surrogate, estimates, entropy, chosen)

    return token_loss, tuple(per_token.values())


def entropy_bonus(
    entropy: Tensor,
    mask: Tensor,
    entropy_coef: float,
    *,
    loss_agg: LossAgg = "token-mean",
    num_tokens: int | Tensor | None = None,
    num_sequences: int | Tensor | None = None,
    max_length: int | None = None,
    sequence_ids: Tensor | None = None,
    group_lengths: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-entropy_coef times the aggregated entropy, to be added to a loss. The other arguments are those of `aggregate`.

    Args:
        entropy: (B, T) nats, from `token_logprobs`.
        mask: (B, T) bool.
        entropy_coef: weight.

    Returns:
        The loss, a scalar, differentiable in `entropy`; and {"entropy": the token mean, which adds up}.
    """
    check_tensors(entropy=entropy)
    check_range("entropy_coef", entropy_coef, "a finite number")
    counts = {"num_tokens": num_tokens, "sequence_ids": sequence_ids}
    denominators = {
        "num_sequences": num_sequences,
        "max_length": max_length,
        "group_lengths": group_lengths,
    }
    # A bonus lowers the loss where the entropy is high.
    loss = -entropy_coef * aggregate(entropy, mask, loss_agg, **counts, **denominators)
    return loss, {"entropy": aggregate(entropy.detach(), mask, "token-mean", **counts)}


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float | None = 0.2,
    num_tokens: int | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped value loss, 1/2 max((v - R)^2, (clip(v, v_old +- value_clip) - R)^2), averaged over tokens.

    Args:
        values: (B, T) floating point.
        old_values: (B, T) at the time of the rollout; a constant.
        returns: (B, T); a constant.
        mask: (B, T) bool.
        value_clip: the largest change from `old_values` that the loss rewards; None means the plain squared error.
        num_tokens: as in `policy_loss`.

    Returns:
        The loss, a scalar in at least fp32, differentiable in `values`; and a dict of detached scalars, token means
        (sums over the tokens that count / num_tokens), which over micro-batches and ranks add up: `value_loss`, the
        loss; `value_clipfrac`, of whether the clipped error is the larger; and in fp64 `return`, `return_square`,
        `value_error`, `value_error_square` of the returns R and the errors e = R - values. From these four follows the
        explained variance, 1 - (E[e^2] - E[e]^2) / (E[R^2] - E[R]^2).

    Raises:
        ValueError: shapes or options that do not fit.

    Source: https://github.com/openai/baselines, ppo2; vwxyzjn/cleanrl, ppo.py.
    """
    if value_clip is not None:
        check_range("value_clip", value_clip, "a number, 0 or more, or inf", "; None is no clip")
    batch = TokenBatch("values", values, mask, num_tokens=num_tokens)
    values = batch.tokens("values", values)
    # The critic learns from old values and returns, not through them.
    old = batch.constant("old_values", old_values)
    returns = batch.constant("returns", returns)

    # https://github.com/vwxyzjn/cleanrl, ppo.py: the clip may only make the error larger.
    unclipped = clipped = (values - returns).square()
    if value_clip is not None:
        near_old = torch.clamp(values, old - value_clip, old + value_clip)
        clipped = (near_old - returns).square()
    loss = batch.aggregate(torch.maximum(unclipped, clipped) / 2, "token-mean")
    clipfrac = batch.aggregate((clipped > unclipped).to(batch.dtype), "token-mean")

    # First and second moments in fp64: the variance of returns far from 0 is a small difference of large numbers.
    returns = returns.double()
    error = returns - values.detach().double()
    moments = {"return": returns, "return_square": returns.square()}
    moments |= {"value_error": error, "value_error_square": error.square()}
    metrics = {"value_loss": loss.detach(), "value_clipfrac": clipfrac}
    return loss, metrics | batch.sums(moments, "token-mean")
