"""AdamW, its schedule and clipping, and their options."""

import math
from collections.abc import Callable
from typing import Any, Literal

import pydantic
import torch
from torch import nn

import fused_rl
from fused_rl.base.checks import check_range

from . import ranks
from .options import Decay, NonNegative, NonNegativeInt, Options, Positive, may_change
from .text import InputError, in_a_line, load_function

SCHEDULES = ("constant", "linear", "cosine")
Schedule = Callable[[int, int], float]
"""(update, number of updates in the run) -> the learning rate over its peak; updates are counted from 0."""


class OptimConfig(Options):
    """The optimizer."""

    lr: NonNegative = may_change(1e-6)
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] | str | Schedule = may_change("linear")
    """After the warm-up: constant, or annealed to zero at the last update; or a function as module:function, which
    returns the factor of lr for (update, number of updates) (docs/hooks.md)."""
    warmup_steps: NonNegativeInt = may_change(0)
    """Optimizer updates with a rising learning rate."""
    weight_decay: NonNegative = may_change(0.0)
    """Decoupled weight decay of all weights except norms and biases."""
    adam_beta2: Decay = may_change(0.999)
    """Decay of the second moment."""
    adam_eps: Positive = may_change(1e-8)
    """Adam's epsilon."""
    tf_adam: bool = False
    """Epsilon outside the bias correction, as in TensorFlow 1: smaller first updates (fused_rl.tf_adam_epsilon)."""
    max_grad_norm: NonNegative = may_change(1.0)
    """Gradients are scaled down to this norm; 0 switches it off."""

    @pydantic.field_validator("lr_schedule")
    @classmethod
    def _named(cls, value: str | Schedule) -> str | Schedule:
        if isinstance(value, str) and value not in SCHEDULES and ":" not in value:
            names = ", ".join(SCHEDULES)
            raise InputError(f"lr_schedule={value!r}: expected one of {names}, or module:function")
        return value


def adamw(parameters: list[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW (arXiv:1711.05101) over `parameters`; norms and biases, which have one dimension, do not decay."""
    decayed, spared = [], []
    for parameter in parameters:
        decays = len(ranks.whole_shape(parameter)) > 1 or not config.weight_decay
        (decayed if decays else spared).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}] if decayed else []
    if spared:
        groups.append({"params": spared, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(
        groups,
        config.lr,
        betas=(0.9, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        # Reads and writes every weight once: on a CPU torch's own choice is a loop of ten passes.
        fused=True,
    )
    return fused_rl.tf_adam_epsilon(optimizer) if config.tf_adam else optimizer


def schedule_function(chosen: str | Schedule) -> str | Schedule:
    """Return a schedule of the user's own as a function, and one of `SCHEDULES` by its name."""
    if isinstance(chosen, str) and chosen not in SCHEDULES:
        return load_function("lr_schedule", chosen)
    return chosen


def users_factors(chosen: str | Schedule, updates: int) -> list[float]:
    """Return what a schedule of the user's own says for every update; nothing for one of `SCHEDULES`."""
    chosen = schedule_function(chosen)
    factors = []
    if isinstance(chosen, str):
        return factors
    # All are asked before the first update, so that none fails after hours.
    for update in range(updates):
        try:
            factors.append(chosen(update, updates))
            check_range("the factor", factors[-1], "a finite number, 0 or more")
        except Exception as error:
            problem = f"lr_schedule at update {update} of {updates}"
            raise InputError(f"{problem}: {in_a_line(error)}") from error
    return factors


def schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, updates: int):
    """Return the learning rate's schedule over `updates` steps: a warm-up, then constant, annealed, or the user's."""
    from transformers import get_scheduler

    name = config.lr_schedule
    factors = users_factors(name, updates)
    if isinstance(name, str) and not factors:
        name = "constant_with_warmup" if name == "constant" else name
        return get_scheduler(
            name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=updates
        )

    def factor(update: int) -> float:
        rising = min(1.0, update / config.warmup_steps) if config.warmup_steps else 1.0
        # After the last update torch asks once more.
        return rising * factors[min(update, updates - 1)]

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Clipping:
    """Scales the gradient of every step of an optimizer down to `max_norm`; 0 only measures it."""

    norm: torch.Tensor
    """Of the last step's gradient, before clipping."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float
    ):
        self.parameters = parameters
        self.limit = max_norm or float("inf")
        optimizer.register_step_pre_hook(self)

    def __call__(self, optimizer: torch.optim.Optimizer, *_) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.norm = nn.utils.get_total_norm(gradients)
        norm = self.norm.item()
        if not math.isfinite(norm):
            optimizer.zero_grad()  # a step without gradients changes no weight; the caller sees the norm
        # torch adds 1e-6 to the norm, too; below the limit it would multiply every gradient by 1.
        elif norm + 1e-6 > 0.99 * self.limit:
            nn.utils.clip_grads_with_norm_(self.parameters, self.limit, self.norm)
