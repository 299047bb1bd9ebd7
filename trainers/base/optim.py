"""AdamW, its schedule and clipping, as an `OptimConfig` describes them."""

import math

import torch
from torch import nn

import fused_rl
from fused_rl.trainers.options import OptimConfig


def adamw(parameters: list[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW (arXiv:1711.05101) over `parameters`; norms and biases, which have one dimension, do not decay."""
    decayed = [p for p in parameters if p.dim() > 1 or not config.weight_decay]
    spared = [p for p in parameters if p.dim() < 2 and config.weight_decay]
    groups = [{"params": decayed}] if decayed else []
    if spared:
        groups.append({"params": spared, "weight_decay": 0.0})
    options = {"lr": config.lr, "weight_decay": config.weight_decay, "eps": config.adam_eps}
    options["fused"] = True  # reads and writes every weight once: on a CPU torch's own choice is a loop of ten passes
    optimizer = torch.optim.AdamW(groups, betas=(0.9, config.adam_beta2), **options)
    return fused_rl.tf_adam_epsilon(optimizer) if config.tf_adam else optimizer


def schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, updates: int):
    """Return the learning rate's schedule over `updates` steps: a warm-up, then constant or annealed to zero."""
    from transformers import get_scheduler

    name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
    return get_scheduler(name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=updates)


class LastStep:
    """The learning rate and gradient norm of an optimizer's last step, noted before the schedule moves on."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.lr: float | None = None
        self.grad_norm: torch.Tensor | None = None
        """The norm before clipping; None where nothing here has clipped."""
        self.optimizer = optimizer
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "lr", optimizer.param_groups[0]["lr"]))

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> None:
        """Scale the gradient of every step from now on down to `max_norm`; 0 only measures it."""
        limit = max_norm or float("inf")

        def before_step(*_):
            self.grad_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            norm = self.grad_norm.item()
            if not math.isfinite(norm):
                self.optimizer.zero_grad()  # a step without gradients changes no weight; the caller sees the norm
            elif norm + 1e-6 > 0.99 * limit:  # torch adds that; below, it would multiply every gradient by 1
                nn.utils.clip_grads_with_norm_(parameters, limit, self.grad_norm)

        self.optimizer.register_step_pre_hook(before_step)
