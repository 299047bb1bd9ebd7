"""The CPU path of the Jensen-Shannon divergence: the functions and formulas of `fused_rl.kernels.jensen_shannon`."""

import torch

from fused_rl.cpu.pair import (
    capped,
    distributions,
    excess,
    exp,
    load,
    over_blocks,
    p_q_delta,
    selected_rows,
)
from fused_rl.kernels.states import JensenShannonSums, KLState, bounded

# numbers per row that p_q_delta takes; after them come the shares, unless these are halves
_PAIR = 8


def js_fwd(x, y, mask, inv_t, state, softcap=None, shares=None):
    """`JensenShannonSums` as (3, N) fp32; with the state (9, N) of `kl_fwd`."""
    n = x.shape[0] * x.shape[1]
    sums = torch.zeros(len(JensenShannonSums._fields), n)
    rows, t, x, y = selected_rows(x, y, mask, inv_t)
    state_of_rows = KLState(*state[:, rows])
    per_row = (*distributions(state_of_rows, t), *shares_per_row(shares, t))
    for part, *pair in capped(x, y, softcap):
        numbers = [z[part] for z in per_row]
        blocks = over_blocks(_js_sums, *pair, *numbers)
        totals = [block.sum(1, dtype=torch.float64) for block in blocks]
        sums[:, rows[part]] = torch.stack(totals).float()
    # rounding may take a sum out of its range
    return bounded(sums, shares)


def shares_per_row(shares, t):
    """The shares as tensors like t (R,): a number would be compiled anew for each value. Nothing for halves."""
    return [torch.full_like(t, share) for share in shares or ()]


def js_logs(delta, expm1, shares):
    """a = log(p / m) and b = log(q / m), with the mixture m of `shares`."""
    if shares:
        larger, smaller, *_ = _sides(delta, *shares)
    else:
        larger, smaller, _ = _sides_of_halves(delta, expm1)
    a = torch.where(delta > 0, larger, smaller)
    b = torch.where(delta > 0, smaller, larger)
    return a, b


def _sides_of_halves(delta, expm1):
    """log(larger / m), log(smaller / m) and |r| = |p - q| / (p + q), with m = (p + q) / 2."""
    distance = delta.abs()
    ratio = exp(-distance)
    # 1 - ratio would cancel
    near = expm1.abs() / (2 + expm1)
    far = (1 - ratio) / (1 + ratio)
    r = torch.where(distance < 1, near, far)
    larger = r.log1p()
    return larger, larger - distance, r


def _sides(delta, p_share, q_share):
    """log(larger / m), log(smaller / m), and the twice of `_near` over the larger: see the kernels' module."""
    distance = delta.abs()
    share = torch.where(delta > 0, p_share, q_share)  # of the larger
    other = torch.where(delta > 0, q_share, p_share)
    ratio = exp(-distance)
    less = torch.where(distance < 1, excess(distance) - distance, ratio - 1)
    t = other * less
    z = t / (2 + t)
    cubic = _cubic(z)
    # log1p(t) by its series; where t is near -1 its digits are in share + other * ratio
    by_series = -2 * (z + cubic)
    by_log = -(share + other * ratio).log()
    larger = torch.where(t > -0.63, by_series, by_log)

    # the terms of the two sides, neither of which is negative
    z_other = -share * less / (2 + (2 - share) * less)
    near = t * share * (z - z_other)
    cubics = share * cubic + other * (1 + less) * _cubic(z_other)
    near = near - 2 * cubics
    return larger, larger - distance, near


def _cubic(z):
    """log1p(t) / 2 - z for t = 2 z / (1 - z), |z| < 0.4626: z^3 / 3 + z^5 / 5 + ..., 4e-8 of t - log1p(t)."""
    w = z * z
    series = w * 0.1485572 + 0.0991994976
    series = series * w + 0.143808395
    series = series * w + 0.199974044
    series = series * w + 0.333333445
    return z * w * series


def _js_sums(x, x_at, y, y_at, *per_row):
    dtype = x.dtype
    shares = per_row[_PAIR:]
    x, y = load(x, x_at, y, y_at)
    p, q, delta, expm1 = p_q_delta(x, y, *per_row[:_PAIR], dtype=dtype)
    if shares:
        larger, smaller, near = _sides(delta, *shares)
        near = torch.where(delta > 0, p, q) * near
    else:
        larger, smaller, r = _sides_of_halves(delta, expm1)
        # m [(1 + r) log(1 + r) + (1 - r) log(1 - r)] / 2 in powers of r: 4e-8 relative up to |r| = 0.47
        z = r * r
        series = z * (1 / 240) + 1 / 182
        for i in (132, 90, 56, 30, 12, 2):
            series = series * z + 1 / i
        near = series * z * p * (1 + 0.5 * expm1)
    # from 1 nat on the two sides do not cancel
    p_a = p * torch.where(delta > 0, larger, smaller)
    q_b = q * torch.where(delta > 0, smaller, larger)
    far = p_a * shares[0] + q_b * shares[1] if shares else (p_a + q_b) / 2
    js = torch.where(delta.abs() < 1, near, far)
    return js.sum(-1), p_a.sum(-1), q_b.sum(-1)


def js_dx(out, rows, x, x_at, y, y_at, g, mean, *per_row):
    """Write g p (a - mean), with g the upstream gradient times the share of P."""
    dtype = x.dtype
    x, y = load(x, x_at, y, y_at, out)
    p, _, delta, expm1 = p_q_delta(x, y, *per_row[:_PAIR], dtype=dtype)
    a, _ = js_logs(delta, expm1, per_row[_PAIR:])
    gradient = p * (a - mean) * g
    out[rows] = gradient.to(dtype)


def js_dy(out, rows, x, x_at, y, y_at, g, mean, *per_row):
    """Write g q (b - mean), with g the upstream gradient times the share of Q."""
    dtype = x.dtype
    x, y = load(x, x_at, y, y_at, out)
    _, q, delta, expm1 = p_q_delta(x, y, *per_row[:_PAIR], dtype=dtype)
    _, b = js_logs(delta, expm1, per_row[_PAIR:])
    gradient = q * (b - mean) * g
    out[rows] = gradient.to(dtype)
