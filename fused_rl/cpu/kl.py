"""The CPU path of the exact divergences: the functions of `fused_rl.kernels.kl`, and their states.

A row is read three times, from the cache: the maxima and the sums of exponentials first, and with them

    KL(P || Q) = sum p (exp(-delta) - 1 + delta),    delta = log(p / q) = (x - y) / T - constant.

For |delta| < 1 a term is p times a polynomial, beyond it is q - p + p delta, each with its own exponential, so that a
column without mass in one row, or with a mask, needs no second look. The constant is off by the rounding of the sums.
As sum p exp(-delta) must be 1, that shows in sum p (exp(-delta) - 1) = z, and is taken off again: log1p(z) from delta,
z - log1p(z) from the divergence. Close distributions then keep all their digits. From 1 nat on the mean of delta is
taken once more, about what it was found to be.

Where the KL is infinite, the state's w is w_all: only mean - k, the constant, is read.

Two paths: rows.c, and eager PyTorch, a few rows at a time, for machines without a C compiler. Soft-capped logits are
copied a few rows at a time on both.
"""

from typing import Any

import torch

from fused_rl.cpu import native
from fused_rl.cpu.compiled import in_huge_pages
from fused_rl.cpu.jensen_shannon import js_gradient
from fused_rl.cpu.logprob import row_sums
from fused_rl.cpu.pair import (
    BANNED,
    chunks,
    excess,
    log_ratio,
    native_pair,
    p_q_delta,
    probabilities,
)
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
    for rows, x_rows, y_rows, t in chunks(x, y, mask, inv_t, softcap):
        function = kl_fwd if native.takes(x_rows, y_rows) else _eager_fwd
        kl[rows], state[:, rows] = function(x_rows, y_rows, None, t)
    return kl, state


def _eager_fwd(x, y, mask, inv_t):
    x, y = (z[0].clamp(min=BANNED) for z in (x, y))
    t = inv_t.double()
    m, x_rest = row_sums(x, inv_t)
    n, y_rest = row_sums(y, inv_t)
    p_some = m > BANNED
    q_some = n > BANNED
    some = p_some & q_some
    # NaN stays, also in a row that has nothing else
    w = torch.where(p_some, 1 + x_rest, 0 * x_rest)
    s = torch.where(q_some, 1 + y_rest, 0 * y_rest)

    # the sums over the columns
    apart = torch.where(some, m - n, 0)
    constant = torch.where(some, x_rest.log1p() - y_rest.log1p(), 0)
    p = probabilities(x, m, w, inv_t)
    q = probabilities(y, n, s, inv_t)
    delta = log_ratio(x, y, inv_t, apart, constant)
    near = delta.abs() < 1
    of_near = excess(delta)
    terms = torch.where(near, p * of_near, q - p + p * delta).sum(-1, dtype=torch.float64)
    moved = torch.where(near, p * (of_near - delta), q - p).sum(-1, dtype=torch.float64)
    lone = ((y <= BANNED) & (x > BANNED)).any(-1)

    # without the rounding of the constant
    finite = some & ~lone
    shift = torch.where(finite, moved.log1p(), 0)
    constant = constant - shift
    divergence = torch.where(finite, (terms - (moved - shift)).clamp(min=0), 0)
    # large delta were rounded: once more, about their mean
    u = log_ratio(x, y, inv_t, apart, constant + divergence)
    mean_u = (p * u).sum(-1, dtype=torch.float64)
    divergence = divergence + torch.where(divergence > 1, mean_u, 0)
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
    kl = torch.where(lone, torch.inf, divergence) + bad
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
    for rows, x_rows, y_rows, t in chunks(x, y, mask, inv_t, softcap):
        function = kl_bwd if native.takes(x_rows, y_rows) else _eager_bwd
        sums_rows = None if sums is None else sums[:, rows]
        per_row = divergence[rows], state[:, rows], sums_rows
        wants = wants_dx, wants_dy
        of_rows = function(g[rows], x_rows, y_rows, None, t, *per_row, *wants, shares=shares)
        for side in wanted:
            gradient = of_rows[side][0]
            if softcap is not None:  # times the cap's slope, of which these are the values
                value = (x_rows, y_rows)[side][0]
                gradient *= 1 - (value / softcap).square()
            out = gradients[side].view(-1, x.shape[2])
            out[rows] = gradient.to(out.dtype)
    return gradients


def _eager_bwd(g, x, y, mask, t, divergence, state, sums, wants_dx, wants_dy, shares):
    x, y = (z[0].clamp(min=BANNED) for z in (x, y))
    state = KLState(*state)
    # no step would make such a divergence finite, or less than 0, and none would change what P bans throughout
    still = (divergence == torch.inf) | (divergence == 0) | (state.w_all == 0)
    slope = torch.where(still, 0, g * t)[:, None]
    p, q, delta = p_q_delta(x, y, t, state)
    if sums is None:
        u = log_ratio(x, y, t, state.offset.double(), state.c.double())
        q_less_p = torch.where(delta.abs() < 1, p * (excess(delta) - delta), q - p)
        gradients = p * u, q_less_p
    else:
        gradients = js_gradient(p, q, delta, sums, shares)
    # what a column of these rows has may be NaN
    gradients = [torch.where(still[:, None], 0, d * slope)[None] for d in gradients]
    return [d if wants else None for d, wants in zip(gradients, (wants_dx, wants_dy), strict=True)]
