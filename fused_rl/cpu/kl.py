"""The CPU path of the exact divergences: the functions of `fused_rl.kernels.kl`, and their states.

A row is read three times, from the cache: the maxima and the sums of exponentials first, and with them

    KL(P || Q) = sum p (exp(-delta) - 1 + delta),    delta = log(p / q) = (x - y) / T - constant.

For |delta| < 1 a term is p times a function of delta, beyond it is q - p + p delta, each with its own exponential, so
that a column without mass in one row, or with a mask, needs no second look. In C the constant is off by the rounding of
the sums. As sum p exp(-delta) must be 1, that shows in sum p (exp(-delta) - 1) = z, and is taken off again: log1p(z)
from delta, z - log1p(z) from the divergence. Close distributions then keep all their digits. From 1 nat on the mean of
delta is taken once more, about what it was found to be.

Where the KL is infinite, the state's w is w_all: only mean - k, the constant, is read.

Two paths: rows.c, and PyTorch in fp64, a few rows at a time, for machines without a C compiler. Soft-capped logits are
copied a few rows at a time on both.
"""

from typing import Any

import torch

from fused_rl.cpu import native
from fused_rl.cpu.compiled import in_huge_pages
from fused_rl.cpu.jensen_shannon import js_gradient
from fused_rl.cpu.logprob import chunks, fp64_per_row
from fused_rl.cpu.pair import BANNED, log_ratio, native_pair, p_q_delta, probabilities
from fused_rl.kernels.states import JensenShannonSums, KLState

# As in the kernels: the maximum of nothing, log(p / q) where P has no mass.
FLOOR, NONE = -9.999999e19, -1e10
MOST = 1e19  # of a logit
TOO_FAR = 1e7  # nats, as in the kernels


def kl_fwd(x, y, mask, inv_t, softcap=None):
    """(B, T, V) twice, (N,) bool | None, float | (N,) fp32 -> KL(P || Q) (N,) fp32, state (9, N) fp32."""
    n = x.shape[0] * x.shape[1]
    kl = x.new_zeros(n, dtype=torch.float32)
    state = kl.new_zeros(len(KLState._fields), n)
    if softcap is None and native.takes(x, y):
        pair = native_pair(x, y, mask, inv_t)
        native.call("kl_fwd", x.numel(), pair, kl, state)
        return kl, state
    for rows, x_rows, y_rows, t in chunks(x, y, mask=mask, inv_t=inv_t, softcap=softcap):
        function = kl_fwd if native.takes(x_rows, y_rows) else _eager_fwd
        kl[rows], state[:, rows] = function(x_rows[None], y_rows[None], None, t)
    return kl, state


def _eager_fwd(x, y, mask, inv_t):
    x, y = (z[0].double().clamp(min=BANNED) for z in (x, y))
    t = fp64_per_row(inv_t, len(x))
    m, n = x.amax(-1), y.amax(-1)
    p_some = m > BANNED
    q_some = n > BANNED
    some = p_some & q_some
    w, s = (((z - top[:, None]) * t[:, None]).exp().sum(-1) for z, top in ((x, m), (y, n)))
    # NaN stays, also in a row that has nothing else
    w = torch.where(p_some, w, 0 * w)
    s = torch.where(q_some, s, 0 * s)

    # the sum over the columns; beyond 1 nat, one without mass in either row has a finite term
    apart = torch.where(some, m - n, 0)
    constant = torch.where(some, w.log() - s.log(), 0)
    p = probabilities(x, m, w, t)
    q = probabilities(y, n, s, t)
    delta = log_ratio(x, y, t, apart, constant)
    terms = torch.where(delta.abs() < 1, p * ((-delta).expm1() + delta), q - p + p * delta)
    banned_in_q = ((y <= BANNED) & (x > BANNED)).any(-1)
    finite = some & ~banned_in_q
    divergence = torch.where(finite, terms.sum(-1).clamp(min=0), 0)
    k = torch.where(some, divergence, NONE)
    distance = apart.abs() * t
    unknown = finite & (distance > TOO_FAR) & (divergence < 0.01 * distance)
    unknown = unknown | (m > MOST) | (n > MOST)
    bad = torch.where(unknown, torch.nan, (w - w) + (s - s))  # 0 or NaN
    mean = apart + (constant + divergence) / t
    offset = mean.float().double()
    state = KLState(
        m=m.clamp(min=FLOOR),
        w=torch.where(some, w, 0),
        w_all=w,
        offset=offset,
        c=(mean - offset) * t,
        n=n.clamp(min=FLOOR),
        f=-s * (-divergence).expm1(),
        s=s,
        k=k + bad,
    )
    kl = torch.where(banned_in_q, torch.inf, divergence) + bad
    return kl.float(), torch.stack(state).float()


def kl_bwd(
    g, x, y, mask, inv_t, divergence, state, sums, wants_dx, wants_dy, softcap=None, shares=None
):
    """Gradients (B, T, V) of x and of y, None where not wanted; g (N,) fp32.

    `sums` are those of `js_fwd` with the same `shares`, or None for KL.
    """
    wanted = [side for side, wants in enumerate((wants_dx, wants_dy)) if wants]
    gradients: list[Any] = [None, None]
    if softcap is None and native.takes(x, y):
        pair = native_pair(x, y, mask, inv_t, shares)
        means = (None, None) if sums is None else JensenShannonSums(*sums.contiguous())[1:]
        per_row = [z.contiguous() for z in (g, divergence, state)]
        for side in wanted:
            out = in_huge_pages(x.new_empty(x.shape))
            native.call("pair_bwd", x.numel(), pair, *per_row, means[side], side, out)
            gradients[side] = out
        return gradients

    new = x.new_empty if mask is None else x.new_zeros
    for side in wanted:
        gradients[side] = in_huge_pages(new(x.shape))
    for rows, x_rows, y_rows, t in chunks(x, y, mask=mask, inv_t=inv_t, softcap=softcap):
        function = kl_bwd if native.takes(x_rows, y_rows) else _eager_bwd
        sums_rows = None if sums is None else sums[:, rows]
        per_row = divergence[rows], state[:, rows], sums_rows
        pair = x_rows[None], y_rows[None]
        of_rows = function(g[rows], *pair, None, t, *per_row, wants_dx, wants_dy, shares=shares)
        for side in wanted:
            gradient = of_rows[side][0]
            if softcap is not None:  # times the cap's slope, of which these are the values
                gradient *= 1 - ((x_rows, y_rows)[side] / softcap).square()
            out = gradients[side].view(-1, x.shape[2])
            out[rows] = gradient.to(out.dtype)
    return gradients


def _eager_bwd(g, x, y, mask, inv_t, divergence, state, sums, wants_dx, wants_dy, shares):
    # both are computed, whichever is wanted: each needs nearly all that the other does
    x, y = (z[0].clamp(min=BANNED) for z in (x, y))
    t = fp64_per_row(inv_t, len(x))
    state = KLState(*state)
    # no step would make such a divergence finite, or less than 0, and none would change what P bans throughout
    no_step = (divergence == torch.inf) | (divergence == 0) | (state.w_all == 0)
    slope = torch.where(no_step, 0, g * t)[:, None]
    p, q, delta = p_q_delta(x, y, t, state)
    if sums is None:
        u = log_ratio(x, y, t, state.offset.double(), state.c.double())
        q_less_p = torch.where(delta.abs() < 1, p * (-delta).expm1(), q - p)
        gradients = p * u, q_less_p
    else:
        gradients = js_gradient(p, q, delta, sums, shares)
    # what a column of these rows has may be NaN
    return [torch.where(no_step[:, None], 0, d * slope)[None] for d in gradients]
