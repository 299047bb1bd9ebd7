"""The ratio levels and surrogates of `policy_loss`; docs/losses.md shows a surrogate of your own in five lines."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fused_rl.base.checks import Finite, Fraction, MayBeInf, NonNegative, Positive, described
from fused_rl.objectives.estimators import k3, sigmoid, tangent_exp
from fused_rl.objectives.options import RangedOptions, functions_named

# Ratio level: (B, T) log-ratios of tokens -> (B, T); all but the token level give a sequence's
# tokens one value.


def _token(log_ratio, sequences):
    return log_ratio


def _sequence(log_ratio, sequences):
    """The geometric mean over the sequence, GSPO (arXiv:2507.18071, eq. 7)."""
    return sequences.expand(sequences.mean(log_ratio))


def _sequence_sum(log_ratio, sequences):
    """The probability ratio of the whole sequence, VESPO (arXiv:2602.10693)."""
    return sequences.expand(sequences.sum(log_ratio))


# What torch.nanquantile takes at most.
_MOST_OF_QUANTILE = 1 << 24
RatioLevel = Literal["token", "sequence", "sequence-sum"]
RATIO_LEVELS: dict[RatioLevel, Callable] = {
    "token": _token,
    "sequence": _sequence,
    "sequence-sum": _sequence_sum,
}


def by_token(level, log_ratio):
    """GSPO-token (arXiv:2507.18071, eq. 13 and 14): a sequence's ratio, whose gradient is that of the token's alone.

    Advantages that are a token's own then weigh that token, as they do in the value. Where all tokens of a sequence
    have one advantage the gradient of the loss is GSPO's.
    """
    return level.detach() + (log_ratio - log_ratio.detach())


# Surrogate: (log_ratio, advantages, logprobs, sequences, options), tensors (B, T) -> (B, T) loss,
# lower is better; one of yours may return metrics beside it.
SurrogateFunction = Callable[..., Tensor | tuple[Tensor, dict[str, Tensor]]]


class Surrogate(Protocol):
    """A surrogate of the library, with what `declares` says of it."""

    reads: tuple[str, ...]
    clipped: Callable[..., Tensor] | None
    needs_batch: bool
    beyond_advantages: bool

    def __call__(
        self,
        log_ratio: Tensor,
        advantages: Tensor,
        logprobs: Tensor,
        sequences: Any,
        options: Any,
        /,
    ) -> Tensor: ...


def needs_sequences(surrogate):
    """Decorator for a surrogate that uses `sequences`: `policy_token_loss`, which sees single tokens, refuses it."""
    surrogate.needs_sequences = True
    return surrogate


class NoSequences:
    """Stands for `sequences` where a loss is formed token by token: a surrogate that uses it raises an error."""

    def __getattr__(self, name):
        raise ValueError(
            f"the surrogate uses sequences.{name}, but policy_token_loss sees single tokens: use linear_token_logprobs "
            "and policy_loss, and decorate the surrogate with fused_rl.objectives.surrogates.needs_sequences"
        )


def declares(
    *reads: str,
    clipped: Callable | None = None,
    needs_batch: bool = False,
    beyond_advantages: bool = False,
) -> Callable[[Callable[..., Tensor]], Surrogate]:
    """Decorator for a surrogate of the library: the options that it reads, and the tokens that its bounds change.

    Options that only other surrogates read are refused with it. `clipped` is a function of (log_ratio, advantages,
    logprobs, options) to (B, T) bool, for the metric `clipfrac`. A surrogate that `needs_batch` compares the tokens of
    a whole update, which must therefore be one call. A surrogate that goes `beyond_advantages` has a gradient where the
    advantage is 0, too. A surrogate of your own may read any option.
    """

    def declared(surrogate: Any) -> Surrogate:
        surrogate.reads, surrogate.clipped, surrogate.needs_batch = reads, clipped, needs_batch
        surrogate.beyond_advantages = beyond_advantages
        return surrogate

    return declared


@dataclass(frozen=True, kw_only=True)
class SurrogateOptions(RangedOptions):
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
    dppo_cap: MayBeInf = 20.0
    """Upper bound of the ratio as the weight of a token in DPPO (arXiv:2602.04879)."""
    ipo_threshold: NonNegative = 0.1
    """Largest change of a token's probability before IPO drops the token."""
    ipo_tau: NonNegative = 1e-3
    """Weight of IPO's squared log-ratio."""
    dro_beta: NonNegative = 0.1
    """Twice the weight of DRO's squared log-ratio (arXiv:2501.12599)."""
    aspo_cap: Positive = 3.0
    """Upper bound of ASPO's weights, which leaves every token its gradient (arXiv:2510.06062)."""
    cov_fraction: Fraction = 2e-4
    """Fraction of an update's tokens that KL-Cov and Clip-Cov choose, at least one token (arXiv:2505.22617)."""
    kl_cov_coef: NonNegative = 1.0
    """Weight of KL-Cov's penalty |log-ratio|, which the tokens of highest covariance pay."""
    clip_cov_low: Finite = 1.0
    """Least covariance of the tokens that Clip-Cov chooses from."""
    clip_cov_high: MayBeInf = 5.0
    """Largest covariance of the tokens that Clip-Cov chooses from."""


# Tokens that a surrogate's bounds change: (log_ratio, advantages, logprobs, options), (B, T) each
# -> (B, T) bool.

_BOUNDS = ("clip_low", "clip_high")
_RATIO_AND_BOUNDS = ("ratio_level", *_BOUNDS)


def _beyond_the_minimum(log_ratio, advantages, logprobs, options):
    # The minimum keeps the gradient where the policy has moved against the advantage: it may come
    # back.
    ratio = tangent_exp(log_ratio)
    below = ratio < 1 - options.clip_low
    if options.delta is not None:
        below = below | (ratio > options.delta)
    return torch.where(advantages > 0, ratio > 1 + options.clip_high, (advantages < 0) & below)


def _beyond_the_bounds(log_ratio, advantages, logprobs, options):
    ratio = tangent_exp(log_ratio)
    return (ratio < 1 - options.clip_low) | (ratio > 1 + options.clip_high)


def _beyond_in_nats(log_ratio, advantages, logprobs, options):
    above, below = log_ratio > options.clip_high, log_ratio < -options.clip_low
    return torch.where(advantages > 0, above, (advantages < 0) & below)


def _probability_change(log_ratio, logprobs):
    """(B, T): the change of each token's probability from the old policy's."""
    return (logprobs.exp() - (logprobs - log_ratio).exp()).detach()


def _beyond_in_probability(log_ratio, advantages, logprobs, options):
    """DPPO-Binary-TV's region: bounds on the change of a token's probability."""
    change = _probability_change(log_ratio, logprobs)
    return torch.where(advantages > 0, change > options.clip_high, change < -options.clip_low)


def _beyond_in_divergence(log_ratio, advantages, logprobs, options):
    """DPPO-Binary-KL's region: bounds, in nats, on the KL of "this token or another"."""
    new, old = logprobs.detach(), (logprobs - log_ratio).detach()
    # The probability of all other tokens; where it is 0, 0 log 0 is 0.
    rest = -torch.expm1(old)
    tail = torch.where(rest > 0, rest * (_log1mexp(old) - _log1mexp(new)), 0)
    divergence = old.exp() * (old - new) + tail
    above = (divergence > options.clip_high) & (new > old)
    return torch.where(advantages > 0, above, (divergence > options.clip_low) & (new < old))


def _log1mexp(x):
    """log(1 - exp(x)) of x below 0."""
    # Either form loses its digits at one end: expm1 keeps them near 0, log1p where exp(x) is tiny.
    # They meet at -log 2.
    return torch.where(x > -0.693, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def _beyond_the_threshold(log_ratio, advantages, logprobs, options):
    return _probability_change(log_ratio, logprobs).abs() > options.ipo_threshold


def _by_sign(positive, value, other, like):
    # where() of two numbers would be fp32, whatever the dtype of the others.
    return torch.full_like(like, other).masked_fill(positive, value)


@declares(*_RATIO_AND_BOUNDS, "delta", clipped=_beyond_the_minimum)
def _clip(log_ratio, advantages, logprobs, sequences, options):
    """PPO's pessimistic minimum (arXiv:1707.06347, eq. 7); `delta` bounds it for negative advantages (dual clip)."""
    ratio = tangent_exp(log_ratio)
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    # Above 1 + clip_high the minimum of a positive advantage is the other term, so this bounds
    # negative ones alone.
    if options.delta is not None:
        ratio = ratio.clamp(max=options.delta)
    gain, bound = ratio * advantages, clipped * advantages
    # Of equal ones minimum() would give each half the gradient, which takes three times as many kernels.
    return -torch.where(bound < gain, bound, gain)


@declares(*_RATIO_AND_BOUNDS, clipped=_beyond_the_bounds)
def _cispo(log_ratio, advantages, logprobs, sequences, options):
    """REINFORCE weighted by the clipped, detached ratio: no token loses its gradient (arXiv:2506.13585, eq. 4)."""
    weight = tangent_exp(log_ratio.detach()).clamp(1 - options.clip_low, 1 + options.clip_high)
    return -weight * advantages * logprobs


@declares("ratio_level", "sapo_temperature_pos", "sapo_temperature_neg")
def _sapo(log_ratio, advantages, logprobs, sequences, options):
    """A sigmoid gate in place of the clip, steeper where the advantage is not positive (arXiv:2511.20347)."""
    temperature = _by_sign(
        advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg, advantages
    )
    return -4 / temperature * sigmoid(temperature * (tangent_exp(log_ratio) - 1)) * advantages


@declares("ratio_level", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
def _vespo(log_ratio, advantages, logprobs, sequences, options):
    """REINFORCE weighted by phi(W) = W^k exp(lambda (1 - W)), detached, W the ratio (arXiv:2602.10693v3, eq. 20)."""
    up = advantages >= 0
    k = _by_sign(up, options.vespo_k_pos, options.vespo_k_neg, advantages)
    rate = _by_sign(up, options.vespo_lambda_pos, options.vespo_lambda_neg, advantages)
    # W is a product over a sequence: beyond these ends phi is 0 in fp32, and its exponent would
    # overflow.
    log_w = log_ratio.detach().clamp(math.log(1e-8), 20)
    return -torch.exp(k * log_w + rate * (1 - log_w.exp())) * advantages * logprobs


@needs_sequences
@declares(*_BOUNDS, clipped=_beyond_in_nats)
def _geo_mean(log_ratio, advantages, logprobs, sequences, options):
    """GMPO: clip each token's log-ratio as PPO clips the ratio, then the geometric mean (arXiv:2507.20673)."""
    # Times the sign of the advantage, the pessimistic one is the smaller, whichever the side.
    sign = torch.sign(advantages)
    clipped = log_ratio.clamp(-options.clip_low, options.clip_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    return -tangent_exp(sequences.expand(sequences.mean(pessimistic))) * advantages


def _reinforce(*reads, weight, beyond):
    """REINFORCE weighted by a function of (log_ratio, advantages, options), detached; 0 for tokens out of bounds."""

    @declares(*reads, clipped=beyond)
    def surrogate(log_ratio, advantages, logprobs, sequences, options):
        weights = weight(log_ratio.detach(), advantages, options)
        is_beyond = beyond(log_ratio, advantages, logprobs, options)
        return torch.where(is_beyond, 0, -weights * advantages * logprobs)

    return surrogate


def _clamped(log_ratio, advantages, options):
    return tangent_exp(log_ratio).clamp(1 - options.clip_low, 1 + options.clip_high)


def _capped(log_ratio, advantages, options):
    return tangent_exp(log_ratio).clamp(max=options.dppo_cap)


def _inverted(log_ratio, advantages, options):
    # Of a positive advantage, tokens that have become less likely shall weigh more, not less.
    by_sign = torch.where(advantages < 0, log_ratio, -log_ratio)
    return tangent_exp(by_sign).clamp(max=options.aspo_cap)


@declares("ipo_threshold", "ipo_tau", clipped=_beyond_the_threshold, beyond_advantages=True)
def _ipo(log_ratio, advantages, logprobs, sequences, options):
    """prime-rl's default loss, IPO: DPPO's mask on either side, and a squared log-ratio (arXiv:2602.02276) on all."""
    beyond = _beyond_the_threshold(log_ratio, advantages, logprobs, options)
    gain = torch.where(beyond, 0, -advantages * tangent_exp(log_ratio))
    # Also on the tokens that are dropped, which it pulls back.
    return gain + options.ipo_tau * log_ratio.square()


@declares("dro_beta", beyond_advantages=True)
def _dro(log_ratio, advantages, logprobs, sequences, options):
    """DRO, Kimi k1.5's loss (arXiv:2501.12599, eq. 3): REINFORCE, and a squared log-ratio."""
    return -advantages * logprobs + options.dro_beta / 2 * log_ratio.square()


@declares("ratio_level")
def _topr(log_ratio, advantages, logprobs, sequences, options):
    """TOPR (arXiv:2503.14286, eq. 8, with sequence-sum): REINFORCE; negative advantages have the ratio up to 1."""
    # Bad responses fade as they become unlikely; good ones are followed however unlikely they are.
    weight = torch.where(advantages > 0, 1, tangent_exp(log_ratio.detach()).clamp(max=1))
    return -weight * advantages * logprobs


def _covariance(advantages, logprobs, mask):
    """(B, T): each token's part of the covariance of advantage and log-probability over `mask`; -inf elsewhere."""
    logprobs = logprobs.detach()
    covariance = (advantages - advantages[mask].mean()) * (logprobs - logprobs[mask].mean())
    return torch.where(mask, covariance, -torch.inf)


def _first_tokens(order, mask, options):
    """(B, T) bool: the first tokens of an order, as many as the fraction says; one at least."""
    count = max(1, int(options.cov_fraction * int(mask.sum())))
    return torch.zeros_like(mask).flatten().index_fill(0, order[:count], True).view_as(mask)


@needs_sequences
@declares("cov_fraction", "kl_cov_coef", needs_batch=True, beyond_advantages=True)
def _kl_cov(log_ratio, advantages, logprobs, sequences, options):
    """KL-Cov (arXiv:2505.22617): no clip; the tokens of highest covariance pay for their log-ratio."""
    order = _covariance(advantages, logprobs, sequences.mask).flatten().argsort(descending=True)
    highest = _first_tokens(order, sequences.mask, options)
    penalty = torch.where(highest, options.kl_cov_coef * log_ratio.abs(), 0)
    return -advantages * tangent_exp(log_ratio) + penalty


@needs_sequences
@declares(
    *_BOUNDS,
    "cov_fraction",
    "clip_cov_low",
    "clip_cov_high",
    clipped=_beyond_the_minimum,
    needs_batch=True,
)
def _clip_cov(log_ratio, advantages, logprobs, sequences, options):
    """Clip-Cov (arXiv:2505.22617): PPO's clip, and no gradient for random tokens of high covariance."""
    covariance = _covariance(advantages, logprobs, sequences.mask)
    within = (covariance > options.clip_cov_low) & (covariance < options.clip_cov_high)
    # Tokens that are clipped anyway have no gradient to lose.
    clipped = _beyond_the_minimum(log_ratio, advantages, logprobs, options)
    candidates = (within & ~clipped).flatten().nonzero()[:, 0]
    # Of the CPU's generator, whose state a checkpoint has: a resumed run drops the same tokens.
    order = torch.randperm(len(candidates), device="cpu").to(candidates.device)
    dropped = _first_tokens(candidates[order], sequences.mask, options)
    return torch.where(dropped, 0, _clip(log_ratio, advantages, logprobs, sequences, options))


@declares()
def _policy_gradient(log_ratio, advantages, logprobs, sequences, options):
    """REINFORCE (Williams 1992): no ratio."""
    return -advantages * logprobs


# MiniMax-M1 (arXiv:2506.13585, eq. 7).
_cispo_masked = _reinforce(*_RATIO_AND_BOUNDS, weight=_clamped, beyond=_beyond_the_minimum)
# DPPO (arXiv:2602.04879), whose old policy is the sampler's.
_dppo_tv = _reinforce(*_BOUNDS, "dppo_cap", weight=_capped, beyond=_beyond_in_probability)
_dppo_kl = _reinforce(*_BOUNDS, "dppo_cap", weight=_capped, beyond=_beyond_in_divergence)
# ASPO (arXiv:2510.06062).
_aspo = _reinforce(*_BOUNDS, "aspo_cap", weight=_inverted, beyond=_beyond_the_minimum)

# Each name is that of a function above.
SurrogateName = Literal[
    "clip",
    "cispo",
    "sapo",
    "vespo",
    "geo-mean",
    "policy-gradient",
    "ipo",
    "dro",
    "topr",
    "kl-cov",
    "clip-cov",
    "cispo-masked",
    "dppo-tv",
    "dppo-kl",
    "aspo",
]
SURROGATES: dict[str, Surrogate] = functions_named(SurrogateName, globals())


def evaluate(
    surrogate: SurrogateFunction, log_ratio, advantages, logprobs, sequences, options
) -> tuple[Tensor, dict]:
    """The loss of each token, and metrics of each token by name, which a user's surrogate may return beside it.

    Raises:
        ValueError: it does not return a loss of each token.
    """
    # One of yours may return a sum by mistake, which would broadcast and be summed again.
    returned = surrogate(log_ratio, advantages, logprobs, sequences, options)
    losses, metrics = returned if isinstance(returned, tuple) else (returned, {})
    if (
        not isinstance(losses, Tensor)
        or losses.shape != logprobs.shape
        or losses.dtype != logprobs.dtype
    ):
        raise ValueError(
            f"the surrogate {getattr(surrogate, '__name__', surrogate)} must return the loss of each token, "
            f"{described(logprobs)} as its arguments; got {described(losses)}. Leave sums and means to loss_agg"
        )
    return losses, metrics


# What weights the surrogate of each token, and nothing else of the loss: (B, T), or 1 if switched
# off.

RolloutGate = Literal["geometric", "k1", "k3", "tv"]
# Gate: (old, rollout, mean over each sequence) -> (S,), per token, so that a sequence's length does
# not count.
ROLLOUT_GATES: dict[RolloutGate, Callable] = {
    "geometric": lambda old, rollout, mean: tangent_exp(mean(old - rollout)),
    "k1": lambda old, rollout, mean: mean(rollout - old).abs(),
    "k3": lambda old, rollout, mean: mean(k3(rollout - old)),
    "tv": lambda old, rollout, mean: mean((rollout.exp() - old.exp()).abs()),
}


def rollout_weights(old, rollout, sequences, options):
    """Return the ratio of the trainer's policy to the inference engine's, truncated or masked; 0 outside the gate."""
    if rollout is None:
        return 1
    weights = _correction(old, rollout, sequences, options)
    if options.rollout_gate is None:
        return weights
    drift = ROLLOUT_GATES[options.rollout_gate](old, rollout, sequences.mean)
    within = (drift >= options.rollout_gate_low) & (drift <= options.rollout_gate_high)
    return weights * sequences.expand(within.to(old.dtype))


def _correction(old, rollout, sequences, options):
    if options.rollout_correction is None:
        return 1
    level, _, beyond_bounds = options.rollout_correction.partition("-")
    log_ratio = old - rollout
    # The importance weight of a whole sequence is the product over its tokens.
    if level == "sequence":
        log_ratio = sequences.expand(sequences.sum(log_ratio))
    ratio = tangent_exp(log_ratio)
    bounded = ratio.clamp(options.rollout_low, options.rollout_high)
    return bounded if beyond_bounds == "truncate" else torch.where(bounded == ratio, ratio, 0)


def off_policy_gate(logprobs, behaviour, advantages, sequences, options):
    """0 for sequences of negative advantage that the policy has left (DeepSeek-V3.2, arXiv:2512.02556, eq. 9)."""
    if options.off_policy_threshold is None:
        return 1
    # Tokens that the policy has already made unlikely would only push it further away.
    gap = sequences.mean(behaviour - logprobs.detach())
    near = sequences.expand(gap) <= options.off_policy_threshold
    return ((advantages >= 0) | near).to(logprobs.dtype)


def entropy_gate(entropy, mask, options):
    """0 for all but the tokens of high entropy (arXiv:2506.01939)."""
    threshold = options.entropy_threshold
    if options.top_entropy is not None:
        # A quantile of the tokens that count: NaN is what nanquantile leaves out.
        included = torch.where(mask, entropy.detach(), torch.nan)
        threshold = _nanquantile(included, 1 - options.top_entropy)
    return 1 if threshold is None else (entropy.detach() >= threshold).to(entropy.dtype)


def _nanquantile(values, q):
    """`torch.nanquantile` of any number of values."""
    if values.numel() <= _MOST_OF_QUANTILE:
        return torch.nanquantile(values, q)
    ranked = values.flatten().sort().values  # NaN comes last
    count = values.numel() - values.isnan().sum()
    # fp32 would not tell neighbouring ranks apart
    rank = (q * (count - 1).double()).clamp(min=0)
    below = ranked[rank.long()]
    above = ranked[rank.ceil().long()]
    return torch.lerp(below, above, rank.frac().to(values.dtype))
