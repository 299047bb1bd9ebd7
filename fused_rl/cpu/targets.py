"""The CPU path of K targets per row, with the functions of `fused_rl.kernels.targets`, which has the formulas.

The row functions of `fused_rl.cpu.logprob` do the work on the vocabulary; what is (N, K) is done here in fp64. A target
outside the columns at hand stands for column 0 with an upstream gradient of 0, which writes there what belongs there.
"""

import torch

from fused_rl.cpu import compiled
from fused_rl.cpu.logprob import FLAT, capped, finite, fp64_per_row, logprob_bwd, logprob_fwd

_CHUNK = 1 << 14  # targets whose fp64 gradients are formed in the cache


def targets_fwd(logits, targets, mask, inv_temperature, softcap):
    """`logprob_fwd` for targets (N, K): the statistics' logprobs are (N, K)."""
    n, vocab = logits.shape
    # of column 0, whose log-probability is not used
    any_target = targets.new_zeros(n)
    statistics = logprob_fwd(logits, any_target, mask, inv_temperature, softcap)

    # of masked rows and other ranks' columns there is nothing to find
    ids = targets.clamp(0, vocab - 1)
    m = statistics.m.double()[:, None]
    rest = statistics.rest.double()[:, None]
    inv_t = fp64_per_row(inv_temperature, n)[:, None]
    x = capped(logits.gather(1, ids), softcap).double()
    s = x.sub_(finite(m)) * inv_t
    s.clamp_(max=0)  # a capped logit computed alone may lie an ulp above the maximum
    logprobs = s.sub_(rest.log1p()).float()
    if mask is not None:
        logprobs = torch.where(mask[:, None], logprobs, 0.0)
    return statistics._replace(logprobs=logprobs)


def targets_bwd(
    dlogprobs,
    dentropy,
    dlse,
    logits,
    targets,
    mask,
    entropy,
    m,
    rest,
    inv_temperature,
    softcap,
    out=None,
):
    """`logprob_bwd` for dlogprobs and targets (N, K); ids outside the vocabulary get no gradient of their own."""
    n, vocab = logits.shape
    statistics = (mask, entropy, m, rest, inv_temperature, softcap)
    if dlogprobs is None or targets.numel() == 0:
        any_target = targets.new_zeros(n)
        return logprob_bwd(None, dentropy, dlse, logits, any_target, *statistics, out=out)

    # upstream gradients per target, and of all that are the same id
    live = m != -torch.inf
    if mask is not None:
        live = mask & live
    here = live[:, None] & (targets >= 0) & (targets < vocab)
    ids = torch.where(here, targets, 0)
    d = torch.where(here, dlogprobs, 0.0)
    d_of_id = _summed_by_id(ids, d, vocab)
    total = dlogprobs.sum(1, dtype=torch.float64)

    # the gradients of the targets' logits, while these still stand, a few rows at a time
    dentropy = m.new_zeros(n) if dentropy is None else dentropy
    dlse = m.new_zeros(n) if dlse is None else dlse
    inv_t = fp64_per_row(inv_temperature, n)
    per_row = total, dentropy, dlse, entropy, m, rest, inv_t
    per_row = [values.double()[:, None] for values in per_row]
    dx = logits.new_empty(ids.shape)
    step = max(1, _CHUNK // targets.shape[1])
    for begin in range(0, n, step):
        c = slice(begin, begin + step)
        target_logits = logits[c].gather(1, ids[c])
        x = capped(target_logits, softcap).double()
        of_rows = [values[c] for values in per_row]
        dx[c] = _gradient(x, d_of_id[c], d[c], softcap, *of_rows)
    dx[~live] = 0

    # the row first, which may take the logits' place, then the targets: equal ids write equal values
    dlse_of_row = (dlse - total).float()
    out = logprob_bwd(None, dentropy, dlse_of_row, logits, ids[:, 0], *statistics, out=out)
    rows = torch.arange(n, device="cpu")[:, None]
    out[rows, ids] = dx.to(out.dtype)  # scatter_ would copy the row first
    return out


def _gradient(x, d_of_id, d, softcap, total, dentropy, dlse, entropy, m, rest, inv_t):
    """The gradient of targets' logits as that of a single one: (n, K) fp64 capped logits, (n, 1) fp64 per row."""
    # of the total its own share leaves that of the others, but at a maximum with most of the mass, where these would be
    # lost: they are summed alone. Of two at the maximum (rest >= 1) neither has most, and each is the other's other
    top = torch.where(rest < 1, m, torch.inf)
    is_below = x < top
    d_below = torch.where(is_below, d, 0.0)
    below = d_below.sum(1, keepdim=True, dtype=torch.float64)
    d_other_ids = torch.where(is_below, total - d_of_id, below)

    # as the target's column in `logprob_bwd`, where the other targets take from dlse
    log1p = rest.log1p()
    mean = log1p - entropy
    s = ((x - m) * inv_t).clamp_(FLAT, 0)
    logp = s - log1p
    dp = dlse - d_other_ids - dentropy * (s - mean)
    one_minus_p = -logp.expm1()
    dx = d_of_id * one_minus_p + logp.exp_() * dp
    slope = inv_t if softcap is None else inv_t * (1 - (x / softcap).square())
    return dx.mul_(slope)


def _summed_by_id(ids, d, vocab):
    """(N, K), (N, K) fp32 -> fp64, for each element the sum over all of its row that have its id."""
    d_of_id = torch.empty_like(d, dtype=torch.float64)
    step = max(1, compiled.CHUNK // vocab)
    # a place for every id of a few rows, zeroed again after use where something was added
    sums = d_of_id.new_zeros(min(step, len(d)) * vocab)
    row_begins = torch.arange(0, len(sums), vocab, device="cpu")[:, None]
    for begin in range(0, len(d), step):
        rows = slice(begin, begin + step)
        chunk_ids = ids[rows]
        places = (chunk_ids + row_begins[: len(chunk_ids)]).view(-1)
        sums.index_add_(0, places, d[rows].double().view(-1))
        d_of_id[rows] = sums.index_select(0, places).view_as(chunk_ids)
        sums.index_fill_(0, places, 0.0)
    return d_of_id
