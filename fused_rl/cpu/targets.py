"""The CPU path of K targets per row, with the functions of `fused_rl.kernels.targets`, which has the formulas.

The row functions of `fused_rl.cpu.logprob` do the work on the vocabulary; what is (N, K) is done here in fp64. A target
outside the columns at hand stands for column 0 with an upstream gradient of 0, which writes there what belongs there.
"""

import torch

from fused_rl.cpu import compiled
from fused_rl.cpu.logprob import FLAT, capped, logprob_bwd, logprob_fwd

_CHUNK = 1 << 14  # targets whose fp64 gradients are formed in the cache


def targets_fwd(logits, targets, mask, inv_temperature, softcap):
    """`logprob_fwd` for targets (N, K): the statistics' logprobs are (N, K)."""
    statistics = logprob_fwd(
        logits, targets.new_zeros(len(targets)), mask, inv_temperature, softcap
    )
    # of masked rows and other ranks' columns there is nothing to find
    ids = targets.clamp(0, logits.shape[1] - 1)
    m = statistics.m.double()[:, None]
    rest = statistics.rest.double()[:, None]
    inv_t = torch.as_tensor(inv_temperature, dtype=torch.float64).expand(len(m))[:, None]
    x = capped(logits.gather(1, ids), softcap).double()
    s = (x.sub_(torch.where(m == -torch.inf, 0.0, m)) * inv_t).clamp_(max=0)
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
        return logprob_bwd(None, dentropy, dlse, logits, targets.new_zeros(n), *statistics, out=out)
    live = m != -torch.inf if mask is None else mask & (m != -torch.inf)
    here = live[:, None] & (targets >= 0) & (targets < vocab)
    ids = torch.where(here, targets, 0)
    d = torch.where(here, dlogprobs, 0.0)
    own = _summed_by_id(ids, d, vocab)
    total = dlogprobs.sum(1, dtype=torch.float64)

    # the gradients of the targets' logits, while these still stand, a few rows at a time
    dentropy, dlse = (torch.zeros(n) if given is None else given for given in (dentropy, dlse))
    inv_t = torch.as_tensor(inv_temperature, dtype=torch.float64).expand(n)
    per_row = [x.double()[:, None] for x in (total, dentropy, dlse, entropy, m, rest, inv_t)]
    g = torch.empty(ids.shape, dtype=logits.dtype)
    step = max(1, _CHUNK // targets.shape[1])
    for c in (slice(i, i + step) for i in range(0, n, step)):
        x = capped(logits[c].gather(1, ids[c]), softcap).double()
        g[c] = _gradient(x, own[c], d[c], softcap, *(values[c] for values in per_row))
    g[~live] = 0

    # the row first, which may take the logits' place, then the targets: equal ids write equal values
    out = logprob_bwd(
        None, dentropy, (dlse - total).float(), logits, ids[:, 0], *statistics, out=out
    )
    out[torch.arange(n)[:, None], ids] = g.to(out.dtype)  # scatter_ would copy the row first
    return out


def _gradient(x, own, d, softcap, total, dentropy, dlse, entropy, m, rest, inv_t):
    """The gradient of targets' logits as that of a single one: (n, K) fp64 capped logits, (n, 1) fp64 per row."""
    # of the total its own share leaves that of the others, but at a maximum with most of the mass, where these would be
    # lost: they are summed alone. Of two at the maximum (rest >= 1) neither has most, and each is the other's other
    top = torch.where(rest < 1, m, torch.inf)
    below = torch.where(x < top, d, 0.0).sum(1, keepdim=True, dtype=torch.float64)
    others = torch.where(x < top, total - own, below)
    log1p = rest.log1p()
    s = ((x - m) * inv_t).clamp_(FLAT, 0)
    logp = s - log1p
    dp = dlse - others - dentropy * (s - (log1p - entropy))
    g = own * -logp.expm1() + logp.exp_() * dp
    slope = inv_t if softcap is None else inv_t * (1 - (x / softcap).square())
    return g.mul_(slope)


def _summed_by_id(ids, d, vocab):
    """(N, K), (N, K) fp32 -> fp64, for each element the sum over all of its row that have its id."""
    own = torch.empty(d.shape, dtype=torch.float64)
    step = max(1, compiled.CHUNK // vocab)
    sums = torch.zeros(min(step, len(d)) * vocab, dtype=torch.float64)
    begins = torch.arange(0, len(sums), vocab)[:, None]
    for begin in range(0, len(d), step):
        rows = slice(begin, begin + step)
        at = (ids[rows] + begins[: len(ids[rows])]).view(-1)
        sums.index_add_(0, at, d[rows].double().view(-1))
        own[rows] = sums.index_select(0, at).view_as(ids[rows])
        sums.index_fill_(0, at, 0.0)
    return own
