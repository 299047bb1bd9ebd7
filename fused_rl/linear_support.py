"""Log-probabilities over kept sets from hidden states (N, H) and the output head (V, H).

A row with a set reads the kept rows of the head: K H reads forward, and as many backward for the gradient of the hidden
states. The head's gradient is K H additions per token, sorted by id. Rows that keep the whole vocabulary, or more ids
than a GEMM over all of it is worth, go through tiles of logits as in `fused_rl.tiles`.
"""

import torch

from fused_rl import tiles
from fused_rl.backend import backend_of
from fused_rl.kernels.states import KeptSets, RowStatistics
from fused_rl.shards import gather, scatter

__all__ = ["linear_kept_logprobs"]

# A row of the GEMM costs as much as gathering this part of the head's rows: on a CPU 1/28 in fp32 and 1/98 in bf16
# (64 x 1024 x 151936); for a GPU 700 TFLOP/s against 4 TB/s give 1/175. Below FEW no GEMM is worth its launch.
_FP32_CPU_SHARE, _SHARE = 32, 128
_FEW = 64
_MARKED = 1 << 20  # elements of the hidden states that are int64 at a time


def linear_kept_logprobs(kept: KeptSets, hidden, weight, bias, targets, inv_temperature, softcap, budget):
    """(logprobs, entropy, lse), (n,) fp32 each, of rows as `fused_rl.linear.rows_that_count` gives them."""
    return _LinearKept.apply(hidden, weight, bias, targets, *kept, inv_temperature, softcap, budget)


class _LinearKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, ids, begin, end, inv_temperature, softcap, budget):
        head, n = tuple(gather(weight, bias)), len(targets)
        kept = KeptSets(ids, begin, end)
        ctx.options = inv_temperature, softcap, budget
        x = torch.zeros(len(ids), device=hidden.device)
        outputs = RowStatistics(*(torch.zeros(n, device=hidden.device) for _ in RowStatistics._fields))
        ctx.parts = _parts(kept, head[0])
        for rows, statistics in zip(ctx.parts, (_gathered, _tiled), strict=True):
            if rows is None or len(rows):
                found = statistics(x, *_of(rows, hidden, targets, kept, inv_temperature), *head, softcap, budget)
                for whole, part in zip(outputs, found, strict=True):
                    whole.copy_(part) if rows is None else whole.index_copy_(0, rows, part)
        logprobs, entropy, lse, m, rest = outputs
        own = entropy.clone()  # the caller may modify the output
        ctx.save_for_backward(hidden, weight, bias, targets, *kept, x, own, m, rest)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *upstream):
        hidden, weight, bias, targets, ids, begin, end, x, *statistics = ctx.saved_tensors
        if all(d is None for d in upstream):
            return (None,) * 10
        upstream = tuple(None if d is None else d.contiguous() for d in upstream)
        head, kept = tuple(gather(weight, bias)), KeptSets(ids, begin, end)
        inv_temperature, softcap, budget = ctx.options
        short, tiled = ctx.parts
        dhidden = dweight = dbias = None
        if tiled is None or len(tiled):
            dhidden, dweight, dbias = _tiled_gradients(
                ctx.needs_input_grad[:3], _some(tiled, *upstream), _some(tiled, *statistics), x,
                *_of(tiled, hidden, targets, kept, inv_temperature), *head, softcap, budget,
            )  # fmt: skip
        if short is None or len(short):
            of_short, dweight, dbias = _gathered_gradients(
                ctx.needs_input_grad[:3], _some(short, *upstream), _some(short, *statistics), x,
                *_of(short, hidden, targets, kept, inv_temperature), *head, softcap, dweight, dbias,
            )  # fmt: skip
            dhidden = of_short if dhidden is None else _joined(hidden, (short, of_short), (tiled, dhidden))
        return dhidden, scatter(dweight, weight), scatter(dbias, bias), *(None,) * 7


def _parts(kept, weight):
    """Rows whose sets are gathered, rows that go through tiles: (n,) indices, or None for all rows."""
    slow_gemm = weight.device.type == "cpu" and weight.dtype == torch.float32
    most = max(_FEW, len(weight) // (_FP32_CPU_SHARE if slow_gemm else _SHARE))
    lengths = kept.end - kept.begin
    short = (lengths > 0) & (lengths <= most)
    parts = short.nonzero()[:, 0], (~short).nonzero()[:, 0]
    if len(parts[1]) == 0:
        return None, parts[1]
    return (parts[0], None) if len(parts[0]) == 0 else parts


def _some(rows, *values):
    return [tiles.at(v, slice(None) if rows is None else rows) for v in values]


def _of(rows, hidden, targets, kept, inv_temperature):
    """Hidden states, targets, sets and temperatures of some rows."""
    hidden, targets, begin, end, inv_t = _some(rows, hidden, targets, kept.begin, kept.end, inv_temperature)
    return hidden, targets, KeptSets(kept.ids, begin, end), inv_t


def _joined(like, *parts):
    joined = torch.empty_like(like)
    for rows, values in parts:
        joined.index_copy_(0, rows, values)
    return joined


def _gathered(x, hidden, targets, kept, inv_t, weight, bias, softcap, budget):
    """`RowStatistics` of rows with sets from the kept rows of the head; x (M,) is filled where they have theirs."""
    backend = backend_of(hidden.device).support
    backend.kept_dot(x, hidden, weight, bias, kept)
    return backend.kept_fwd(x, kept, targets, None, inv_t, softcap)


def _gathered_gradients(
    needs, upstream, statistics, x, hidden, targets, kept, inv_t, weight, bias, softcap, dweight, dbias
):
    """Gradients of hidden, weight and bias; the latter two added to those given."""
    backend, dx = backend_of(hidden.device).support, torch.zeros_like(x)
    backend.kept_bwd(*upstream, x, kept, targets, None, *statistics, inv_t, softcap, out=dx)
    dhidden = backend.kept_hidden(dx, weight, kept) if needs[0] else None
    if needs[1] or needs[2]:
        entries = _by_id(kept, dx, hidden)
        dweight, dbias = backend.kept_head(*entries, hidden, len(weight), dweight, dbias, needs[1:])
    return dhidden, dweight, dbias


def _by_id(kept, dx, hidden):
    """Gradients and rows (E,) of all entries, sorted by id; the ids (U,) once each, and where their entries end.

    Entries of one id stand in an order that follows from what is added, not from the order of the tokens: equal marks
    are, but for one chance in 2^64, equal terms.
    """
    lengths = kept.end - kept.begin
    row = torch.repeat_interleave(lengths)
    at = torch.arange(len(row), device=row.device) + (kept.begin - (lengths.cumsum(0) - lengths))[row]
    ids, dx = kept.ids[at].long(), dx[at]
    mark = _mark(hidden)[row].mul_(-7046029254386353131).add_(dx.view(torch.int32)).mul_(-4417276706812531889)
    order = mark.argsort()
    order = order[ids[order].argsort(stable=True)]
    once, counts = torch.unique_consecutive(ids[order], return_counts=True)
    return dx[order], row[order], once, counts.cumsum(0)


def _mark(hidden):
    """(n,) int64: equal for rows of equal bits, and for hardly any others."""
    bits = hidden.contiguous().view(torch.int16 if hidden.element_size() == 2 else torch.int32)
    # odd weights without a pattern; overflow wraps around
    weights = torch.arange(1, bits.shape[1] + 1, device=bits.device).mul_(-7046029254386353131)
    weights = (weights ^ (weights >> 29)).mul_(-4658895280553007687) | 1
    parts = [(part * weights).sum(1) for part in bits.split(max(1, _MARKED // max(1, bits.shape[1])))]
    return torch.cat(parts) if parts else weights[:0]


def _tiled(x, hidden, targets, kept, inv_t, weight, bias, softcap, budget):
    """`RowStatistics` of any rows from whole logits, a tile at a time; x (M,) is filled where they have sets."""
    n, vocab = hidden.shape[0], weight.shape[0]
    backend = backend_of(hidden.device).support
    outputs = RowStatistics(*(torch.zeros(n, device=hidden.device) for _ in RowStatistics._fields))
    step = tiles.forward_rows(hidden, vocab, budget)
    formed = tiles.Logits(weight, bias, step * vocab, budget, softcap)
    for rows in tiles.blocks(n, step):
        logits, t = formed.tile(hidden[rows]), tiles.at(inv_t, rows)
        sets = kept._replace(begin=kept.begin[rows], end=kept.end[rows])
        found = backend.whole_fwd(logits, targets[rows], sets.begin == sets.end, t, softcap)
        found = backend.kept_fwd(x, sets, targets[rows], None, t, softcap, logits=logits, into=found)
        found = formed.with_common(found, hidden[rows], t)
        for whole, part in zip(outputs, found, strict=True):
            whole[rows] = part
    return outputs


def _tiled_gradients(needs, upstream, statistics, x, hidden, targets, kept, inv_t, weight, bias, softcap, budget):
    """Gradients of hidden, weight and bias, over recomputed tiles of logits: `tiles.recomputed` with sets."""
    n, vocab = hidden.shape[0], weight.shape[0]
    backend = backend_of(hidden.device).support
    tile = tiles.backward_tile(hidden, vocab, needs, budget)
    gradients = tiles.Gradients(needs, hidden, weight, bias, tile)
    formed = tiles.Logits(weight, bias, tile[0] * tile[1], budget, softcap)
    for rows in tiles.blocks(n, max(1, tile[0])):
        grads, state = _some(rows, *upstream), _some(rows, *statistics)
        sets = kept._replace(begin=kept.begin[rows], end=kept.end[rows])
        chosen, t = targets[rows], tiles.at(inv_t, rows)
        for columns in tiles.blocks(vocab, tile[1]):
            logits = formed.tile(hidden[rows], columns)
            # in their place the gradient: whole rows as these columns see their targets, then the sets' own columns
            dlp, dlse, local = tiles.in_columns(grads[0], grads[2], chosen, columns)
            whole = sets.begin == sets.end
            backend.whole_bwd(dlp, grads[1], dlse, logits, local, whole, *state, t, softcap, out=logits)
            first = columns.start
            backend.kept_bwd(*grads, x, sets, chosen, None, *state, t, softcap, out=logits, first=first)
            gradients.add(logits, hidden[rows], weight[columns], rows, columns)
    return gradients.take()
