"""Log-probabilities over supports from hidden states (N, H) and the output head (V, H).

A row with a set reads the kept rows of the head: K H reads forward, and as many backward for the gradient of the hidden
states. The head's gradient is K H additions per token, sorted by id. Rows that keep the whole vocabulary, or more ids
than a GEMM over all of it is worth, go through tiles of logits as in `fused_rl.ops.tiles`.
"""

import torch

from fused_rl.base.backend import backend_of
from fused_rl.base.checks import once_differentiable
from fused_rl.base.outputs import unless_modified
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
        x = hidden.new_zeros(len(ids), dtype=torch.float32)
        ctx.rows_by_way, ctx.gathered = _rows_by_way(support, head[0])
        logprobs, entropy, lse, m, rest = _statistics(
            ctx.rows_by_way, hidden, head, targets, support, x, *ctx.options
        )
        ctx.save_for_backward(hidden, weight, bias, targets, *support, x, m, rest)
        # nothing counts the changes of a tensor of inference mode
        ctx.entropy = entropy.detach(), 0 if entropy.is_inference() else entropy._version
        ctx.set_materialize_grads(False)
        return logprobs, entropy, lse

    @staticmethod
    @once_differentiable("linear_token_logprobs")
    def backward(ctx, *upstream):
        hidden, weight, bias, targets, ids, begin, end, x, m, rest = ctx.saved_tensors
        if all(d is None for d in upstream):
            return (None,) * 10
        upstream = tuple(None if d is None else d.contiguous() for d in upstream)
        head = gather(weight, bias)
        support = RowSupport(ids, begin, end)
        needs = ctx.needs_input_grad[:3]
        inv_temperature, softcap, budget = ctx.options
        short, tiled = ctx.rows_by_way
        entropy = unless_modified(*ctx.entropy)
        if entropy is None:
            again = torch.zeros_like(x)
            inputs = ctx.rows_by_way, hidden, head, targets, support, again, *ctx.options
            entropy = _statistics(*inputs).entropy
        statistics = entropy, m, rest
        dhidden = dweight = dbias = None

        # rows in tiles first: their gradient of the head is whole, and the others' sums are added to it
        if tiled is None or len(tiled):
            states, row_targets, sets, inv_t = _row_inputs(
                tiled, hidden, targets, support, inv_temperature
            )
            row_upstream = _select(tiled, *upstream)
            row_statistics = _select(tiled, *statistics)
            inputs = row_upstream, states, *head, row_targets, row_statistics
            gradients = tiles.recomputed(needs, *inputs, inv_t, softcap, budget, support=sets, x=x)
            dhidden, dweight, dbias = gradients.take()
        if short is None or len(short):
            states, row_targets, sets, inv_t = _row_inputs(
                short, hidden, targets, support, inv_temperature
            )
            row_upstream = _select(short, *upstream)
            row_statistics = _select(short, *statistics)
            inputs = row_upstream, states, *head, row_targets, row_statistics
            entries = sets, ctx.gathered, x, dweight, dbias
            of_short, dweight, dbias = _gathered_gradients(needs, *inputs, inv_t, softcap, *entries)
            if dhidden is None:
                dhidden = of_short
            else:
                # both are some of the rows, and the gradient is wanted of both
                assert short is not None and tiled is not None and of_short is not None
                of_tiled = dhidden
                dhidden = torch.empty_like(hidden)
                dhidden.index_copy_(0, short, of_short)
                dhidden.index_copy_(0, tiled, of_tiled)
        return *scatter((dhidden, dweight, dbias), weight, bias), *(None,) * 7


def _rows_by_way(support, weight):
    """Rows whose sets are gathered, rows that go through tiles: (n,) indices, or None for all rows; and how many ids
    the former keep. A device is waited for once."""
    slow_gemm = weight.device.type == "cpu" and weight.dtype == torch.float32
    share = _FP32_CPU_SHARE if slow_gemm else _SHARE
    most = max(_FEW, len(weight) // share)
    lengths = support.end - support.begin
    is_short = (lengths > 0) & (lengths <= most)
    kept_ids = (lengths * is_short).sum()
    count, gathered = torch.stack([is_short.sum(), kept_ids]).tolist()

    # a sort, as nonzero would wait for the device again
    order = (~is_short).byte().argsort(stable=True)
    short = order[:count]
    tiled = order[count:]
    if count == len(order):
        return (None, tiled), gathered
    if count == 0:
        return (short, None), gathered
    return (short, tiled), gathered


def _statistics(rows_by_way, hidden, head, targets, support, x, inv_temperature, softcap, budget):
    """`RowStatistics` of all rows; x (M,) is filled with the logits of the sets."""
    weight, bias = head
    outputs = []
    for rows, statistics in zip(rows_by_way, (_gathered, tiles.statistics), strict=True):
        if rows is not None and len(rows) == 0:
            continue
        states, row_targets, sets, inv_t = _row_inputs(
            rows, hidden, targets, support, inv_temperature
        )
        of_rows = statistics(
            states, weight, bias, row_targets, inv_t, softcap, budget, support=sets, x=x
        )
        if rows is None:
            return of_rows
        # no views: they are returned
        outputs = outputs or [x.new_zeros(len(targets)) for _ in RowStatistics._fields]
        for output, values in zip(outputs, of_rows, strict=True):
            output.index_copy_(0, rows, values)
    return RowStatistics(*outputs)


def _select(rows, *values):
    return [tiles.at(v, slice(None) if rows is None else rows) for v in values]


def _row_inputs(rows, hidden, targets, support, inv_temperature):
    """Hidden states, targets, sets and temperatures of some rows."""
    hidden, targets, inv_t = _select(rows, hidden, targets, inv_temperature)
    sets = support if rows is None else support.at(rows)
    return hidden, targets, sets, inv_t


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

    # a mark of what an entry adds: the bits of its hidden state and of its gradient
    mark = _mark(hidden)[row].mul_(-7046029254386353131)
    mark.add_(dx.view(torch.int32)).mul_(-4417276706812531889)
    by_mark = mark.argsort()
    by_id = ids[by_mark].argsort(stable=True)
    order = by_mark[by_id]
    unique_ids, counts = torch.unique_consecutive(ids[order], return_counts=True)
    return dx[order], row[order], unique_ids, counts.cumsum(0)


def _mark(hidden):
    """(n,) int64: equal for rows of equal bits, and for hardly any others."""
    integers = torch.int16 if hidden.element_size() == 2 else torch.int32
    bits = hidden.contiguous().view(integers)
    width = bits.shape[1]
    # odd weights without a pattern; overflow wraps around
    weights = torch.arange(1, width + 1, device=bits.device).mul_(-7046029254386353131)
    weights = (weights ^ (weights >> 29)).mul_(-4658895280553007687) | 1
    # some rows at a time: as int64 they take up to four times the memory
    step = max(1, _MARKED // max(1, width))
    marks = [(some * weights).sum(1) for some in bits.split(step)]
    return torch.cat(marks) if marks else weights[:0]
