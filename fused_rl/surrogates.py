"""The ratio levels and surrogates of `policy_loss`; docs/losses.md shows a surrogate of your own in five lines."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fused_rl.checks import NonNegative, Positive, described
from fused_rl.estimators import tangent_exp

__all__ = [
    "RATIO_LEVELS",
    "SURROGATES",
    "SurrogateOptions",
    "declares",
    "NoSequences",
    "RatioLevel",
    "applied",
    "by_token",
    "entropy_gate",
    "needs_sequences",
    "off_policy_gate",
    "rollout_weights",
]


# Ratio level: (B, T) log-ratios of tokens -> (B, T); all but the token level give a sequence's tokens one value.


def _token(log_ratio, sequences):
    return log_ratio


def _sequence(log_ratio, sequences):
    """The geometric mean over the sequence, GSPO (arXiv:2507.18071, eq. 7)."""
    return sequences.expand(sequences.mean(log_ratio))


def _sequence_sum(log_ratio, sequences):
    """The probability ratio of the whole sequence, VESPO (arXiv:2602.10693)."""
    return sequences.expand(sequences.sum(log_ratio))


RatioLevel = Literal["token", "sequence", "sequence-sum"]
RATIO_LEVELS: dict[RatioLevel, Callable] = {"token": _token, "sequence": _sequence, "sequence-sum": _sequence_sum}


def by_token(level, log_ratio):
    """GSPO-token (arXiv:2507.18071, eq. 13 and 14): a sequence's ratio, whose gradient is that of the token's alone.

    Advantages that are a token's own then weigh that token, as they do in the value. Where all tokens of a sequence
    have one advantage the gradient of the loss is GSPO's.
    """
    return level.detach() + (log_ratio - log_ratio.detach())


# Surrogate: (log_ratio, advantages, logprobs, sequences, options), tensors (B, T) -> (B, T) loss, lower is better.


def needs_sequences(surrogate):
    """Decorator for a surrogate that uses `sequences`: `policy_token_loss`, which sees single tokens, refuses it."""
    surrogate.needs_sequences = True
    return surrogate


class NoSequences:
    """Stands for `sequences` where a loss is formed token by token: a surrogate that reaches for it hears why not."""

    def __getattr__(self, name):
        raise ValueError(
            f"the surrogate uses sequences.{name}, but policy_token_loss sees single tokens: use linear_token_logprobs "
            "and policy_loss, and decorate the surrogate with fused_rl.surrogates.needs_sequences"
        )


def declares(*reads: str, clipped: Callable | None = None):
    """Decorator for a surrogate of the library: the options that it reads, and the tokens that its bounds change.

    Options that only other surrogates read have no meaning beside it. `clipped` is a function of (log_ratio,
    advantages, options) to (B, T) bool, for the metric `clipfrac`. A surrogate of yours may read any option.
    """

    def declared(surrogate):
        surrogate.reads, surrogate.clipped = reads, clipped
        return surrogate

    return declared


@dataclass(frozen=True)
class SurrogateOptions:
    """The options that only some surrogates read, which `declares` names."""

    sapo_temperature_pos: Positive = 1.0
    """Temperature of SAPO's gate for positive advantages (arXiv:2511.20347)."""
    sapo_temperature_neg: Positive = 1.05
    """Temperature of SAPO's gate for other advantages."""
    vespo_k_pos: NonNegative = 2.0
    """VESPO's power of the ratio for advantages of at least 0 (arXiv:2602.10693)."""
    vespo_lambda_pos: NonNegative = 3.0
    """VESPO's rate for advantages of at least 0."""
    vespo_k_neg: NonNegative = 3.0
    """VESPO's power of the ratio for negative advantages."""
    vespo_lambda_neg: NonNegative = 2.0
    """VESPO's rate for negative advantages."""


_RATIO_AND_BOUNDS = ("ratio_level", "clip_low", "clip_high")


def _beyond_the_minimum(log_ratio, advantages, options):
    ratio = tangent_exp(log_ratio)
    below = ratio < 1 - options.clip_low
    if options.delta is not None:
        below = below | (ratio > options.delta)
    return torch.where(advantages > 0, ratio > 1 + options.clip_high, (advantages < 0) & below)


def _beyond_the_bounds(log_ratio, advantages, options):
    ratio = tangent_exp(log_ratio)
    return (ratio < 1 - options.clip_low) | (ratio > 1 + options.clip_high)


def _beyond_in_nats(log_ratio, advantages, options):
    above, below = log_ratio > options.clip_high, log_ratio < -options.clip_low
    return torch.where(advantages > 0, above, (advantages < 0) & below)


def _by_sign(positive, value, other, like):
    return torch.full_like(like, other).masked_fill(positive, value)  # where() of two numbers would be fp32


@declares(*_RATIO_AND_BOUNDS, "delta", clipped=_beyond_the_minimum)
def _clip(log_ratio, advantages, logprobs, sequences, options):
    """PPO's pessimistic minimum (arXiv:1707.06347, eq. 7); `delta` bounds it for negative advantages (dual clip)."""
    ratio = tangent_exp(log_ratio)
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.delta is not None:
        ratio = ratio.clamp(max=options.delta)
    return -torch.minimum(ratio * advantages, clipped * advantages)


@declares(*_RATIO_AND_BOUNDS, clipped=_beyond_the_bounds)
def _cispo(log_ratio, advantages, logprobs, sequences, options):
    """REINFORCE weighted by the clipped, detached ratio: no token loses its gradient (arXiv:2506.13585, eq. 4)."""
    weight = tangent_exp(log_ratio.detach()).clamp(1 - options.clip_low, 1 + options.clip_high)
    return -weight * advantages * logprobs


@declares("ratio_level", "sapo_temperature_pos", "sapo_temperature_neg")
def _sapo(log_ratio, advantages, logprobs, sequences, options):
    """A sigmoid gate in place of the clip, steeper where the advantage is not positive (arXiv:2511.20347)."""
    temperature = _by_sign(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg, advantages)
    return -4 / temperature * torch.sigmoid(temperature * (tangent_exp(log_ratio) - 1)) * advantages


@declares("ratio_level", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
def _vespo(log_ratio, advantages, logprobs, sequences, options):
    """REINFORCE weighted by phi(W) = W^k exp(lambda (1 - W)), detached, W the ratio (arXiv:2602.10693)."""
    up = advantages >= 0
    k = _by_sign(up, options.vespo_k_pos, options.vespo_k_neg, advantages)
    rate = _by_sign(up, options.vespo_lambda_pos, options.vespo_lambda_neg, advantages)
    log_w = log_ratio.detach().clamp(math.log(1e-8), 20)
    return -torch.exp(k * log_w + rate * (1 - log_w.exp())) * advantages * logprobs


@needs_sequences
@declares(*_RATIO_AND_BOUNDS, clipped=_beyond_in_nats)
def _geo_mean(log_ratio, advantages, logprobs, sequences, options):
    """GMPO: clip each token's log-ratio as PPO clips the ratio, then the geometric mean (arXiv:2507.20673)."""
    sign = torch.sign(advantages)
    clipped = log_ratio.clamp(-options.clip_low, options.clip_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    return -tangent_exp(sequences.expand(sequences.mean(pessimistic))) * advantages


@declares()
def _policy_gradient(log_ratio, advantages, logprobs, sequences, options):
    """REINFORCE (Williams 1992): no ratio."""
    return -advantages * logprobs


SURROGATES: dict[str, Callable] = {
    "clip": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
    "geo-mean": _geo_mean,
    "policy-gradient": _policy_gradient,
}


def applied(surrogate: Callable, log_ratio, advantages, logprobs, sequences, options) -> tuple[Tensor, dict]:
    """The loss of each token, and metrics of each token by name, which a user's surrogate may return beside it.

    Raises:
        ValueError: it does not take five arguments, or does not return a loss of each token.
    """
    arguments = log_ratio, advantages, logprobs, sequences, options
    name = getattr(surrogate, "__name__", repr(surrogate))
    wanted = tuple(logprobs.shape)
    try:
        inspect.signature(surrogate).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"the surrogate {name} is called with (log_ratio, advantages, logprobs, sequences, options), tensors "
            f"{wanted}, but does not take these: {error}"
        ) from None
    found = surrogate(*arguments)
    losses, metrics = found if isinstance(found, tuple) else (found, {})
    if not isinstance(losses, Tensor) or tuple(losses.shape) != wanted or losses.dtype != logprobs.dtype:
        raise ValueError(
            f"the surrogate {name} must return the loss of each token, {logprobs.dtype} {wanted} as its arguments; got "
            f"{described(losses) if isinstance(losses, Tensor) else type(losses).__name__}. Leave sums and means to "
            "loss_agg"
        )
    return losses, metrics


# What weights the surrogate of each token, and nothing else of the loss: (B, T), or 1 if switched off.


def rollout_weights(old, rollout, sequences, options):
    """Return the truncated or masked ratio of the trainer's policy to the inference engine's."""
    if rollout is None or options.rollout_correction is None:
        return 1
    level, _, how = options.rollout_correction.partition("-")
    log_ratio = old - rollout
    if level == "sequence":
        log_ratio = sequences.expand(sequences.sum(log_ratio))
    ratio = tangent_exp(log_ratio)
    bounded = ratio.clamp(options.rollout_low, options.rollout_high)
    return bounded if how == "truncate" else torch.where(bounded == ratio, ratio, 0)


def off_policy_gate(logprobs, behaviour, advantages, sequences, options):
    """0 for sequences of negative advantage that the policy has left (DeepSeek-V3.2, arXiv:2512.02556, eq. 9)."""
    if options.off_policy_threshold is None:
        return 1
    gap = sequences.mean(behaviour - logprobs.detach())
    near = sequences.expand(gap) <= options.off_policy_threshold
    return ((advantages >= 0) | near).to(logprobs.dtype)


def entropy_gate(entropy, mask, options):
    """0 for all but the tokens of high entropy (arXiv:2506.01939)."""
    threshold = options.entropy_threshold
    if options.top_entropy is not None:
        counted = torch.where(mask, entropy.detach(), torch.nan)
        threshold = torch.nanquantile(counted, 1 - options.top_entropy)
    return 1 if threshold is None else (entropy.detach() >= threshold).to(entropy.dtype)
