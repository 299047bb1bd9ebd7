"""The CPU path of the exact divergences: the functions and formulas of `fused_rl.kernels.kl`.

A row is cut into blocks of the vocabulary that stay in the cache while they are passed over three times: maxima, mean
of u, sums about that mean. Each keeps its own reference, and the few numbers per block are merged in fp64:
with u = d / T - r about any r, s = sum w u and F(r) = sum w (exp(-u) - 1 + u), a move by h to r + h gives

    F(r + h) = exp(h) F(r) + W (exp(h) - 1 - h) - (exp(h) - 1) s.
"""

import torch

from fused_rl.cpu.compiled import in_huge_pages
from fused_rl.cpu.jensen_shannon import js_dx, js_dy, shares_per_row
from fused_rl.cpu.pair import (
    BANNED,
    capped,
    difference,
    distributions,
    excess,
    exp,
    load,
    over_blocks,
    p_q_delta,
    selected_rows,
    write_gradient,
)
from fused_rl.kernels.states import JensenShannonSums, KLState

# As in the kernels: the maximum of nothing, a mass that is none, log(p / q) where P has no mass.
FLOOR, TINY, NONE = -9.999999e19, 1e-30, -1e10
MOST = 1e19  # of a logit
FARTHEST = 40.0  # nats: with p at least 1e-38, no q that counts goes with a p of 0
Q_APART = 1.6e5  # e^12: of F / W, beyond which what is Q's is that far from P's mean, and p exp(-u) has lost digits
TOO_FAR = 1e7  # nats, as in the kernels


def kl_fwd(x, y, mask, inv_t, softcap=None):
    """(B, T, V) twice, (N,) bool | None, float | (N,) fp32 -> KL(P || Q) (N,) fp32, state (9, N) fp32."""
    n = x.shape[0] * x.shape[1]
    rows, t, x, y = selected_rows(x, y, mask, inv_t)
    kl = torch.zeros(n)
    state = torch.zeros(len(KLState._fields), n)
    for chunk, *pair in capped(x, y, softcap):
        # most blocks pass with the fast sums; the others are taken again by the careful ones
        blocks = over_blocks(_near_sums, *pair, t[chunk], recompute=True, careful=_block_sums)
        chunk_rows = rows[chunk]
        inv_t_column = t[chunk].double()[:, None]
        kl[chunk_rows], state[:, chunk_rows] = _merge(*blocks, inv_t_column)
    return kl, state


def kl_bwd(
    g, x, y, mask, inv_t, divergence, state, sums, wants_dx, wants_dy, softcap=None, shares=None
):
    """Gradients (B, T, V) of x and of y, None where not wanted; g (N,) fp32.

    `sums` are those of `js_fwd` with the same `shares`, or None for KL.
    """
    new = torch.empty if mask is None else torch.zeros
    dx = in_huge_pages(new(x.shape, dtype=x.dtype)) if wants_dx else None
    dy = in_huge_pages(new(y.shape, dtype=y.dtype)) if wants_dy else None
    rows, t, x, y = selected_rows(x, y, mask, inv_t)
    state = KLState(*state[:, rows])
    # no step would make such a divergence finite, and none would change what P bans throughout
    still = (divergence[rows] == torch.inf) | (state.w_all == 0)
    g = torch.where(still, 0, g[rows] * t)
    common = distributions(state, t)
    if sums is None:
        g_over_w = torch.where(still, 0, g / state.w_all)
        of_p = state.m, t, state.offset, state.c, g_over_w
        gradients = {
            _kl_dx: (dx, 0, of_p),
            _kl_dy: (dy, 1, (*common, g)),
        }
    else:
        sums = JensenShannonSums(*sums[:, rows])
        common = (*common, *shares_per_row(shares, t))
        p_share, q_share = shares or (0.5, 0.5)
        of_p = g * p_share, sums.p_a, *common
        of_q = g * q_share, sums.q_b, *common
        gradients = {
            js_dx: (dx, 0, of_p),
            js_dy: (dy, 1, of_q),
        }
    for function, (out, side, per_row) in gradients.items():
        if out is not None:
            out_rows = out.view(-1, out.shape[-1])
            write_gradient(function, out_rows, rows, (x, y), side, per_row, softcap)
    return dx, dy


def _near_sums(x, x_at, y, y_at, t):
    """Return `_block_sums`, and True where they hold: no banned column, and p and q within FARTHEST of each other."""
    dtype = x.dtype
    # nothing is clamped: a banned column makes a sum infinite or NaN, and the block is not held
    x = x[x_at].float()
    y = y[y_at].float()
    m = x.amax(-1, True)
    first = x[..., :1] - y[..., :1]  # a constant between the rows then costs u no bits
    e = difference(x, y, first, dtype) * t
    p = exp((x - m) * t)
    w = p.sum(-1, True)
    a = (p * e).sum(-1, True)
    c = a / w

    # about the mean of the block; q / p is exp(-u), and the maximum of y is not needed
    u = e - c
    s = (p * u).sum(-1, True)
    far_above = exp(-u) - 1 + u
    above_tangent = torch.where(u.abs() < 1, excess(u), far_above)
    f = (p * above_tangent).sum(-1, True)

    # a block is held where p and q are within reach of each other, and its mean says something of all columns;
    # nor does e round what u is: 6e-8 of c is little beside the deviation of u
    farthest = u.abs().amax(-1, True)
    held = (farthest < FARTHEST) & (f < Q_APART * w)
    held = held & (c * c * w <= 1e7 * f)
    held = held & (c.abs() < FARTHEST)
    held = held & (m > BANNED) & (first < MOST)
    # a block of one value is a mask: there u is y, which may be rounded at 40 nats, and Q may have most of its mass
    held = held & (x.amin(-1, True) < m)
    if dtype == torch.bfloat16:  # whose x - y is taken as it rounds
        held = held & (first.abs() * t < FARTHEST)
    n = m - first - c / t  # where p and q are alike
    none = torch.zeros_like(m)
    sums = held, m, n, w, w, first, a, s, f, none, none
    return tuple(z.squeeze(-1) for z in sums)


def _block_sums(x, x_at, y, y_at, t):
    """(M, blocks, width) and an index of its blocks, twice, t (K, 1) -> K of each number that `_merge` takes."""
    x, y = load(x, x_at, y, y_at)
    m = x.amax(-1, True)
    n = y.amax(-1, True)
    d = x - y
    allowed = y > BANNED

    # x - y where P is largest: a constant between the rows, or one token's mass, then costs u no bits
    is_top = allowed & (x == m)
    at_top = torch.where(is_top, d, -torch.inf).amax(-1, True)
    has_top = (at_top > -torch.inf) & (m > BANNED)
    at_top = torch.where(has_top, at_top, 0.0)
    # as in the kernels: where Q masks that column alone, the others are as far from it
    far_at_top = has_top & (at_top.abs() * t > FARTHEST)
    at_top = torch.where(far_at_top, m - n, at_top)
    e = difference(x, y, at_top, torch.float32) * t

    # the condition changes nothing but the order: w_all waits, and is summed in one pass with w and a
    top = torch.where(has_top, m, m.clamp(min=FLOOR))
    p_all = exp((x - top) * t)
    p = torch.where(allowed, p_all, 0.0)
    w_all = p_all.sum(-1, True)
    w = p.sum(-1, True)
    a = (p * e).sum(-1, True)
    some = w > TINY
    c = torch.where(some, a / w, 0.0)
    u = e - c

    # F about the block's own mean; what P all but lacks is Q's alone, with another scale, and so is all of a block of
    # which the mean says nothing
    near = (u.abs() < 1) & some & (c.abs() < FARTHEST)
    q = exp((y - n.clamp(min=FLOOR)) * t)
    s = (p * u).sum(-1, True)
    above_tangent = torch.where(near, excess(u), u - 1)
    f = (p * above_tangent).sum(-1, True)
    f_y = torch.where(near, 0.0, q).sum(-1, True)
    lone = torch.where(allowed, 0.0, d).amax(-1, True)  # above 0: Q bans a column that P does not
    sums = m, n, w_all, w, at_top, a, s, f, f_y, lone
    return tuple(z.squeeze(-1) for z in sums)


def _moved(h):
    """exp(h) - 1 - h of fp64 numbers."""
    series = torch.full_like(h, 1 / 5040)
    for n in (720, 120, 24, 6, 2):
        series = series * h + 1 / n
    near = series * h.square()
    far = torch.expm1(h) - h
    return torch.where(h.abs() < 1e-2, near, far)


def _merge(m, n, w_all, w, at_top, a, s, f, f_y, lone, t):
    """Sums of `_block_sums`, t (R, 1) fp64 -> KL (R,), state (9, R)."""
    some = w > TINY
    c = torch.where(some, a / w, 0.0)  # in fp32, as the blocks had it
    about_mean = c.abs() < FARTHEST
    m = m.clamp(min=FLOOR)
    n = n.clamp(min=FLOOR)
    fp32 = m, n, w_all, w, at_top, c, s, f, f_y
    m, n, w_all, w, at_top, c, s, f, f_y = (z.double() for z in fp32)
    # a mask of -1e15 that both have cancels before c is taken off
    apart = (m - at_top) * t - c
    c = c + at_top * t

    # all about the row's maxima and its mean
    m_row = m.amax(1, True)
    n_row = n.amax(1, True)
    share = ((m - m_row) * t).exp()
    weight = torch.where(some, w * share, 0.0)
    s_weight = torch.where(some, s * share, 0.0)
    w_row = weight.sum(1, True)
    w_all = (w_all * share).sum(1, True)
    some_row = w_row > TINY
    # the mean, from that of the block with most mass: equal ones then give exactly it
    heaviest = weight.argmax(1, True)
    first = torch.where(some_row, c.gather(1, heaviest), 0.0)
    moved_mass = weight * (c - first) + s_weight
    beyond = moved_mass.sum(1, True) / w_row
    mean = first + torch.where(some_row, beyond, 0.0)

    # F moved there, by h
    h = mean - c
    f_scale = torch.where(about_mean, (apart - n_row * t).exp(), 0.0)
    scale = ((m_row - n_row) * t - mean).exp()
    scale = torch.where(some_row, scale, 0.0)
    near = scale * (weight * _moved(h) - torch.expm1(h) * s_weight)
    far = f_scale * (w - s) - scale * (weight * (1 + h) - s_weight)
    # far, and without a mean, all of the block is Q's
    is_near = (h < 1) & about_mean & some_row
    moved = torch.where(is_near, near, far)
    f_y = f_y * ((n - n_row) * t).exp()
    q = f_scale * (f + w - s)
    f = f_scale * f + moved
    q = torch.where(some, q, 0.0) + f_y
    f = torch.where(some, f, 0.0) + f_y
    q = q.sum(1, True)
    f = f.sum(1, True).clamp_(min=0)
    w_row = torch.where(some_row, w_row, 0.0)

    # the divergence of the row, infinite where P has a column to itself, however little its mass there
    lone = (lone > 0).any(1, True)
    z = (n_row - m_row) * t + mean
    kl, k = _divergence(w_row, w_all, z, f, lone)
    # mean / t goes into the offset, so that c is small and keeps its bits for the gradient
    offset = (mean / t).float().double()

    # 0, or NaN where a logit is NaN or inf: sums and maxima of one row may have dropped it
    nan = (w_all - w_all) + (n_row - n_row)
    nan = torch.where((m_row > MOST) | (n_row > MOST), torch.nan, nan)
    distance = (m_row - n_row).abs() * t
    unknown = some_row & (distance > TOO_FAR) & (kl < 0.01 * distance)
    kl = torch.where(unknown, torch.nan, kl)
    k = torch.where(unknown, torch.nan, k)
    kl = torch.where(lone, torch.inf, kl) + nan
    state = KLState(
        m=m_row,
        w=w_row,
        w_all=w_all,
        offset=offset,
        c=mean - offset * t,
        n=n_row,
        f=f,
        s=q,
        k=k,
    )
    return kl[:, 0].float(), torch.cat(state, 1).T.float()


def _divergence(w, w_all, z, f, lone):
    """KL = log1p(f / w exp(z)) over the columns that both allow, and k with log(p / q) = u + k."""
    some = w > 0
    r = torch.where(some, f / w, 1.0)
    # exp overflows in fp64 from 709 nats on
    near = torch.log1p(r * z.clamp(max=600).exp())
    far = z + torch.where(r > 0, r, 1.0).log()
    kl = torch.where(z > 600, far, near)
    kl = torch.where(some, kl, 0.0)
    allowed = torch.where(lone, (w / w_all).log(), 0.0)  # P's share of the columns that Q allows
    return kl, torch.where(some, kl + allowed, NONE)


def _kl_dx(out, rows, x, x_at, y, y_at, m, t, offset, c, g):
    dtype = x.dtype
    x, y = load(x, x_at, y, y_at, out)
    u = difference(x, y, offset, dtype) * t - c
    gradient = exp((x - m) * t) * u * g
    out[rows] = gradient.to(dtype)


def _kl_dy(out, rows, x, x_at, y, y_at, *per_row):
    *per_row, g = per_row
    dtype = x.dtype
    x, y = load(x, x_at, y, y_at, out)
    p, q, delta, expm1 = p_q_delta(x, y, *per_row, dtype=dtype)
    q_less_p = torch.where(delta.abs() < 1, p * expm1, q - p)
    out[rows] = (q_less_p * g).to(dtype)
