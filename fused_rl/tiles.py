"""Row statistics of hidden states (N, H) under an output head (V, H), and their gradients, over tiles of logits.

A tile is one GEMM; the row kernels turn it into statistics or, in place, into its gradient; two more GEMMs take that to
the hidden states and to the weight. Statistics need whole rows, so forward tiles are blocks of rows. With the
statistics known, a tile may be any rectangle. Of 16-bit inputs, a block of columns with all rows gives its part of the
weight's gradient in one GEMM, rounded once, and needs an fp32 sum of the (N, H) gradient alone; blocks of rows need one
of the (V, H) gradient. `backward_tile` takes the smaller; a single tile needs none.
"""

import torch

from fused_rl.backend import row_functions
from fused_rl.cpu.compiled import in_huge_pages
from fused_rl.kernels.states import RowStatistics

# Below this many rows in a tile, reading and writing the fp32 sum of the weight's gradient costs more than the GEMM
# that recomputing adds: the break-even is 4 x FLOP/s / (bytes/s), 800 to 1200 on an H100 or H200, about 60 on a CPU.
_ONE_PASS_ROWS = 512
_PARTIAL_BYTES = 16 << 20  # at most, of one product on its way into an fp32 sum
_PRODUCT = 2048  # rows and columns of a 16-bit factor that are fp32 at once, where its products are not to be rounded
CPU_ROWS_BYTES = 16 << 20  # what the row functions of `fused_rl.cpu` take at most for a tile


def budget(workspace_mb, hidden, copied):
    """Bytes for tiles and fp32 sums: without what the row functions take, nor the rows that a mask had copied out."""
    total = int(workspace_mb * 2**20)
    taken = 2 * hidden.numel() * hidden.element_size() if copied else 0  # and their gradient on its way back
    taken += CPU_ROWS_BYTES if hidden.device.type == "cpu" else 0
    return max(total - taken, total // 2)


def blocks(total: int, size: int):
    return (slice(i, min(i + size, total)) for i in range(0, total, size))


def at(values, rows):
    """Rows of what is per row; a number or None is the same for all."""
    return values[rows] if isinstance(values, torch.Tensor) else values


def logits_tile(hidden, weight, bias, buffer):  # (n, H), (v, H), (v,) | None -> (n, v) in the storage of `buffer`
    n, vocab = hidden.shape[0], weight.shape[0]
    out = buffer[: n * vocab].view(n, vocab)
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


def add_mm(total, a, b, first, unrounded=False):
    """total (n, k) = or += a (n, m) @ b (m, k). On a CPU an fp32 total of 16-bit factors gets partials rounded to them,
    or at the price of fp32 products `unrounded` ones."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=0 if first else 1)
        return
    if total.device.type == "cuda" and torch.version.hip is None:  # no other device adds 16-bit products to fp32
        torch.addmm(total, a, b, beta=0 if first else 1, out_dtype=torch.float32, out=total)
        return
    if unrounded:
        if first:
            total.zero_()
        for rows in blocks(total.shape[0], _PRODUCT):
            for inner in blocks(a.shape[1], _PRODUCT):
                total[rows].addmm_(a[rows, inner].float(), b[inner].float())
        return
    row_bytes = b.shape[1] * b.element_size()
    for rows in blocks(total.shape[0], max(1, _PARTIAL_BYTES // row_bytes)):
        part = torch.mm(a[rows], b)
        total[rows].copy_(part) if first else total[rows].add_(part)


class Gradients:
    """Gradients of hidden, weight, bias (None where not asked for), summed over tiles of the gradient of the logits.

    They come in the dtype of `hidden`, or in `dtypes`, one for each: those of parameters that were cast for the GEMMs.
    Then no product is rounded before it is summed.
    """

    def __init__(self, needs, hidden, weight, bias, tile, dtypes=None):
        n, vocab = hidden.shape[0], weight.shape[0]
        self.unrounded = dtypes is not None
        self.dtypes = dtypes or (hidden.dtype,) * 3
        # what several tiles add to is kept in fp32; without rows no tile comes, and the gradients stay zero
        several = tile[1] < vocab, tile[0] < n
        pairs = zip(several, self.dtypes[:2], strict=True)
        sums = [torch.float32 if adds or dtype != hidden.dtype else dtype for adds, dtype in pairs]
        new = torch.empty_like if n else torch.zeros_like
        self.hidden = new(hidden, dtype=sums[0]) if needs[0] else None
        self.weight = in_huge_pages(new(weight, dtype=sums[1])) if needs[1] else None
        self.bias = new(bias, dtype=torch.float32) if needs[2] else None

    def add(self, dlogits, hidden, weight, rows, columns):  # (n, v), (n, H), (v, H) of one tile
        factor = dlogits.to(hidden.dtype)  # of logits in fp32, such a gradient
        if self.hidden is not None:
            add_mm(self.hidden[rows], factor, weight, columns.start == 0, self.unrounded)
        if self.weight is not None:
            add_mm(self.weight[columns], factor.t(), hidden, rows.start == 0, self.unrounded)
        if self.bias is not None:
            if rows.start == 0:
                self.bias[columns].zero_()
            for some in blocks(len(dlogits), max(1, _PARTIAL_BYTES // (4 * dlogits.shape[1]))):  # it takes an fp32 copy
                self.bias[columns].add_(dlogits[some].sum(0, dtype=torch.float32))

    def take(self):
        """Hands over the gradients in their dtypes, each fp32 sum freed before the next is rounded."""
        hidden, self.hidden = self.hidden, None
        hidden = None if hidden is None else hidden.to(self.dtypes[0])
        weight, self.weight = self.weight, None
        weight = None if weight is None else weight.to(self.dtypes[1])
        return hidden, weight, None if self.bias is None else self.bias.to(self.dtypes[2])


def sum_bytes(n, width, size):
    """Bytes of an fp32 sum (n, width) of low-precision products, and of one of these on its way; fp32 sums in place."""
    return 4 * n * width + min(_PARTIAL_BYTES, n * width * size) if size < 4 else 0


def forward_rows(hidden, vocab, budget):
    return max(1, min(hidden.shape[0], budget // (vocab * hidden.element_size())))


def backward_tile(hidden, vocab, needs, budget, copies=1):
    """(rows, columns) of a tile that recomputes logits, `copies` of it within the budget less the fp32 sum needed."""
    n, width = hidden.shape
    size = hidden.element_size()
    # one tile, or blocks of rows
    if n * vocab * size * copies <= budget or size == 4:
        # fp32 logits must come out of the product that the statistics came from, else exp(x - m) inherits the
        # difference; rounding to 16 bits hides it
        return forward_rows(hidden, vocab, budget // copies), vocab

    # blocks of columns sum the gradient of hidden in fp32, blocks of rows that of the weight: whichever is smaller
    by_columns = sum_bytes(n, width, size) if needs[0] else 0
    by_rows = sum_bytes(vocab, width, size) if needs[1] else 0
    tile_bytes = max(budget - min(by_columns, by_rows), budget // 4)  # a sum beyond the budget must not starve the GEMM
    tile_bytes //= copies
    if by_rows < by_columns:
        return max(1, tile_bytes // (vocab * size)), vocab
    columns = tile_bytes // (n * size)
    columns -= columns % (128 if columns >= 128 else 16)  # whole vectors in every row
    return n, min(vocab, max(16, columns))


def one_pass_rows(hidden, vocab, needs, budget):
    """Rows of a tile when the gradient is formed at once; 0 where the fp32 sum of dweight leaves too few."""
    rows = forward_rows(hidden, vocab, budget)
    if rows >= hidden.shape[0] or hidden.element_size() == 4 or not needs[1]:
        return rows
    size = hidden.element_size()
    rows = max(0, budget - sum_bytes(vocab, hidden.shape[1], size)) // (vocab * size)
    return rows if rows >= _ONE_PASS_ROWS else 0


def statistics(hidden, weight, bias, targets, inv_temperature, softcap, budget, visit=None):
    """`RowStatistics` of all rows; of targets (N, K) the logprobs are (N, K).

    `visit(rows, logits)` sees every tile, whole rows of it.
    """
    n, vocab = hidden.shape[0], weight.shape[0]
    forward, _ = row_functions(hidden.device, targets)
    per_row = [torch.zeros(n, device=hidden.device) for _ in RowStatistics._fields[1:]]  # no views: they are handed out
    outputs = [torch.zeros(targets.shape, device=hidden.device), *per_row]
    step = forward_rows(hidden, vocab, budget)
    buffer = in_huge_pages(hidden.new_empty(step * vocab))
    for rows in blocks(n, step):
        logits = logits_tile(hidden[rows], weight, bias, buffer)
        block = forward(logits, targets[rows], None, at(inv_temperature, rows), softcap)
        for whole, part in zip(outputs, block, strict=True):
            whole[rows] = part
        if visit is not None:
            visit(rows, logits)
    return RowStatistics(*outputs)


def in_columns(dlogprobs, dlse, targets, columns):
    """Upstream gradients and targets as a block of columns sees them.

    Where the target stands elsewhere, dlp (1{j = target} - p_j) is -dlp p_j: a gradient -dlp of lse. Of K targets per
    row, those that stand elsewhere become -1, which is in no vocabulary.
    """
    here = (targets >= columns.start) & (targets < columns.stop)
    if targets.dim() == 2:
        local = torch.where(here, targets - columns.start, -1)
        if dlogprobs is None:
            return None, dlse, local
        elsewhere = torch.where(here, 0, dlogprobs).double().sum(1)
        dlse = (-elsewhere if dlse is None else dlse - elsewhere).float()
        return torch.where(here, dlogprobs, 0), dlse, local
    local = torch.where(here, targets - columns.start, 0)
    if dlogprobs is None:
        return None, dlse, local
    if dlse is None:
        return torch.where(here, dlogprobs, 0), torch.where(here, 0, -dlogprobs), local
    return torch.where(here, dlogprobs, 0), torch.where(here, dlse, dlse - dlogprobs), local


def recomputed(
    needs, upstream, hidden, weight, bias, targets, statistics, inv_temperature, softcap, budget, dtypes=None
):
    """Gradients of hidden, weight, bias from those of (logprobs, entropy, lse), over recomputed tiles of logits."""
    n, vocab = hidden.shape[0], weight.shape[0]
    _, backward = row_functions(hidden.device, targets)
    tile = backward_tile(hidden, vocab, needs, budget)
    gradients = Gradients(needs, hidden, weight, bias, tile, dtypes)
    buffer = in_huge_pages(hidden.new_empty(tile[0] * tile[1]))
    upstream = tuple(None if d is None else d.contiguous() for d in upstream)
    # each tile: its logits again, in their place their gradient, and from that the parameters'
    for rows in blocks(n, max(1, tile[0])):
        dlogprobs, dentropy, dlse = (at(d, rows) for d in upstream)
        entropy, m, rest = (s[rows] for s in statistics)
        for columns in blocks(vocab, tile[1]):
            head = weight[columns]
            logits = logits_tile(hidden[rows], head, at(bias, columns), buffer)
            d, dl, local = in_columns(dlogprobs, dlse, targets[rows], columns)
            inv_t = at(inv_temperature, rows)
            backward(d, dentropy, dl, logits, local, None, entropy, m, rest, inv_t, softcap, out=logits)
            gradients.add(logits, hidden[rows], head, rows, columns)
    return gradients
