"""The CPU path of the Jensen-Shannon divergence: the functions and formulas of `fused_rl.kernels.jensen_shannon`."""

import torch

from fused_rl.cpu import native
from fused_rl.cpu.logprob import chunks, fp64_per_row
from fused_rl.cpu.pair import BANNED, native_pair, p_q_delta
from fused_rl.kernels.states import JensenShannonSums, KLState, bounded

HALVES = 0.5, 0.5


def js_fwd(x, y, mask, inv_t, state, softcap=None, shares=None):
    """`JensenShannonSums` as (3, N) fp32; with the state (9, N) of `kl_fwd`."""
    sums = state.new_zeros(len(JensenShannonSums._fields), x.shape[0] * x.shape[1])
    if softcap is None and native.takes(x, y):
        pair = native_pair(x, y, mask, inv_t, shares)
        native.call("js_fwd", x.numel(), pair, state.contiguous(), sums)
    else:
        for rows, x_rows, y_rows, t in chunks(x, y, mask=mask, inv_t=inv_t, softcap=softcap):
            function = js_fwd if native.takes(x_rows, y_rows) else _eager_fwd
            pair = x_rows[None], y_rows[None]
            of_rows = function(*pair, None, t, state[:, rows], shares=shares)
            sums[:, rows] = of_rows
    # rounding may take a sum out of its range
    return bounded(sums, shares)


def _eager_fwd(x, y, mask, inv_t, state, shares):
    x, y = (z[0].clamp(min=BANNED) for z in (x, y))
    p, q, delta = p_q_delta(x, y, fp64_per_row(inv_t, len(x)), KLState(*state))
    p_share, q_share = shares or HALVES
    a, b = _logs(delta, p_share, q_share)
    p_a = p * a
    q_b = q * b
    return torch.stack([z.sum(-1) for z in (p_share * p_a + q_share * q_b, p_a, q_b)]).float()


def js_gradient(p, q, delta, sums, shares):
    """p (a - mean) and q (b - mean), each times the share of its side, (R, V), with the sums (3, R)."""
    _, mean_a, mean_b = sums[..., None]
    p_share, q_share = shares or HALVES
    a, b = _logs(delta, p_share, q_share)
    return p_share * p * (a - mean_a), q_share * q * (b - mean_b)


def _logs(delta, p_share, q_share):
    """a = log(p / m) and b = log(q / m), where m is the mixture."""
    delta = delta.clamp(-500, 500)  # beyond, one of the two has no mass
    return -(q_share * (-delta).expm1()).log1p(), -(p_share * delta.expm1()).log1p()
