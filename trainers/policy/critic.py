"""A value per token: the reward that the rest of a response is expected to bring, before each of its tokens.

The critic is a reward model that is read at every token; it is saved as one, so either can start the other.
Left out: heads of more than one layer, distributions over values, a value head on the policy's backbone.
"""

from pathlib import Path
from typing import TypeVar

import torch

from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.data.batch import Batch
from fused_rl.trainers.models.reward_model import Critic, check_reads_policy, load_reward_model, save_reward_model
from fused_rl.trainers.options import NonNegative, NonNegativeInt, OptimConfig, RunConfig, names_of

Config = TypeVar("Config", bound=RunConfig)
APART = ("lr", "warmup_steps")


class CriticConfig(OptimConfig):
    """Where the critic starts and how it is optimised."""

    critic: str | None = None
    """Folder or Hub name of what it starts from: a causal language model (with a head of zeros), a reward model or a
    saved critic (with their heads); None is the policy's starting model."""
    critic_lr: NonNegative | None = None
    """Peak learning rate of the critic; None is the policy's."""
    critic_warmup_steps: NonNegativeInt | None = None
    """Optimizer updates of the critic with a rising learning rate; None is the policy's."""
    value_clip: NonNegative | None = 0.2
    """A value gains nothing by moving further than this from what it was before the update; None is no bound."""
    critic_only: NonNegativeInt = 0
    """Train the critic alone, on this many rollouts of the unchanged policy, and save it; 0 trains both."""


def optim_of(config: CriticConfig) -> OptimConfig:
    """The critic's optimizer options: its own where they are given, else the policy's."""
    options = {name: getattr(config, name) for name in names_of(OptimConfig)}
    for name in APART:
        own = getattr(config, f"critic_{name}")
        options[name] = options[name] if own is None else own
    return OptimConfig(**options)


def planned(config: Config) -> Config:
    """A run's config with the steps of `critic_only`, where they are given."""
    if not isinstance(config, CriticConfig) or not config.critic_only:  # what is none is refused when the run begins
        return config
    return config.changed(steps=config.critic_only, num_train_epochs=None)


class OwnCritic:
    """The critic in an engine, with an optimizer of its own."""

    def __init__(self, trained, tokenizer=None):
        self.engine = trained
        self.tokenizer = tokenizer

    def values(self, part: Batch) -> torch.Tensor:
        """(b, T - 1): what is expected before each token, 0 where masked."""
        return self.engine(part.input_ids, part.response_mask)

    def backward(self, value_loss: torch.Tensor) -> None:
        """Gradients of the loss of a micro-batch, over its denominators of all ranks."""
        self.engine.backward(value_loss * ranks.world_size())  # the engine averages over ranks

    def optimizer_step(self, step: int) -> dict[str, float]:
        """One update; its metrics."""
        found = engine.optimizer_step(self.engine, step)
        return {"optim/critic_lr": found["lr"], "optim/critic_grad_norm": found["optim/grad_norm"]}

    def skip(self, updates: int) -> None:
        """As `Policy.skip`."""
        for _ in range(updates):
            self.engine.lr_scheduler.step()

    def save(self, folder: Path) -> None:
        """Write critic and tokenizer in the Hub format, complete or not at all."""
        save_reward_model(self.engine, self.tokenizer, folder)


def load_critic(config: RunConfig, tokenizer, device: torch.device, updates: int) -> OwnCritic:
    """The critic, for `updates` optimizer steps; refuses one that reads tokens otherwise."""
    name = config.critic or config.model
    revision = config.revision if config.critic is None else None
    critic = load_reward_model(name, revision, config, config, device, kind=Critic)
    if config.critic is not None:
        check_reads_policy("critic", name, tokenizer, config.model)
    return OwnCritic(engine.initialize(critic, optim_of(config), config, updates), tokenizer)
