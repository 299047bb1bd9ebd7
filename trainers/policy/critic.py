"""A value per token: the reward that the rest of a response is expected to bring, before each of its tokens.

A critic of its own is a reward model that is read at every token; it is saved as one, so either can start the other.
`critic=shared` is a head on the policy's backbone instead: half the memory, and one optimizer for both.
Left out: heads of more than one layer, distributions over values, saving a shared head apart from checkpoints.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import torch
from torch import nn

import fused_rl
from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.base.written import listed_folder
from fused_rl.trainers.data.batch import Batch
from fused_rl.trainers.models.language_model import LanguageModel
from fused_rl.trainers.models.reward_model import RewardModel, check_reads_policy
from fused_rl.trainers.options.config import (
    Decay,
    InputError,
    NonNegative,
    NonNegativeInt,
    OptimConfig,
    Positive,
    RunConfig,
    names_of,
)
from fused_rl.trainers.options.needs import Needs
from fused_rl.trainers.options.source import Source
from fused_rl.trainers.policy.policy import Passed, Policy

SHARED = "shared"  # as `critic`: the policy's own backbone
Config = TypeVar("Config", bound=RunConfig)
APART = ("lr", "lr_schedule", "warmup_steps", "weight_decay", "adam_beta2", "max_grad_norm")


@dataclass(kw_only=True)
class CriticConfig(OptimConfig):
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

    def forward(self, input_ids, mask, temperature=1.0, *, want_values=False, **options):
        """As `LanguageModel`; with `want_values` also the values, as `Critic` returns them."""
        if want_values:
            return self._with_values(input_ids, mask, temperature, **options)
        return super().forward(input_ids, mask, temperature, **options)

    def _with_values(self, input_ids, mask, temperature, *, support=None, packed=None, token_loss=None, per_token=()):
        lm, targets = self.base, input_ids[:, 1:]
        hidden = lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        values = torch.where(mask, self.value_head(hidden), 0)
        head = lm.get_output_embeddings()
        options = {"temperature": temperature, "mask": mask, "bias": head.bias, **self.head_options}
        if token_loss is not None and support is None:
            return fused_rl.linear_token_loss(hidden, head.weight, targets, token_loss, *per_token, **options), values
        if support is not None:
            options["support"] = support.spread(mask)
        rows = fused_rl.linear_token_logprobs(hidden, head.weight, targets, **options)
        if token_loss is None:
            return rows, values
        loss = fused_rl.masked_sum(token_loss(rows.logprobs, rows.entropy, *per_token), mask)
        return fused_rl.LinearTokenLoss(loss, rows.logprobs.detach(), rows.entropy.detach()), values


def _values(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(B, T, H) and (1, H) -> (B, T) fp32; not as a matrix product, whose order of summation depends on the batch."""
    return (hidden.float() * weight.float()).sum(-1)


class OwnCritic:
    """A critic with weights and an optimizer of its own."""

    extend = None  # of the policy

    def __init__(self, engine_of_critic, tokenizer=None):
        self.engine, self.tokenizer = engine_of_critic, tokenizer
        self.engines = {"critic": engine_of_critic}  # beside the policy's, in checkpoints

    def values(self, policy: Policy, part: Batch, passed: Passed | None = None) -> torch.Tensor:
        """(b, T - 1): what is expected before each token, 0 where masked."""
        return self.engine(part.input_ids, part.response_mask)

    def backward(self, policy: Policy, loss: torch.Tensor, value_loss: torch.Tensor) -> None:
        """Gradients of both losses of a micro-batch."""
        self.engine.backward(value_loss * ranks.world_size())  # the engine averages over ranks
        policy.backward(loss)

    def optimizer_step(self, step: int) -> dict[str, float]:
        """One update of the critic."""
        found = engine.optimizer_step(self.engine, step)
        return {"optim/critic_lr": found["lr"], "optim/critic_grad_norm": found["optim/grad_norm"]}

    def skip(self, updates: int) -> None:
        """As `Policy.skip`."""
        for _ in range(updates):
            self.engine.lr_scheduler.step()

    def save(self, folder: Path) -> None:
        """Write critic and tokenizer in the Hub format, complete or not at all."""
        zero3 = self.engine.zero_optimization_stage() == 3
        state = self.engine._zero3_consolidated_16bit_state_dict() if zero3 else None
        if ranks.rank() == 0:
            with listed_folder(folder) as unfinished:
                self.engine.module.save_pretrained(str(unfinished), state)
                self.tokenizer.save_pretrained(unfinished)
        ranks.barrier()


class SharedCritic:
    """The same of a head on the policy's backbone: the policy's passes, optimizer and checkpoints are its own."""

    extend = PolicyWithValues
    engines: ClassVar[dict] = {}

    def __init__(self, value_coef: float):
        self.value_coef = value_coef

    def values(self, policy: Policy, part: Batch, passed: Passed | None = None) -> torch.Tensor:
        """As `OwnCritic.values`; those that a pass of the policy has given, if there was one."""
        return policy.values(part) if passed is None else passed.values

    def backward(self, policy: Policy, loss: torch.Tensor, value_loss: torch.Tensor) -> None:
        """Gradients of the sum of both."""
        policy.backward(loss + self.value_coef * value_loss)

    def optimizer_step(self, step: int) -> dict[str, float]:
        """Nothing: the policy's is its step too."""
        return {}

    def skip(self, updates: int) -> None:
        """Nothing of its own."""

    def save(self, folder: Path) -> None:
        """Nothing: its head is in the checkpoints alone."""


def load_critic(config: RunConfig, tokenizer, device: torch.device, updates: int) -> OwnCritic | SharedCritic:
    """The critic, one of its own for `updates` optimizer steps; refuses one that reads tokens otherwise."""
    if config.critic == SHARED:
        return SharedCritic(config.value_coef)
    name = config.critic or config.model
    critic = Critic.from_pretrained(
        name,
        dtype=engine.torch_dtype(config),
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_targets=config.lora_targets,
        revision=config.revision if config.critic is None else None,
        attn_implementation=config.attn_implementation,
    )
    if config.critic is not None:
        check_reads_policy("critic", name, critic, tokenizer, config.model, config.revision)
    if config.gradient_checkpointing:
        critic.classifier.gradient_checkpointing_enable({"use_reentrant": False})
    return OwnCritic(engine.initialize(critic.to(device), optim_of(config), config, updates), tokenizer)


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
