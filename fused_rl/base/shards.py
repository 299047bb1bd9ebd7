"""Whole parameters out of FSDP2 shards, and this rank's part of a whole gradient."""

import sys
from typing import Any

from torch import Tensor


def gather(weight: Tensor, bias: Tensor | None) -> tuple[Any, Any]:
    """The whole tensors: an FSDP2 shard is gathered, in the forward pass and again in the backward pass."""
    # ZeRO 3 may have partitioned them since the forward pass.
    check_gathered(weight=weight, bias=bias)
    return _full(weight), _full(bias)


def check_gathered(**named: Any) -> None:
    """Refuse weights and biases that DeepSpeed ZeRO 3 holds in parts, of which nothing is left here."""
    for name, x in named.items():
        if x is not None and x.shape == (0,):
            raise ValueError(
                f"{name} has shape (0,), as a parameter that DeepSpeed ZeRO 3 has partitioned. Call this inside the "
                "forward of the module given to deepspeed.initialize, or keep the parameter gathered "
                "(deepspeed.zero.GatheredParameters) until the backward pass is over"
            )


def _full(parameter):
    return parameter.full_tensor() if is_dtensor(parameter) else parameter


def scatter(gradients, weight, bias):
    """The gradients of hidden states, whole weight and whole bias, the last two as this rank's of its own."""
    if not (is_dtensor(weight) or is_dtensor(bias)):
        return gradients
    dhidden, dweight, dbias = gradients
    return dhidden, _scattered(dweight, weight), _scattered(dbias, bias)


def _scattered(gradient, parameter):
    """This rank's gradient of the whole tensor as the tensor's own kind; over shards the mean, as FSDP2 reduces."""
    if gradient is None or not is_dtensor(parameter):
        return gradient
    # Where a DTensor exists, this module is loaded already; elsewhere nobody waits for it.
    from torch.distributed.tensor import DTensor, Partial

    mesh = parameter.device_mesh
    # `Partial` sums over the mesh what the tokens of each rank give for the whole tensor.
    partial = DTensor.from_local(
        gradient.div_(mesh.size()), mesh, [Partial()] * mesh.ndim, run_check=False
    )
    return partial.redistribute(placements=parameter.placements)


def is_dtensor(tensor):
    # No DTensor exists before its module is imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
