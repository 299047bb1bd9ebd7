"""The CPU path of the exact divergences: the functions and formulas of `fused_rl.kernels.kl`.

A row is cut into blocks of the vocabulary that stay in the cache while they are passed over three times: maxima, mean
of u, sums about that mean. Each keeps its own reference, and the few numbers per block are merged in fp64:
with u = d / T - r about any r, s = sum w u and F(r) = sum w (exp(-u) - 1 + u), a move by h to r + h gives

    F(r + h) = exp(h) F(r) + W (exp(h) - 1 - h) - (exp(h) - 1) s.

As in `fused_rl.cpu`, large inputs go through Inductor, small ones and machines without a C++ compiler through eager
PyTorch, a few rows at a time, with the same functions.
"""

import torch

from fused_rl import cpu

# As in the kernels: -inf, the maximum of nothing, a mass that is none, log(p / q) where P has no mass.
BANNED, FLOOR, TINY, NONE = -1e20, -5e19, 1e-30, -1e10
STATE = 9  # m, w, w_all, offset, c, n, f, s, k
_LOG2E = 1.4426950408889634
# Inductor would write to memory what several sums use; here it is to compute it again, from a block in the cache.
_RECOMPUTE = {f"realize_{what}_threshold": 10000 for what in ("reads", "acc_reads", "opcount")}


def kl_fwd(x, y, mask, inv_t):
    """(B, T, V) twice, (N,) bool | None, float | (N,) fp32 -> KL(P || Q) (N,) fp32, state (9, N) fp32."""
    n = x.shape[0] * x.shape[1]
    rows, t, x, y = _selected(x, y, mask, inv_t)
    kl, state = torch.zeros(n), torch.zeros(STATE, n)
    kl[rows], state[:, rows] = _merge(*_over_blocks(_block_sums, x, y, t), t.double()[:, None])
    return kl, state


def js_fwd(x, y, mask, inv_t, state):
    """Sums over the vocabulary, (3, N) fp32: the divergence, sum p a, sum q b; with the state of `kl_fwd`."""
    sums = torch.zeros(3, x.shape[0] * x.shape[1])
    rows, t, x, y = _selected(x, y, mask, inv_t)
    found = _over_blocks(_js_sums, x, y, *_distributions(state[:, rows], t))
    sums[:, rows] = torch.stack([part.sum(1, dtype=torch.float64) for part in found]).float()
    return sums


def kl_bwd(g, x, y, mask, inv_t, divergence, state, sums, wants_dx, wants_dy):
    """Gradients (B, T, V) of x and of y, None where not wanted; g (N,) fp32; `sums` of `js_fwd`, or None for KL."""
    new = torch.empty if mask is None else torch.zeros
    dx, dy = (
        cpu.in_huge_pages(new(z.shape, dtype=z.dtype)) if wanted else None
        for z, wanted in ((x, wants_dx), (y, wants_dy))
    )
    rows, t, x, y = _selected(x, y, mask, inv_t)
    state = state[:, rows]
    _, _, w_all, offset, c, *_ = state
    # no step would make such a divergence finite, and none would change what P bans throughout
    still = (divergence[rows] == torch.inf) | (w_all == 0)
    g = torch.where(still, 0, g[rows] * t)
    common = _distributions(state, t)
    if sums is None:
        x_rows, y_rows = (state[0], t, offset, c, torch.where(still, 0, g / w_all)), (*common, g)
        functions = _kl_dx, _kl_dy
    else:
        x_rows, y_rows = (*common, g / 2, sums[1, rows]), (*common, g / 2, sums[2, rows])
        functions = _js_dx, _js_dy
    for out, function, per_row in zip((dx, dy), functions, (x_rows, y_rows), strict=True):
        if out is not None:
            _write(function, out.view(-1, out.shape[-1]), rows, x, y, per_row)
    return dx, dy


# What follows takes logits as a matrix and the rows of it that count, ((M, V), (R,)), and (R,) numbers of these rows.


def _selected(x, y, mask, inv_t):
    """The rows that count (R,), 1 / temperature of each (R,) fp32, and x and y as matrices with those rows."""
    n = x.shape[0] * x.shape[1]
    rows = torch.arange(n) if mask is None else mask.nonzero()[:, 0]
    t = torch.as_tensor(inv_t, dtype=torch.float32).expand(n)[rows]
    return rows, t, _matrix(x.detach(), rows), _matrix(y.detach(), rows)


def _matrix(x, rows):
    """Without a copy also for slices such as logits[:, :-1], whose rows are some of those of a larger matrix."""
    batch, length, vocab = x.shape
    step, stride = x.stride()[:2]
    if batch < 2 or length == 0 or step == length * stride:
        return x.reshape(batch * length, vocab), rows
    if stride == 0 or step % stride:
        return x.reshape(batch * length, vocab), rows
    apart = step // stride
    whole = x.as_strided(((batch - 1) * apart + length, vocab), (stride, x.stride(2)))
    return whole, rows // length * apart + rows % length


def _over_blocks(function, x, y, *per_row):
    """`function` of all blocks: its sums, (R, blocks) fp32 each."""
    vocab = x[0].shape[1]
    tail = vocab % cpu._BLOCK
    parts = []
    if vocab >= cpu._BLOCK:
        compiled = _compile_pays(x)
        blocks = [(z[:, : vocab - tail].unflatten(1, (-1, cpu._BLOCK)), at) for z, at in (x, y)]
        parts.append(_sums(function, *blocks, per_row, compiled))
    if tail:
        parts.append(_sums(function, *((z[:, None, vocab - tail :], at) for z, at in (x, y)), per_row, False))
    return [torch.cat(columns, 1) for columns in zip(*parts, strict=True)]


def _sums(function, x, y, per_row, compiled):
    """Of blocks ((M, blocks, width), (R,)) twice. One index for rows and blocks: Inductor then fuses all into one."""
    count, rows = x[0].shape[1], x[1].numel()
    if compiled:
        for z, _ in (x, y):
            torch._dynamo.mark_static(z, 2)
    block = torch.arange(count).repeat(rows)
    x, y = ((z, (at.repeat_interleave(count), block)) for z, at in (x, y))
    per_row = [z.repeat_interleave(count)[:, None] for z in per_row]
    if compiled:
        found = _compiled(function, *x, *y, *per_row)
    else:
        step = cpu._CHUNK // cpu._BLOCK
        parts = []
        for c in (slice(i, i + step) for i in range(0, max(1, block.numel()), step)):
            at = [tuple(i[c] for i in z[1]) for z in (x, y)]
            parts.append(function(x[0], at[0], y[0], at[1], *(z[c] for z in per_row)))
        found = [torch.cat(part) for part in zip(*parts, strict=True)]
    return [z.view(rows, count) for z in found]


def _compile_pays(x):
    return cpu._compile_pays(x[1].numel(), x[0].shape[1], None)


def _compiled(function, *args):
    with torch._inductor.config.patch(_RECOMPUTE if function is _block_sums else {}):
        return cpu._compiled(function)(*args)


def _write(function, out, rows, x, y, per_row):
    per_row = [z[:, None] for z in per_row]
    if _compile_pays(x):
        _compiled(function, out, rows, *x, *y, *per_row)
    else:
        step = max(1, cpu._CHUNK // out.shape[1])
        for c in (slice(i, i + step) for i in range(0, rows.numel(), step)):
            function(out, rows[c], x[0], x[1][c], y[0], y[1][c], *(z[c] for z in per_row))


def _load(x, x_at, y, y_at, out=None):
    if out is not None:  # else Inductor may not see it, and keeps in memory what it cannot fuse with the write
        torch._check(out.shape[1] == x.shape[1])
    return (z[at].float().clamp(min=BANNED) for z, at in ((x, x_at), (y, y_at)))


def _exp(z):
    # Inductor would keep every exp that several sums use; in eager mode exp2 has other bits at a vector's end
    return (z * _LOG2E).exp2() if torch.compiler.is_compiling() else z.exp()


def _excess(u):
    """exp(-u) - 1 + u for |u| <= 1 by a polynomial (Chebyshev fit, 1.2e-7 relative): exp would cancel."""
    p = 2.5358644e-05 * u - 2.0329202e-04
    p = p * u + 1.3885394e-03
    p = p * u - 8.3308844e-03
    p = p * u + 4.1666735e-02
    p = p * u - 1.6666697e-01
    return (p * u + 0.5) * u * u


def _difference(x, y, offset, dtype):
    """x - y - offset, with what x - y rounds off (Knuth's TwoSum) but for bf16, where that is next to nothing."""
    d = x - y
    if dtype == torch.bfloat16:
        return d - offset
    back = d - x
    return (d - offset) + ((x - (d - back)) - (y + back))


def _block_sums(x, x_at, y, y_at, t):
    """(M, blocks, width) and an index of its blocks, twice, t (K, 1) -> K of each number that `_merge` takes."""
    dtype = x.dtype
    x, y = _load(x, x_at, y, y_at)
    m, n = x.amax(-1, True), y.amax(-1, True)
    d, allowed = x - y, y > BANNED
    # x - y where P is largest: a constant between the rows, or one token's mass, then costs u no bits
    at_top = torch.where(allowed & (x == m), d, -torch.inf).amax(-1, True)
    found = at_top > BANNED
    e = _difference(x, y, torch.where(found, at_top, 0.0), dtype) * t
    # the condition changes nothing but the order: w_all waits, and is summed in one pass with w and a
    p_all = _exp((x - torch.where(found, m, m.clamp(min=FLOOR))) * t)
    p = torch.where(allowed, p_all, 0.0)
    w_all, w, a = (z.sum(-1, True) for z in (p_all, p, p * e))
    some = w > TINY
    u = e - torch.where(some, a / w, 0.0)
    near = (u.abs() < 1) & some
    s = (p * u).sum(-1, True)
    f = (p * torch.where(near, _excess(u), u - 1)).sum(-1, True)
    f_y = torch.where(near, 0.0, _exp((y - n.clamp(min=FLOOR)) * t)).sum(-1, True)
    return tuple(z.squeeze(-1) for z in (m, n, w_all, w, at_top, a, s, f, f_y, d.amax(-1, True)))


def _moved(h):
    """exp(h) - 1 - h of fp64 numbers."""
    series = torch.full_like(h, 1 / 5040)
    for n in (720, 120, 24, 6, 2):
        series = series * h + 1 / n
    return torch.where(h.abs() < 1e-2, series * h.square(), torch.expm1(h) - h)


def _merge(m, n, w_all, w, at_top, a, s, f, f_y, most, t):
    """Sums of `_block_sums`, t (R, 1) fp64 -> KL (R,), state (9, R)."""
    some = w > TINY
    c = torch.where(some, a / w, 0.0).double()  # in fp32, as the blocks had it
    c += torch.where(at_top > BANNED, at_top, 0.0).double() * t
    m, n, w_all, w, s, f, f_y = (z.double() for z in (m.clamp(min=FLOOR), n.clamp(min=FLOOR), w_all, w, s, f, f_y))
    m_row, n_row = m.amax(1, True), n.amax(1, True)
    share = ((m - m_row) * t).exp()
    weight, s_weight = (torch.where(some, z * share, 0.0) for z in (w, s))
    w_row, w_all = weight.sum(1, True), (w_all * share).sum(1, True)
    some_row = w_row > TINY
    # the mean, from one of the references: equal ones then give exactly it
    first = torch.where(some, c, -torch.inf).amax(1, True)
    first = torch.where(some_row, first, 0.0)
    mean = first + torch.where(some_row, (weight * (c - first) + s_weight).sum(1, True) / w_row, 0.0)
    h = mean - c
    own, scale = (((z - n_row) * t - r).exp() for z, r in ((m, c), (m_row, mean)))
    scale = torch.where(some_row, scale, 0.0)
    near = scale * (weight * _moved(h) - torch.expm1(h) * s_weight)
    far = own * (w - s) - scale * (weight * (1 + h) - s_weight)
    moved = torch.where((h < 1) & some_row, near, far)  # far, without a mean: all that is Q's
    f = torch.where(some, own * f + moved, 0.0) + f_y * ((n - n_row) * t).exp()
    f, w_row = f.sum(1, True).clamp_(min=0), torch.where(some_row, w_row, 0.0)
    lone = (most > -BANNED / 2).any(1, True)  # Q bans a column that P does not, however little its mass
    rows = w_row, w_all, mean, (n_row - m_row) * t + mean, f, lone
    kl, k = _divergence(*rows)
    # mean / t goes into the offset, so that c is small and keeps its bits for the gradient
    offset = (mean / t).float().double()
    nan = (w_all - w_all) + (n_row - n_row)  # 0, or NaN where a logit is NaN or inf
    kl = torch.where(lone, torch.inf, kl) + nan
    state = m_row, w_row, w_all, offset, mean - offset * t, n_row, f, f + scale * w_row, k
    return kl[:, 0].float(), torch.stack([z[:, 0] for z in state]).float()


def _divergence(w, w_all, mean, z, f, lone):
    """KL = log1p(f / w exp(z)) over the columns that both allow, and k with log(p / q) = u + k."""
    some = w > 0
    r = torch.where(some, f / w, 1.0)
    far = z + torch.where(r > 0, r, 1.0).log()
    kl = torch.where(z > 600, far, torch.log1p(r * z.clamp(max=600).exp()))
    kl = torch.where(some, kl, 0.0)
    return kl, torch.where(some, kl + torch.where(lone, (w / w_all).log(), 0.0), NONE)


def _distributions(state, t):
    """What `_p_q_delta` takes of each row; about the maxima where KL is large, as `_far` of the kernels."""
    m, _, w_all, offset, c, n, _, s, k = state
    far, apart = k > 8, m - n
    c = torch.where(far, (m.double() - n.double() - apart).float() * t, c)
    offset, k = torch.where(far, apart, offset), torch.where(far, (s / w_all).log(), k)
    return m, torch.where(w_all == 0, 0, 1 / w_all), n, torch.where(s == 0, 0, 1 / s), t, offset, c, k


def _p_q_delta(x, y, m, p_scale, n, q_scale, t, offset, c, k, dtype):
    """p, q, delta = log(p / q), and expm1(-delta), exact where |delta| < 1."""
    p = _exp((x - m) * t) * p_scale
    q = _exp((y - n) * t) * q_scale
    delta = (_difference(x, y, offset, dtype) * t - c) + k
    return p, q, delta, _excess(delta) - delta


def _js_logs(delta, expm1):
    """a = log(p / mean(p, q)), b = log(q / mean(p, q)) and |r| = |p - q| / (p + q)."""
    distance = delta.abs()
    ratio = _exp(-distance)
    r = torch.where(distance < 1, expm1.abs() / (2 + expm1), (1 - ratio) / (1 + ratio))
    larger = r.log1p()
    smaller = larger - distance
    return torch.where(delta > 0, larger, smaller), torch.where(delta > 0, smaller, larger), r


def _js_sums(x, x_at, y, y_at, *per_row):
    dtype = x.dtype
    x, y = _load(x, x_at, y, y_at)
    p, q, delta, expm1 = _p_q_delta(x, y, *per_row, dtype)
    log_a, log_b, r = _js_logs(delta, expm1)
    # mean(p, q) [(1 + r) log(1 + r) + (1 - r) log(1 - r)] / 2 in powers of r: 4e-8 relative up to |r| = 0.47
    z = r * r
    series = z * (1 / 240) + 1 / 182
    for i in (132, 90, 56, 30, 12, 2):
        series = series * z + 1 / i
    p_a, q_b = p * log_a, q * log_b
    near = series * z * p * (1 + 0.5 * expm1)
    js = torch.where(delta.abs() < 1, near, (p_a + q_b) / 2)
    return js.sum(-1), p_a.sum(-1), q_b.sum(-1)


def _kl_dx(out, rows, x, x_at, y, y_at, m, t, offset, c, g):
    dtype = x.dtype
    x, y = _load(x, x_at, y, y_at, out)
    u = _difference(x, y, offset, dtype) * t - c
    out[rows] = (_exp((x - m) * t) * u * g).to(dtype)


def _kl_dy(out, rows, x, x_at, y, y_at, *per_row):
    *per_row, g = per_row
    dtype = x.dtype
    x, y = _load(x, x_at, y, y_at, out)
    p, q, delta, expm1 = _p_q_delta(x, y, *per_row, dtype)
    out[rows] = (torch.where(delta.abs() < 1, p * expm1, q - p) * g).to(dtype)


def _js_dx(out, rows, x, x_at, y, y_at, *per_row):
    *per_row, g, mean = per_row
    dtype = x.dtype
    x, y = _load(x, x_at, y, y_at, out)
    p, _, delta, expm1 = _p_q_delta(x, y, *per_row, dtype)
    out[rows] = (p * (_js_logs(delta, expm1)[0] - mean) * g).to(dtype)


def _js_dy(out, rows, x, x_at, y, y_at, *per_row):
    *per_row, g, mean = per_row
    dtype = x.dtype
    x, y = _load(x, x_at, y, y_at, out)
    _, q, delta, expm1 = _p_q_delta(x, y, *per_row, dtype)
    out[rows] = (q * (_js_logs(delta, expm1)[1] - mean) * g).to(dtype)
