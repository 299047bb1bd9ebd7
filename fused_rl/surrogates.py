"""The choices of `policy_loss`: ratio levels, surrogates and options, and the known algorithms as a table of them."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from fused_rl.kl import KL_ESTIMATORS, tangent_exp

__all__ = ["PRESETS", "PolicyLossOptions", "Preset"]

LOSS_AGGS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
ROLLOUT_CORRECTIONS = ("token-truncate", "token-mask", "sequence-truncate", "sequence-mask")


# Ratio level: (B, T) log-ratios of tokens -> (B, T); all but the token level give a sequence's tokens one value.


def _token(log_ratio, sequences):
    return log_ratio


def _sequence(log_ratio, sequences):
    """The geometric mean over the sequence, GSPO (arXiv:2507.18071, eq. 7)."""
    return sequences.expand(sequences.mean(log_ratio))


def _sequence_sum(log_ratio, sequences):
    """The probability ratio of the whole sequence, VESPO (arXiv:2602.10693)."""
    return sequences.expand(sequences.sum(log_ratio))


RATIO_LEVELS = {"token": _token, "sequence": _sequence, "sequence-sum": _sequence_sum}


# Surrogate: (log_ratio, advantages, logprobs, sequences, options), tensors (B, T) -> (B, T) loss, lower is better.


def _by_sign(positive, value, other, like):
    return torch.full_like(like, other).masked_fill(positive, value)  # where() of two numbers would be fp32


def _clip(log_ratio, advantages, logprobs, sequences, options):
    """PPO's pessimistic minimum (arXiv:1707.06347, eq. 7); `delta` bounds it for negative advantages (dual clip)."""
    ratio = tangent_exp(log_ratio)
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.delta is not None:
        ratio = ratio.clamp(max=options.delta)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _cispo(log_ratio, advantages, logprobs, sequences, options):
    """REINFORCE weighted by the clipped, detached ratio: no token loses its gradient (arXiv:2506.13585, eq. 4)."""
    weight = tangent_exp(log_ratio.detach()).clamp(1 - options.clip_low, 1 + options.clip_high)
    return -weight * advantages * logprobs


def _sapo(log_ratio, advantages, logprobs, sequences, options):
    """A sigmoid gate in place of the clip, steeper where the advantage is not positive (arXiv:2511.20347)."""
    temperature = _by_sign(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg, advantages)
    return -4 / temperature * torch.sigmoid(temperature * (tangent_exp(log_ratio) - 1)) * advantages


def _vespo(log_ratio, advantages, logprobs, sequences, options):
    """REINFORCE weighted by phi(W) = W^k exp(lambda (1 - W)), detached, W the ratio (arXiv:2602.10693)."""
    up = advantages >= 0
    k = _by_sign(up, options.vespo_k_pos, options.vespo_k_neg, advantages)
    rate = _by_sign(up, options.vespo_lambda_pos, options.vespo_lambda_neg, advantages)
    log_w = log_ratio.detach().clamp(math.log(1e-8), 20)
    return -torch.exp(k * log_w + rate * (1 - log_w.exp())) * advantages * logprobs


def _geo_mean(log_ratio, advantages, logprobs, sequences, options):
    """GMPO: clip each token's log-ratio as PPO clips the ratio, then the geometric mean (arXiv:2507.20673)."""
    sign = torch.sign(advantages)
    clipped = log_ratio.clamp(-options.clip_low, options.clip_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    return -tangent_exp(sequences.expand(sequences.mean(pessimistic))) * advantages


def _policy_gradient(log_ratio, advantages, logprobs, sequences, options):
    """REINFORCE (Williams 1992): no ratio."""
    return -advantages * logprobs


SURROGATES = {
    "clip": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
    "geo-mean": _geo_mean,
    "policy-gradient": _policy_gradient,
}


@dataclasses.dataclass(frozen=True)
class PolicyLossOptions:
    """Everything `policy_loss` lets you choose, with its defaults (PPO's); `PRESETS` are changes to these."""

    ratio_level: str = "token"
    """Which probability ratio a token gets: "token", "sequence" (geometric mean) or "sequence-sum" (the product)."""
    surrogate: str | Callable = "clip"
    """A name of `SURROGATES`, or your own function of the same arguments."""
    loss_agg: str = "token-mean"
    """One of `LOSS_AGGS`."""
    clip_low: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; 1 is no lower bound. geo-mean clips the log-ratio."""
    clip_high: float = 0.2
    """inf is no upper bound."""
    delta: float | None = None
    """Bound on the ratio where the advantage is negative, above 1 + clip_high: dual clip (arXiv:1912.09729)."""
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    kl_coef: float = 0.0
    """Weight of the KL term in the loss; needs `ref_logprobs`."""
    kl_estimator: str = "rk3"
    """One of `kl_estimate`'s."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; needs `entropy`."""
    rollout_correction: str | None = "token-truncate"
    """How exp(old_logprobs - rollout_logprobs) weights the surrogate where `rollout_logprobs` are given: of each token
    or of the sequence, truncated to the bounds or 0 outside them; None: not at all."""
    rollout_low: float = 0.0
    rollout_high: float = 2.0
    off_policy_threshold: float | None = None
    """Drop the surrogate of sequences with negative advantage that the policy has left by more than this, in nats per
    token (mean of rollout or old logprobs - logprobs; DeepSeek-V3.2, arXiv:2512.02556, eq. 9)."""
    top_entropy: float | None = None
    """Keep the surrogate of this fraction of the batch's tokens only, those of highest entropy (arXiv:2506.01939)."""
    entropy_threshold: float | None = None
    """The same by a fixed threshold in nats, which does not depend on the micro-batch."""

    def __post_init__(self):
        check_choice("ratio_level", self.ratio_level, RATIO_LEVELS)
        check_choice("loss_agg", self.loss_agg, LOSS_AGGS)
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        if not callable(self.surrogate):
            check_choice("surrogate", self.surrogate, SURROGATES)
        if self.rollout_correction is not None:
            check_choice("rollout_correction", self.rollout_correction, ROLLOUT_CORRECTIONS)
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError(f"clip_low and clip_high are offsets >= 0, got {self.clip_low} and {self.clip_high}")
        if self.delta is not None and self.surrogate in SURROGATES and self.surrogate != "clip":
            raise ValueError(f'delta belongs to the surrogate "clip", not to {self.surrogate!r}')
        if self.delta is not None and self.delta <= 1 + self.clip_high:
            raise ValueError(f"delta must lie above 1 + clip_high = {1 + self.clip_high}, got {self.delta}")
        if self.sapo_temperature_pos <= 0 or self.sapo_temperature_neg <= 0:
            raise ValueError("sapo_temperature_pos and sapo_temperature_neg must be > 0")
        if self.top_entropy is not None and not 0 < self.top_entropy <= 1:
            raise ValueError(f"top_entropy is a fraction in (0, 1], got {self.top_entropy}")
        if self.top_entropy is not None and self.entropy_threshold is not None:
            raise ValueError("give top_entropy or entropy_threshold, not both")


def check_choice(name, value, valid):
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}; got {value!r}")


class Preset(NamedTuple):
    options: dict
    paper: str
    equation: str


_GSPO = {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
_MIN = "-min(r A, clip(r) A)"
PRESETS = {
    "ppo": Preset({}, "arXiv:1707.06347, eq. 7", f"1/N sum_it {_MIN}"),
    "grpo": Preset({"loss_agg": "seq-mean-token-mean"}, "arXiv:2402.03300, eq. 3", f"1/B sum_i 1/n_i sum_t {_MIN}"),
    "bnpo": Preset({}, "TRL's bnpo: N counts the local batch", f"1/N sum_it {_MIN}"),
    "dr_grpo": Preset({"loss_agg": "seq-mean-token-sum-norm"}, "arXiv:2503.20783", f"1/(B L) sum_it {_MIN}"),
    "dapo": Preset({"clip_high": 0.28}, "arXiv:2503.14476, eq. 8", f"1/N sum_it {_MIN}"),
    "gspo": Preset(
        {**_GSPO, "loss_agg": "seq-mean-token-mean"}, "arXiv:2507.18071, eq. 5", "1/B sum_i -min(s_i A, clip(s_i) A)"
    ),
    "cispo": Preset(
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        "arXiv:2506.13585, eq. 4",
        "1/N sum_it -sg(clip(r)) A log p",
    ),
    "sapo": Preset(
        {"surrogate": "sapo", "loss_agg": "seq-mean-token-mean"},
        "arXiv:2511.20347",
        "1/B sum_i 1/n_i sum_t -4/tau sigmoid(tau (r - 1)) A",
    ),
    "luspo": Preset(
        {**_GSPO, "clip_low": 2e-3, "clip_high": 2.5e-3, "loss_agg": "seq-mean-token-sum"},
        "arXiv:2602.05261",
        "1/B sum_i -n_i min(s_i A, clip(s_i) A)",
    ),
    "vespo": Preset(
        {"surrogate": "vespo", "ratio_level": "sequence-sum"},
        "arXiv:2602.10693",
        "1/N sum_it -sg(W_i^k exp(lambda (1 - W_i))) A log p",
    ),
    "rloo": Preset(
        {"surrogate": "policy-gradient", "loss_agg": "seq-mean-token-sum"},
        "arXiv:2402.14740",
        "1/B sum_i -A sum_t log p",
    ),
    "reinforce++": Preset({}, "arXiv:2501.03262", f"1/N sum_it {_MIN}, A whitened over the batch"),
    "gmpo": Preset(
        {"surrogate": "geo-mean", "clip_low": 0.4, "clip_high": 0.4, "loss_agg": "seq-mean-token-mean"},
        "arXiv:2507.20673",
        "1/B sum_i -A exp(1/n_i sum_t sgn(A) min(sgn(A) log r, sgn(A) clip(log r)))",
    ),
}


def resolve_options(preset, options):
    if preset is not None:
        check_choice("preset", preset, PRESETS)
    for name in options:
        check_choice("option", name, PolicyLossOptions.__dataclass_fields__)
    return PolicyLossOptions(**{**(PRESETS[preset].options if preset else {}), **options})


def surrogate_of(chosen):
    return chosen.surrogate if callable(chosen.surrogate) else SURROGATES[chosen.surrogate]


def check_token_level(chosen):
    """A loss formed token by token cannot see the rest of a sequence, or of the batch."""
    wide = {
        "ratio_level": chosen.ratio_level != "token",
        "surrogate": chosen.surrogate == "geo-mean",
        "off_policy_threshold": chosen.off_policy_threshold is not None,
        "top_entropy": chosen.top_entropy is not None,
    }
    for name, needs_more in wide.items():
        if needs_more:
            raise ValueError(
                f"{name}={getattr(chosen, name)!r} needs more than one token at a time: use linear_token_logprobs and "
                "policy_loss (for top_entropy, entropy_threshold)"
            )
