"""The options that PPO and GRPO share: rollouts, scorers, and everything that `fused_rl.policy_loss` can be told."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import fused_rl
from fused_rl.presets import PolicyLossOptions
from fused_rl.trainers.config import (
    Finite,
    InputError,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFraction,
    PositiveInt,
    RunConfig,
    load_function,
)


@dataclass(kw_only=True)
class PolicyConfig(RunConfig):
    """Rollouts and the policy loss. An option of the loss that is None is the preset's."""

    batch_option: ClassVar[str] = "prompts_per_step"

    prompt_column: str | None = None
    """Text or messages; None takes prompt, messages or question, whichever is there."""
    answer_column: str | None = None
    """Ground truth for the verifiers; None takes ground_truth or answer. Of `... #### 42` the part after the marks."""
    verifiers: str = "math"
    """Comma-separated: math, reasoning_gym, reasoning_gym:<dataset>, module:function, reward_model:<folder>. The reward
    is the sum of their scores, each times its weight (0.2*module:function). math and reasoning_gym say which answers
    are right; functions do (from a score of 1 on) where no other does, or where they are given a threshold
    (module:function>=0.5); reward models do with a threshold alone."""
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
    temperature: Positive = 1.0
    """Of sampling, and of every log-probability in the loss."""
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


def loss_options(config: PolicyConfig) -> dict[str, object]:
    """What the config says about the loss, as `fused_rl.policy_loss` names it, checked."""
    given = {f.name: getattr(config, f.name) for f in fields(PolicyLossOptions)}
    given = {name: value for name, value in given.items() if value is not None}
    if ":" in given.get("surrogate", ""):
        given["surrogate"] = load_function(given["surrogate"], "surrogate")
    try:
        PolicyLossOptions(**{**fused_rl.PRESETS[config.preset].options, **given})
    except ValueError as error:
        raise InputError(str(error)) from error
    return {"preset": config.preset, **given}
