"""The options that PPO and GRPO share: rollouts, scorers, and everything that `fused_rl.policy_loss` can be told."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import fused_rl
from fused_rl.presets import PolicyLossOptions, resolve_options, unread_option
from fused_rl.trainers.options.config import (
    ClosedUnitInterval,
    Finite,
    InputError,
    NonNegative,
    NonNegativeFloat,
    NonNegativeInt,
    Positive,
    PositiveFraction,
    PositiveInt,
    RunConfig,
    Temperature,
)
from fused_rl.trainers.options.needs import NO_EVALUATION, RUN_NEEDS, Needs
from fused_rl.trainers.options.source import Source
from fused_rl.trainers.policy.own_surrogate import load_surrogate
from fused_rl.trainers.scorers.options import NO_ANSWER, WITH_ANSWER, read, sources_of


@dataclass(kw_only=True)
class PolicyConfig(RunConfig):
    """Rollouts and the policy loss. An option of the loss that is None is the preset's."""

    batch_option: ClassVar[str] = "prompts_per_step"

    prompt_column: str | None = None
    """Text or messages; None takes prompt, messages or question, whichever is there."""
    answer_column: str | None = None
    """Ground truth for the verifiers; None takes ground_truth or answer. Of `... #### 42` the part after the marks."""
    verifiers: str | list[str] = "math"
    """Comma-separated, or a list: math, reasoning_gym, reasoning_gym:<dataset>, exact_match, regex('pattern'), format,
    length(target=100), module:function, reward_model:<folder> (docs/verifiers.md). The reward is the sum of their
    scores, or, where each has a weight, the weighted one: 1*math, 0.2*module:function. Those that compare with the
    answer say which responses are right; functions and patterns do (from a score of 1 on) where no other does, or where
    they are given a threshold (module:function>=0.5); reward models and length do with a threshold alone."""
    prompts_per_step: PositiveInt = 32
    """Prompts per rollout, over all ranks."""
    minibatches: PositiveInt = 2
    """Optimizer updates per pass over a rollout."""
    epochs: PositiveInt = 1
    """Passes over a rollout."""
    max_new_tokens: PositiveInt = 256
    """Longer responses are cut; they are scored as they are."""
    mask_truncated: bool = False
    """Leave responses that were cut out of the loss."""
    temperature: Temperature = 1.0
    """Of sampling, and of every log-probability in the loss."""
    top_p: PositiveFraction = 1.0
    """Draw from as few of the likeliest tokens as have this much of the probability together; 1 draws from all. Where
    this, top_k or min_p leaves tokens out, every log-probability, entropy and KL is over what was left."""
    top_k: NonNegativeInt = 0
    """Draw from so many of the likeliest tokens; 0 draws from all."""
    min_p: ClosedUnitInterval = 0.0
    """Draw from tokens with at least this fraction of the likeliest one's probability; 0 draws from all."""
    rollout_batch_size: PositiveInt = 64
    """Responses generated together."""
    preset: str = "grpo"
    """A row of fused_rl.PRESETS: it chooses ratio, surrogate, clipping, aggregation and advantages."""
    ratio_level: Literal["token", "sequence", "sequence-sum"] | None = None
    """Whose probability ratio a token gets: its own, its sequence's geometric mean, or its sequence's product."""
    surrogate: str | None = None
    """clip, cispo, sapo, vespo, geo-mean, policy-gradient, or a function of yours, module:function (docs/losses.md)."""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None = (
        None
    )
    """How the losses of tokens become one number; the norm is max_new_tokens."""
    clip_low: NonNegative | None = None
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: NonNegativeFloat | None = None
    """See clip_low; inf is no upper bound."""
    skip_impossible: bool | None = None
    """Leave out tokens that a policy gives no probability (-inf), which make the loss NaN."""
    delta: Positive | None = None
    """Bound on the ratio where the advantage is negative, above 1 + clip_high (dual clip)."""
    sapo_temperature_pos: Positive | None = None
    """Of SAPO's gate where the advantage is positive."""
    sapo_temperature_neg: Positive | None = None
    """Of SAPO's gate elsewhere."""
    vespo_k_pos: NonNegative | None = None
    """VESPO's power of the ratio where the advantage is 0 or more."""
    vespo_lambda_pos: NonNegative | None = None
    """VESPO's rate there."""
    vespo_k_neg: NonNegative | None = None
    """VESPO's power of the ratio where the advantage is negative."""
    vespo_lambda_neg: NonNegative | None = None
    """VESPO's rate there."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the starting model in the loss; it is measured in any case."""
    kl_estimator: Literal["k1", "k2", "k3", "k4", "rk3", "k1+", "k3+"] = "rk3"
    """Of the KL in the loss; k1 does not hold the policy (its expected gradient is zero)."""
    entropy_coef: Finite = 0.0
    """Weight of the entropy bonus in the loss."""
    rollout_correction: Literal["token-truncate", "token-mask", "sequence-truncate", "sequence-mask"] | None = None
    """How the ratio of trainer to sampler weights the surrogate, where the sampler tells its log-probabilities."""
    rollout_low: NonNegative | None = None
    """Lower bound of that weight."""
    rollout_high: NonNegativeFloat | None = None
    """Upper bound of that weight."""
    off_policy_threshold: NonNegative | None = None
    """Drop the surrogate of sequences of negative advantage that drifted by more nats per token."""
    top_entropy: PositiveFraction | None = None
    """Keep the surrogate of this fraction of a micro-batch's tokens only, those of highest entropy."""
    entropy_threshold: NonNegative | None = None
    """The same by a fixed threshold in nats, which does not depend on the micro-batch."""
    eval_samples: PositiveInt = 4
    """Sampled responses per held-out problem: the k of pass@k."""
    show_samples: PositiveInt = 4
    """Responses shown as a table at each evaluation."""

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.verifiers, list):
            self.verifiers = ", ".join(self.verifiers)

    def reads(self) -> list[Source]:
        """What the scorers are made of, and the user's surrogate."""
        of_user = self.surrogate is not None and ":" in self.surrogate
        surrogate = [Source("surrogate", f"surrogate={self.surrogate}", self.surrogate)] if of_user else []
        return super().reads() + sources_of(self.verifiers) + surrogate


def loss_options(config: PolicyConfig) -> dict[str, object]:
    """What the config says about the loss, as `fused_rl.policy_loss` names it, checked."""
    given = {f.name: getattr(config, f.name) for f in fields(PolicyLossOptions)}
    given = {name: value for name, value in given.items() if value is not None}
    given.setdefault("kl_estimator", "rk3")
    if ":" in given.get("surrogate", ""):
        given["surrogate"] = load_surrogate(given["surrogate"])
    try:
        PolicyLossOptions(**{**fused_rl.PRESETS[config.preset].options, **given})
    except ValueError as error:
        raise InputError(str(error)) from error
    return {"preset": config.preset, **given}


def check_loss_options(config: PolicyConfig) -> None:
    """Refuse options of the loss that contradict each other, or that the chosen surrogate does not read."""
    options = loss_options(config)
    preset = options.pop("preset")
    unread = unread_option(preset, options)
    if unread is not None:
        name, readers = unread
        chosen = resolve_options(preset, options).surrogate
        raise InputError(
            f"{name}={options[name]} has no meaning with surrogate={chosen}, which does not read it; leave it out, or "
            f"choose --surrogate {' or '.join(readers)}"
        )


def _compares(config: PolicyConfig) -> bool:
    return any(part.kind in WITH_ANSWER for part in read(config.verifiers))


POLICY_NEEDS = (
    *RUN_NEEDS,
    Needs("answer_column", _compares, NO_ANSWER),
    Needs("eval_samples", lambda config: config.eval_size > 0, NO_EVALUATION),
    Needs("show_samples", lambda config: config.eval_size > 0, NO_EVALUATION),
)
