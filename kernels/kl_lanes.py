"""The sums of KL over columns, spread over lanes (a lane is a thread). `kl.py` derives the formulas.

What a lane knows of its columns are nine numbers, each (lanes,) fp32, which are called a `Lane` in this module and are
listed at NUMBERS. There are two ways to compute them from some columns.

`start`, `step` and `settled` look at each column once. They count in units of p relative to the lane's largest x, and
with t = -u in log2 units they add up

    W = sum p        A = sum p t        F = sum p (2^t - 1 - t ln 2)

The sum of q is W + F + A ln 2 and is not added up itself; no exponential or maximum of y is needed either, because
2^t is q / p. A tile of columns is kept in registers: first come p and the mean of t, then A and F about that mean, so
that only the sums that the lane had before are moved. The centre may be any number near the mean, as A holds the rest.
This is right while q / p and its inverse stay below 2^FARTHEST, the centre is within that, and no column is banned.
`held` tells whether it was right, because every other case leaves inf, NaN, a large |t| or a large centre.

`careful` is right for any logits. It looks at each column three times, for the maxima, for the mean and for the sums
about it, and scales p and q separately.

q is p 2^t as long as x - y - offset has enough digits. It has not where a lane's mean is beyond MAX_MEAN: for example,
where x alone is a mask of -1e9, x - y holds nothing of y. Such a lane is called apart: its f is the sum of q itself,
and stays so as lanes merge, until the mean of all is within MAX_MEAN. There F = sum q - W (1 + h - left) cancels
nothing, because h is large.
"""

import triton
import triton.language as tl

from .pair import BANNED, LN2, LOG2E, difference, excess, load

# the maximum of nothing, next to BANNED: exp2(BANNED - FLOOR) is 0
FLOOR = tl.constexpr(-9.999999e19)
TINY = tl.constexpr(1e-30)  # P's mass on columns that Q allows; less counts as none
FARTHEST = tl.constexpr(60.0)  # log2 units
# nats from the offset, a little more than FARTHEST: x - y is accurate to 2e-6 there
MAX_MEAN = tl.constexpr(42.0)
LARGEST = tl.constexpr(16777216.0)  # log2 units from 0: a reference there is off by 1 at most
NOWHERE = tl.constexpr(-1e30)  # stands in fast sums for a column past the row's end

# The numbers of a `Lane`: m, w, w_all, c, left, n, s and f as in `KLState`, where left is the mean of d / T beyond c
# and f is the sum of q if the lane is apart; and `banned_in_q`, above 0 where Q bans a column that P allows.
NUMBERS = tl.constexpr(9)


# One look at each column


@triton.jit
def excess2(t):
    """Return 2^t - 1 - t ln 2 for |t| <= 1, by a polynomial (minimax, 1.7e-7 relative) because exp2 would cancel."""
    p = tl.fma(t, 1.5303376e-05, 1.5602181e-04)
    p = tl.fma(t, p, 1.3334262e-03)
    p = tl.fma(t, p, 9.6173873e-03)
    p = tl.fma(t, p, 5.5504080e-02)
    p = tl.fma(t, p, 2.4022655e-01)
    return (t * t) * p


@triton.jit
def start(LANES: tl.constexpr):
    """Return lanes that have seen nothing: (m, w, c, a, f, far), where far is the largest |t| and |c| so far."""
    zero = tl.zeros((LANES,), tl.float32)
    return zero + FLOOR, zero, zero, zero, zero, zero


@triton.jit
def step(m, w, c, a, f, far, xs, ys, inside, offset, k, EXACT: tl.constexpr, K: tl.constexpr):
    """Return the lanes after one more tile.

    xs and ys are tuples of K windows (lanes, columns) fp32. `inside` is a tuple of masks for the last of them, because
    those before lie in the row. No sum begins from zeros, because the compiler would add them, and nothing is negated,
    because that costs a subtraction.
    """
    # p relative to the new maximum, and the sum of p d
    old = tl.fma(m, k, 0.0)
    top = xs[0]
    for i in tl.static_range(1, K):
        top = tl.maximum(top, xs[i])
    m = tl.maximum(m, tl.max(top, 1))
    ref = tl.fma(m, k, 0.0)
    ps, vs = (), ()
    for i in tl.static_range(K):
        v = difference(xs[i], ys[i], offset, EXACT)
        if i >= K - len(inside):
            v = tl.where(inside[i - K + len(inside)], v, 0.0)
        vs = vs + (v,)
        ps = ps + (tl.exp2(tl.fma(xs[i], k, -ref[:, None])),)
    p_sum, pv_sum = ps[0], ps[0] * vs[0]
    for i in tl.static_range(1, K):
        p_sum += ps[i]
        pv_sum = tl.fma(ps[i], vs[i], pv_sum)
    w_tile = tl.sum(p_sum, 1)

    # A and F of the tile, about a centre near the mean of both lane and tile
    rescale = tl.exp2(old - ref)
    w_old, a_old, f_old = w * rescale, a * rescale, f * rescale
    w = w_old + w_tile
    centre = c + tl.fma(tl.sum(pv_sum, 1), k, -c * w_tile) / w
    for i in tl.static_range(K):
        t = tl.fma(vs[i], -k, centre[:, None])
        g = tl.where(tl.abs(t) < 1, excess2(t), tl.fma(t, -LN2, -1.0) + tl.exp2(t))
        if i == 0:
            a_tile, f_tile, most = ps[0] * t, ps[0] * g, tl.abs(t)
        else:
            a_tile, f_tile, most = (
                tl.fma(ps[i], t, a_tile),
                tl.fma(ps[i], g, f_tile),
                tl.maximum(most, tl.abs(t)),
            )

    # what the lane had before, moved to that centre: 2^h F, because F + (2^h - 1) F cancels where the centre falls far
    h = centre - c
    grown = tl.exp2(h)
    g = tl.where(tl.abs(h) < 1, excess2(h), tl.fma(h, -LN2, grown - 1))
    f_old = tl.fma(grown, f_old, tl.fma(tl.fma(h, LN2, g), a_old * LN2, w_old * g))
    a = tl.fma(h, w_old, a_old) + tl.sum(a_tile, 1)
    far = tl.maximum(far, tl.maximum(tl.max(most, 1), tl.abs(centre)))
    return m, w, centre, a, f_old + tl.sum(f_tile, 1), far


@triton.jit
def held(m, w, a, f, far, k):
    """Return True if what `step` added up is right in all lanes."""
    right = (far < FARTHEST) & (tl.abs(m * k) < LARGEST) & (w > 0)
    right = right & (w - w == 0) & (a - a == 0) & (f - f == 0)
    return tl.min(right.to(tl.int32), 0) == 1


@triton.jit
def settled(m, w, c, a, f, offset, k, inv_t):
    """Return the `Lane` of what `step` added up, with c in nats, as accurate as it was in log2 units."""
    # `step` counted relative to the rounded m k; from here on sums are relative to m itself
    _, rounded = _times(m, k)
    unit = tl.exp2(-rounded)
    w, a, f = w * unit, a * unit, f * unit
    nats = inv_t / k
    nats_low = tl.fma(-nats, k, inv_t) / k
    c_nats, c_low = _times(c, nats)
    c_low = tl.fma(c, nats_low, c_low)

    # the centre moves by c_low, which the conversion to nats rounded off, and F moves with it
    moment = -LN2 * a
    f += w * (0.5 * c_low * c_low) - c_low * (f - moment)
    left = tl.where(w > 0, moment / w, 0.0) + c_low
    n = m - offset - c_nats / inv_t  # stands for the maximum of y: there the scale of f is 1
    unit = scale(w, m, c_nats, n, offset, inv_t)
    return m, w, w, c_nats, left, n, unit * (f + w * (1 - left)), unit * f, tl.zeros_like(w)


@triton.jit
def _times(a, b):
    """Return the product and what its rounding took off."""
    product = tl.fma(a, b, 0.0)  # an fma, which the compiler does not contract into another one
    return product, tl.fma(a, b, -product)


# Three looks at each column


@triton.jit
def careful(x_ptr, y_ptr, begin, stop, offset, inv_t, softcap, LANES: tl.constexpr):
    """Return the `Lane` of the columns from `begin` to `stop`, for any logits."""
    COLUMNS: tl.constexpr = 8
    cols = tl.arange(0, LANES)[:, None] + tl.arange(0, COLUMNS)[None, :] * LANES
    zero = tl.zeros((LANES,), tl.float32)
    k = inv_t * LOG2E
    m, n, banned_in_q = zero + FLOOR, zero + FLOOR, zero
    for at in tl.range(begin, stop, LANES * COLUMNS, num_stages=1):
        x, y = load(x_ptr, y_ptr, at + cols, stop, softcap)
        m = tl.maximum(m, tl.max(x, 1))
        n = tl.maximum(n, tl.max(y, 1))

    # the mean of d / T under P, over the columns that Q allows
    w_all, w, c = zero, zero, zero
    for at in tl.range(begin, stop, LANES * COLUMNS, num_stages=1):
        x, y = load(x_ptr, y_ptr, at + cols, stop, softcap)
        p = tl.exp2((x - m[:, None]) * k)
        w_all += tl.sum(p, 1)
        p = tl.where(y > BANNED, p, 0.0)
        w += tl.sum(p, 1)
        c += tl.sum(p * difference(x, y, offset, True), 1)
        banned_in_q = tl.maximum(banned_in_q, tl.max(tl.where(y > BANNED, 0.0, x - y), 1))
    some = w > TINY
    c = tl.where(some, c / w * inv_t, 0.0)
    w = tl.where(some, w, 0.0)  # if this drops a NaN, w_all or s has one too

    # f about that mean
    together = some & within(c)
    left, s, f, f_q = zero, zero, zero, zero
    for at in tl.range(begin, stop, LANES * COLUMNS, num_stages=1):
        x, y = load(x_ptr, y_ptr, at + cols, stop, softcap)
        p = tl.where(y > BANNED, tl.exp2((x - m[:, None]) * k), 0.0)
        q = tl.exp2((y - n[:, None]) * k)
        u = tl.fma(difference(x, y, offset, True), inv_t, -c[:, None])
        near = tl.abs(u) < tl.where(together, 1.0, -1.0)[:, None]
        s += tl.sum(q, 1)
        left += tl.sum(p * u, 1)
        f += tl.sum(p * tl.where(near, excess(u), u - 1), 1)
        f_q += tl.sum(tl.where(near, 0.0, q), 1)
    left = tl.where(some, left / w, 0.0)
    f = tl.where(together, f_q + scale(w, m, c, n, offset, inv_t) * f, s)
    return m, w, w_all, c, left, n, s, f, banned_in_q


# Lanes together


@triton.jit
def exponent(m, c, n, offset, inv_t):
    """Return (m - n - offset) / T - c, accurate to its own fp32 rounding though its terms may be hundreds of nats."""
    d = m - n
    back = d - m
    low = (m - (d - back)) - (n + back)
    e = d - offset
    back = e - d
    low += (d - (e - back)) - (offset + back)
    return tl.fma(low, inv_t, tl.fma(e, inv_t, -c))


@triton.jit
def scale(w, m, c, n, offset, inv_t):
    """Return the scale of f, exp((m - n - offset) / T - c), or 0 where P has no mass.

    It does not overflow, because w scale is at most the number of columns.
    """
    return tl.where(w > 0, tl.exp2(exponent(m, c, n, offset, inv_t) * LOG2E), 0.0)


@triton.jit
def within(c):
    """Return True if f is F about c, and False if the lane is apart or c is NaN."""
    return tl.abs(c) <= MAX_MEAN


@triton.jit
def _moved(scaled_w, w, unit, h, left, some):
    """Return what a lane of weight w adds to f as its centre moves by h: w scale (exp(h) - 1 - h).

    `scaled_w` is the first term of that product, and `unit` is the scale. `left` is the lane's mean beyond its c, a
    first moment that matters where h is large.
    """
    near = w * unit * excess(-h)
    far = tl.fma(-scaled_w, left, scaled_w) - w * unit * (1 + (h - left))
    return tl.where(tl.abs(h) < tl.where(some, 1.0, -1.0), near, far)


@triton.jit
def merge(one, other, offset, inv_t):
    """Return, lane by lane, the `Lane` of the columns of both."""
    m, w, w_all, c, left, n, s, f, banned_in_q = one
    m2, w2, w_all2, c2, left2, n2, s2, f2, banned_in_q2 = other
    k = inv_t * LOG2E
    m_new, n_new = tl.maximum(m, m2), tl.maximum(n, n2)
    # w scale of each lane about its own centre, in the unit of the common n; a lane that is apart has no f to move
    has_f, has_f2 = within(c), within(c2)
    scaled_w = tl.where(has_f, w * scale(w, m, c, n_new, offset, inv_t), 0.0)
    scaled_w2 = tl.where(has_f2, w2 * scale(w2, m2, c2, n_new, offset, inv_t), 0.0)
    # the sums relative to the common maxima, and the mean of both lanes
    x_unit, x_unit2 = tl.exp2((m - m_new) * k), tl.exp2((m2 - m_new) * k)
    y_unit, y_unit2 = tl.exp2((n - n_new) * k), tl.exp2((n2 - n_new) * k)
    w, w2 = w * x_unit, w2 * x_unit2
    w_new = w + w2
    some = w_new > TINY
    c_new = tl.where(some, c + (c2 - c) * (w2 / w_new), 0.0)
    left_new = tl.where(some, (w * ((c - c_new) + left) + w2 * ((c2 - c_new) + left2)) / w_new, 0.0)
    w_new = tl.where(some, w_new, 0.0)
    # f of both about the new centre, or the sum of q if that is too far from the offset
    unit = scale(w_new, m_new, c_new, n_new, offset, inv_t)
    f = f * y_unit + f2 * y_unit2
    f += _moved(scaled_w, w, unit, c_new - c, left, some & has_f)
    f += _moved(scaled_w2, w2, unit, c_new - c2, left2, some & has_f2)
    w_all = w_all * x_unit + w_all2 * x_unit2
    s = s * y_unit + s2 * y_unit2
    f = tl.where(within(c_new), f, s)
    return m_new, w_new, w_all, c_new, left_new, n_new, s, f, tl.maximum(banned_in_q, banned_in_q2)


@triton.jit
def reduce_lanes(lanes, offset, inv_t):
    """Return the `Lane` of the whole row, as scalars."""
    # as `merge`, but of all lanes at once
    m, w, w_all, c, left, n, s, f, banned_in_q = lanes
    k = inv_t * LOG2E
    m_row = tl.max(m, 0)
    n_row = tl.max(n, 0)
    x_unit, y_unit = tl.exp2((m - m_row) * k), tl.exp2((n - n_row) * k)
    has_f = within(c)
    scaled_w = tl.where(has_f, w * scale(w, m, c, n_row, offset, inv_t), 0.0)
    w = w * x_unit
    w_row = tl.sum(w, 0)
    some = w_row > TINY
    c_row = tl.where(some, tl.sum(w * c, 0) / w_row, 0.0)
    left_row = tl.where(some, tl.sum(w * ((c - c_row) + left), 0) / w_row, 0.0)
    w_row = tl.where(some, w_row, 0.0)
    unit = scale(w_row, m_row, c_row, n_row, offset, inv_t)
    # one tensor of truth values, because Triton's interpreter cannot combine a scalar one with a tensor
    near = tl.where(has_f, tl.where(some, 1, 0), 0) > 0
    f = tl.sum(f * y_unit + _moved(scaled_w, w, unit, c_row - c, left, near), 0)
    w_all = tl.sum(w_all * x_unit, 0)
    s = tl.sum(s * y_unit, 0)
    return (
        m_row,
        w_row,
        w_all,
        c_row,
        left_row,
        n_row,
        s,
        tl.where(within(c_row), f, s),
        tl.max(banned_in_q, 0),
    )
