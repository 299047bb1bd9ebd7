"""Activations that are computed again in the backward pass, and where the inputs of the layers wait for it."""

from collections.abc import Callable
from typing import Any

import torch

from ..base.text import InputError


def checkpoint_activations(model: Any, on: str) -> None:
    """Have a transformers model compute its layers again in the backward pass; `on` is where their inputs wait."""
    # The reentrant form has no gradient where its inputs have none, as under adapters.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if on == "cpu":
        # transformers has no public name for the function that its layers call.
        name = "_gradient_checkpointing_func"
        layers = [module for module in model.modules() if name in vars(module)]
        if not layers:
            problem = f"{type(model).__name__} of this transformers recomputes in another way"
            raise InputError(f"checkpoint_activations_on=cpu: {problem}; choose device")
        for layer in layers:
            setattr(layer, name, _with_inputs_on_cpu(getattr(layer, name)))


def _with_inputs_on_cpu(checkpoint: Callable) -> Callable:
    """Return a checkpoint function whose tensors wait in CPU memory: the inputs, as it saves nothing else."""

    def checkpoint_on_cpu(*inputs):
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(*inputs)

    return checkpoint_on_cpu
