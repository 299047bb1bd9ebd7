"""Every op once more in a few lines of plain PyTorch, with the same names and arguments, also in fp64: the oracle of
the tests.

Nothing here is fast or small in memory. What is masked is computed from zeros and then dropped.
"""

import math

import torch

from fused_rl.base.outputs import LinearTokenLoss, TokenLogprobs


def _per_column(temperature):
    """A number, or one per row as it divides (..., V)."""
    per_row = isinstance(temperature, torch.Tensor) and temperature.dim()
    return temperature[..., None] if per_row else temperature


def _kept(rows, mask, shift=False):
    """(...) bool: the rows (..., n) that count; for `shift` not the last position."""
    if mask is None:
        return torch.ones(rows.shape[:-1], dtype=torch.bool, device=rows.device)
    return torch.nn.functional.pad(mask, (0, 1)) if shift else mask


def _allowed(support, shape):
    """(..., V) bool: the ids that each row keeps."""
    lengths = support.offsets.diff()
    # An empty range keeps the whole vocabulary.
    allowed = (lengths == 0)[:, None].repeat(1, shape[-1])
    allowed[torch.repeat_interleave(lengths), support.ids.long()] = True
    return allowed.view(shape)


def token_logprobs(
    logits,
    targets,
    *,
    temperature=1.0,
    mask=None,
    softcap=None,
    shift=False,
    inplace=False,
    support=None,
):
    """`fused_rl.token_logprobs` in the dtype of `logits`, by its definition; `inplace` has no effect."""
    # Position t predicts token t + 1, so the last position and the first target have no partner.
    allowed = None if support is None else _allowed(support, logits.shape)
    if shift:
        allowed = None if allowed is None else allowed[:, 1:]
        logits = logits[:, :-1]
        targets = targets[:, 1:]
    several = targets.dim() == logits.dim()
    targets = targets if several else targets[..., None]
    mask = _kept(logits, mask)
    # A row whose columns are all banned has no distribution; a softcap makes every column finite.
    banned_columns = logits.detach() == -torch.inf
    if allowed is not None:
        banned_columns = banned_columns | ~allowed
    banned = banned_columns.all(-1) if softcap is None else torch.zeros_like(mask)
    live = mask & ~banned

    # The logits that are compared, of rows that count: capped, divided by the temperature, without
    # what is not kept.
    x = torch.where(live[..., None], logits, 0)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    x = x / _per_column(temperature)
    x = x if allowed is None else x.masked_fill(~allowed & live[..., None], -torch.inf)

    # The sum without the maximum's 1, next to which the others would drown.
    top, index = x.max(-1, keepdim=True)
    rest = (x - top).exp().scatter(-1, index, 0).sum(-1, keepdim=True)
    logp = x - top - rest.log1p()
    # p * log p is 0 at banned tokens: where() on the input, so that 0 * inf reaches neither value
    # nor gradient.
    entropy = -(logp.exp() * torch.where(logp == -torch.inf, 0, logp)).sum(-1)
    # A target in a row without a distribution has probability 0, if the row counts.
    chosen = logp.gather(-1, torch.where(live[..., None], targets, 0).long())
    nothing = torch.where(mask & banned, -torch.inf, 0.0).to(x.dtype)
    chosen = torch.where(live[..., None], chosen, nothing[..., None])
    lse = torch.where(live, (top + rest.log1p())[..., 0], nothing)
    return TokenLogprobs(chosen if several else chosen[..., 0], entropy * live, lse)


def _head(hidden, weight, bias, logits_dtype):
    """Logits in the inputs' dtype, or in `logits_dtype` where that is wider, of products in it."""
    dtype = (
        hidden.dtype if logits_dtype is None else torch.promote_types(hidden.dtype, logits_dtype)
    )
    bias = None if bias is None else bias.to(dtype)
    return torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype), bias)


def linear_token_logprobs(
    hidden,
    weight,
    targets,
    *,
    bias=None,
    mask=None,
    shift=False,
    workspace_mb=None,
    logits_dtype=None,
    **options,
):
    """`fused_rl.linear_token_logprobs` in the inputs' dtype on every device; `workspace_mb` has no effect, and
    `options` are as in `token_logprobs`.
    """
    kept = _kept(hidden, mask, shift)
    logits = _head(torch.where(kept[..., None], hidden, 0), weight, bias, logits_dtype)
    return token_logprobs(logits, targets, mask=mask, shift=shift, **options)


def linear_token_loss(hidden, weight, targets, token_loss, *per_token, mask=None, **options):
    """`fused_rl.linear_token_loss` by its definition; `options` as in `linear_token_logprobs`."""
    logprobs, entropy, _ = linear_token_logprobs(hidden, weight, targets, mask=mask, **options)
    # The loss sees the tokens that count alone, so what it makes of others reaches nothing.
    kept = torch.ones_like(entropy, dtype=torch.bool) if mask is None else mask
    loss = token_loss(logprobs[kept], entropy[kept], *(values[kept] for values in per_token)).sum()
    return LinearTokenLoss(loss, logprobs.detach(), entropy.detach())


def linear_cross_entropy(
    hidden,
    weight,
    targets,
    *,
    bias=None,
    label_smoothing=0.0,
    z_loss=0.0,
    class_weight=None,
    ignore_index=-100,
    num_tokens=None,
    temperature=1.0,
    mask=None,
    softcap=None,
    shift=False,
    workspace_mb=None,
    logits_dtype=None,
):
    """`fused_rl.linear_cross_entropy` by its definition, of PyTorch's own function."""
    if shift:
        hidden, targets = hidden[:, :-1], targets[:, 1:]
    kept = targets != ignore_index if mask is None else mask & (targets != ignore_index)
    logits = _head(hidden[kept], weight, bias, logits_dtype)
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    per_row = isinstance(temperature, torch.Tensor)
    x = x / (temperature.expand(kept.shape)[kept][:, None] if per_row else temperature)
    class_weight = None if class_weight is None else class_weight.to(x.dtype)
    total_weight = kept.sum() if class_weight is None else class_weight[targets[kept]].sum()
    options = {"label_smoothing": label_smoothing, "reduction": "sum"}
    loss = torch.nn.functional.cross_entropy(x, targets[kept].long(), class_weight, **options)
    z = z_loss * torch.logsumexp(x, -1).square().sum() if z_loss else 0
    if num_tokens is None:
        return loss / total_weight + z / kept.sum()
    return (loss + z) / torch.as_tensor(num_tokens, dtype=x.dtype, device=x.device)


def kl_estimate(logprobs, ref_logprobs, kl_estimator="rk3", *, old_logprobs=None):
    """`fused_rl.kl_estimate` by the definitions, tangents included: it cancels near 0 where they do."""
    old_logprobs = logprobs if old_logprobs is None else old_logprobs
    d = logprobs - ref_logprobs
    r = _exp(logprobs - old_logprobs).detach()
    k1 = d
    k2 = d**2 / 2
    k3 = _exp(-d) - 1 + d
    # Straight-through: the value of one, the gradient of the other.
    straight_through = {"k1+": k2 + (k1 - k2).detach(), "k3+": k2 + (k3 - k2).detach()}
    weighted = {"k4": r * (k2 + d + (k1 - k2 - d).detach()), "rk3": r * straight_through["k3+"]}
    return {"k1": k1, "k2": k2, "k3": k3, **straight_through, **weighted}[kl_estimator]


def _exp(x):
    """exp, from 20 nats on its tangent."""
    # At 20 itself clamp has a slope and relu has none, so the slopes do not add up there.
    return x.clamp(max=20).exp() * (1 + torch.relu(x - 20))


def _kl(logp, logq):
    """sum p (log p - log q); columns without p add nothing."""
    return (logp.exp() * torch.where(logp.isinf(), 0, logp - logq)).sum(-1)


def token_kl(
    logits,
    ref_logits,
    *,
    direction="reverse",
    jsd_beta=0.5,
    temperature=1.0,
    mask=None,
    softcap=None,
    shift=False,
):
    """`fused_rl.token_kl` in the dtype of `logits`, for rows that are not -inf throughout."""
    if shift:
        logits, ref_logits = logits[:, :-1], ref_logits[:, :-1]
    mask = _kept(logits, mask)
    # A NaN in a masked row would pass through the divergence into the gradient.
    pair = (torch.where(mask[..., None], x, 0) for x in (logits, ref_logits))
    pair = pair if softcap is None else (softcap * torch.tanh(x / softcap) for x in pair)
    logp, logq = (torch.log_softmax(x / _per_column(temperature), -1) for x in pair)
    return _divergence(logp, logq, direction, jsd_beta).where(mask, 0)


def topk_kl(logprobs, ref_logprobs, *, direction="reverse", mask=None):
    """`fused_rl.topk_kl` for K tokens that are not all: the K outcomes, and the tail as one more."""
    mask = _kept(logprobs, mask)
    # Masked rows keep the tail alone, so that nothing of theirs reaches a gradient.
    counted = (torch.where(mask[..., None], x, -torch.inf) for x in (logprobs, ref_logprobs))
    # Without the tail as an outcome this would be no KL, and could be negative.
    logp, logq = (torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in counted)
    return _divergence(logp, logq, direction).where(mask, 0)


def _divergence(logp, logq, direction, jsd_beta=0.5):
    if direction == "reverse":
        return _kl(logp, logq)
    if direction == "forward":
        return _kl(logq, logp)
    # Columns without p and q: where() on the input, against 0 * inf in the gradient.
    none = logp.isinf() & logq.isinf()
    logp_or_0, logq_or_0 = (torch.where(none, 0, z) for z in (logp, logq))
    log_mixture = torch.logaddexp(
        logp_or_0 + math.log(1 - jsd_beta), logq_or_0 + math.log(jsd_beta)
    )
    p_a, q_b = (z.exp() * torch.where(z.isinf(), 0, z - log_mixture) for z in (logp, logq))
    return ((1 - jsd_beta) * p_a + jsd_beta * q_b).sum(-1)


def linear_token_kl(
    hidden,
    weight,
    ref_hidden,
    ref_weight,
    *,
    bias=None,
    ref_bias=None,
    mask=None,
    shift=False,
    workspace_mb=None,
    logits_dtype=None,
    **options,
):
    """`fused_rl.linear_token_kl` by its definition; `options` as in `token_kl`."""
    kept = _kept(hidden, mask, shift)
    hidden, ref_hidden = (torch.where(kept[..., None], h, 0) for h in (hidden, ref_hidden))
    heads = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
    logits, ref_logits = (_head(*head, logits_dtype) for head in heads)
    return token_kl(logits, ref_logits, mask=mask, shift=shift, **options)


def gae(rewards, values, mask, *, gamma, gae_lambda):
    """`fused_rl.gae` by its definition: the loop from the last token to the first, in the inputs' dtype."""
    advantages = torch.zeros_like(rewards)
    returns = torch.zeros_like(rewards)
    for b in range(rewards.shape[0]):
        # Beyond the last token that counts, value and advantage are 0.
        value = advantage = 0.0
        for t in mask[b].nonzero()[:, 0].flip(0).tolist():
            # A_t = delta_t + gamma * lambda * A_(t+1), from arXiv:1506.02438, eq. 16.
            advantage = (
                rewards[b, t] + gamma * value - values[b, t] + gamma * gae_lambda * advantage
            )
            value = values[b, t]
            advantages[b, t], returns[b, t] = advantage, advantage + value
    return advantages, returns
