"""Log-probabilities, and losses of single tokens, from hidden states (N, H) and the output head (V, H).

The (N, V) logits never exist: `tiles` forms them a tile at a time. There are five ways to do so. A loss here is that of
`linear_token_loss` or `linear_cross_entropy`, FLOP are those of both passes per logit, and bytes come beside inputs and
results: those of the workspace, and those that the backward pass needs.

    way         taken                                              FLOP  workspace                kept
    forward     where no input needs a gradient                     2 H  tile                     nothing
    recomputed  by linear_token_logprobs                            8 H  tile + 4 H min(N, V)     12 N
    at once     by a loss, where a tile of 512 rows or of all fits  6 H  tile + 4 H V             gradients
    in two      by a loss, where it does not                        8 H  tile + 4 H min(N, V)     gradients
    kept sets   by linear_token_logprobs with `support`             6 H  none                     4 per kept id

- A logit takes 2 H in its product, and 2 H in each of the products for the gradients of the hidden states and of the
  weight. A weight that needs no gradient saves the last 2 H.
- A tile takes what the workspace has left beside the fp32 sum of a gradient over tiles. Only 16-bit inputs with more
  than one tile need a sum: at once that of the weight's gradient, because a tile is whole rows; when logits are
  recomputed, the smaller one (`tiles.backward_tile`). Where none is needed, as for a weight without a gradient, a loss
  is always formed at once, however few rows a tile has.
- "At once" and "in two" form the gradients in the forward pass (`LinearLoss`), and the backward pass only scales them.
  If the graph is used again, they are recomputed, for 6 H more.
- For kept sets FLOP are per kept id, and so are bytes, because the logits are kept. Rows with the whole vocabulary, or
  with more ids than 64 and than a 128th of it (a 32nd in fp32 on a CPU), are recomputed in tiles (`linear_support`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_rl.base.checks import (
    LOGITS_DTYPES,
    check_head_tensors,
    check_logits_dtype,
    check_range,
    check_rows,
    check_softcap,
    check_target_values,
    check_targets,
    check_temperature,
    check_temperature_values,
    check_tensor,
    check_tensors,
    check_transforms,
    described,
    once_differentiable,
    values_are_checked,
)
from fused_rl.base.graphs import breaks_graph
from fused_rl.base.outputs import LinearTokenLoss, TokenLogprobs, unless_modified
from fused_rl.base.shards import gather, scatter
from fused_rl.ops import tiles
from fused_rl.ops.linear_support import LinearSupport
from fused_rl.ops.rows import row_bwd, row_fwd
from fused_rl.ops.token_support import TokenSupport, check_support, check_support_values


class _LinearTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, inv_temperature, softcap, budget, visit):
        ctx.options = inv_temperature, softcap, budget
        logprobs, entropy, lse, m, rest = tiles.statistics(
            hidden, *gather(weight, bias), targets, *ctx.options, visit
        )
        ctx.save_for_backward(hidden, weight, bias, targets, m, rest)
        # nothing counts the changes of a tensor of inference mode
        ctx.entropy = entropy.detach(), 0 if entropy.is_inference() else entropy._version
        ctx.set_materialize_grads(False)
        return logprobs, entropy, lse

    @staticmethod
    @once_differentiable("linear_token_logprobs")
    def backward(ctx, *upstream):
        hidden, weight, bias, targets, m, rest = ctx.saved_tensors
        if all(d is None for d in upstream):
            return (None,) * 8
        inputs = hidden, *gather(weight, bias), targets
        entropy = _entropy(ctx, inputs)
        gradients = tiles.recomputed(
            ctx.needs_input_grad, upstream, *inputs, (entropy, m, rest), *ctx.options
        )
        return *scatter(gradients.take(), weight, bias), *(None,) * 5


def _entropy(ctx, inputs):
    """Return the entropy that the forward pass returned, computed again where the caller has modified it."""
    entropy = unless_modified(*ctx.entropy)
    return tiles.statistics(*inputs, *ctx.options).entropy if entropy is None else entropy


def _token_gradients(token_loss, statistics, per_token):
    """Sum of the token losses, detached, and its gradient by each statistic, None where it does not use one."""
    # Hooks of a checkpoint around the op would run its forward pass again for this graph, which ends here.
    no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.enable_grad(), no_hooks:
        leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in statistics]
        values = token_loss(*leaves, *per_token)
        rows = statistics[1].shape
        if not isinstance(values, Tensor) or values.shape != rows:
            wanted = f"one value per token, {tuple(rows)}, unreduced"
            raise ValueError(f"token_loss must return {wanted}; got {described(values)}")
        total = values.float().sum()
        gradients: list[Any] = [None] * len(leaves)
        if total.requires_grad:  # a constant loss has no gradient
            used = [i for i, x in enumerate(leaves) if x is not None]
            used_gradients = torch.autograd.grad(
                total, [leaves[i] for i in used], allow_unused=True
            )
            for i, d in zip(used, used_gradients, strict=True):
                gradients[i] = None if d is None else d.contiguous()
        if gradients[0] is None:
            gradients[0] = torch.zeros_like(leaves[0])
        return total.detach(), gradients


class TokenLoss(NamedTuple):
    """A loss of single tokens, and what it is called with before `per_token`."""

    function: Callable[..., Tensor]
    # (n,) logprobs and entropy; for True the lse, too, and the mean logit or None
    takes_lse: bool = False
    # (V,) fp32, of each logit in the mean
    share: Tensor | None = None
    # of (rows, tile) before the loss of these rows, as in `tiles.statistics`
    visit: Callable[[slice, Tensor], None] | None = None

    def mean(self, weight, bias):
        return None if self.share is None else tiles.MeanLogit(weight, bias, self.share)

    def gradients(self, statistics, mean, per_token):
        inputs = statistics[:2]
        if self.takes_lse:
            inputs = *statistics[:3], mean
        total, gradients = _token_gradients(self.function, inputs, per_token)
        missing = (None,) * (4 - len(gradients))
        return total, (*gradients, *missing)


def _gradients_at_once(step, needs, hidden, weight, bias, targets, options, token_loss, per_token):
    """Loss, gradients, upstream gradients and statistics, each tile of `step` rows of logits formed once."""
    # one tile of logits, used again and again, and what all tiles add to
    inv_temperature, softcap, budget = options
    n, vocab = hidden.shape[0], weight.shape[0]
    gradients = tiles.Gradients(needs, hidden, weight, bias, (step, vocab))
    formed = tiles.Logits(weight, bias, step * vocab, budget, softcap)
    mean = token_loss.mean(weight, bias)

    def of_tile(rows):
        # the tile's statistics, its loss, and the gradient of its logits
        inv_t = tiles.at(inv_temperature, rows)
        logits = formed.tile(hidden[rows])
        statistics = row_fwd(logits, targets[rows], None, inv_t, softcap)
        if token_loss.takes_lse:
            statistics = formed.with_common(statistics, hidden[rows], inv_t)
        if token_loss.visit is not None:
            token_loss.visit(rows, logits)
        means = None if mean is None else mean.of(hidden[rows], inv_t)
        value, upstream = token_loss.gradients(statistics, means, [p[rows] for p in per_token])
        dlogits = formed.gradient(logits)
        state = statistics.entropy, statistics.m, statistics.rest
        row_bwd(upstream[:3], logits, targets[rows], None, state, inv_t, softcap, out=dlogits)
        gradients.add(dlogits, hidden[rows], weight, rows, slice(0, vocab))
        # what is returned, and what a second backward pass would need
        return value, [statistics.logprobs, *state, *upstream]

    if step == n:  # the only tile has the results
        loss, results = of_tile(slice(0, n))
    else:  # no views of one tensor: they are returned
        loss = hidden.new_zeros((), dtype=torch.float32)
        # four statistics and four upstream gradients, of which the first is as the targets
        results = [loss.new_zeros(shape) for shape in 2 * [targets.shape, n, n, n]]
        for rows in tiles.blocks(n, step):
            value, tile_results = of_tile(rows)
            loss += value
            for total, values in zip(results, tile_results, strict=True):
                if values is not None:
                    total[rows] = values
    statistics, upstream = results[:4], results[4:]
    if mean is not None:
        mean.add_gradient(gradients, upstream[3], hidden, inv_temperature)
    return loss, gradients, upstream, statistics


def _recomputed(needs, upstream, hidden, weight, bias, targets, state, options, mean):
    """`Gradients` from those of logprobs, entropy, lse and mean, over recomputed tiles of logits."""
    gradients = tiles.recomputed(
        needs, upstream[:3], hidden, weight, bias, targets, state, *options
    )
    if mean is not None:
        mean.add_gradient(gradients, upstream[3], hidden, options[0])
    return gradients


def _value(hidden, weight, bias, targets, options, token_loss, per_token):
    """Statistics, `MeanLogit` or None, the loss, and its gradients by the statistics."""
    visit = token_loss.visit
    statistics = tiles.statistics(hidden, weight, bias, targets, *options, visit=visit)
    mean = token_loss.mean(weight, bias)
    means = None if mean is None else mean.of(hidden, options[0])
    return statistics, mean, *token_loss.gradients(statistics, means, per_token)


def _gradients_in_two(needs, hidden, weight, bias, targets, options, token_loss, per_token):
    """`_gradients_at_once` with the logits formed a second time: no sum of the weight's gradient over rows."""
    statistics, mean, loss, upstream = _value(
        hidden, weight, bias, targets, options, token_loss, per_token
    )
    state = statistics.entropy, statistics.m, statistics.rest
    gradients = _recomputed(needs, upstream, hidden, weight, bias, targets, state, options, mean)
    return loss, gradients, upstream, (statistics.logprobs, *state)


class LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, inv_temperature, softcap, budget, token_loss, *per_token
    ):
        head = gather(weight, bias)
        needs = ctx.needs_input_grad[:3]
        options = inv_temperature, softcap, budget
        if not any(needs):
            row_statistics, _, loss, _ = _value(
                hidden, *head, targets, options, token_loss, per_token
            )
            return loss, row_statistics.logprobs, row_statistics.entropy
        step = tiles.one_pass_rows(hidden, len(weight), needs, budget)
        form = functools.partial(_gradients_at_once, step) if step else _gradients_in_two
        loss, gradients, upstream, statistics = form(
            needs, hidden, *head, targets, options, token_loss, per_token
        )
        logprobs, entropy, m, rest = statistics

        # the backward pass only scales these, once: a graph that is used again starts from the statistics
        ctx.gradients = scatter(gradients.take(), weight, bias)
        ctx.save_for_backward(hidden, weight, bias, targets, m, rest, *upstream)
        # nothing counts the changes of a tensor of inference mode
        ctx.entropy = entropy.detach(), 0 if entropy.is_inference() else entropy._version
        ctx.options = options
        # a visitor may hold a tile of its own, which ends with this pass
        ctx.token_loss = token_loss._replace(visit=None)
        ctx.mark_non_differentiable(logprobs, entropy)
        return loss, logprobs, entropy

    @staticmethod
    @once_differentiable("linear_token_loss")
    def backward(ctx, dloss, *_):
        return loss_backward(ctx, dloss)


def loss_backward(ctx, dloss):
    """What the forward pass has formed, times the gradient of the loss; a retained graph recomputes it."""
    rest_of_inputs = (None,) * (len(ctx.needs_input_grad) - 3)
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is not None:
        # on a CPU a pass over (V, H) costs a tenth of the GEMMs; a GPU would have to wait to know the number
        as_they_are = dloss.device.type == "cpu" and dloss == 1
        if not as_they_are:
            # in place: no second copy of a (V, H) tensor
            gradients = [None if d is None else d.mul_(dloss) for d in gradients]
        return *gradients, *rest_of_inputs
    # the gradients formed in the forward pass belong to their first user
    hidden, weight, bias, targets, m, rest, *upstream = ctx.saved_tensors
    upstream = [None if d is None else d * dloss for d in upstream]
    head = gather(weight, bias)
    inputs = hidden, *head, targets
    state = _entropy(ctx, inputs), m, rest
    mean = ctx.token_loss.mean(*head)
    gradients = _recomputed(ctx.needs_input_grad, upstream, *inputs, state, ctx.options, mean)
    return *scatter(gradients.take(), weight, bias), *rest_of_inputs


def _autocast(hidden, weight, bias):
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    bias = None if bias is None else bias.to(dtype)
    return hidden.to(dtype), weight.to(dtype), bias


def _check_head(hidden, weight, targets, bias, mask, shift):
    """Return the shape of the rows."""
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be (..., H) and weight (V, H), as in torch.nn.Linear; got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    rows = check_rows(hidden, mask, shift)
    check_targets(targets, "hidden", hidden, shift)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be (V,) = ({weight.shape[0]},), got {tuple(bias.shape)}")
    operands = [t for t in (hidden, weight, bias) if t is not None]
    dtypes = [t.dtype for t in operands]
    if len(set(dtypes)) > 1 or hidden.dtype not in LOGITS_DTYPES:
        raise ValueError(
            "hidden, weight and bias must have one dtype, float32, bfloat16 or float16, or be under autocast; got "
            + ", ".join(map(str, dtypes))
            + "; cast the hidden states to the head's, hidden.to(weight.dtype)"
        )
    devices = {t.device for t in (*operands, targets)}
    if len(devices) > 1:
        raise ValueError(
            f"hidden, weight, targets and bias must be on one device, got {sorted(map(str, devices))}"
        )
    return rows


class _Rows(NamedTuple):
    """The rows that count, as the autograd functions take them, and where they came from."""

    arguments: tuple  # hidden (n, H), weight, bias, targets (n,) or (n, K), inv_temperature, softcap, `tiles.Budget`
    kept: Tensor | None  # (n,) their positions; None when all count
    shape: torch.Size  # of the rows, as the caller has them

    def select(self, per_row):  # (..., *rest) -> (n, *rest)
        if len(self.shape) != 1:
            rest = per_row.shape[len(self.shape) :]
            per_row = per_row.reshape(self.shape.numel(), *rest)
        return per_row if self.kept is None else per_row[self.kept]

    def restore(self, values):  # (n, *rest) -> (..., *rest), 0 where masked
        if self.kept is None and len(self.shape) == 1:
            return values
        rest = values.shape[1:]
        if self.kept is not None:
            zeros = values.new_zeros(self.shape.numel(), *rest)
            values = zeros.index_copy(0, self.kept, values)
        return values.view(self.shape + rest)


def _places(mask):
    """(n,) where the mask is True; None where all of it is. A device is waited for once."""
    if mask is None:
        return None
    kept = mask.reshape(-1).nonzero()[:, 0]
    return None if len(kept) == mask.numel() else kept


def rows_that_count(
    hidden,
    weight,
    targets,
    bias,
    temperature,
    mask,
    softcap,
    shift,
    workspace_mb,
    logits_dtype,
    like=None,
):
    """Check the arguments and drop masked rows before any GEMM; `like`: rows of another call with the same mask."""
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    hidden, weight, bias = _autocast(hidden, weight, bias)
    shape = _check_head(hidden, weight, targets, bias, mask, shift)
    check_temperature(temperature, shape, hidden.device)
    check_softcap(softcap)
    if workspace_mb is not None:
        check_range("workspace_mb", workspace_mb, "a finite number above 0", "; it is in MiB")
    check_logits_dtype(logits_dtype, hidden.dtype)
    # position t with the target of t + 1
    if shift:
        hidden = hidden[:, :-1]
        targets = targets[:, 1:]

    # masked rows go before any GEMM
    kept = _places(mask) if like is None else like.kept
    rows = _Rows((), kept, torch.Size(shape))
    row_temperature = None
    if isinstance(temperature, Tensor):
        row_temperature = temperature.detach().to(hidden.device, torch.float32)
        row_temperature = row_temperature.expand(rows.shape)
    # while rows still have the caller's places, which messages name
    if values_are_checked(hidden.device):
        several = targets.dim() == hidden.dim()
        check_target_values(targets, mask, weight.shape[0], several=several)
        check_temperature_values(row_temperature, mask)
    if row_temperature is not None:
        temperature = rows.select(row_temperature)
    inv_temperature = 1.0 / temperature
    hidden = rows.select(hidden)
    targets = rows.select(targets).long()
    copied = rows.kept is not None
    budget = tiles.budget(workspace_mb, hidden, len(weight), copied, logits_dtype)
    arguments = hidden, weight, bias, targets, inv_temperature, softcap, budget
    return rows._replace(arguments=arguments)


@breaks_graph
def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    softcap: float | None = None,
    shift: bool = False,
    workspace_mb: float | None = None,
    logits_dtype: torch.dtype | None = None,
    support: TokenSupport | None = None,
    visit: Callable[[slice, Tensor], None] | None = None,
) -> TokenLogprobs:
    """Log-probability of each target, entropy and log-sum-exp in nats, from hidden states and the output head.

    The logits are recomputed in the backward pass (8 H FLOP per logit in all), so any loss can follow, and a retained
    graph can be used again. If the loss is a sum over single tokens, `linear_token_loss` needs only 6 H.

    Args:
        hidden: (..., H) fp32, bf16 or fp16. Under autocast, `hidden`, `weight` and `bias` are cast as autocast does.
        weight: (V, H), as in `torch.nn.Linear`. It may be tied or frozen. It may be a DeepSpeed ZeRO-3 parameter (then
            call this function inside the forward of the module that DeepSpeed was given), or an FSDP2 shard (DTensor),
            which is gathered here in the forward and in the backward pass, and whose gradient is averaged over the
            mesh.
        targets: (...) integers below V, or (..., K), K targets per row; only those under the mask are read.
        bias: (V,).
        temperature: a number, or a tensor that broadcasts to (...), one per token. To scale the logits by s, give
            `temperature / s`, and with soft-capping also `softcap / s`.
        mask: (...) bool, True where a token counts; others are dropped before any work and get a gradient of 0.
        softcap: logits become softcap * tanh(logits / softcap), before the temperature.
        shift: hidden (B, T, H) at t scores targets (B, T) at t + 1, or (B, T, K). Outputs, mask and per-row temperature
            are (B, T - 1); for `support` it has the rows of all T targets.
        workspace_mb: MiB that may be used beside inputs, outputs and gradients, for tiles of logits, copies of the rows
            that count, and fp32 sums of low-precision gradients. It changes results only within rounding. None means
            512 on a CPU. On a GPU it means an eighth of the free memory, rounded down to three binary digits, or what
            one pass of `linear_token_loss` needs if that is more (and at most half of the free memory). If a number is
            too small for that, the forward pass uses one row of logits, and the backward pass uses a quarter of the
            workspace for logits beside sums of 4 min(N, V) H bytes.
        logits_dtype: the dtype of the logits of 16-bit operands. torch.float32 is that of the sums of their products.
            With the operands' dtype each logit is rounded, which moves a log-probability by 7e-3 to 4e-2. None means
            float32 on CUDA and ROCm (torch 2.10 or newer), whose products return it, and the operands' dtype on a CPU,
            which has to cast them (docs/numerics.md has both errors and costs). The gradients of the logits are in any
            case rounded to the operands' dtype, because their products are in it.
        support: the ids that a truncated sampler kept for each of the targets, including the target. All three outputs
            are then over these ids alone, and tokens outside the set get no gradient. Only the kept rows of the weight
            are read, without logits and without a GEMM over V. The weight's gradient has the same bits in any order of
            the tokens; on a CPU, the rows of a large gradient that no set touches are memory that was never written.
            Rows with an empty range, and rows with so many ids that a GEMM is cheaper, go through tiles together.
        visit: `visit(rows, logits)` reads each tile of logits (r, V) in the forward pass and must not modify it; `rows`
            are a slice of the tokens that count. The logits are without `softcap` and `temperature`, and may lack what
            all logits of a row have in common. With `support` it is not called.

    Returns:
        TokenLogprobs(logprobs, entropy, lse), fp32, 0 where masked: logprobs have the shape of the targets, and the
        others (...). All three are differentiable once with respect to hidden, weight and bias. Gradients have the
        dtypes of the inputs and are summed in fp32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; an option out of range; on CPU, or with
            FUSED_RL_CHECKED=1 in the environment, a target outside the vocabulary or its kept set, an id outside the
            vocabulary, or a row's temperature out of range.
    """
    check_tensors(hidden=hidden, targets=targets)
    check_head_tensors(weight=weight, bias=bias)
    check_transforms("linear_token_logprobs", hidden, weight, bias)
    if support is not None:
        check_support(support, several=targets.dim() == hidden.dim())
    options = temperature, mask, softcap, shift, workspace_mb, logits_dtype
    rows = rows_that_count(hidden, weight, targets, bias, *options)
    if support is None:
        outputs = _LinearTokenLogprobs.apply(*rows.arguments, visit)
        return TokenLogprobs(*map(rows.restore, outputs))

    # the sets of the rows that count
    sets = support.of_rows(targets.shape, targets.device)
    if shift:
        sets = sets.at((slice(None), slice(1, None)))
        targets = targets[:, 1:]
    if values_are_checked(targets.device):
        check_support_values(sets, targets, mask, weight.shape[0])
    begin = rows.select(sets.begin)
    end = rows.select(sets.end)
    inputs, options = rows.arguments[:4], rows.arguments[4:]
    outputs = LinearSupport.apply(*inputs, sets.ids, begin, end, *options)
    return TokenLogprobs(*map(rows.restore, outputs))


@breaks_graph
def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: Callable[..., Tensor],
    *per_token: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    softcap: float | None = None,
    shift: bool = False,
    workspace_mb: float | None = None,
    logits_dtype: torch.dtype | None = None,
    visit: Callable[[slice, Tensor], None] | None = None,
) -> LinearTokenLoss:
    """Sum of a loss of single tokens over the mask, its gradients formed in the forward pass: 6 H FLOP per logit.

    `token_loss(logprobs, entropy, *per_token)` gets (n,) fp32 tensors for some of the tokens that count, or (n, K)
    logprobs if there are K targets per token, and the values of each `per_token` for the same tokens. It returns (n,)
    values, each of which depends on its own token only. (A mean, or a ratio over a sequence, does not; use
    `linear_token_logprobs` for these.) Denominators belong into a weight per token, or onto the returned loss, where a
    factor scales every gradient. Only `logprobs` and `entropy` carry gradients.

        def clipped(logprobs, entropy, old_logprobs, advantages):
            ratio = (logprobs - old_logprobs).exp()
            return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

        loss, *_ = linear_token_loss(hidden, weight, targets, clipped, old_logprobs, advantages, mask=mask)

    Args:
        hidden, weight, targets, bias, temperature, mask, softcap, shift, workspace_mb, logits_dtype, visit: as in
            `linear_token_logprobs`. If more than one tile is needed, the fp32 sum of the weight's gradient of bf16 or
            fp16 inputs (4 V H bytes) is part of the workspace. If it leaves room for less than 512 rows of logits, the
            logits are formed twice, in 8 H FLOP.
        token_loss: the function described above; it may be called several times. Metrics can be computed from the
            returned tensors.
        per_token: (..., *) tensors without gradients, which hold what the loss needs per token; (B, T - 1, *) with
            `shift`. Where hidden is (N, H) and there is no mask, `visit` may fill in the rows that it is called for:
            `token_loss` is called for them afterwards.

    Returns:
        LinearTokenLoss(loss, logprobs, entropy): the sum () fp32, differentiable once with respect to hidden, weight
        and bias; and detached, in fp32 and 0 where masked, the log-probabilities in the shape of the targets and the
        entropy (...) in nats. A retained graph may be used again, which recomputes the logits. In fp16 the gradients
        are formed before any later loss scale is applied.

    Raises:
        ValueError: as `linear_token_logprobs`; a per_token that has another shape or requires a gradient; a token_loss
            that returns another shape.
    """
    check_tensors(hidden=hidden, targets=targets)
    check_head_tensors(weight=weight, bias=bias)
    check_transforms("linear_token_loss", hidden, weight, bias)
    options = temperature, mask, softcap, shift, workspace_mb, logits_dtype
    rows = rows_that_count(hidden, weight, targets, bias, *options)
    # the gradient is formed here, in the forward pass: nothing given per token could get one
    for i, values in enumerate(per_token):
        check_tensor(f"per_token[{i}]", values)
        if values.shape[: len(rows.shape)] != rows.shape:
            raise ValueError(
                f"per_token[{i}] must start with the targets' shape {tuple(rows.shape)}, got {tuple(values.shape)}"
            )
        if values.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"per_token[{i}] requires a gradient, which token_loss cannot give; pass it detached"
            )
    selected = map(rows.select, per_token)
    function = TokenLoss(token_loss, visit=visit)
    loss, logprobs, entropy = LinearLoss.apply(*rows.arguments, function, *selected)
    return LinearTokenLoss(loss, rows.restore(logprobs), rows.restore(entropy))
