"""The CPU path of the exact divergences: the functions and formulas of `fused_rl.kernels.kl`, a few rows at a time."""

import torch

_CHUNK_BYTES = 6 << 20
# As in the kernels: -inf, the maximum of nothing, a mass that is none, log(p / q) where P has no mass.
BANNED, FLOOR, TINY, NONE = -1e20, -5e19, 1e-30, -1e10
STATE = 9  # m, w, w_all, offset, c, n, f, s, k
# exp(-u) - 1 + u = u^2 (1/2 + ...), |u| <= 1, to 1.2e-7 (Chebyshev fit)
_EXCESS = (2.5358644e-05, -2.0329202e-04, 1.3885394e-03, -8.3308844e-03, 4.1666735e-02, -1.6666697e-01, 0.5)


def _polynomial(u, coefficients):
    total = torch.full_like(u, coefficients[0])
    for coefficient in coefficients[1:]:
        torch.addcmul(torch.tensor(coefficient), total, u, out=total)
    return total


def _excess(u):
    return _polynomial(u, _EXCESS).mul_(u).mul_(u)


def _chunks(x, y, mask, inv_t):
    """(rows, x, y, inv_t) of a few unmasked rows at a time, fp32; per-row values as (rows, 1)."""
    vocab = x.shape[-1]
    x, y = x.reshape(-1, vocab), y.reshape(-1, vocab)
    rows = torch.arange(x.shape[0]) if mask is None else mask.nonzero()[:, 0]
    for chunk in rows.split(max(1, _CHUNK_BYTES // (16 * vocab))):
        t = inv_t[chunk, None] if isinstance(inv_t, torch.Tensor) else inv_t
        yield chunk, x[chunk].float().clamp_(min=BANNED), y[chunk].float().clamp_(min=BANNED), t


def _difference(x, y, offset):
    """x - y - offset with what x - y rounds off (Knuth's TwoSum)."""
    d = x - y
    back = d - x
    lost = (x - (d - back)).sub_(back.add_(y))
    return d.sub_(offset).add_(lost)


def kl_fwd(x, y, mask, inv_t):
    """(B, T, V) twice, (N,) bool | None, float | (N,) fp32 -> KL(P || Q) (N,) fp32, state (9, N) fp32."""
    kl, state = torch.zeros(x.shape[0] * x.shape[1]), torch.zeros(STATE, x.shape[0] * x.shape[1])
    for rows, a, b, t in _chunks(x, y, mask, inv_t):
        # x - y at the first column that both allow: a constant between the rows then costs c and u no bits
        at = ((a > BANNED) & (b > BANNED)).to(torch.uint8).argmax(1, True)
        x_0, y_0 = a.gather(1, at), b.gather(1, at)
        offset = torch.where((x_0 > BANNED) & (y_0 > BANNED), x_0 - y_0, 0)
        m, n = a.amax(1, True).clamp_(min=FLOOR), b.amax(1, True).clamp_(min=FLOOR)
        p = (a - m).mul_(t).exp_()
        w_all = p.sum(1, True)
        p.masked_fill_(b <= BANNED, 0)
        w = p.sum(1, True)
        some = ~(w <= TINY)
        d = _difference(a, b, offset)
        lone = (d > -BANNED / 2).any(1, True)
        c = torch.where(some, (p * d).sum(1, True) / w * t, 0)
        w = torch.where(some, w, 0)
        scale = torch.where(some, torch.exp(_difference(m, n, offset) * t - c), 0)
        u = d.mul_(t).sub_(c)
        left = torch.where(some, (p * u).sum(1, True) / w, 0)  # what fp32 leaves out of c
        near = (u.abs() < 1) & some
        p.mul_(scale)
        f = torch.where(near, p * _excess(u), (b - n).mul_(t).exp_() + p * (u - 1)).sum(1, True)
        z = c - _difference(m, n, offset) * t
        r = torch.where(some, f / w, 1)
        far = z + torch.where(r > 0, r, 1).log()
        value = torch.where(z > 28, far, torch.log1p(r * z.clamp(max=28).exp())).mul(some)
        k = torch.where(w > 0, value + torch.where(lone, (w / w_all).log(), 0), NONE)
        # c / t goes into the offset, so that c + left is small and keeps its bits for the gradient
        mean = offset + c / t
        c = (c.double() + (offset - mean).double() * t).float() + left
        state[:, rows] = torch.cat([m, w, w_all, mean, c, n, f, f + scale * w, k], 1).t()
        nan = (w_all - w_all) + (n - n)  # 0, or NaN where a logit is NaN or inf
        kl[rows] = (torch.where(lone, torch.inf, value) + nan)[:, 0]
    return kl, state


def _p_q_delta(a, b, t, state):
    """p, q, u, delta = log(p / q), and expm1(-delta), exact where |delta| < 1."""
    m, _, w_all, offset, c, n, _, s, k = (row[:, None] for row in state)
    p = (a - m).mul_(t).exp_().mul_(torch.where(w_all == 0, 0, 1 / w_all))
    q = (b - n).mul_(t).exp_().mul_(torch.where(s == 0, 0, 1 / s))
    u = _difference(a, b, offset).mul_(t).sub_(c)
    delta = u + k
    return p, q, u, delta, _excess(delta).sub_(delta)


def _js_logs(delta, expm1):
    """a = log(p / mean(p, q)), b = log(q / mean(p, q)) and |r| = |p - q| / (p + q)."""
    distance = delta.abs()
    ratio = distance.neg().exp_()
    r = torch.where(distance < 1, expm1.abs() / (2 + expm1), (1 - ratio) / (1 + ratio))
    larger = r.log1p()
    smaller = larger - distance
    return torch.where(delta > 0, larger, smaller), torch.where(delta > 0, smaller, larger), r


def js_fwd(x, y, mask, inv_t, state):
    """Sums over the vocabulary, (3, N) fp32: the divergence, sum p a, sum q b; with the state of `kl_fwd`."""
    sums = torch.zeros(3, x.shape[0] * x.shape[1])
    for rows, a, b, t in _chunks(x, y, mask, inv_t):
        p, q, _, delta, expm1 = _p_q_delta(a, b, t, state[:, rows])
        log_a, log_b, r = _js_logs(delta, expm1)
        # mean(p, q) [(1 + r) log(1 + r) + (1 - r) log(1 - r)] / 2 in powers of r: 4e-8 relative up to |r| = 0.47
        z = r.square()
        series = _polynomial(z, [1 / (2 * i * (2 * i - 1)) for i in range(8, 0, -1)]).mul_(z)
        p_a, q_b = p * log_a, q * log_b
        near = series * p * (1 + 0.5 * expm1)
        sums[:, rows] = torch.stack(
            [torch.where(delta.abs() < 1, near, (p_a + q_b) / 2).sum(1), p_a.sum(1), q_b.sum(1)]
        )
    return sums


def kl_bwd(g, x, y, mask, inv_t, divergence, state, sums, wants_dx, wants_dy):
    """Gradients (B, T, V) of x and of y, None where not wanted; g (N,) fp32; `sums` of `js_fwd`, or None for KL."""
    new = torch.empty if mask is None else torch.zeros
    dx = new(x.shape, dtype=x.dtype) if wants_dx else None
    dy = new(y.shape, dtype=y.dtype) if wants_dy else None
    for rows, a, b, t in _chunks(x, y, mask, inv_t):
        p, q, u, delta, expm1 = _p_q_delta(a, b, t, state[:, rows])
        g_t = g[rows, None].mul(t).masked_fill_(divergence[rows, None] == torch.inf, 0)
        g_t.masked_fill_(state[2, rows, None] == 0, 0)  # P bans everything
        if sums is None:
            a_x, a_y = p * u, torch.where(delta.abs() < 1, p * expm1, q - p)
        else:
            log_a, log_b, _ = _js_logs(delta, expm1)
            a_x, a_y = p * (log_a - sums[1, rows, None]) / 2, q * (log_b - sums[2, rows, None]) / 2
        if wants_dx:
            dx.view(-1, x.shape[-1])[rows] = (a_x * g_t).to(x.dtype)
        if wants_dy:
            dy.view(-1, y.shape[-1])[rows] = (a_y * g_t).to(y.dtype)
    return dx, dy
