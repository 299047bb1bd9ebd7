"""The options that PPO and GRPO share: how responses are drawn, and what their loss can be told."""

from dataclasses import dataclass
from typing import ClassVar

import fused_rl
from fused_rl.presets import PolicyLossOptions, resolve_options
from fused_rl.trainers.options.config import InputError, Options, PositiveInt, RunConfig, names_of
from fused_rl.trainers.options.derived import as_options
from fused_rl.trainers.options.needs import NO_EVALUATION, RUN_NEEDS, Needs
from fused_rl.trainers.policy.own_surrogate import load_surrogate
from fused_rl.trainers.samplers.options import SAMPLER_NEEDS, SamplerConfig

WEIGHTS = {"kl_coef": 0.0, "entropy_coef": 0.0}  # of the loss: numbers, on which other options depend


@dataclass(kw_only=True)
class RolloutConfig(SamplerConfig):
    """Which prompts are rolled out, and how long their responses may be."""

    batch_option: ClassVar[str] = "prompts_per_step"
    sections: ClassVar[dict[str, str]] = {"*": "rollout", "prompt_column": "data"}

    prompt_column: str | None = None
    """Text or messages; None takes prompt, messages or question, whichever is there."""
    prompts_per_step: PositiveInt = 32
    """Prompts per rollout, over all ranks."""
    group_size: PositiveInt = 1
    """Responses per prompt; each has its own advantages."""
    max_new_tokens: PositiveInt = 256
    """Longer responses are cut; they are scored as they are."""


@dataclass(kw_only=True)
class LossConfig(as_options(PolicyLossOptions, names_of(PolicyLossOptions), **WEIGHTS), Options):
    """The loss of a policy, and how often a rollout is trained on. An option that is None is the preset's."""

    sections: ClassVar[dict[str, str]] = {"*": "loss"}

    preset: str = "grpo"
    """A row of fused_rl.PRESETS: it chooses ratio, surrogate, clipping, aggregation and advantages."""
    mask_truncated: bool = False
    """Leave responses that were cut out of the loss."""
    minibatches: PositiveInt = 2
    """Optimizer updates per pass over a rollout."""
    epochs: PositiveInt = 1
    """Passes over a rollout."""


@dataclass(kw_only=True)
class PolicyConfig(RolloutConfig, LossConfig, RunConfig):
    """Rollouts, their evaluation, and the policy loss."""

    eval_samples: PositiveInt = 4
    """Sampled responses per held-out problem: the k of pass@k."""
    show_samples: PositiveInt = 4
    """Responses shown at each evaluation, chosen at random: half of held-out rows, the same ones each time, and half of
    the step's own."""


def loss_options(config: LossConfig) -> dict[str, object]:
    """What the config says about the loss, as `fused_rl.policy_loss` names it, checked."""
    given = {name: getattr(config, name) for name in names_of(PolicyLossOptions)}
    given = {name: value for name, value in given.items() if value is not None}
    given.setdefault("kl_estimator", PolicyLossOptions.kl_estimator)
    if ":" in given.get("surrogate", ""):
        given["surrogate"] = load_surrogate(given["surrogate"])
    try:
        resolve_options(config.preset, given)
    except ValueError as error:
        raise InputError(str(error)) from error
    return {"preset": config.preset, **given}


def check_loss_options(config: LossConfig) -> None:
    """Refuse an unknown preset, and options that contradict each other, or that the chosen surrogate does not read."""
    if config.preset not in fused_rl.PRESETS:
        raise InputError(f"preset={config.preset!r} is not one of {sorted(fused_rl.PRESETS)}")
    loss_options(config)


POLICY_NEEDS = (
    *RUN_NEEDS,
    *SAMPLER_NEEDS,
    Needs("eval_samples", lambda config: config.eval_size > 0, NO_EVALUATION),
    Needs("show_samples", lambda config: config.eval_size > 0, NO_EVALUATION),
)
