"""The base of KL and Jensen-Shannon on the CPU: two tensors of logits for rows.c, or a few rows of both at a time."""

import torch

from fused_rl.cpu import compiled, native
from fused_rl.cpu.logprob import capped, either
from fused_rl.kernels.states import KLState

BANNED = -1e20  # as in the kernels: stands for -inf
FAR = 8.0  # nats of KL, from which log(p / q) is taken about the rows' maxima


def native_pair(x, y, mask, inv_t, shares=None):
    """(B, T, V) twice, (N,) bool | None, float | (N,) fp32, `Shares` -> the argument of rows.c."""
    batch, length, vocab = x.shape
    return native.Pair(
        *(x, *x.stride()[:2]),
        *(y, *y.stride()[:2]),
        native.DTYPES[x.dtype],
        batch * length,
        length,
        vocab,
        mask,
        *either(inv_t),
        *(shares or (0.5, 0.5)),
    )


def chunks(x, y, mask, inv_t, softcap):
    """A few rows that count at a time: which (R,), their capped logits (1, R, V) fp32 twice, 1 / temperature (R,)."""
    _, length, vocab = x.shape
    n = x.shape[:2].numel()
    counted = torch.arange(n, device="cpu") if mask is None else mask.nonzero()[:, 0]
    t = torch.as_tensor(inv_t, dtype=torch.float32, device="cpu").expand(n)
    for rows in counted.split(max(1, compiled.CHUNK // vocab)):
        index = rows // max(1, length), rows % max(1, length)
        pair = [capped(z.detach()[index], softcap)[None] for z in (x, y)]
        yield rows, *pair, t[rows]


def excess(u):
    """exp(-u) - 1 + u for |u| <= 1 by a polynomial (Chebyshev fit, 1.2e-7 relative): exp would cancel."""
    p = 2.5358644e-05 * u - 2.0329202e-04
    p = p * u + 1.3885394e-03
    p = p * u - 8.3308844e-03
    p = p * u + 4.1666735e-02
    p = p * u - 1.6666697e-01
    return (p * u + 0.5) * u * u


def log_ratio(x, y, t, apart, constant):
    """(x - y - apart) t - constant for fp32 x, y (R, V), t (R,), and (R,) fp64."""
    whole = apart + constant / t
    offset = whole.float()
    rest = (whole - offset).float()
    # with what x - y rounds off (Knuth's TwoSum)
    d = x - y
    back = d - x
    rounded_off = (x - (d - back)) - (y + back)
    return ((d - offset[:, None]) + (rounded_off - rest[:, None])) * t[:, None]


def probabilities(x, m, mass, t):
    """exp((x - m) t) / mass, (R, V) fp32; 0 for a mass of 0."""
    scale = torch.where(mass == 0, 0, 1 / mass).float()
    exponent = (x - m.float()[:, None]) * t[:, None]
    return exponent.exp() * scale[:, None]


def p_q_delta(x, y, t, state: KLState):
    """p, q and log(p / q), (R, V) fp32, from the state of the rows."""
    m, w, n, s, offset, c, k = (
        z.double() for z in (state.m, state.w_all, state.n, state.s, state.offset, state.c, state.k)
    )
    # far apart, k and the mean would cancel
    far = k > FAR
    apart = torch.where(far, m - n, offset)
    constant = torch.where(far, (w / s).log(), c - k)
    p = probabilities(x, m, w, t)
    q = probabilities(y, n, s, t)
    return p, q, log_ratio(x, y, t, apart, constant)
