"""The CPU path of the Jensen-Shannon divergence: the functions and formulas of `fused_rl.kernels.jensen_shannon`."""

import torch

from fused_rl.cpu import native
from fused_rl.cpu.pair import BANNED, chunks, excess, native_pair, p_q_delta
from fused_rl.kernels.states import JensenShannonSums, KLState, bounded

HALVES = 0.5, 0.5


def js_fwd(x, y, mask, inv_t, state, softcap=None, shares=None):
    """`JensenShannonSums` as (3, N) fp32; with the state (9, N) of `kl_fwd`."""
    sums = state.new_zeros(len(JensenShannonSums._fields), x.shape[0] * x.shape[1])
    if softcap is None and native.takes(x, y):
        pair = native_pair(x, y, mask, inv_t, shares)
        native.call("js_fwd", x.numel(), pair, state.contiguous(), sums)
    else:
        for rows, x_rows, y_rows, t in chunks(x, y, mask, inv_t, softcap):
            function = js_fwd if native.takes(x_rows, y_rows) else _eager_fwd
            of_rows = function(x_rows, y_rows, None, t, state[:, rows], shares=shares)
            sums[:, rows] = of_rows
    # rounding may take a sum out of its range
    return bounded(sums, shares)


def _eager_fwd(x, y, mask, t, state, shares):
    x, y = (z[0].clamp(min=BANNED) for z in (x, y))
    p, q, delta = p_q_delta(x, y, t, KLState(*state))
    p_share, q_share = shares or HALVES
    a, b, near = _logs(p, q, delta, p_share, q_share)
    p_a = p * a
    q_b = q * b
    js = torch.where(delta.abs() < 1, near, p_share * p_a + q_share * q_b)
    return torch.stack([z.sum(-1, dtype=torch.float64) for z in (js, p_a, q_b)]).float()


def js_gradient(p, q, delta, sums, shares):
    """p (a - mean) and q (b - mean), each times the share of its side, (R, V), with the sums (3, R)."""
    _, mean_a, mean_b = sums[..., None]
    p_share, q_share = shares or HALVES
    a, b, _ = _logs(p, q, delta, p_share, q_share)
    return p_share * p * (a - mean_a), q_share * q * (b - mean_b)


def _logs(p, q, delta, p_share, q_share):
    """a = log(p / m), b = log(q / m), and p_share p a + q_share q b for |delta| < 1: see the kernels' module."""
    above = delta > 0
    distance = delta.abs()
    # a tensor: of two numbers torch.where has the default dtype
    p_share = p.new_full((), p_share)
    share = torch.where(above, p_share, q_share)  # of the larger
    other = torch.where(above, q_share, p_share)
    ratio = (-distance).exp()
    less = torch.where(distance < 1, excess(distance) - distance, ratio - 1)
    t = other * less
    z = t / (2 + t)
    cubic = _cubic(z)
    # log1p(t) by its series; where t is near -1 its digits are in share + other * ratio
    by_series = -2 * (z + cubic)
    by_log = -(share + other * ratio).log()
    larger = torch.where(t > -0.63, by_series, by_log)
    smaller = larger - distance

    # the terms of the two sides, neither of which is negative
    z_other = -share * less / (2 + (2 - share) * less)
    near = t * share * (z - z_other)
    cubics = share * cubic + other * (1 + less) * _cubic(z_other)
    near = torch.where(above, p, q) * (near - 2 * cubics)
    return torch.where(above, larger, smaller), torch.where(above, smaller, larger), near


def _cubic(z):
    """log1p(t) / 2 - z for t = 2 z / (1 - z), |z| < 0.4626: z^3 / 3 + z^5 / 5 + ..., 4e-8 of t - log1p(t)."""
    w = z * z
    series = w * 0.1485572 + 0.0991994976
    series = series * w + 0.143808395
    series = series * w + 0.199974044
    series = series * w + 0.333333445
    return z * w * series
