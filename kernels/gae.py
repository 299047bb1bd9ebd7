"""Generalised advantage estimation (arXiv:1506.02438, eq. 16) over the tokens that count, from the last to the first.

With z = (1 - lambda) value + lambda return, a token needs one number of the next one that counts:

    return_t = r_t + gamma z_{t+1},    advantage_t = return_t - value_t,
    z_t = b_t + rho z_{t+1},    b_t = (1 - lambda) value_t + lambda r_t,    rho = gamma lambda,

z = 0 beyond the last, and a masked position hands z on. Within a block, with i_t the number of tokens before t that
count, rho^i_t z_t is the sum of rho^i_j b_j over j >= t and of what comes from behind the block. Sums toward the front
only add larger weights to smaller ones, so nothing cancels; a block is short enough for rho^i to stay within fp64.

Bytes: rewards, values and mask are read once (their neighbours come from the cache) and two outputs written. Sums are
fp64: a return may add up 10^5 rewards.
"""

import math

import torch
import triton
import triton.language as tl


@triton.jit
def _load(rewards_ptr, values_ptr, mask_ptr, t, T):
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
    gamma_low,  # scalars are fp32: each number comes as a sum of two
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
    z_behind = gamma_64 * 0
    for back in tl.range(0, blocks, num_stages=1):
        t = (blocks - 1 - back) * BLOCK + cols
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


def _split(x):
    high = float(torch.tensor(x, dtype=torch.float32, device="cpu"))
    return high, x - high


def gae(rewards, values, mask, gamma, gae_lambda, dtype):
    """(B, T), (B, T), (B, T) bool, floats -> advantages, returns, (B, T) in `dtype`; strides of T are 1."""
    rows, length = rewards.shape
    advantages = torch.empty(rows, length, device=rewards.device, dtype=dtype)
    returns = torch.empty_like(advantages)
    # against log2(0); the difference is far below fp64's resolution
    rho = max(gamma * gae_lambda, 2.0**-100)
    log2_rho = math.log2(rho)
    block = max(8, min(1024, triton.next_power_of_2(length)))
    while block * -log2_rho > 900:
        block //= 2
    if advantages.numel():
        numbers = (length, rewards.stride(0), values.stride(0), mask.stride(0))
        numbers += (*_split(gamma), *_split(gae_lambda), *_split(log2_rho))
        with torch.cuda.device_of(rewards):
            gae_kernel[(rows,)](
                rewards, values, mask, advantages, returns, *numbers, BLOCK=block, num_warps=4
            )
    return advantages, returns
