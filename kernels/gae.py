"""Generalised advantage estimation (arXiv:1506.02438, eq. 16) over the tokens that count, from the last to the first.

With z = (1 - lambda) value + lambda return, a token needs only one number of the next token that counts:

    return_t = r_t + gamma z_{t+1},    advantage_t = return_t - value_t,
    z_t = b_t + rho z_{t+1},    b_t = (1 - lambda) value_t + lambda r_t,    rho = gamma lambda,

z is 0 beyond the last token, and a masked position passes z on unchanged. Within a block, with i_t the number of tokens
before t that count, rho^i_t z_t is the sum of rho^i_j b_j over j >= t, plus what comes from behind the block. The sums
run from the back, so larger weights are added to smaller ones, and a block is short enough for rho^i to stay within
fp64.

Bytes: rewards, values and mask are read once (their neighbours come from the cache), and two outputs are written. The
sums are fp64, because a return may add up 10^5 rewards.
"""

import math

import torch
import triton
import triton.language as tl

from .launch import launch, split


@triton.jit
def _load(rewards_ptr, values_ptr, mask_ptr, t, T):
    """Return reward and value of positions t in fp64, 0 where they do not count, and which of them count."""
    counts = tl.load(mask_ptr + t, mask=t < T, other=0) != 0
    r = tl.load(rewards_ptr + t, mask=counts, other=0.0).to(tl.float64)
    v = tl.load(values_ptr + t, mask=counts, other=0.0).to(tl.float64)
    return r, v, counts


@triton.jit(do_not_specialize=["T", "stride_r", "stride_v", "stride_m"])
def gae_kernel(
    rewards_ptr,  # (B, T)
    values_ptr,  # (B, T)
    mask_ptr,  # (B, T) bool
    advantages_ptr,  # (B, T), contiguous
    returns_ptr,  # (B, T), contiguous
    T,
    stride_r: tl.int64,
    stride_v: tl.int64,
    stride_m: tl.int64,
    gamma,
    gamma_low,  # scalars arrive as fp32, so each number comes as a sum of two
    gae_lambda,
    gae_lambda_low,
    log2_rho,
    log2_rho_low,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rewards_ptr += row * stride_r
    values_ptr += row * stride_v
    mask_ptr += row * stride_m
    gamma_64 = gamma.to(tl.float64) + gamma_low.to(tl.float64)
    lambda_64 = gae_lambda.to(tl.float64) + gae_lambda_low.to(tl.float64)
    log2_rho_64 = log2_rho.to(tl.float64) + log2_rho_low.to(tl.float64)
    cols = tl.arange(0, BLOCK)
    blocks = tl.cdiv(T, BLOCK)
    z_behind = gamma_64 * 0  # a zero in fp64
    for back in tl.range(0, blocks, num_stages=1):
        t = (blocks - 1 - back) * BLOCK + cols
        # z_{t+1}, from the tokens one position later
        r, v, counts = _load(rewards_ptr, values_ptr, mask_ptr, t + 1, T)
        one = counts.to(tl.int32)
        i = tl.cumsum(one, 0) - one
        weight = tl.exp2(i.to(tl.float64) * log2_rho_64)
        b = tl.where(counts, (1 - lambda_64) * v + lambda_64 * r, 0.0) * weight
        behind = tl.exp2(tl.sum(one, 0).to(tl.float64) * log2_rho_64) * z_behind
        z_next = (tl.cumsum(b, 0, reverse=True) + behind) / weight
        z_behind = tl.sum(tl.where(cols == 0, z_next, 0.0), 0)
        r, v, counts = _load(rewards_ptr, values_ptr, mask_ptr, t, T)
        returns = r + gamma_64 * z_next
        advantages = tl.where(counts, returns - v, 0.0).to(advantages_ptr.dtype.element_ty)
        returns = tl.where(counts, returns, 0.0).to(returns_ptr.dtype.element_ty)
        tl.store(advantages_ptr + row * T + t, advantages, mask=t < T)
        tl.store(returns_ptr + row * T + t, returns, mask=t < T)


def gae(rewards, values, mask, gamma, gae_lambda, dtype):
    """Return advantages and returns, (B, T) in `dtype` and contiguous, with 0 where a token does not count.

    Args:
        rewards, values: (B, T) of any floating dtype; the stride of T must be 1, for the mask too.
        mask: (B, T) bool, True for the tokens that count.
        gamma, gae_lambda: floats in [0, 1].
    """
    rows, length = rewards.shape
    advantages = torch.empty(rows, length, device=rewards.device, dtype=dtype)
    returns = torch.empty_like(advantages)
    # log2(0) would be infinite, and rho^1 of 2^-100 is 0 beside the other terms in fp64
    rho = max(gamma * gae_lambda, 2.0**-100)
    log2_rho = math.log2(rho)
    block = max(8, min(1024, 1 << (length - 1).bit_length()))
    # rho^i of a block must not underflow: fp64 reaches down to 2^-1022
    while block * -log2_rho > 900:
        block //= 2
    if advantages.numel():
        numbers = (length, rewards.stride(0), values.stride(0), mask.stride(0))
        numbers += (*split(gamma), *split(gae_lambda), *split(log2_rho))
        pointers = (rewards, values, mask, advantages, returns)
        launch(gae_kernel, (rows,), pointers, numbers, {"BLOCK": block, "num_warps": 4})
    return advantages, returns
