"""The cross-entropy of an output head with label smoothing, class weights and z-loss, without its logits.

One pass, as `linear_token_loss`: beside the target's log-probability a row needs its log-sum-exp, which is there, and
the mean of its logits, which is linear in the hidden states.
"""

import torch
from torch import Tensor

from fused_rl.base.checks import (
    check_head_tensors,
    check_range,
    check_rows,
    check_targets,
    check_tensor,
    check_tensors,
    check_transforms,
    described,
    once_differentiable,
    values_are_checked,
)
from fused_rl.base.graphs import breaks_graph
from fused_rl.ops.linear import LinearLoss, TokenLoss, loss_backward, rows_that_count


class _LinearCrossEntropy(LinearLoss):
    backward = staticmethod(
        once_differentiable("linear_cross_entropy")(
            lambda ctx, dloss, *_: loss_backward(ctx, dloss)
        )
    )


@breaks_graph
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    num_tokens: int | float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    softcap: float | None = None,
    shift: bool = False,
    workspace_mb: float | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Mean cross-entropy in nats of the targets, as `torch.nn.functional.cross_entropy`, from hidden states and head.

    Its gradients are formed in the forward pass, in 6 H FLOP per logit, like those of `linear_token_loss`. For a token
    with V logits x, log-probabilities log p, weights w of the classes (1 by default) and a target y, the loss is

        -(1 - label_smoothing) w[y] log p[y] - label_smoothing / V * sum(w * log p) + z_loss * logsumexp(x)^2

    Args:
        hidden, weight, bias, temperature, softcap, shift, workspace_mb, logits_dtype: as in `linear_token_logprobs`.
        targets: (...) integers below V, or `ignore_index`.
        label_smoothing: the part of each target that is spread over all classes, from 0 to 1. The loss is infinite
            where a class has a logit of -inf and a weight, as torch's is; its gradients are finite.
        z_loss: coefficient of the squared log-sum-exp in nats^2 of the logits, after the softcap and divided by the
            temperature; Liger calls it lse_square_scale.
        class_weight: (V,) floating point, a weight for each class, as `weight` of torch's function.
        ignore_index: the target of a token that does not count.
        num_tokens: the number by which the sum over tokens is divided, for example the tokens of the whole batch, over
            micro-batches and processes; 1 returns the sum. None means the tokens of this call, or with class weights
            the sum of their targets' weights, as in torch (z_loss is a mean over the tokens in any case). A tensor must
            hold one number; it gets no gradient.
        mask: (...) bool, True where a token counts, beside `ignore_index`; (B, T - 1) for `shift`.

    Returns:
        fp32 () or in the shape of `num_tokens`, differentiable once with respect to hidden, weight and bias. Where no
        token counts and the denominator is 0 it is NaN, as torch's mean is, and the gradients are 0.

    Raises:
        ValueError: as `linear_token_logprobs`; several targets per row; label smoothing beside a softcap; a class
            weight that is not (V,) or requires a gradient; a number of tokens that is not one number, or requires a
            gradient; one that is negative or not finite, of a tensor where values are checked: on a CPU, or with
            FUSED_RL_CHECKED=1 in the environment.
    """
    check_tensors(hidden=hidden, targets=targets)
    check_head_tensors(weight=weight, bias=bias)
    check_transforms("linear_cross_entropy", hidden, weight, bias)
    check_rows(hidden, mask, shift)
    check_targets(targets, "hidden", hidden, shift)
    if targets.dim() == hidden.dim():
        raise ValueError(
            f"linear_cross_entropy takes one target per row, {tuple(hidden.shape[:-1])}, got {tuple(targets.shape)}"
        )
    _check_num_tokens(num_tokens)
    check_range("label_smoothing", label_smoothing, "a number from 0 to 1")
    check_range("z_loss", z_loss, "a finite number, 0 or more")
    if label_smoothing and softcap is not None:
        raise ValueError(
            "label_smoothing needs logits without a softcap; compute the loss from the logits, with "
            "torch.nn.functional.cross_entropy"
        )
    vocab = len(weight)
    if class_weight is not None:
        _check_class_weight(class_weight, weight)

    # the rows that count, and the weight of each
    labels = targets[:, 1:] if shift else targets
    counted = labels.long() != ignore_index  # in uint8, -100 would be 156
    mask = counted if mask is None else mask & counted
    options = temperature, mask, softcap, shift, workspace_mb, logits_dtype
    rows = rows_that_count(hidden, weight, targets, bias, *options)
    states, _, _, ids, *_ = rows.arguments
    n = len(ids)
    weights = states.new_ones(n, dtype=torch.float32)  # the weight may be a shard
    share = weights.new_full((vocab,), 1 / max(1, vocab))
    if class_weight is not None:
        weights = class_weight.float()[ids]
        share = class_weight.float() / vocab
    total_share = share.sum()

    # denominators: a loss without tokens is 0 / 0 where they are its own, with a gradient of 0
    total_weight = n if class_weight is None else weights.sum()
    count = total_weight if num_tokens is None else num_tokens
    # of a number no upload, which a device would wait for
    count = count.to(weights) if isinstance(count, Tensor) else weights.new_full((), count)
    fraction = 1 / count.reshape(()) if n else weights.new_zeros(())
    # of the tokens' mean beside a sum over weights
    z_scale = z_loss if num_tokens is not None else z_loss * total_weight / max(1, n)
    # A share of a large batch times a small probability is 0 in fp16, where the caller's loss scale comes too late:
    # there the share is taken after the gradients are formed. Elsewhere it goes in, and saves them a rounding.
    late = states.dtype == torch.float16
    slopes = torch.cat([weights, total_share[None]])
    factor = _fp16_scale(states, slopes) if late else fraction

    def plain(logprobs, _, weights):
        return -(1 - label_smoothing) * weights * logprobs * factor

    def regularized(logprobs, entropy, lse, mean, weights):
        loss = plain(logprobs, entropy, weights)
        if label_smoothing:
            loss = loss + label_smoothing * factor * (total_share * lse - mean)
        return loss + z_scale * factor * lse.square() if z_loss else loss

    token_loss = TokenLoss(plain)
    if label_smoothing or z_loss:
        token_loss = TokenLoss(regularized, True, share if label_smoothing else None)
    loss, *_ = _LinearCrossEntropy.apply(*rows.arguments, token_loss, weights)
    if late:
        loss = loss * (fraction / factor)
    # no view, which could not be scaled in place under FSDP2
    return loss + (torch.zeros_like(count) if n else 0 / count)


def _fp16_scale(states, slopes):
    """The power of 2, up to 1, with which sums of all rows' gradients stay far below 65504, ()."""
    # a token's gradient of a logit is at most the largest of `slopes`; the bias has states of 1
    sums = torch.linalg.vector_norm(states, 1, dim=0, dtype=torch.float32)
    most = torch.nn.functional.pad(sums, (0, 1), value=len(states)).max() * slopes.abs().max()
    return torch.exp2((2.0**14 / most).log2().floor()).clamp(max=1)


def _check_num_tokens(num_tokens):
    if num_tokens is None:
        return
    value = num_tokens
    if isinstance(num_tokens, Tensor):
        check_tensor("num_tokens", num_tokens)
        no_number = num_tokens.dtype.is_complex or num_tokens.dtype == torch.bool
        if num_tokens.numel() != 1 or no_number:
            raise ValueError(f"num_tokens must be one number, got {described(num_tokens)}")
        if num_tokens.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "num_tokens requires a gradient, which it does not get; pass it detached"
            )
        if not values_are_checked(num_tokens.device):
            return
        value = num_tokens.item()
    check_range("num_tokens", value, "a finite number, 0 or more")


def _check_class_weight(class_weight, weight):
    check_tensor("class_weight", class_weight)
    vocab = len(weight)
    if class_weight.shape != (vocab,) or not class_weight.dtype.is_floating_point:
        raise ValueError(
            f"class_weight must be ({vocab},) floating point, got {described(class_weight)}"
        )
    if class_weight.device != weight.device:
        raise ValueError(
            f"class_weight must be on the device of weight, {weight.device}, got {class_weight.device}"
        )
    if class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "class_weight requires a gradient, which it does not get; pass it detached"
        )
