"""The CPU path of the Jensen-Shannon divergence: the functions and formulas of `fused_rl.kernels.jensen_shannon`."""

import torch

from fused_rl.cpu.pair import (
    capped,
    distributions,
    exp,
    load,
    over_blocks,
    p_q_delta,
    selected_rows,
)
from fused_rl.kernels.states import JensenShannonSums, KLState, bounded


def js_fwd(x, y, mask, inv_t, state, softcap=None):
    """`JensenShannonSums` as (3, N) fp32; with the state (9, N) of `kl_fwd`."""
    sums = torch.zeros(len(JensenShannonSums._fields), x.shape[0] * x.shape[1])
    rows, t, x, y = selected_rows(x, y, mask, inv_t)
    per_row = distributions(KLState(*state[:, rows]), t)
    for part, *pair in capped(x, y, softcap):
        blocks = over_blocks(_js_sums, *pair, *(z[part] for z in per_row))
        totals = [block.sum(1, dtype=torch.float64) for block in blocks]
        sums[:, rows[part]] = torch.stack(totals).float()
    return bounded(sums)


def js_logs(delta, expm1):
    """a = log(p / mean(p, q)), b = log(q / mean(p, q)) and |r| = |p - q| / (p + q)."""
    distance = delta.abs()
    ratio = exp(-distance)
    near = expm1.abs() / (2 + expm1)
    r = torch.where(distance < 1, near, (1 - ratio) / (1 + ratio))
    larger = r.log1p()
    smaller = larger - distance
    a = torch.where(delta > 0, larger, smaller)
    b = torch.where(delta > 0, smaller, larger)
    return a, b, r


def _js_sums(x, x_at, y, y_at, *per_row):
    dtype = x.dtype
    x, y = load(x, x_at, y, y_at)
    p, q, delta, expm1 = p_q_delta(x, y, *per_row, dtype)
    log_a, log_b, r = js_logs(delta, expm1)
    # mean(p, q) [(1 + r) log(1 + r) + (1 - r) log(1 - r)] / 2 in powers of r: 4e-8 relative up to |r| = 0.47
    z = r * r
    series = z * (1 / 240) + 1 / 182
    for i in (132, 90, 56, 30, 12, 2):
        series = series * z + 1 / i
    p_a, q_b = p * log_a, q * log_b
    near = series * z * p * (1 + 0.5 * expm1)
    js = torch.where(delta.abs() < 1, near, (p_a + q_b) / 2)
    return js.sum(-1), p_a.sum(-1), q_b.sum(-1)


def js_dx(out, rows, x, x_at, y, y_at, *per_row):
    *per_row, g, mean = per_row
    dtype = x.dtype
    x, y = load(x, x_at, y, y_at, out)
    p, _, delta, expm1 = p_q_delta(x, y, *per_row, dtype)
    a, _, _ = js_logs(delta, expm1)
    out[rows] = (p * (a - mean) * g).to(dtype)


def js_dy(out, rows, x, x_at, y, y_at, *per_row):
    *per_row, g, mean = per_row
    dtype = x.dtype
    x, y = load(x, x_at, y, y_at, out)
    _, q, delta, expm1 = p_q_delta(x, y, *per_row, dtype)
    _, b, _ = js_logs(delta, expm1)
    out[rows] = (q * (b - mean) * g).to(dtype)
