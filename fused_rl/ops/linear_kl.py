"""Exact KL of two output heads over the same tokens (distillation), from hidden states: no (N, V) tensor of logits.

In FLOP per logit 2H for each head forward, and again for the logits recomputed backward, and 4H for the gradients.
"""

import torch
from torch import Tensor

from fused_rl.base.backend import backend_of
from fused_rl.base.checks import (
    check_head_tensors,
    check_tensors,
    check_transforms,
    once_differentiable,
)
from fused_rl.base.graphs import breaks_graph
from fused_rl.base.outputs import unless_modified
from fused_rl.kernels.states import JensenShannonSums, shares_of
from fused_rl.ops import tiles
from fused_rl.ops.kl import Direction, check_direction
from fused_rl.ops.linear import gather, rows_that_count, scatter

_TILES = 3  # of one size at once: the logits of both heads and the gradient of one


def _pair(logits, ref_logits, direction):
    """(1, n, V) each: the distribution whose divergence is taken, then from which."""
    pair = (ref_logits, logits) if direction == "forward" else (logits, ref_logits)
    return [x[None] for x in pair]


class _LinearTokenKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, ref_hidden, ref_weight, ref_bias, *options):
        ctx.options = options
        heads = *gather(weight, bias), *gather(ref_weight, ref_bias)
        divergence, *state = _statistics(hidden, ref_hidden, heads, options)
        ctx.save_for_backward(hidden, weight, bias, ref_hidden, ref_weight, ref_bias, *state)
        # nothing counts the changes of a tensor of inference mode
        ctx.divergence = (
            divergence.detach(),
            0 if divergence.is_inference() else divergence._version,
        )
        return divergence

    @staticmethod
    @once_differentiable("linear_token_kl")
    def backward(ctx, g):
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, *state = ctx.saved_tensors
        inputs = hidden, ref_hidden, (*gather(weight, bias), *gather(ref_weight, ref_bias))
        divergence = unless_modified(*ctx.divergence)
        if divergence is None:
            divergence, *_ = _statistics(*inputs, ctx.options)
        statistics = divergence, *state
        gradients = _gradients(
            ctx.needs_input_grad, g.contiguous(), *inputs, statistics, ctx.options
        )
        return *scatter(gradients.take(), weight, bias), *(None,) * 8


def _statistics(hidden, ref_hidden, heads, options):
    """Return the divergence (n,), `KLState` (9, n), and `JensenShannonSums` (3, n) or None."""
    weight, bias, ref_weight, ref_bias = heads
    inv_temperature, direction, jsd_beta, softcap, budget = options
    n, vocab = hidden.shape[0], weight.shape[0]
    backend = backend_of(hidden.device)
    step = tiles.tile_rows(hidden, vocab * _TILES * budget.dtype.itemsize, budget.bytes)
    of_policy = tiles.Logits(weight, bias, step * vocab, budget, softcap)
    of_reference = tiles.Logits(ref_weight, ref_bias, step * vocab, budget, softcap)
    divergence, state, sums = [], [], []
    for rows in tiles.blocks(max(n, 1), step):  # without rows, too, there is a tile
        logits = of_policy.tile(hidden[rows])
        ref_logits = of_reference.tile(ref_hidden[rows])
        x, y = _pair(logits, ref_logits, direction)
        inv_t = tiles.at(inv_temperature, rows)
        of_rows, state_rows = backend.kl.kl_fwd(x, y, None, inv_t, softcap)
        # Jensen-Shannon is a second pass over the tile, which needs the state of the first
        if jsd_beta is not None:
            pair = x, y, None, inv_t, state_rows, softcap
            sums_rows = backend.jensen_shannon.js_fwd(*pair, shares_of(jsd_beta))
            sums.append(sums_rows)
            of_rows = JensenShannonSums(*sums_rows).divergence.clone()  # no view: it is returned
        divergence.append(of_rows)
        state.append(state_rows)
    return _joined(divergence), _joined(state), _joined(sums) if sums else None


def _joined(of_tiles):
    """Return the rows of all tiles, without a copy of those of a single one."""
    return of_tiles[0] if len(of_tiles) == 1 else torch.cat(of_tiles, -1)


def _gradients(needs, g, hidden, ref_hidden, heads, statistics, options):
    weight, bias, ref_weight, ref_bias = heads
    inv_temperature, direction, jsd_beta, softcap, budget = options
    n, vocab = hidden.shape[0], weight.shape[0]
    backend = backend_of(hidden.device)
    tile = tiles.backward_tile(hidden, vocab, needs, budget, copies=_TILES)
    gradients = tiles.Gradients(needs, hidden, weight, bias, tile)
    size = tile[0] * tile[1]
    of_policy = tiles.Logits(weight, bias, size, budget, softcap)
    of_reference = tiles.Logits(ref_weight, ref_bias, size, budget, softcap)
    wants = (False, True) if direction == "forward" else (True, False)
    for rows in tiles.blocks(n, max(1, tile[0])):
        divergence, state, sums = (
            None if s is None else s[..., rows].contiguous() for s in statistics
        )
        shares = None if jsd_beta is None else shares_of(jsd_beta)
        inv_t = tiles.at(inv_temperature, rows)
        # both heads' logits again, and the gradient of the policy's
        for columns in tiles.blocks(vocab, tile[1]):
            logits = of_policy.tile(hidden[rows], columns)
            ref_logits = of_reference.tile(ref_hidden[rows], columns)
            x, y = _pair(logits, ref_logits, direction)
            both = backend.kl.kl_bwd(
                g[rows], x, y, None, inv_t, divergence, state, sums, *wants, softcap, shares
            )
            dlogits = both[wants.index(True)]
            gradients.add(dlogits[0], hidden[rows], weight[columns], rows, columns)
            del both, dlogits  # else it stays while the next tile's is formed
    return gradients


@breaks_graph
def linear_token_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    direction: Direction = "reverse",
    jsd_beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    softcap: float | None = None,
    shift: bool = False,
    workspace_mb: float | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Exact divergence per token between a policy and a reference in nats, from the hidden states and head of each.

    This is `token_kl` of the logits of both heads, of which only a tile exists at a time. It serves distillation and an
    exact KL penalty.

    Args:
        hidden, weight, bias: (..., H), (V, H), (V,) of the policy, as in `linear_token_logprobs`.
        ref_hidden, ref_weight, ref_bias: (..., H'), (V, H'), (V,) of the reference. They are constants and get no
            gradient, even if they require one. H' may differ from H. For gradients on both sides use `token_kl`.
        direction, jsd_beta, temperature, mask, softcap, shift: as in `token_kl`; for `shift` hidden (B, T, H) and
            ref_hidden (B, T, H') are of whole sequences, and the last position counts for nothing.
        workspace_mb, logits_dtype: as in `linear_token_logprobs`, for the logits of both heads.

    Returns:
        (...) fp32, 0 where masked, differentiable once with respect to hidden, weight and bias. A loss of any form can
        follow, and a retained graph can be used again.

    Raises:
        ValueError: a direction, shape, dtype or device that does not fit.
    """
    beta = check_direction(direction, jsd_beta)
    check_tensors(hidden=hidden, ref_hidden=ref_hidden)
    check_head_tensors(weight=weight, ref_weight=ref_weight, bias=bias, ref_bias=ref_bias)
    check_transforms("linear_token_kl", hidden, weight, bias)
    if ref_hidden.shape[:-1] != hidden.shape[:-1] or ref_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"both must have the same tokens and vocabulary, got hidden {tuple(hidden.shape)} and "
            f"{tuple(ref_hidden.shape)}, weight {tuple(weight.shape)} and {tuple(ref_weight.shape)}"
        )
    ref_hidden, ref_weight = ref_hidden.detach(), ref_weight.detach()
    ref_bias = None if ref_bias is None else ref_bias.detach()

    # none is looked at
    targets = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
    options = temperature, mask, softcap, shift, workspace_mb, logits_dtype
    rows = rows_that_count(hidden, weight, targets, bias, *options)
    ref_rows = rows_that_count(ref_hidden, ref_weight, targets, ref_bias, *options, like=rows)
    hidden, weight, bias, _, inv_temperature, softcap, budget = rows.arguments
    reference = ref_rows.arguments[:3]
    if reference[0].dtype != hidden.dtype or reference[0].device != hidden.device:
        raise ValueError(
            f"both must have one dtype and device, got {hidden.dtype} on {hidden.device} and {reference[0].dtype} on "
            f"{reference[0].device}; convert one, or call this under autocast"
        )

    # what the reference's rows take is off the workspace too
    taken = reference[0].nbytes if rows.kept is not None else 0
    # the divergence takes twice as much there
    taken += tiles.CPU_ROWS_BYTES if hidden.device.type == "cpu" else 0
    budget = budget.less(taken)
    options = inv_temperature, direction, beta, softcap, budget
    return rows.restore(_LinearTokenKL.apply(hidden, weight, bias, *reference, *options))
