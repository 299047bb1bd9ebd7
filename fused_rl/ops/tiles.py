"""Row statistics of hidden states (N, H) under an output head (V, H), and their gradients, over tiles of logits.

A tile is one GEMM; the row kernels turn it into statistics or, in place, into its gradient; two more GEMMs take that to
the hidden states and to the weight. Statistics need whole rows, so forward tiles are blocks of rows. With the
statistics known, a tile may be any rectangle. Of 16-bit inputs, a block of columns with all rows gives its part of the
weight's gradient in one GEMM, rounded once, and needs an fp32 sum of the (N, H) gradient alone; blocks of rows need one
of the (V, H) gradient. `backward_tile` takes the smaller; a single tile needs none.

Logits of 16-bit operands are of these operands' dtype or in fp32; their gradient goes into the products rounded to it.
"""

import math
from typing import Any, NamedTuple

import torch

from fused_rl.cpu.compiled import in_huge_pages
from fused_rl.kernels.states import RowStatistics
from fused_rl.ops.rows import row_bwd, row_fwd

# Below this many rows in a tile, reading and writing the fp32 sum of the weight's gradient costs more than the GEMM
# that recomputing adds: the break-even is 4 x FLOP/s / (bytes/s), 800 to 1200 on an H100 or H200, about 60 on a CPU.
_ONE_PASS_ROWS = 512
_PARTIAL_BYTES = 16 << 20  # at most, of one product on its way into an fp32 sum
_PRODUCT = 2048  # rows and columns of a 16-bit factor that are fp32 at once, where its products are not to be rounded
CPU_ROWS_BYTES = 16 << 20  # what the row functions of `fused_rl.cpu` take at most for a tile
# Rows and columns of 16-bit operands that a CPU casts at once.
_CAST = 512
# So many products are summed, then about the root of H / _SHORT of these sums, then those: 10 % slower than one sum of
# all H, and a third of its rounding (H = 896 and 4096).
_SHORT = 64
# by default; 24 take as long (1024 x 512 x 32000, bf16: 1.14 to 1.22 times three GEMMs)
CPU_WORKSPACE_MB = 512
_SAMPLE = 64  # rows of a head that tell what all have in common
_MOST = 64.0  # of a weight


class Budget(NamedTuple):
    """Bytes for tiles and fp32 sums, and the dtype of the logits in the tiles."""

    bytes: int
    dtype: torch.dtype

    def less(self, taken: int) -> "Budget":
        """Return the bytes left beside `taken`, and at least half of all."""
        return self._replace(bytes=max(self.bytes - taken, self.bytes // 2))

    def per_logit(self, operands: torch.dtype, copies: int = 1) -> int:
        """Bytes of a logit in `copies` tiles and, where it has another dtype, of its gradient as an operand."""
        of_gradient = 0 if self.dtype == operands else operands.itemsize
        return copies * self.dtype.itemsize + of_gradient


def default_logits_dtype(operands: torch.dtype, device: torch.device) -> torch.dtype:
    """fp32 where the product of 16-bit operands can return it at no cost, on CUDA and ROCm; else the operands'."""
    return torch.float32 if device.type == "cuda" else operands


def default_workspace(
    free: int, width: int, vocab: int, operands: torch.dtype, dtype: torch.dtype
) -> int:
    """Return the default workspace on a GPU with `free` bytes: an eighth, rounded down to three binary digits.

    If one pass of `linear_token_loss` needs more, and at most half of the free memory, it gets what it needs.
    """
    eighth = free // 8
    # so that a little more or less memory changes no tile
    below_three_digits = 1 << max(0, eighth.bit_length() - 3)
    eighth -= eighth % below_three_digits
    row_bytes = vocab * Budget(0, dtype).per_logit(operands)
    needed = _ONE_PASS_ROWS * row_bytes + sum_bytes(vocab, width, operands.itemsize)
    return max(eighth, needed) if needed <= free // 2 else eighth


def budget(workspace_mb, hidden, vocab, copied, logits_dtype=None):
    """`Budget` without what the row functions take, casts, nor the rows that a mask had copied out."""
    dtype = logits_dtype or default_logits_dtype(hidden.dtype, hidden.device)
    # and their gradient on its way back
    taken = 2 * hidden.numel() * hidden.element_size() if copied else 0
    device = hidden.device
    if device.type == "cpu":
        taken += CPU_ROWS_BYTES
        # `product` casts both factors, and sums a part beside the whole
        if dtype != hidden.dtype:
            taken += 4 * _CAST * (_CAST + 2 * hidden.shape[1])
    if workspace_mb is None and device.type == "cuda":
        # what PyTorch holds but does not use counts as free, so that a second step has the tiles of the first
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
        default = default_workspace(free, hidden.shape[-1], vocab, hidden.dtype, dtype)
        return Budget(default, dtype)
    total = int((workspace_mb or CPU_WORKSPACE_MB) * 2**20)
    return Budget(total, dtype).less(taken)


def blocks(total: int, size: int):
    return (slice(i, min(i + size, total)) for i in range(0, total, size))


def at(values, rows):
    """Rows of what is per row; a number or None is the same for all."""
    return values[rows] if isinstance(values, torch.Tensor) else values


def product(hidden, weight, out, center=0.0):
    """out (n, v) fp32 = hidden (n, H) @ (weight (v, H) - center (H,)).T, of 16-bit operands.

    A GPU returns fp32, and has no `center`. A CPU casts: without AMX its fp32 products are faster than 16-bit ones.
    """
    if hidden.device.type == "cuda":
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    memory = out.new_empty(_CAST * _CAST)
    width = max(1, hidden.shape[1])
    short_sums = -(-width // _SHORT)
    together = _SHORT * math.isqrt(short_sums)
    for columns in blocks(len(weight), _CAST):
        head = weight[columns].float().sub_(center)
        for rows in blocks(len(hidden), _CAST):
            states = hidden[rows].float()
            total = out[rows, columns]
            partial = memory[: total.numel()].view(total.shape)
            # the first sum is written where the others are added
            for some in blocks(width, together):
                target = partial if some.start else total
                _by_short_sums(states[:, some], head[:, some], out=target)
                if some.start:
                    total.add_(partial)
    return out


def _by_short_sums(a, b, out):  # (n, K) fp32, (v, K) fp32 -> a @ b.T
    for some in blocks(max(1, a.shape[1]), _SHORT):
        out.addmm_(a[:, some], b[:, some].t(), beta=1 if some.start else 0)


def _center(weight):  # (V, H) -> (H,) fp32
    """A middle of some rows in every coordinate, so that no single row takes the digits of the others; 0 where it is no
    weight but a mask, which most of the rows may have."""
    some = torch.arange(_SAMPLE, device=weight.device) * len(weight) // _SAMPLE
    center = weight[some].float().median(0).values
    return torch.where(center.abs() <= _MOST, center, 0.0)


class Logits:
    """Tiles of hidden (n, H) @ weight (V, H).T + bias (V,), one after the other in the same memory.

    fp32 ones of 16-bit operands lack, on a CPU, what all columns of a row have in common, which `with_common` puts
    back: log-probability, entropy, divergence and every gradient are without it, and a sum that ends at 30 would be
    rounded at 30 all the way. A soft cap needs the whole logits.
    """

    def __init__(self, weight, bias, size, budget, softcap=None):
        self.weight = weight
        self.bias = bias
        self.center: Any = 0.0  # a vector where the logits are centered
        self.top = 0.0
        self.buffer = in_huge_pages(weight.new_empty(size, dtype=budget.dtype))
        self.rounded = None  # memory for gradients of another dtype than the logits
        wider = budget.dtype != weight.dtype
        self.centered = wider and weight.device.type != "cuda" and softcap is None
        if self.centered:
            self.center = _center(weight)
            # most of it may be a mask of -1e9: what stands at its top is what matters
            if bias is not None:
                self.top = bias.float().max().nan_to_num_(0, 0, 0)

    def tile(self, hidden, columns=slice(None)):
        """(n, v): the logits of some rows, in some columns."""
        weight = self.weight[columns]
        bias = at(self.bias, columns)
        n, vocab = hidden.shape[0], weight.shape[0]
        out = self.buffer[: n * vocab].view(n, vocab)
        if out.dtype != weight.dtype:
            product(hidden, weight, out, self.center)
            return out if bias is None else out.add_(bias.float() - self.top)
        if bias is None:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.addmm(bias, hidden, weight.t(), out=out)

    def gradient(self, tile):
        """Memory for the gradient of a tile (n, v) in the operands' dtype: the tile itself where it has that dtype."""
        if tile.dtype == self.weight.dtype:
            return tile
        if self.rounded is None:
            self.rounded = self.weight.new_empty(self.buffer.shape)
        return self.rounded[: tile.numel()].view(tile.shape)

    def with_common(self, statistics, hidden, inv_temperature):
        """`RowStatistics` of a tile with the lse of its whole logits; m stays what the gradient subtracts."""
        if not self.centered:
            return statistics
        center = self.center.double()
        # a cast of all rows at once would take four times their memory
        chunks = blocks(len(hidden), _CAST)
        dots = [hidden[rows].double() @ center for rows in chunks]
        common = torch.cat(dots) + self.top
        lse = statistics.lse + common * inv_temperature
        return statistics._replace(lse=lse.float())


def add_mm(total, a, b, first, unrounded=False):
    """total (n, k) = or += a (n, m) @ b (m, k). On a CPU an fp32 total of 16-bit factors gets partials rounded to them,
    or at the price of fp32 products `unrounded` ones."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=0 if first else 1)
        return
    # no other device adds 16-bit products to fp32
    if total.device.type == "cuda" and torch.version.hip is None:
        if first:
            torch.mm(a, b, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return
    if unrounded:
        if first:
            total.zero_()
        for rows in blocks(total.shape[0], _PRODUCT):
            for inner in blocks(a.shape[1], _PRODUCT):
                total[rows].addmm_(a[rows, inner].float(), b[inner].float())
        return
    row_bytes = b.shape[1] * b.element_size()
    step = max(1, _PARTIAL_BYTES // row_bytes)
    for rows in blocks(total.shape[0], step):
        partial = torch.mm(a[rows], b)
        if first:
            total[rows].copy_(partial)
        else:
            total[rows].add_(partial)


class Gradients:
    """Gradients of hidden, weight, bias (None where not needed), summed over tiles of the gradient of the logits.

    They come in the dtype of `hidden`, or in `dtypes`, one for each: those of parameters that were cast for the GEMMs.
    Then no product is rounded before it is summed.
    """

    def __init__(self, needs, hidden, weight, bias, tile, dtypes=None):
        n, vocab = hidden.shape[0], weight.shape[0]
        rows, columns = tile
        self.unrounded = dtypes is not None
        self.dtypes = dtypes or (hidden.dtype,) * 3

        # what several tiles add to is kept in fp32; without rows no tile comes, and the gradients stay zero
        def sum_dtype(several, dtype):
            return torch.float32 if several or dtype != hidden.dtype else dtype

        new = torch.empty_like if n else torch.zeros_like
        self.hidden = self.weight = self.bias = None
        if needs[0]:
            self.hidden = new(hidden, dtype=sum_dtype(columns < vocab, self.dtypes[0]))
        if needs[1]:
            weight_sum = new(weight, dtype=sum_dtype(rows < n, self.dtypes[1]))
            self.weight = in_huge_pages(weight_sum)
        if needs[2]:
            self.bias = new(bias, dtype=torch.float32)

    def add(self, dlogits, hidden, weight, rows, columns):  # (n, v), (n, H), (v, H) of one tile
        factor = dlogits.to(hidden.dtype)
        if self.hidden is not None:
            add_mm(self.hidden[rows], factor, weight, columns.start == 0, self.unrounded)
        if self.weight is not None:
            dlogits_t = factor.t()
            add_mm(self.weight[columns], dlogits_t, hidden, rows.start == 0, self.unrounded)
        if self.bias is not None:
            total = self.bias[columns]
            if rows.start == 0:
                total.zero_()
            # a sum in fp32 makes a copy in fp32
            step = max(1, _PARTIAL_BYTES // (4 * dlogits.shape[1]))
            for some in blocks(len(dlogits), step):
                total.add_(dlogits[some].sum(0, dtype=torch.float32))

    def take(self):
        """Hands over the gradients in their dtypes, each fp32 sum freed before the next is rounded."""
        hidden, self.hidden = self.hidden, None
        hidden = None if hidden is None else hidden.to(self.dtypes[0])
        weight, self.weight = self.weight, None
        weight = None if weight is None else weight.to(self.dtypes[1])
        bias = None if self.bias is None else self.bias.to(self.dtypes[2])
        return hidden, weight, bias


class MeanLogit:
    """The mean of each row's logits over T, with shares (V,) fp32: linear in the hidden states, as no softcap is.

    So it needs no tile: it is a product with the head's mean row, and its gradient one of two vectors, exact in fp32.
    """

    def __init__(self, weight, bias, share):
        self.share = share
        self.head = weight.new_zeros(weight.shape[1], dtype=torch.float32)
        # in place and into `out`, which autocast leaves alone
        for columns in blocks(len(weight), self._step):
            self.head.addmv_(weight[columns].float().t(), share[columns])
        # a class without a share may be banned, and 0 * inf is NaN
        self.bias = 0.0 if bias is None else torch.where(share == 0, 0, share * bias.float()).sum()

    @property
    def _step(self):
        return max(1, _PARTIAL_BYTES // (4 * max(1, len(self.head))))

    def of(self, hidden, inv_temperature):  # (n, H) -> (n,) fp32
        means = self.head.new_zeros(len(hidden))
        for rows in blocks(len(hidden), self._step):
            torch.mv(hidden[rows].float(), self.head, out=means[rows])
        return means.add_(self.bias).mul_(inv_temperature)

    def add_gradient(self, gradients, dmean, hidden, inv_temperature):
        """Add that of `dmean` (n,) to `Gradients`, once for all tiles."""
        dmean = dmean * inv_temperature
        total = torch.zeros_like(self.head)
        for rows in blocks(len(hidden), self._step):
            total.addmv_(hidden[rows].float().t(), dmean[rows])
            if gradients.hidden is not None:
                gradients.hidden[rows].add_(dmean[rows, None] * self.head)
        if gradients.weight is not None:
            for columns in blocks(len(self.share), self._step):
                gradients.weight[columns].add_(self.share[columns, None] * total)
        if gradients.bias is not None:
            gradients.bias.add_(self.share * dmean.sum())


def sum_bytes(n, width, size):
    """Bytes of an fp32 sum (n, width) of low-precision products, and of one of these on its way; fp32 sums in place."""
    if size >= 4:
        return 0
    product_bytes = n * width * size
    return 4 * n * width + min(_PARTIAL_BYTES, product_bytes)


def tile_rows(hidden, row_bytes, size):
    """Rows of a tile of `size` bytes: all, or a multiple of four, so that what each row has begins at 16 bytes in every
    tile; where it does not, Triton compiles the kernels again."""
    n = hidden.shape[0]
    rows = max(1, min(n, size // row_bytes))
    return rows if rows == n else rows - rows % 4 or rows


def backward_tile(hidden, vocab, needs, budget, copies=1):
    """(rows, columns) of a tile that recomputes logits, `copies` of it within the budget less the fp32 sum needed."""
    n, width = hidden.shape
    size = hidden.element_size()
    per_logit = budget.per_logit(hidden.dtype, copies)
    if n * vocab * per_logit <= budget.bytes:
        return n, vocab
    if size == 4:
        # logits of fp32 operands must come out of the product that the statistics came from, else exp(x - m) inherits
        # the difference; rounding to 16 bits, of logits or of their gradient, hides it
        return tile_rows(hidden, vocab * per_logit, budget.bytes), vocab

    # blocks of columns sum the gradient of hidden in fp32, blocks of rows that of the weight: whichever is smaller
    by_columns = sum_bytes(n, width, size) if needs[0] else 0
    by_rows = sum_bytes(vocab, width, size) if needs[1] else 0
    # a sum beyond the budget must not starve the GEMM
    tile_bytes = max(budget.bytes - min(by_columns, by_rows), budget.bytes // 4)
    if by_rows < by_columns:
        return tile_rows(hidden, vocab * per_logit, tile_bytes), vocab
    columns = tile_bytes // (n * per_logit)
    columns -= columns % (128 if columns >= 128 else 16)  # whole vectors in every row
    return n, min(vocab, max(16, columns))


def one_pass_rows(hidden, vocab, needs, budget):
    """Rows of a tile when the gradient is formed at once; 0 where the fp32 sum of dweight leaves too few."""
    n, width = hidden.shape
    size = hidden.element_size()
    row_bytes = vocab * budget.per_logit(hidden.dtype)
    rows = tile_rows(hidden, row_bytes, budget.bytes)
    if rows >= n or size == 4 or not needs[1]:
        return rows
    rows = tile_rows(hidden, row_bytes, budget.bytes - sum_bytes(vocab, width, size))
    return rows if rows >= _ONE_PASS_ROWS else 0


def statistics(
    hidden,
    weight,
    bias,
    targets,
    inv_temperature,
    softcap,
    budget,
    visit=None,
    support=None,
    x=None,
):
    """`RowStatistics` of all rows; of targets (N, K) the logprobs are (N, K). `support` and x as in `row_fwd`.

    `visit(rows, tile)` sees every tile, whole rows of it, without what `Logits` leaves out.
    """
    n, vocab = hidden.shape[0], weight.shape[0]
    step = tile_rows(hidden, vocab * budget.dtype.itemsize, budget.bytes)
    logits = Logits(weight, bias, step * vocab, budget, softcap)

    def of_tile(rows):
        tile = logits.tile(hidden[rows])
        inv_t = at(inv_temperature, rows)
        sets = None if support is None else support.at(rows)
        of_rows = row_fwd(tile, targets[rows], None, inv_t, softcap, sets, x)
        of_rows = logits.with_common(of_rows, hidden[rows], inv_t)
        if visit is not None:
            visit(rows, tile)
        return of_rows

    # the only tile has the outputs; several write theirs into new tensors, no views: they are returned
    if step == n:
        return of_tile(slice(0, n))
    shapes = targets.shape, n, n, n, n
    outputs = RowStatistics(*(hidden.new_zeros(shape, dtype=torch.float32) for shape in shapes))
    for rows in blocks(n, step):
        for output, values in zip(outputs, of_tile(rows), strict=True):
            output[rows] = values
    return outputs


def recomputed(
    needs,
    upstream,
    hidden,
    weight,
    bias,
    targets,
    statistics,
    inv_temperature,
    softcap,
    budget,
    dtypes=None,
    support=None,
    x=None,
):
    """`Gradients` of hidden, weight, bias from those of (logprobs, entropy, lse), over recomputed tiles of logits."""
    n, vocab = hidden.shape[0], weight.shape[0]
    tile = backward_tile(hidden, vocab, needs, budget)
    gradients = Gradients(needs, hidden, weight, bias, tile, dtypes)
    formed = Logits(weight, bias, tile[0] * tile[1], budget, softcap)
    upstream = tuple(None if d is None else d.contiguous() for d in upstream)
    # each tile: its logits again, their gradient, and from that the parameters'
    for rows in blocks(n, max(1, tile[0])):
        upstream_rows = [at(d, rows) for d in upstream]
        state = [s[rows] for s in statistics]
        sets = None if support is None else support.at(rows)
        options = at(inv_temperature, rows), softcap
        for columns in blocks(vocab, tile[1]):
            logits = formed.tile(hidden[rows], columns)
            dlogits = formed.gradient(logits)
            # in all columns no target stands elsewhere
            first = None if tile[1] == vocab else columns.start
            where = {"out": dlogits, "support": sets, "x": x, "first": first}
            row_bwd(upstream_rows, logits, targets[rows], None, state, *options, **where)
            gradients.add(dlogits, hidden[rows], weight[columns], rows, columns)
    return gradients
