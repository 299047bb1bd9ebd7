"""A value per token: the reward that the rest of a response is expected to bring, before each of its tokens.

A critic of its own is a reward model that is read at every token; it is saved as one, so either can start the other.
`critic=shared` is a head on the policy's backbone instead: half the memory, and one optimizer for both.
Left out: heads of more than one layer, distributions over values, saving a shared head apart from checkpoints.
"""

from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import torch

from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.data.batch import Batch
from fused_rl.trainers.models.reward_model import check_reads_policy, load_reward_model, save_reward_model
from fused_rl.trainers.models.value_model import Critic, PolicyWithValues
from fused_rl.trainers.options.config import (
    Decay,
    InputError,
    Needs,
    NonNegative,
    NonNegativeInt,
    OptimConfig,
    Positive,
    RunConfig,
    names_of,
)
from fused_rl.trainers.policy.policy import Passed, Policy

SHARED = "shared"  # as `critic`: the policy's own backbone
Config = TypeVar("Config", bound=RunConfig)
APART = ("lr", "lr_schedule", "warmup_steps", "weight_decay", "adam_beta2", "max_grad_norm")


class CriticConfig(OptimConfig):
    """Where the critic starts and how it is optimised; an option of its optimizer that is None is the policy's."""

    critic: str | None = None
    """Folder or Hub name of what it starts from: a causal language model (with a head of zeros), a reward model or a
    saved critic (with their heads); None is the policy's starting model. shared: a head on the policy's backbone."""
    critic_lr: NonNegative | None = None
    """Peak learning rate of the critic; None is the policy's, here and below."""
    critic_lr_schedule: Literal["constant", "linear", "cosine"] | None = None
    """Its schedule after the warm-up."""
    critic_warmup_steps: NonNegativeInt | None = None
    """Its optimizer updates with a rising learning rate."""
    critic_weight_decay: NonNegative | None = None
    """Its decoupled weight decay."""
    critic_adam_beta2: Decay | None = None
    """Its decay of the second moment."""
    critic_max_grad_norm: NonNegative | None = None
    """Its gradients are scaled down to this norm; 0 switches it off."""
    value_clip: NonNegative | None = 0.2
    """A value gains nothing by moving further than this from what it was before the update; None is no bound."""
    value_coef: Positive = 0.1
    """Weight of the value loss beside the policy's, where the backbone is shared."""
    critic_only: NonNegativeInt = 0
    """Train the critic alone, on this many rollouts of the unchanged policy, and save it; 0 trains both."""

    needs: ClassVar = (
        Needs(
            "value_coef",
            lambda config: config.critic == SHARED,
            "has no meaning for a critic of its own, with its own optimizer; leave it out, or give --critic shared",
        ),
    )


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


def planned(config: Config) -> Config:
    """A run's config with the steps of `critic_only`, where they are given."""
    if not isinstance(config, CriticConfig) or not config.critic_only:  # what is none is refused when the run begins
        return config
    return config.changed(steps=config.critic_only, num_train_epochs=None)


class SharedCritic:
    """A head on the policy's backbone, whose passes, optimizer and checkpoints are the policy's."""

    extend: ClassVar = PolicyWithValues
    """What it makes of the policy."""
    engines: ClassVar[dict[str, object]] = {}
    """Beside the policy's, in checkpoints."""

    def __init__(self, value_coef: float):
        self.value_coef = value_coef

    def values(self, policy: Policy, part: Batch, passed: Passed | None = None) -> torch.Tensor:
        """(b, T - 1): what is expected before each token, 0 where masked; of the pass that the policy has made."""
        return policy.values(part) if passed is None else passed.values

    def backward(self, policy: Policy, loss: torch.Tensor, value_loss: torch.Tensor) -> None:
        """Gradients of both losses of a micro-batch."""
        policy.backward(loss + self.value_coef * value_loss)

    def optimizer_step(self, step: int) -> dict[str, float]:
        """One update of what the policy's does not update; its metrics."""
        return {}

    def skip(self, updates: int) -> None:
        """As `Policy.skip`."""

    def save(self, folder: Path) -> None:
        """Write critic and tokenizer in the Hub format, complete or not at all; a shared head is in checkpoints."""


class OwnCritic(SharedCritic):
    """A critic with weights and an optimizer of its own."""

    extend = None

    def __init__(self, trained, tokenizer=None):
        self.engine, self.tokenizer, self.engines = trained, tokenizer, {"critic": trained}

    def values(self, policy, part, passed=None):
        return self.engine(part.input_ids, part.response_mask)

    def backward(self, policy, loss, value_loss):
        self.engine.backward(value_loss * ranks.world_size())  # the engine averages over ranks
        policy.backward(loss)

    def optimizer_step(self, step):
        found = engine.optimizer_step(self.engine, step)
        return {"optim/critic_lr": found["lr"], "optim/critic_grad_norm": found["optim/grad_norm"]}

    def skip(self, updates):
        for _ in range(updates):
            self.engine.lr_scheduler.step()

    def save(self, folder):
        save_reward_model(self.engine, self.tokenizer, folder)


def load_critic(config: RunConfig, tokenizer, device: torch.device, updates: int) -> SharedCritic:
    """The critic, one of its own for `updates` optimizer steps; refuses one that reads tokens otherwise."""
    if config.critic == SHARED:
        return SharedCritic(config.value_coef)
    name = config.critic or config.model
    revision = config.revision if config.critic is None else None
    critic = load_reward_model(name, revision, config, config, device, kind=Critic)
    if config.critic is not None:
        check_reads_policy("critic", name, critic, tokenizer, config.model, config.revision)
    return OwnCritic(engine.initialize(critic, optim_of(config), config, updates), tokenizer)
