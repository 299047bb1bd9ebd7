"""The base of KL and Jensen-Shannon on the CPU: two tensors of logits for rows.c, and distributions in fp64."""

import torch

from fused_rl.cpu import native
from fused_rl.cpu.logprob import either
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


def log_ratio(x, y, t, apart, constant):
    """(x - y - apart) t - constant, (R, V) fp64, of (R,) each."""
    return (x.double() - y - apart[:, None]) * t[:, None] - constant[:, None]


def probabilities(x, m, mass, t):
    """exp((x - m) t) / mass, (R, V) fp64; 0 for a mass of 0."""
    scale = torch.where(mass == 0, 0, 1 / mass)
    return ((x.double() - m[:, None]) * t[:, None]).exp() * scale[:, None]


def p_q_delta(x, y, t, state: KLState):
    """p, q and log(p / q), (R, V) fp64, from the state of the rows."""
    state = KLState(*(z.double() for z in state))
    # far apart, k and the mean would cancel
    far = state.k > FAR
    apart = torch.where(far, state.m - state.n, state.offset)
    constant = torch.where(far, (state.w_all / state.s).log(), state.c - state.k)
    p = probabilities(x, state.m, state.w_all, t)
    q = probabilities(y, state.n, state.s, t)
    return p, q, log_ratio(x, y, t, apart, constant)
