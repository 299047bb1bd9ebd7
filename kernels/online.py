"""Online softmax statistics of one row, spread over lanes: the step, the merge, and a sum that is free of order.

A lane carries, over the elements x that it has seen,

    m     their maximum, which is itself held out of the two sums (a second element equal to m is in them)
    ref   fl(m * scale) in log2 units, what the sums are relative to; scale = log2(e) / temperature
    rest  the sum of 2^d          with d = x * scale - ref, rounded once (fma)
    t     the sum of 2^d * d

Holding the maximum out keeps sum(exp(x - m)) - 1 accurate to fp32 rounding when one token has all the mass. It costs a
minimum per element: max(m, x) stays in the lane, and min(m, x) goes into the sums. As each lane has its own reference,
lanes do not communicate until the row ends. ref is off by delta = m * scale - ref, which an fma gives exactly and
`reduce_lanes` takes out again, so that a constant added to all logits cancels.

An element of -inf adds nothing, and a lane that has seen nothing else has m = NEG. NaN reaches rest and stays there.

Lanes are right while |ref| < 2^31; beyond, 2^delta is more than the exponent of a sum can hold. `in_range` tells which
rows are right, and `wide_row` reads the others again, relative to their true maximum.
"""

import triton
import triton.language as tl

# The least maximum of a lane, below every usual logit. It is finite, also times any scale, so inf - inf cannot arise.
NEG = tl.constexpr(-1.0e30)
FAR = tl.constexpr(-1.0e4)  # log2 units: 2^FAR is 0, and FAR times any upstream gradient is finite
LN2 = tl.constexpr(0.6931471805599453)
NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def widen(words):
    """Return (2n,) fp32 in memory order from (n,) int32 of two bf16 each, with one instruction per element, not 1.5."""
    return tl.interleave(
        (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    )


@triton.jit
def reference(m, scale):
    """Return ref = fl(m * scale), and delta, what its rounding took off, bounded so that 2^delta is finite."""
    # an fma, because ptxas would contract a plain product into the differences that follow
    ref = tl.fma(m, scale, 0.0)
    return ref, tl.minimum(tl.maximum(tl.fma(m, scale, -ref), -100.0), 100.0)


@triton.jit
def start(LANES: tl.constexpr):
    """Return lanes that have seen nothing: (m, rest, t), each (LANES,) fp32."""
    zero = tl.zeros((LANES,), tl.float32)
    return zero + NEG, zero, zero


@triton.jit
def step(m, rest, t, xs, scale, K: tl.constexpr):
    """Return the lanes after K more elements each; xs is a tuple of K tensors (LANES,) fp32."""
    old, _ = reference(m, scale)
    lows = ()
    for k in tl.static_range(K):
        lows = lows + (tl.minimum(m, xs[k], propagate_nan=NAN),)
        m = tl.maximum(m, xs[k])
    ref, _ = reference(m, scale)
    rest, t = rescale(rest, t, old - ref)
    for k in tl.static_range(K):
        rest, t = add(rest, t, tl.fma(lows[k], scale, -ref))
    return m, rest, t


@triton.jit
def add(rest, t, d):
    """Return the sums (rest, t) with one more element at distance d (log2 units) from the reference."""
    d = tl.maximum(d, NEG, propagate_nan=NAN)  # because 2^-inf * -inf would be NaN
    p = tl.exp2(d)
    return rest + p, tl.fma(p, d, t)


@triton.jit
def rescale(rest, t, d):
    """Return the sums (rest, t) relative to a reference that is higher by -d (log2 units)."""
    a = tl.exp2(d)
    return rest * a, tl.fma(rest, d, t) * a


@triton.jit
def merge(m, rest, t, m2, rest2, t2, scale):
    """Return, lane by lane, (m, rest, t) over the elements of both; ref follows from m."""
    ref, _ = reference(m, scale)
    ref2, _ = reference(m2, scale)
    low = tl.minimum(m, m2)
    m = tl.maximum(m, m2)
    new = tl.maximum(ref, ref2)
    rest, t = rescale(rest, t, ref - new)
    rest2, t2 = rescale(rest2, t2, ref2 - new)
    rest, t = add(rest + rest2, t + t2, from_below(low, new, scale))
    return m, rest, t


@triton.jit
def from_below(low, ref, scale):
    """Return the distance (log2 units) of a maximum from the reference `ref` of the maximum that has replaced it."""
    # for equal maxima the distance is what rounding took off ref; where both are NEG it has no meaning
    return tl.minimum(tl.fma(low, scale, -ref), tl.where(low > NEG, 100.0, 1.0))


@triton.jit
def fold(m, rest, t, scale, VEC: tl.constexpr):
    """Return lanes (n,) from (n * VEC,), each merged from VEC neighbours, which are rescaled only once each."""
    ms, rests, ts = neighbours(m, VEC), neighbours(rest, VEC), neighbours(t, VEC)
    m, lows = ms[0], ()
    for k in tl.static_range(1, VEC):
        lows = lows + (tl.minimum(m, ms[k]),)
        m = tl.maximum(m, ms[k])
    ref, _ = reference(m, scale)
    old, _ = reference(ms[0], scale)
    rest, t = rescale(rests[0], ts[0], old - ref)
    for k in tl.static_range(1, VEC):
        old, _ = reference(ms[k], scale)
        next_rest, next_t = rescale(rests[k], ts[k], old - ref)
        rest, t = add(rest + next_rest, t + next_t, from_below(lows[k - 1], ref, scale))
    return m, rest, t


@triton.jit
def neighbours(x, VEC: tl.constexpr):
    """Return VEC tensors (n,) from (n * VEC,), which hold the elements of each group of neighbours in a fixed order."""
    xs = halves(halves((x,)))
    return halves(xs) if VEC == 8 else xs


@triton.jit
def halves(xs):
    """Return the even and the odd elements of each tensor of a tuple."""
    out = ()
    for i in tl.static_range(len(xs)):
        even, odd = tl.split(tl.reshape(xs[i], (xs[i].shape[0] // 2, 2)))
        out = out + (even, odd)
    return out


@triton.jit
def reduce_lanes(m, rest, t, scale, scale_low):
    """Reduce the lanes (LANES,) of a row to its maximum m, rest = sum(exp(s)) - 1 and t = sum(exp(s) * s), scalars.

    Here s = (x - m) / T, and scale + scale_low is log2(e) / T. The rounding of the scale changes e^-30 by 30 times half
    an ulp; sums of s and s^2 take that out again (the latter as if all of the rest were at one s, where the error is
    largest).

    Every reduction is free of order, so lanes may be permuted and split over programs without changing a bit.
    """
    # each lane's sums, relative to the exact m * scale instead of its rounded ref
    _, delta = reference(m, scale)
    rest, t = rescale(rest, t, -delta)
    t = tl.minimum(t, 0.0, propagate_nan=NAN)
    top = tl.max(m, 0)
    d = (m - top) * scale
    w = tl.exp2(d)
    # of the lanes at the top one holds the row's maximum out; what the others hold out are ties, which add 1 each
    below = m < top
    rest_top = tl.where(below, w * (rest + 1.0), rest)
    t_top = tl.where(below, w * tl.fma(d, rest + 1.0, t), t)
    ties = tl.sum((m == top).to(tl.int32), 0) - 1
    rest = exact_sum(rest_top) + ties.to(tl.float32)
    t = -LN2 * exact_sum(-t_top)
    off = scale_low / scale
    mean = tl.where(rest > 0, t / rest, 0.0)
    return top, tl.fma(off, t, rest), tl.fma(off, t + t * mean, t)


@triton.jit
def valid(inv_t):
    """Return 1 / temperature of a row, or NaN where it is outside the range that `fused_rl.base.checks` allows."""
    return tl.where((inv_t > 0.99e-6) & (inv_t < 1.01e6), inv_t, float("nan"))


@triton.jit
def in_range(m, rest, t, scale):
    """Return True if the lanes of a row are right: its maximum is in range, and its sums are finite."""
    # 2^30, because lanes with other maxima may reach up to 2^31
    held = (m > NEG) & (tl.abs(m * scale) < 1073741824.0)
    return held & (rest - rest == 0) & (t - t == 0)


@triton.jit
def exact_sum(x):
    """Return the sum of x >= 0, with the same bits in any order, or NaN if any is NaN.

    It is added in 64-bit fixed point whose unit is 40 bits below the largest x; integer addition is associative.
    """
    largest = tl.max(tl.where(x < float("inf"), x, float("inf")), 0)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -80), 80)
    up = ((127 + 40 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((127 - 40 + exponent) << 23).to(tl.float32, bitcast=True)
    total = tl.sum((x * up).to(tl.int64), 0).to(tl.float32) * down
    return tl.where(largest < float("inf"), total, float("nan"))


@triton.jit
def log1p(x):
    """Return log(1 + x) for x >= 0 to about an ulp, small x included, as fdlibm's log1pf does.

    The device's own log is an approximation.
    """
    u = 1.0 + x
    # u = 2^k (1 + f) with 1 + f in [0.7, 1.4); below that range x itself is f, and no bit of it is lost in u
    k = ((u.to(tl.int32, bitcast=True) - 0x3F3504F3) >> 23).to(tl.float32)
    f = (u.to(tl.int32, bitcast=True) - (k.to(tl.int32) << 23)).to(tl.float32, bitcast=True) - 1.0
    lost = tl.where(k > 0, tl.where(x >= 1.0, 1.0 - (u - x), x - (u - 1.0)) / u, 0.0)
    f = tl.where(k > 0, f, x)
    s = f / (2.0 + f)
    z = s * s
    series = z * tl.fma(
        z, tl.fma(z, tl.fma(z, 0.24279078841, 0.28498786688), 0.40000972152), 0.66666662693
    )
    half = 0.5 * f * f
    y = f - (half - (s * (half + series) + tl.fma(k, 9.0580006145e-06, lost)))
    y = tl.fma(k, 6.9313812256e-01, y)
    return tl.where(x < float("inf"), y, x)  # inf, NaN


@triton.jit
def tanh(x):
    """Return tanh(x) to a few ulp, small x included; Triton's core language has none."""
    z = x * x
    odd = tl.fma(z, tl.fma(z, -5.70498872745e-3, 2.06390887954e-2), -5.37397155531e-2)
    small = tl.fma(x * z, tl.fma(z, tl.fma(z, odd, 1.33314422036e-1), -3.33332819422e-1), x)
    y = tl.exp2(tl.minimum(tl.abs(x), 20.0) * (2.0 * 1.4426950408889634)) + 1.0
    # 1 / y by rsqrt and one Newton step: a division takes twice the instructions
    r = tl.rsqrt(y)
    r = r * r
    big = tl.fma(-2.0 * r, tl.fma(-y, r, 2.0), 1.0)
    big = tl.where(x < 0, -big, big)
    return tl.where(tl.abs(x) > 0.625, big, small)  # NaN is not > 0.625
