"""The options of `policy_loss`, and the known algorithms as a table of changes to them."""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

from fused_rl.base.checks import (
    Finite,
    Fraction,
    MayBeInf,
    NonNegative,
    Positive,
    check_choice,
    check_flag,
    described,
)
from fused_rl.objectives.advantages import Advantage
from fused_rl.objectives.aggregation import LOSS_AGGS, LossAgg
from fused_rl.objectives.estimators import KL_ESTIMATORS, KLEstimator
from fused_rl.objectives.options import check_names, check_ranges
from fused_rl.objectives.surrogates import (
    RATIO_LEVELS,
    ROLLOUT_GATES,
    SURROGATES,
    RatioLevel,
    RolloutGate,
    SurrogateFunction,
    SurrogateName,
    SurrogateOptions,
)

RolloutCorrection = Literal["token-truncate", "token-mask", "sequence-truncate", "sequence-mask"]
# Option -> those that have no meaning where it is None.
BOUNDS = {
    "rollout_correction": ("rollout_low", "rollout_high"),
    "rollout_gate": ("rollout_gate_low", "rollout_gate_high"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLossOptions(SurrogateOptions):
    """The options of `policy_loss`; the defaults are PPO's, and `PRESETS` are changes to these."""

    ratio_level: RatioLevel = "token"
    """Ratio of a token: its own (token), its sequence's geometric mean (sequence) or product (sequence-sum)."""
    surrogate: SurrogateName | str | SurrogateFunction = "clip"
    """Loss of a token (docs/losses.md), by its name, or your own function, on the command line module:function."""
    loss_agg: LossAgg = "token-mean"
    """How the losses of tokens become one number; the norm is `max_length`, in a run max_new_tokens."""
    clip_low: NonNegative = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; 1 means no lower bound. geo-mean clips the log-ratio,
    dppo-tv bounds the change of a token's probability, dppo-kl the token's KL in nats."""
    clip_high: MayBeInf = 0.2
    """See clip_low; inf means no upper bound."""
    delta: Positive | None = None
    """Bound on the ratio for negative advantages, above 1 + clip_high: dual clip (arXiv:1912.09729)."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the reference."""
    kl_estimator: KLEstimator = "rk3"
    """Estimator of that KL. In the loss, the expected gradient of k1 is zero; in the reward, k3 grows exponentially."""
    entropy_coef: Finite = 0.0
    """Weight of the entropy bonus in the loss."""
    rollout_correction: RolloutCorrection | None = "token-truncate"
    """Weight of the surrogate, exp(old_logprobs - rollout_logprobs), if the sampler reports its log-probabilities: of
    each token or of the sequence, truncated to the bounds or 0 outside them."""
    rollout_low: NonNegative = 0.0
    """Lower bound of that weight."""
    rollout_high: MayBeInf = 2.0
    """Upper bound of that weight."""
    rollout_gate: RolloutGate | None = None
    """Drop the surrogate of sequences where the sampler's policy differs too much per token, if the sampler reports
    its log-probabilities: by the geometric mean of the ratio, or the mean k1 (absolute), k3 or total variation."""
    rollout_gate_low: NonNegative = 0.0
    """Lower bound of that mean."""
    rollout_gate_high: NonNegative | None = None
    """Upper bound of that mean, which a gate needs: in nats for k1 and k3, in probability for tv."""
    off_policy_threshold: NonNegative | None = None
    """Drop the surrogate of sequences with negative advantage if the policy has moved by more nats per token: the mean
    of rollout or old logprobs - logprobs (DeepSeek-V3.2, arXiv:2512.02556, eq. 9)."""
    top_entropy: Fraction | None = None
    """Keep the surrogate of this fraction of the tokens, those of highest entropy (arXiv:2506.01939): in one call of
    `policy_loss`, in the trainers in an optimizer step over all ranks."""
    entropy_threshold: NonNegative | None = None
    """Keep the surrogate of tokens with at least this entropy, in nats."""
    skip_impossible: bool = False
    """Leave out tokens with probability 0 (-inf), which otherwise make the loss NaN or inf. They leave the loss, KL,
    metrics and the denominators that are counted here; denominators that you give stay."""

    def __post_init__(self):
        # Names first, because the ranges and readers below depend on them.
        for name, names in _CHOICES.items():
            # Only a wrong name costs a call, which says what is meant.
            if getattr(self, name) not in names:
                check_choice(name, getattr(self, name), [*filter(None, names)])
        if not callable(self.surrogate):
            check_choice("surrogate", self.surrogate, SURROGATES)
        if self.rollout_gate is not None and self.rollout_gate_high is None:
            raise ValueError(
                f"rollout_gate={self.rollout_gate} needs its upper bound, rollout_gate_high"
            )
        check_flag("skip_impossible", self.skip_impossible)
        check_ranges(self)
        self._check_read()

        # Options that contradict each other: a bound within the bound, an empty interval, two masks of entropy.
        if self.delta is not None and self.delta <= 1 + self.clip_high:
            raise ValueError(
                f"delta must lie above 1 + clip_high = {1 + self.clip_high}, got {self.delta}"
            )
        if self.rollout_low > self.rollout_high:
            raise ValueError(
                f"rollout_low={self.rollout_low} is above rollout_high={self.rollout_high}; swap them"
            )
        if self.top_entropy is not None and self.entropy_threshold is not None:
            raise ValueError("give top_entropy or entropy_threshold, not both")

    def _check_read(self):
        """Refuse an option that only other surrogates read, and bounds of a correction that is off."""
        # What equals its default may as well not have been given.
        for name in _unread_options(self.surrogate):
            value = getattr(self, name)
            if value != getattr(PolicyLossOptions, name):
                raise ValueError(
                    f"{name}={value} has no meaning with surrogate={self.surrogate}, which does not read it; leave it "
                    f"out, or choose surrogate {' or '.join(_READERS[name])}"
                )
        for switch, names in BOUNDS.items():
            for name in names:
                value = getattr(self, name)
                if getattr(self, switch) is None and value != getattr(PolicyLossOptions, name):
                    raise ValueError(
                        f"{name}={value} has no meaning with {switch}=None; leave it out, or choose a {switch}"
                    )


# Option -> its names. Tuples, not the tables: a list or dictionary that was given is not hashable.
_CHOICES = {
    "ratio_level": (*RATIO_LEVELS,),
    "loss_agg": (*LOSS_AGGS,),
    "kl_estimator": KL_ESTIMATORS,
    "rollout_correction": (None, *get_args(RolloutCorrection)),
    "rollout_gate": (None, *ROLLOUT_GATES),
}
# Option -> the surrogates that read it, for those that not all read.
_READERS: dict[str, list[str]] = {}
for _surrogate, _function in SURROGATES.items():
    for _option in _function.reads:
        _READERS.setdefault(_option, []).append(_surrogate)


def _unread_options(surrogate: object) -> list[str]:
    """Return the options that only other surrogates read; one of yours may read any."""
    return _UNREAD.get(surrogate, []) if isinstance(surrogate, str) else []


# Surrogate -> the options that only others read, made once: every call of a loss looks at them.
_UNREAD = {
    surrogate: [name for name, readers in _READERS.items() if surrogate not in readers]
    for surrogate in SURROGATES
}


class Preset(NamedTuple):
    """A known algorithm: what it changes of `PolicyLossOptions`, and the advantages that its paper multiplies by."""

    options: dict[str, Any]
    advantage: Advantage
    """How rewards become advantages (docs/losses.md); None is the preset's."""
    paper: str
    equation: str


# PPO's pessimistic minimum, in the equations of the table (docs/losses.md has them in full).
_MIN = "-min(r A, clip(r) A)"

PresetName = Literal[
    Literal["ppo", "grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo"],
    Literal["sapo", "luspo", "vespo", "rloo", "reinforce++", "gmpo", "scalerl"],
]
PRESETS: dict[PresetName, Preset] = {
    # The defaults of `PolicyLossOptions` are PPO's.
    "ppo": Preset({}, "gae", "arXiv:1707.06347, eq. 7", f"1/N sum_it {_MIN}"),
    "grpo": Preset(
        {"loss_agg": "seq-mean-token-mean"},
        "group-std",
        "arXiv:2402.03300, eq. 3",
        f"1/B sum_i 1/n_i sum_t {_MIN}",
    ),
    # TRL's DAPO without the wider upper bound, averaged over the tokens of the local batch.
    "bnpo": Preset(
        {}, "group-std", "TRL's name", f"1/N sum_it {_MIN}, N of the local batch in TRL"
    ),
    "dr_grpo": Preset(
        {"loss_agg": "seq-mean-token-sum-norm"},
        "group-mean",
        "arXiv:2503.20783",
        f"1/(B L) sum_it {_MIN}",
    ),
    "dapo": Preset(
        {"clip_high": 0.28}, "group-std", "arXiv:2503.14476, eq. 8", f"1/N sum_it {_MIN}"
    ),
    # A mean over a sequence moves far less than a token's ratio, so its bounds are hundreds of times narrower.
    "gspo": Preset(
        {
            "ratio_level": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "loss_agg": "seq-mean-token-mean",
        },
        "group-std",
        "arXiv:2507.18071, eq. 5",
        "1/B sum_i -min(s_i A, clip(s_i) A)",
    ),
    # No lower bound, and an upper one that cuts only ratios above 5: the weight is what is clipped, not the gradient.
    "cispo": Preset(
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        "group-std",
        "arXiv:2506.13585, eq. 4",
        "1/N sum_it -sg(clip(r)) A log p",
    ),
    "sapo": Preset(
        {"surrogate": "sapo", "loss_agg": "seq-mean-token-mean"},
        "group-std",
        "arXiv:2511.20347",
        "1/B sum_i 1/n_i sum_t -4/tau sigmoid(tau (r - 1)) A",
    ),
    # GSPO times the length of the sequence: otherwise each token of a long response weighs less.
    "luspo": Preset(
        {
            "ratio_level": "sequence",
            "clip_low": 2e-3,
            "clip_high": 2.5e-3,
            "loss_agg": "seq-mean-token-sum",
        },
        "group-std",
        "arXiv:2602.05261",
        "1/B sum_i -n_i min(s_i A, clip(s_i) A)",
    ),
    "vespo": Preset(
        {"surrogate": "vespo", "ratio_level": "sequence-sum"},
        "group-std",
        "arXiv:2602.10693v3, eq. 20",
        "1/N sum_it -sg(W_i^k exp(lambda (1 - W_i))) A log p",
    ),
    "rloo": Preset(
        {"surrogate": "policy-gradient", "loss_agg": "seq-mean-token-sum"},
        "leave-one-out",
        "arXiv:2402.14740",
        "1/B sum_i -A sum_t log p",
    ),
    "reinforce++": Preset({}, "batch-std", "arXiv:2501.03262", f"1/N sum_it {_MIN}"),
    # Bounds on log-ratios: the paper's (e^-0.4, e^0.4).
    "gmpo": Preset(
        {
            "surrogate": "geo-mean",
            "clip_low": 0.4,
            "clip_high": 0.4,
            "loss_agg": "seq-mean-token-mean",
        },
        "group-std",
        "arXiv:2507.20673",
        "1/B sum_i -A exp(1/n_i sum_t sgn(A) min(sgn(A) log r, sgn(A) clip(log r)))",
    ),
    # CISPO, with every prompt weighing the same however long its responses are.
    "scalerl": Preset(
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "loss_agg": "prompt-mean"},
        "group-mean-batch-std",
        "arXiv:2510.13786",
        "1/B sum_i 1/m_i sum_t -sg(clip(r)) A log p, m_i the mean length of the prompt's responses",
    ),
}


# TRL's names for options, each of which would be taken for a typing error otherwise.
TRL_NAMES = {
    "beta": "kl_coef",
    "epsilon": "clip_low and clip_high",
    "epsilon_high": "clip_high",
    "loss_type": "preset",
}


def resolve_options(
    preset: PresetName | Preset | None,
    changes: dict[str, Any],
    options: PolicyLossOptions | None = None,
) -> PolicyLossOptions:
    """The options of a preset, or those given, overridden by `changes`; what is unknown is a ValueError."""
    if preset is not None and options is not None:
        raise ValueError(
            "give preset or options, not both; pass an option that should differ as an argument of its name"
        )
    if options is not None and not isinstance(options, PolicyLossOptions):
        raise ValueError(
            f"options must be PolicyLossOptions or None, got {described(options)}; unpack a dict with **"
        )
    # A preset is a row of the table, or one of yours; unknown names in either are refused below.
    base = {}
    if isinstance(preset, Preset):
        base = preset.options
    elif preset is not None:
        check_choice("preset", preset, PRESETS)
        base = PRESETS[preset].options
    for name in (*base, *changes):
        if name in TRL_NAMES:
            raise ValueError(f"{name} is TRL's name; use {TRL_NAMES[name]}")
    check_names((*base, *changes), PolicyLossOptions)
    if options is not None:
        return dataclasses.replace(options, **changes) if changes else options
    # A preset's bounds leave with its surrogate, unless the new one reads them too.
    unread = _unread_options(changes.get("surrogate"))
    read = {name: value for name, value in base.items() if name not in unread}
    return PolicyLossOptions(**{**read, **changes})


def surrogate_of(chosen: PolicyLossOptions) -> SurrogateFunction:
    return chosen.surrogate if callable(chosen.surrogate) else SURROGATES[chosen.surrogate]


def option_beyond_a_token(chosen: PolicyLossOptions) -> str | None:
    """The first option by which a token's loss depends on the rest of its sequence or batch; None where none does."""
    needs_more = {
        "ratio_level": chosen.ratio_level != "token",
        # A surrogate of yours has the mark only if `needs_sequences` decorates it.
        "surrogate": getattr(surrogate_of(chosen), "needs_sequences", False),
        "off_policy_threshold": chosen.off_policy_threshold is not None,
        "top_entropy": chosen.top_entropy is not None,
    }
    return next((name for name, needs in needs_more.items() if needs), None)
