"""One token of each row of logits, drawn from softmax(logits / temperature) in one read, without a wait for the host.

Gumbel's argmax: with E_j independent exponential times, the argmax of x_j / T - log E_j has the probabilities
softmax(x / T). It is the argmin of E_j exp(-x_j / T), which needs no second logarithm. E_j comes from Philox (Salmon et
al., 2011) at the counter (column, row, offset) of the key `seed`, so a token depends on its own row of logits, the
row's index and the two numbers alone: not on other rows, nor on how a row is split. Seed and offset lie in device
memory, so a captured CUDA graph draws anew where the offset has been raised.

Bytes: one read. A program has BLOCK columns of a row, and of these leaves the maximum, the sum of exponentials and the
first column to be drawn; `merge_kernel` has a program per row.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, contiguous, launch
from .online import FAR, LN2, NAN, log1p

BLOCK = 4096  # columns of a program
# Philox4x32 passes all tests of BigCrush from seven rounds on (Salmon et al., 2011, table 2)
ROUNDS = tl.constexpr(7)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def waiting_times(state_ptr, row, four):
    """Return exponential times (4n,) of the columns in the groups `four` (n,) of four neighbours.

    A time is -log(1 - u) for the uniform u = (bits + 1/2) / 2^32, so it is neither 0 nor infinite. The smallest times
    win, so u keeps all its bits near 0; as -log of an fp32 number near 1 they would be 0.
    """
    seed, offset = tl.load(state_ptr), tl.load(state_ptr + 1)
    zero = four * 0
    low, high = (offset & 0xFFFFFFFF).to(tl.uint32), (offset >> 32).to(tl.uint32)
    row = (zero + row).to(tl.uint32)
    a, b, c, d = tl.philox(seed, four.to(tl.uint32), row, zero + low, zero + high, ROUNDS)
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (4 * four.shape[0],))
    u = tl.minimum(tl.fma(bits.to(tl.float32), 0.5**32, 0.5**33), 1 - 0.5**24)
    near = tl.fma(u, tl.fma(u, tl.fma(u, tl.fma(u, 1 / 5, 1 / 4), 1 / 3), 1 / 2), 1.0) * u
    return tl.where(u < 1 / 16, near, -LN2 * tl.log2(1 - u))


@triton.jit
def first_of(times, columns, vocab):
    """Return the smallest time, and the first column that has it; a column of the row if all are infinite or NaN."""
    first = tl.min(times, 0)
    return first, tl.min(tl.where(times == first, columns, vocab - 1), 0)


@triton.jit
def block_kernel(
    x_ptr,  # (N, V) bf16, fp16 or fp32
    state_ptr,  # (2,) int64: seed, offset
    blocks_ptr,  # (N, blocks, 3) fp32: maximum, sum of exp(x - maximum) less 1, smallest time at the maximum
    column_ptr,  # (N, blocks) int32: the column of that time
    vocab,
    x_stride,
    inv_t,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    # a counter gives four numbers, one for each of four neighbours
    four = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    columns = four[:, None] * 4 + tl.arange(0, 4)[None, :]
    x_row = x_ptr + row.to(tl.int64) * x_stride
    x = tl.load(x_row + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    x, columns = tl.reshape(x, (BLOCK,)), tl.reshape(columns, (BLOCK,))

    # the maximum is held out of the sum of exponentials, as in `online.py`; NaN and +inf make that sum NaN
    m = tl.max(x, 0)
    s = (x - tl.where(m == float("-inf"), 0.0, m)) * inv_t
    p = tl.exp2(tl.maximum(s, FAR, propagate_nan=NAN) * LOG2E)
    ties = tl.sum((x == m).to(tl.int32), 0)
    rest = tl.sum(tl.where(x == m, p - 1, p), 0) + (ties - 1).to(tl.float32)
    time, column = first_of(
        waiting_times(state_ptr, row, four) * tl.exp2(s * -LOG2E), columns, vocab
    )
    nth = row.to(tl.int64) * tl.num_programs(1) + block
    tl.store(blocks_ptr + nth * 3, m)
    tl.store(blocks_ptr + nth * 3 + 1, rest)
    tl.store(blocks_ptr + nth * 3 + 2, time)
    tl.store(column_ptr + nth, column)


@triton.jit
def merge_kernel(
    x_ptr,  # (N, V) bf16, fp16 or fp32
    blocks_ptr,  # (N, blocks, 3) fp32
    column_ptr,  # (N, blocks) int32
    token_ptr,  # (N,) int64
    logprob_ptr,  # (N,) fp32
    broken_ptr,  # (N,) bool
    blocks,
    vocab,
    x_stride,
    inv_t,
    BLOCKS: tl.constexpr,  # the next power of two
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCKS)
    nth, inside = row * blocks + lane, lane < blocks
    ms = tl.load(blocks_ptr + nth * 3, mask=inside, other=float("-inf"))
    rests = tl.load(blocks_ptr + nth * 3 + 1, mask=inside, other=0.0)
    times = tl.load(blocks_ptr + nth * 3 + 2, mask=inside, other=float("inf"))
    columns = tl.load(column_ptr + nth, mask=inside, other=0)
    m = tl.max(ms, 0)
    s = (ms - m) * inv_t
    _time, token = first_of(times * tl.exp2(s * -LOG2E), columns, vocab)
    # of the blocks at the maximum one holds it out; those of the others are ties, which add 1 each
    ties = tl.sum((ms == m).to(tl.int32), 0)
    rests = tl.where(ms == m, rests, tl.exp2(s * LOG2E) * (1 + rests))
    rest = tl.sum(rests, 0) + (ties - 1).to(tl.float32)
    broken = (tl.abs(m) == float("inf")) | (rest != rest)
    x = tl.load(x_ptr + row * x_stride + token).to(tl.float32)
    logprob = (x - m) * inv_t - log1p(rest)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, tl.where(broken, float("nan"), logprob))
    tl.store(broken_ptr + row, broken)


def sample_token(logits, philox_state, inv_temperature):
    """Return the token (N,) int64 of each row, its log-probability (N,) fp32 in nats, and `broken` (N,) bool.

    Args:
        logits: (N, V) bf16, fp16 or fp32; -inf is never drawn.
        philox_state: (2,) int64, the seed and the offset.
        inv_temperature: 1 / temperature, a float.

    A row that is -inf throughout or has NaN or +inf is broken: its token is any, and its log-probability is NaN.
    """
    n, vocab = logits.shape
    blocks = cdiv(vocab, BLOCK)
    logprobs = torch.empty(n, dtype=torch.float32, device=logits.device)
    tokens = torch.empty_like(logprobs, dtype=torch.int64)
    broken = torch.empty_like(logprobs, dtype=torch.bool)
    if n == 0:
        return tokens, logprobs, broken
    of_blocks = logprobs.new_empty(n, blocks, 3)
    columns = torch.empty(n, blocks, dtype=torch.int32, device=logits.device)
    numbers = vocab, logits.stride(0), float(inv_temperature)
    pointers = logits, *contiguous(philox_state), of_blocks, columns
    launch(block_kernel, (n, blocks), pointers, numbers, {"BLOCK": BLOCK, "num_warps": 4})
    pointers = logits, of_blocks, columns, tokens, logprobs, broken
    options = {"BLOCKS": triton.next_power_of_2(blocks), "num_warps": 1}
    launch(merge_kernel, (n,), pointers, (blocks, *numbers), options)
    return tokens, logprobs, broken
