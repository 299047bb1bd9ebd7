"""The CPU path of generalised advantage estimation: the function and formulas of `fused_rl.kernels.gae`."""

import torch


def gae(rewards, values, mask, gamma, gae_lambda, dtype):
    """(B, T), (B, T), (B, T) bool, floats -> advantages, returns, (B, T) in `dtype`."""
    r = torch.where(mask, rewards, 0).double()
    v = torch.where(mask, values, 0).double()

    # z = (1 - lambda) value + lambda return is all that a token needs of the next: z_t = b_t + a_t z_{t+1}, by doubling
    # a masked token hands on the z of the next: b is 0 and a is 1
    b = (1 - gae_lambda) * v + gae_lambda * r
    z = torch.where(mask, b, 0)
    one = torch.ones_like(z)
    a = torch.where(mask, gamma * gae_lambda, one)
    step = 1
    while step < z.shape[1]:
        here = a[:, :-step]
        ahead = a[:, step:]
        z[:, :-step] += here * z[:, step:]
        a[:, :-step] = here * ahead
        step *= 2

    # the return of a token from the next one's z
    z_next = torch.nn.functional.pad(z[:, 1:], (0, 1))
    returns = r + gamma * z_next
    advantages = torch.where(mask, returns - v, 0)
    returns = torch.where(mask, returns, 0)
    return advantages.to(dtype), returns.to(dtype)
