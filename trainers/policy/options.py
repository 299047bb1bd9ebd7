"""The options that PPO and GRPO share: how responses are drawn, and what their loss can be told."""

from typing import TYPE_CHECKING, ClassVar

from fused_rl.presets import PolicyLossOptions, PresetName, resolve_options
from fused_rl.trainers import options as config
from fused_rl.trainers.base.functions import load_function
from fused_rl.trainers.options import (
    NO_EVALUATION,
    InputError,
    Needs,
    Options,
    PositiveInt,
    RunConfig,
    derived,
    evaluates,
)
from fused_rl.trainers.rollouts.options import SamplerConfig

LOSS = tuple(PolicyLossOptions.__dataclass_fields__)
# Two weights are numbers, on which other options depend; what is None is the preset's.
if TYPE_CHECKING:

    class _OfTheLoss(PolicyLossOptions, Options):  # pyright: ignore
        """The fields as a type checker sees them."""

else:
    _OfTheLoss = derived(PolicyLossOptions, kl_coef=0.0, entropy_coef=0.0)


MAIN = (*config.MAIN, "verifiers", "prompts_per_step", "max_new_tokens", "temperature")


class RolloutConfig(SamplerConfig):
    """Which prompts are rolled out, and how long their responses may be."""

    batch_option: ClassVar[str] = "prompts_per_step"
    prompt_column: str | None = None
    """Text or messages; None takes prompt, messages or question, whichever is there."""
    prompts_per_step: PositiveInt = 32
    """Prompts per rollout, over all ranks."""
    group_size: PositiveInt = 1
    """Responses per prompt; each has its own advantages."""
    max_new_tokens: PositiveInt = 256
    """Longer responses are cut; they are scored as they are."""


class LossConfig(_OfTheLoss):
    """The loss of a policy, and how often a rollout is trained on. An option that is None is the preset's."""

    preset: PresetName = "grpo"
    """A row of fused_rl.PRESETS: it chooses ratio, surrogate, clipping, aggregation and advantages."""
    mask_truncated: bool = False
    """Leave responses that were cut out of the loss."""
    minibatches: PositiveInt = 2
    """Optimizer updates per pass over a rollout."""
    epochs: PositiveInt = 1
    """Passes over a rollout."""


class PolicyConfig(RolloutConfig, LossConfig, RunConfig):
    """Rollouts, their evaluation, and the policy loss."""

    eval_samples: PositiveInt = 4
    """Sampled responses per held-out problem: the k of pass@k."""
    show_samples: PositiveInt = 4
    """Responses shown at each evaluation, chosen at random: half of held-out rows, the same ones each time, and half of
    the step's own."""

    needs: ClassVar = (
        Needs("eval_samples", evaluates, NO_EVALUATION),
        Needs("show_samples", evaluates, NO_EVALUATION),
        Needs(
            "lag",
            lambda config: config.zero_stage < 3 or config.server is not None,
            "with zero_stage=3 would draw from weights that ranks must gather together, while they train on them; give "
            "--server, or --zero_stage 2",
        ),
    )


def loss_options(config: LossConfig, **changes) -> PolicyLossOptions:
    """Return the options of `fused_rl.policy_loss` that the config and `changes` give, checked."""
    given = {name: getattr(config, name) for name in LOSS}
    given = {name: value for name, value in given.items() if value is not None}
    given.setdefault("kl_estimator", PolicyLossOptions.kl_estimator)
    if ":" in str(given.get("surrogate")):
        given["surrogate"] = load_function("surrogate", str(given["surrogate"]))
    try:
        return resolve_options(config.preset, given | changes)
    except ValueError as error:
        raise InputError(str(error)) from error
