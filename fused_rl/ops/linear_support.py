"""Log-probabilities over supports from hidden states (N, H) and the output head (V, H).

A row with a set reads the kept rows of the head: K H reads forward, and as many backward for the gradient of the hidden
states. The head's gradient is K H additions per token, sorted by id. Rows that keep the whole vocabulary, or more ids
than a GEMM over all of it is worth, go through tiles of logits as in `fused_rl.ops.tiles`.
"""

import torch

from fused_rl.base.backend import backend_of
from fused_rl.base.checks import once_differentiable
from fused_rl.base.shards import gather, scatter
from fused_rl.kernels.states import RowStatistics, RowSupport
from fused_rl.ops import tiles

# A row of the GEMM costs as much as gathering this part of the head's rows: on a CPU 1/28 in fp32 and 1/98 in bf16
# (64 x 1024 x 151936); for a GPU 700 TFLOP/s against 4 TB/s give 1/175. Below FEW no GEMM is worth its launch.
_FP32_CPU_SHARE, _SHARE = 32, 128
_FEW = 64
_MARKED = 1 << 20  # elements of the hidden states that are int64 at a time


class LinearSupport(torch.autograd.Function):
    """(logprobs, entropy, lse), (n,) fp32 each, of rows as `fused_rl.ops.linear.rows_that_count` gives them."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, ids, begin, end, inv_temperature, softcap, budget
    ):
        head = gather(weight, bias)
        support = RowSupport(ids, begin, end)
        ctx.options = inv_temperature, softcap, budget
        x = torch.zeros(len(ids), device=hidden.device)
        outputs = RowStatistics(
            *(torch.zeros(len(targets), device=hidden.device) for _ in RowStatistics._fields)
        )
        ctx.parts, ctx.gathered = _parts(support, head[0])
        for rows, statistics in zip(ctx.parts, (_gathered, tiles.statistics), strict=True):
            if rows is None or len(rows):
                some, chosen, sets, inv_t = _of(rows, hidden, targets, support, inv_temperature)
                found = statistics(some, *head, chosen, inv_t, softcap, budget, support=sets, x=x)
                for whole, part in zip(outputs, found, strict=True):
                    whole.copy_(part) if rows is None else whole.index_copy_(0, rows, part)
        logprobs, entropy, lse, m, rest = outputs
        own = entropy.clone()  # the caller may modify the output
        ctx.save_for_backward(hidden, weight, bias, targets, *support, x, own, m, rest)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, lse

    @staticmethod
    @once_differentiable("linear_token_logprobs")
    def backward(ctx, *upstream):
        hidden, weight, bias, targets, ids, begin, end, x, *statistics = ctx.saved_tensors
        if all(d is None for d in upstream):
            return (None,) * 10
        upstream = tuple(None if d is None else d.contiguous() for d in upstream)
        head = gather(weight, bias)
        support = RowSupport(ids, begin, end)
        needs = ctx.needs_input_grad[:3]
        inv_temperature, softcap, budget = ctx.options
        short, tiled = ctx.parts
        dhidden = dweight = dbias = None
        if tiled is None or len(tiled):
            some, chosen, sets, inv_t = _of(tiled, hidden, targets, support, inv_temperature)
            given = _some(tiled, *upstream), some, *head, chosen, _some(tiled, *statistics)
            gradients = tiles.recomputed(needs, *given, inv_t, softcap, budget, support=sets, x=x)
            dhidden, dweight, dbias = gradients.take()
        if short is None or len(short):
            some, chosen, sets, inv_t = _of(short, hidden, targets, support, inv_temperature)
            given = _some(short, *upstream), some, *head, chosen, _some(short, *statistics)
            entries = sets, ctx.gathered, x, dweight, dbias
            of_short, dweight, dbias = _gathered_gradients(needs, *given, inv_t, softcap, *entries)
            if dhidden is not None:
                of_short = (
                    torch.empty_like(hidden)
                    .index_copy_(0, short, of_short)
                    .index_copy_(0, tiled, dhidden)
                )
            dhidden = of_short
        return dhidden, scatter(dweight, weight), scatter(dbias, bias), *(None,) * 7


def _parts(support, weight):
    """Rows whose sets are gathered, rows that go through tiles: (n,) indices, or None for all rows; and how many ids
    the former keep. A device is waited for once."""
    slow_gemm = weight.device.type == "cpu" and weight.dtype == torch.float32
    most = max(_FEW, len(weight) // (_FP32_CPU_SHARE if slow_gemm else _SHARE))
    lengths = support.end - support.begin
    short = (lengths > 0) & (lengths <= most)
    count, gathered = torch.stack([short.sum(), (lengths * short).sum()]).tolist()
    order = (~short).byte().argsort(stable=True)
    parts = order[:count], order[count:]
    if count == len(short):
        parts = None, parts[1]
    elif count == 0:
        parts = parts[0], None
    return parts, gathered


def _some(rows, *values):
    return [tiles.at(v, slice(None) if rows is None else rows) for v in values]


def _of(rows, hidden, targets, support, inv_temperature):
    """Hidden states, targets, sets and temperatures of some rows."""
    hidden, targets, inv_t = _some(rows, hidden, targets, inv_temperature)
    return hidden, targets, support if rows is None else support.at(rows), inv_t


def _gathered(hidden, weight, bias, targets, inv_t, softcap, budget, support, x):
    """`RowStatistics` of rows with sets from the kept rows of the head; x (M,) is filled where they have theirs."""
    backend = backend_of(hidden.device).support
    backend.kept_dot(x, hidden, weight, bias, support)
    return backend.kept_fwd(x, support, targets, None, inv_t, softcap)


def _gathered_gradients(
    needs,
    upstream,
    hidden,
    weight,
    bias,
    targets,
    statistics,
    inv_t,
    softcap,
    support,
    kept,
    x,
    dweight,
    dbias,
):
    """Gradients of hidden, weight and bias; the latter two added to those given. The sets keep `kept` ids."""
    backend = backend_of(hidden.device).support
    dx = torch.zeros_like(x)
    backend.kept_bwd(*upstream, x, support, targets, None, *statistics, inv_t, softcap, out=dx)
    dhidden = backend.kept_hidden(dx, weight, support) if needs[0] else None
    if needs[1] or needs[2]:
        entries = _by_id(support, kept, dx, hidden)
        dweight, dbias = backend.kept_head(*entries, hidden, len(weight), dweight, dbias, needs[1:])
    return dhidden, dweight, dbias


def _by_id(support, kept, dx, hidden):
    """Gradients and rows (E,) of all entries, sorted by id; the ids (U,) once each, and where their entries end.

    Entries of one id stand in an order that follows from what is added, not from the order of the tokens: equal marks
    are, but for one chance in 2^64, equal terms.
    """
    lengths = support.end - support.begin
    row = torch.repeat_interleave(lengths, output_size=kept)
    starts = support.begin - (lengths.cumsum(0) - lengths)
    at = torch.arange(len(row), device=row.device) + starts[row]
    ids = support.ids[at].long()
    dx = dx[at]
    mark = _mark(hidden)[row].mul_(-7046029254386353131)
    mark.add_(dx.view(torch.int32)).mul_(-4417276706812531889)
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
    some = max(1, _MARKED // max(1, bits.shape[1]))
    parts = [(part * weights).sum(1) for part in bits.split(some)]
    return torch.cat(parts) if parts else weights[:0]
