"""One sampled token per row of logits: one read, and no wait of the host for the device."""

import torch
from torch import Tensor

from fused_rl.base.backend import backend_of
from fused_rl.base.checks import (
    check_device,
    check_logits,
    check_plain,
    check_temperature,
    described,
)
from fused_rl.base.graphs import skips_dispatcher
from fused_rl.base.outputs import SampledTokens


def sample_token(
    logits: Tensor, philox_state: Tensor, *, temperature: float = 1.0
) -> SampledTokens:
    """Sample a token of each row from softmax(logits / temperature), with its log-probability.

    The token is Gumbel's argmax, that of x_j / temperature - log E_j with independent exponential times E_j: the logits
    are read once, and no probability is stored. -inf logits (banned tokens) are never sampled. The random numbers
    depend on the seed, the offset and the row's index alone, so a row gets the same token whatever the other rows and
    their number are; CPUs have other numbers than GPUs. Seed and offset are read on the device: a CUDA graph that has
    captured the call samples anew at each replay if the offset is raised in between, or in the graph.

        philox_state = torch.tensor([seed, 0], device="cuda")
        token = fused_rl.sample_token(logits, philox_state).tokens
        philox_state[1] += 1

    Args:
        logits: (B, V), bf16, fp16 or fp32.
        philox_state: (2,) int64 on the device of the logits, the seed and the offset. Every call needs an offset of its
            own; it is not raised here.
        temperature: a number from 1e-6 to 1e6. For greedy sampling take `logits.argmax(-1)`.

    Returns:
        `SampledTokens(tokens, logprobs, broken)`, (B,) each and not differentiable. The log-probability is that of
        `token_logprobs` to fp32 rounding. A row that has NaN or +inf, or is -inf throughout, has no distribution: it is
        broken, with any token of the vocabulary and a log-probability of NaN.

    Raises:
        ValueError: a shape, dtype or device that does not fit; a temperature out of range.
    """
    check_logits("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits must be (B, V), got {tuple(logits.shape)}")
    if not isinstance(philox_state, Tensor) or philox_state.dtype != torch.int64:
        raise ValueError(
            f"philox_state must be an int64 tensor (2,), got {described(philox_state)}"
        )
    check_plain("philox_state", philox_state)
    if philox_state.shape != (2,):
        raise ValueError(
            f"philox_state must be (2,): seed, offset; got {tuple(philox_state.shape)}"
        )
    check_device("philox_state", philox_state, logits.device, "logits")
    check_temperature(temperature, (), logits.device)
    inputs = logits.detach(), philox_state, 1.0 / float(temperature)
    if skips_dispatcher(logits, philox_state):
        return SampledTokens(*_sample(*inputs))
    return SampledTokens(*torch.ops.fused_rl.sample_token(*inputs))


def _sample(
    logits: Tensor, philox_state: Tensor, inv_temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    return backend_of(logits.device).sampling.sample_token(rows, philox_state, inv_temperature)


_operator = torch.library.custom_op("fused_rl::sample_token", _sample, mutates_args=())


@_operator.register_fake
def _sample_fake(logits, philox_state, inv_temperature):
    # shapes and dtypes alone, for torch.compile
    dtypes = torch.int64, torch.float32, torch.bool
    return tuple(logits.new_empty(len(logits), dtype=dtype) for dtype in dtypes)
