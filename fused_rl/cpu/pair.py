"""The base of KL and Jensen-Shannon on the CPU: rows of two logits as p and q, a block or a chunk at a time.

Large inputs go through Inductor, small ones and machines without a C++ compiler through eager PyTorch, a few rows at a
time, with the same functions. Logits come as a matrix and the rows of it that count, ((M, V), (R,)), with (R,) numbers
of these rows.
"""

import torch

from fused_rl.cpu import compiled
from fused_rl.cpu.compiled import BLOCK
from fused_rl.kernels.states import KLState

BANNED = -1e20  # as in the kernels: stands for -inf
_FAR = 8.0  # nats of KL, as in the kernels
_LOG2E = 1.4426950408889634
# Inductor would write to memory what several sums use; here it is to compute it again, from a block in the cache.
_RECOMPUTE = {f"realize_{what}_threshold": 10000 for what in ("reads", "acc_reads", "opcount")}


def selected_rows(x, y, mask, inv_t):
    """The rows that count (R,), 1 / temperature of each (R,) fp32, and x and y as matrices with those rows."""
    n = x.shape[0] * x.shape[1]
    rows = torch.arange(n) if mask is None else mask.nonzero()[:, 0]
    t = torch.as_tensor(inv_t, dtype=torch.float32).expand(n)
    return rows, t[rows], matrix(x.detach(), rows), matrix(y.detach(), rows)


def matrix(x, rows):
    """Without a copy also for slices such as logits[:, :-1], whose rows are some of those of a larger matrix."""
    batch, length, vocab = x.shape
    step, stride = x.stride()[:2]
    one_matrix = batch < 2 or length == 0 or step == length * stride
    # a view of one matrix, or a copy where the sequences begin at no rows of a larger one
    if one_matrix or stride == 0 or step % stride:
        return x.reshape(batch * length, vocab), rows
    apart = step // stride
    size = (batch - 1) * apart + length, vocab
    whole = x.as_strided(size, (stride, x.stride(2)))
    sequence = rows // length
    return whole, sequence * apart + rows % length


def over_blocks(function, x, y, *per_row, recompute=False, careful=None):
    """`function` of all blocks: its sums, (R, blocks) fp32 each; `recompute`: read a block again for every sum.

    With `careful` the first of these says which blocks hold, and is left out: the others are taken again by it.
    """
    vocab = x[0].shape[1]
    tail = vocab % BLOCK
    sums = []
    # whole blocks together, compiled where that pays
    if vocab >= BLOCK:
        whole = vocab - tail
        pair = []
        for z, at in (x, y):
            z_blocks = z[:, :whole].unflatten(1, (-1, BLOCK))
            pair.append((z_blocks, at))
        x_blocks, y_blocks = pair
        options = _RECOMPUTE if recompute else {}
        pays = compiled.compile_pays(x[1].numel(), vocab)
        sums.append(_sums(function, x_blocks, y_blocks, per_row, pays, options, careful))
    # the row's end, of another width, which would be one more variant to compile
    if tail:
        x_last, y_last = ((z[:, None, vocab - tail :], at) for z, at in (x, y))
        sums.append(_sums(function, x_last, y_last, per_row, False, {}, careful))
    return [torch.cat(columns, 1) for columns in zip(*sums, strict=True)]


def _sums(function, x, y, per_row, compile_pays, options, careful):
    """Gather blocks ((M, blocks, width), (R,)) twice. One index for rows and blocks lets Inductor fuse all."""
    x, x_at = x
    y, y_at = y
    count = x.shape[1]
    rows = x_at.numel()
    block = torch.arange(count).repeat(rows)
    x_at = x_at.repeat_interleave(count), block
    y_at = y_at.repeat_interleave(count), block
    per_row = [z.repeat_interleave(count)[:, None] for z in per_row]
    # the width of a block is a constant of the code, the numbers of rows and blocks are not
    if compile_pays:
        torch._dynamo.mark_static(x, 2)
        torch._dynamo.mark_static(y, 2)
        with torch._inductor.config.patch(options):
            sums = compiled.by_inductor(function)(x, x_at, y, y_at, *per_row)
    else:
        sums = _in_chunks(function, x, x_at, y, y_at, per_row)
    if careful is not None:
        held, *sums = sums
        again = held.logical_not().nonzero()[:, 0]
        if again.numel():
            # few blocks as a rule: those with a ban, or with p and q far apart
            x_again = [index[again] for index in x_at]
            y_again = [index[again] for index in y_at]
            numbers = [z[again] for z in per_row]
            corrected = _in_chunks(careful, x, x_again, y, y_again, numbers)
            sums = [z.index_copy(0, again, new) for z, new in zip(sums, corrected, strict=True)]
    return [z.view(rows, count) for z in sums]


def _in_chunks(function, x, x_at, y, y_at, per_row):
    blocks = max(1, x_at[0].numel())  # without any, one call says the shapes
    results = []
    for chunk in _chunks(blocks, compiled.CHUNK // BLOCK):
        x_index = tuple(index[chunk] for index in x_at)
        y_index = tuple(index[chunk] for index in y_at)
        numbers = [z[chunk] for z in per_row]
        results.append(function(x, x_index, y, y_index, *numbers))
    return [torch.cat(pieces) for pieces in zip(*results, strict=True)]


def _chunks(total, size):
    return (slice(i, i + size) for i in range(0, total, size))


def capped(x, y, softcap):
    """(part, x, y): all rows as they are; under a softcap a few rows at a time, capped, in fp32."""
    if softcap is None:
        yield slice(None), x, y
        return
    step = max(1, compiled.CHUNK // x[0].shape[1])
    for part in _chunks(x[1].numel(), step):
        pair = []
        for z, at in (x, y):
            z_capped = z[at[part]].float()
            z_capped.div_(softcap).tanh_().mul_(softcap)
            pair.append((z_capped, torch.arange(len(z_capped))))
        yield part, *pair


def write_gradient(function, out, rows, pair, side, per_row, softcap):
    """`function` writes these rows of `out`, (N, V), the gradient of x (side 0) or of y (side 1)."""
    x, y = pair
    if softcap is None:
        write_rows(function, out, rows, x, y, per_row)
        return
    for part, x_capped, y_capped in capped(x, y, softcap):
        x, at = (x_capped, y_capped)[side]
        gradient = torch.empty_like(x)
        numbers = [z[part] for z in per_row]
        write_rows(function, gradient, at, x_capped, y_capped, numbers)
        # the cap's slope, of which x is the value: 1 - (x / softcap)^2
        slope = x.div_(softcap).square_().neg_().add_(1)
        out[rows[part]] = gradient.mul_(slope).to(out.dtype)


def write_rows(function, out, rows, x, y, per_row):
    """`function` writes these rows of `out`, (N, V), from x and y."""
    x, x_at = x
    y, y_at = y
    per_row = [z[:, None] for z in per_row]
    if compiled.compile_pays(x_at.numel(), x.shape[1]):
        compiled.by_inductor(function)(out, rows, x, x_at, y, y_at, *per_row)
        return
    step = max(1, compiled.CHUNK // out.shape[1])
    for chunk in _chunks(rows.numel(), step):
        numbers = [z[chunk] for z in per_row]
        function(out, rows[chunk], x, x_at[chunk], y, y_at[chunk], *numbers)


def load(x, x_at, y, y_at, out=None):
    if out is not None:
        # else Inductor may not see it, and keeps in memory what it cannot fuse with the write
        torch._check(out.shape[1] == x.shape[1])
    x = x[x_at].float().clamp(min=BANNED)
    y = y[y_at].float().clamp(min=BANNED)
    return x, y


def exp(z):
    # Inductor would keep every exp that several sums use; in eager mode exp2 has other bits at a vector's end
    return (z * _LOG2E).exp2() if torch.compiler.is_compiling() else z.exp()


def excess(u):
    """exp(-u) - 1 + u for |u| <= 1 by a polynomial (Chebyshev fit, 1.2e-7 relative): exp would cancel."""
    p = 2.5358644e-05 * u - 2.0329202e-04
    p = p * u + 1.3885394e-03
    p = p * u - 8.3308844e-03
    p = p * u + 4.1666735e-02
    p = p * u - 1.6666697e-01
    return (p * u + 0.5) * u * u


def difference(x, y, offset, dtype):
    """x - y - offset, with what x - y rounds off (Knuth's TwoSum) but for bf16, where that is next to nothing."""
    d = x - y
    if dtype == torch.bfloat16:
        return d - offset
    back = d - x
    lost = (x - (d - back)) - (y + back)
    return (d - offset) + lost


def distributions(state: KLState, t):
    """Return the arguments of `p_q_delta` per row; for a large KL about the maxima (`about_the_maxima`)."""
    far = state.k > _FAR
    apart = state.m - state.n
    rounded_off = state.m.double() - state.n.double() - apart
    c_far = rounded_off.float() * t
    k_far = (state.s / state.w_all).log()
    c = torch.where(far, c_far, state.c)
    offset = torch.where(far, apart, state.offset)
    k = torch.where(far, k_far, state.k)
    # a row that is banned throughout has no mass to divide by
    p_scale = torch.where(state.w_all == 0, 0, 1 / state.w_all)
    q_scale = torch.where(state.s == 0, 0, 1 / state.s)
    return state.m, p_scale, state.n, q_scale, t, offset, c, k


def p_q_delta(x, y, m, p_scale, n, q_scale, t, offset, c, k, dtype):
    """p, q, delta = log(p / q), and expm1(-delta), exact where |delta| < 1."""
    p = exp((x - m) * t) * p_scale
    q = exp((y - n) * t) * q_scale
    delta = (difference(x, y, offset, dtype) * t - c) + k
    return p, q, delta, excess(delta) - delta
