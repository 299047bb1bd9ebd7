"""Layers that are compiled one by one, as torchtitan does, which a run does where its option says so."""

from typing import Any

import torch

from ..base.text import InputError


def compile_layers(model: Any) -> None:
    """Compile each layer of a transformers model by itself, for rows of any length."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise InputError(
            f"torch_compile: {type(model).__name__} has no layers that transformers marks"
        )
    # All layers of all models share one table of graphs: with a gradient and without, trained and frozen, with a mask
    # and without. Where it is full, layers run as they are.
    torch._dynamo.config.recompile_limit = 64
    for layer in layers:
        layer.compile(dynamic=True)
