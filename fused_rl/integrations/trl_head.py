"""TRL's fused LM head on our row kernels: log-probabilities, entropy and three metrics per token, logits in tiles.

The row state serves every output. With s = (x - max x) / temperature it holds sum(exp(s)) without the maximum's own
term, also at half the temperature, where it is the sum of squares; so log(sum p^2) is a difference of two numbers of
its own size, whatever the logits' offset. The mean of linear logits is hidden . mean(weight) + mean(bias).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fused_rl.base.backend import backend_of
from fused_rl.ops import tiles

# So many elements of logits are in fp32 at once.
_MEAN_ELEMENTS = 1 << 22


class Head(NamedTuple):
    """How hidden states become scores: x = cap(hidden @ weight.T + bias) * inv_temperature."""

    inv_temperature: float
    softcap: float | None
    outputs: tuple[str, ...]
    dtype: torch.dtype  # of the products' factors
    logits_dtype: torch.dtype | None = None


def capped_mean(logits: Tensor, softcap: float) -> Tensor:  # (n, V) -> (n,) fp32
    step = max(1, _MEAN_ELEMENTS // logits.shape[1])
    means = [
        (logits[c].float() / softcap).tanh_().mean(-1) for c in tiles.blocks(len(logits), step)
    ]
    return softcap * torch.cat(means)


def linear_mean(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # (n, H), (V, H), (V,) -> (n,) fp32; on a GPU no copy of the weight is in fp32.
    mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
    return mean if bias is None else mean + bias.mean(dtype=torch.float32)


def scored(hidden, weight, bias, targets, head, budget):
    """`RowStatistics` of all rows, and by name what else `head.outputs` asks for, (n,) each."""
    n = hidden.shape[0]
    backend = backend_of(hidden.device).logprob
    squares = (
        hidden.new_zeros(n, dtype=torch.float32) if "log_sum_sq_probs" in head.outputs else None
    )
    top = torch.zeros_like(targets) if "is_top1" in head.outputs else None
    capped = head.softcap is not None and "mean_logits" in head.outputs
    means = hidden.new_zeros(n, dtype=torch.float32) if capped else None

    def visit(rows, logits):
        if squares is not None:
            # At half the temperature exp(s) is squared, so its sum is that of the squares.
            at_half = backend.logprob_fwd(
                logits, targets[rows], None, 2 * head.inv_temperature, head.softcap
            )
            squares[rows] = at_half.rest.log1p()
        if top is not None:
            # Of equal logits the first one counts, as in TRL.
            top[rows] = logits.max(-1).indices
        if means is not None:
            means[rows] = capped_mean(logits, head.softcap)

    statistics = tiles.statistics(
        hidden, weight, bias, targets, head.inv_temperature, head.softcap, budget, visit
    )
    extra = {}
    if squares is not None:
        extra["log_sum_sq_probs"] = squares - 2 * statistics.rest.log1p()
    if top is not None:
        # In a row that is -inf throughout no token is the likeliest.
        extra["is_top1"] = (top == targets) & (statistics.logprobs > -torch.inf)
    if "mean_logits" in head.outputs:
        means = linear_mean(hidden, weight, bias) if means is None else means
        extra["mean_logits"] = means * head.inv_temperature
    return statistics, extra


def cast(dtype, hidden, weight, bias):
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class HeadLogprobs(torch.autograd.Function):
    """(N, H), (V, H), (V,) | None, (N,) -> log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1, (N,) each.

    The first two are differentiable with respect to hidden, weight and bias, whose gradients are summed in fp32 and
    come in the dtypes of those; an output that `head` does not ask for is None.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, head, gathered):
        ctx.set_materialize_grads(False)
        inputs = cast(head.dtype, hidden, weight, bias)
        budget = tiles.budget(None, inputs[0], len(inputs[1]), False, head.logits_dtype)
        # The mean of the logits is a product in fp32, which autocast would round.
        with torch.autocast(hidden.device.type, enabled=False):
            statistics, extra = scored(*inputs, targets, head, budget)
        ctx.options = head, gathered, budget
        ctx.save_for_backward(
            hidden, weight, bias, targets, statistics.entropy.clone(), statistics.m, statistics.rest
        )
        entropy = statistics.entropy if "entropy" in head.outputs else None
        ctx.mark_non_differentiable(*extra.values())
        return (
            statistics.logprobs,
            entropy,
            *map(extra.get, ("log_sum_sq_probs", "mean_logits", "is_top1")),
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dlogprobs, dentropy, *_):
        if dlogprobs is None and dentropy is None:
            return (None,) * 6
        hidden, weight, bias, targets, *statistics = ctx.saved_tensors
        head, gathered, budget = ctx.options
        upstream = dlogprobs, dentropy, None
        # ZeRO 3 has partitioned the head again since the forward pass.
        with gathered(weight, bias):
            dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
            inputs = cast(head.dtype, hidden, weight, bias)
            options = head.inv_temperature, head.softcap, budget
            gradients = tiles.recomputed(
                ctx.needs_input_grad[:3], upstream, *inputs, targets, statistics, *options, dtypes
            )
            return *gradients.take(), None, None, None
