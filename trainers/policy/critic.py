"""A value per token: the reward that the rest of a response is expected to bring, before each of its tokens.

A critic of its own is a reward model that is read at every token; it is saved as one, so either can start the other.
`critic=shared` is a head on the policy's backbone instead: half the memory, and one optimizer for both.
Left out: heads of more than one layer, distributions over values, saving a shared head apart from checkpoints.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

import fused_rl
from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.models.language_model import LanguageModel, Scored
from fused_rl.trainers.models.reward_model import (
    RewardModel,
    check_reads_policy,
    load_reward_model,
)
from fused_rl.trainers.options.config import (
    Decay,
    InputError,
    NonNegative,
    NonNegativeInt,
    OptimConfig,
    Options,
    Positive,
    RunConfig,
    names_of,
)
from fused_rl.trainers.options.needs import Needs
from fused_rl.trainers.options.source import Source

SHARED = "shared"  # as `critic`: the policy's own backbone
Config = TypeVar("Config", bound=RunConfig)
APART = ("lr", "lr_schedule", "warmup_steps", "weight_decay", "adam_beta2", "max_grad_norm")


@dataclass(kw_only=True)
class CriticConfig(Options):
    """Where the critic starts and how it is optimised; an option of its optimizer that is None is the policy's."""

    critic: str | None = None
    """Folder or Hub name of what it starts from: a causal language model (with a head of zeros), a reward model or a
    saved critic (with their heads); None is the policy's starting model. shared: a head on the policy's backbone."""
    critic_lr: NonNegative | None = None
    """Peak learning rate of the critic."""
    critic_lr_schedule: Literal["constant", "linear", "cosine"] | None = None
    """After the warm-up: constant, or annealed to zero at the last update."""
    critic_warmup_steps: NonNegativeInt | None = None
    """Optimizer updates with a rising learning rate."""
    critic_weight_decay: NonNegative | None = None
    """Decoupled weight decay."""
    critic_adam_beta2: Decay | None = None
    """Decay of the second moment."""
    critic_max_grad_norm: NonNegative | None = None
    """Gradients are scaled down to this norm; 0 switches it off."""
    value_clip: NonNegative | None = 0.2
    """A value gains nothing by moving further than this from what it was before the update; None is no bound."""
    value_coef: Positive = 0.1
    """Weight of the value loss beside the policy's, where the backbone is shared."""
    critic_only: NonNegativeInt = 0
    """Train the critic alone, on this many rollouts of the unchanged policy, and save it; 0 trains both."""

    def reads(self) -> list[Source]:
        """What the critic starts from."""
        apart = self.critic not in (None, SHARED)
        return super().reads() + ([Source("critic", f"critic={self.critic}", self.critic)] if apart else [])


def optim_of(config: CriticConfig) -> OptimConfig:
    """The critic's optimizer options: its own where they are given, else the policy's."""
    options = {name: getattr(config, name) for name in names_of(OptimConfig)}
    for name in APART:
        own = getattr(config, f"critic_{name}")
        options[name] = options[name] if own is None else own
    return OptimConfig(**options)


def check_critic(config: CriticConfig) -> None:
    """Refuse options of a critic of its own where the backbone is shared."""
    if config.critic != SHARED:
        return
    given = [f"critic_{name}" for name in APART if getattr(config, f"critic_{name}") is not None]
    given += ["critic_only"] if config.critic_only else []
    if given:
        raise InputError(
            f"critic=shared has the policy's optimizer and backbone, so it cannot have its own {', '.join(given)}; "
            "drop them, or give the critic weights of its own: --critic FOLDER"
        )


CRITIC_NEEDS = (
    Needs(
        "value_coef",
        lambda config: config.critic == SHARED,
        "has no meaning for a critic of its own, which has its own optimizer; leave it out, or give --critic shared",
    ),
)


def planned(config: Config) -> Config:
    """A run's config with the steps of `critic_only`, where they are given."""
    if not config.critic_only:
        return config
    return dataclasses.replace(config, steps=config.critic_only, num_train_epochs=None)


class Critic(RewardModel):
    """A reward model that is read before every token; a new head is zero, so that nothing is expected at first."""

    @torch.no_grad()
    def reset_head(self) -> None:
        """Set the head to zero."""
        self.classifier.score.weight.zero_()

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What is expected before each token.

        Args:
            input_ids: (B, T) int64, padded on the right.
            mask: (B, T - 1) bool, True where token t + 1 is of the response.

        Returns:
            (B, T - 1) fp32, differentiable; 0 where masked, which is also the value after a response has ended.
        """
        hidden = self.classifier.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        raw = _values(hidden, self.classifier.score.weight)
        return torch.where(mask, (raw - self.score_mean) / self.score_std, 0)


class ValueHead(nn.Module):
    """(B, T, H) -> (B, T) fp32, zero at first; a module, so that ZeRO 3 gathers its weight where it is called."""

    def __init__(self, like: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, like.shape[1], dtype=like.dtype, device=like.device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _values(hidden, self.weight)


class PolicyWithValues(LanguageModel):
    """The policy with a value head on its backbone."""

    def __init__(self, policy: LanguageModel):
        super().__init__(policy.lm, policy.loss_from, lora=policy.lora, head_dtype=policy.head_dtype)
        if policy.loss_from != "linear":
            raise InputError(f"critic=shared reads hidden states: loss_from={policy.loss_from} must be linear")
        self.value_head = ValueHead(self.base.get_output_embeddings().weight)

    def forward(self, input_ids, mask, temperature=1.0, *, support=None, want_values=False, **options):
        """As `LanguageModel`; with `want_values` also `values`, as `Critic` returns them."""
        if not want_values:
            return super().forward(input_ids, mask, temperature, support=support, **options)
        lm = self.base
        hidden = lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        head, targets = lm.get_output_embeddings(), input_ids[:, 1:]
        options = {"temperature": temperature, "mask": mask, "bias": head.bias, **self.head_options}
        if support is not None:
            options["support"] = support.spread(mask)
        rows = fused_rl.linear_token_logprobs(hidden, head.weight, targets, **options)
        return Scored(rows.logprobs, rows.entropy, values=torch.where(mask, self.value_head(hidden), 0))


def _values(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(B, T, H) and (1, H) -> (B, T) fp32; not as a matrix product, whose order of summation depends on the batch."""
    return (hidden.float() * weight.float()).sum(-1)


def load_critic(config: RunConfig, tokenizer, device: torch.device, updates: int):
    """The critic of its own in an engine for `updates` optimizer steps; refuses one that reads tokens otherwise."""
    name = config.critic or config.model
    revision = config.revision if config.critic is None else None
    critic = load_reward_model(name, revision, config, config, device, kind=Critic)
    if config.critic is not None:
        check_reads_policy("critic", name, critic, tokenizer, config.model, config.revision)
    return engine.initialize(critic, optim_of(config), config, updates)


class Watch:
    """Says once each what is wrong with a critic that does not learn."""

    PATIENCE = 10

    def __init__(self):
        self.dead_said, self.worse_said, self.worse = False, False, 0

    def look(self, grad_norm: float | None, var_explained: float) -> None:
        """After each step: the norm of the critic's gradient (None: not known), and the variance it explained."""
        self.worse = self.worse + 1 if var_explained < 0 else 0
        if grad_norm == 0 and not self.dead_said:
            self.dead_said = True
            _warn(
                "the critic has no gradient: its value loss is 0, every response is empty, or value_clip holds every "
                "token; look at loss/value_avg, completions/mean_length and val/clipfrac_avg"
            )
        if self.worse >= self.PATIENCE and not self.worse_said:
            self.worse_said = True
            _warn(
                f"val/var_explained was below 0 for {self.PATIENCE} steps: the critic is worse than a constant, and "
                "adds noise to the advantages; look at critic_lr, value_clip (smaller than the rewards' scale?), and "
                "warm it up first: --critic_only N, then --critic OUTPUT_DIR/critic"
            )


def _warn(text: str) -> None:
    if ranks.rank() == 0:
        tell(f"warning: {text}")
