"""Public functions on a device, beside those of tests/hostile.py and hostile_tokens.py; how often the host may wait.

A case takes `put`, which puts a CPU tensor where it is to run, and returns outputs and leaves; a public op without
a case fails tests/device/test_ops.py.
"""

from collections.abc import Callable

import torch

import fused_rl

B, T = 4, 5


CASES: dict[str, Callable] = {}


def case(op: str, form: str = ""):
    """Lists a function of `put` under the op and its form."""

    def listed(call):
        CASES[f"{op}, {form}" if form else op] = call
        return call

    return listed


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some(*shape):
    """A mask that drops every third."""
    return (torch.arange(torch.Size(shape).numel()) % 3 > 0).view(shape)


def tokens(put):
    """Log-probabilities of the policy, which are a leaf, those of before and of the reference, and entropies."""
    logprobs = put(-normal(B, T).abs().requires_grad_())
    return (
        logprobs,
        *(put(-normal(B, T, seed=i).abs()) for i in (1, 2)),
        put(normal(B, T, seed=3).abs()),
    )


@case("policy_loss", "top entropy, denominators, sampler's log-probabilities")
def _corrected_loss(put):
    logprobs, old, ref, entropy = tokens(put)
    options = {"entropy": entropy, "top_entropy": 0.4, "num_tokens": 17, "num_sequences": B}
    options |= {"rollout_logprobs": ref, "rollout_correction": "token-truncate", "preset": "grpo"}
    advantages, mask = put(normal(B, seed=5)), put(some(B, T))
    found, metrics = fused_rl.policy_loss(logprobs, old, advantages, mask, **options)
    return [found, *metrics.values()], [logprobs]


@case("sample_token")
def _sample_token(put):
    return fused_rl.sample_token(put(normal(B, 50)), put(torch.tensor([3, 1])), temperature=0.7), []


@case("policy_token_loss")
def _policy_token_loss(put):
    logprobs, old, ref, entropy = tokens(put)
    mask = put(some(B, T))
    options = {"ref_logprobs": ref, "kl_coef": 0.1, "entropy_coef": 0.01, "preset": "grpo"}
    loss, per_token = fused_rl.policy_token_loss(old, put(normal(B, seed=5)), mask, **options)
    return [loss(logprobs, entropy, *per_token)], [logprobs]


for advantage in fused_rl.ADVANTAGES:
    if advantage != "gae":

        @case("response_advantages", advantage)
        def _response_advantages(put, advantage=advantage):
            rewards = put(normal(2, 8) if advantage == "gdpo" else normal(8))
            given = {"lengths": put(normal(8).abs()), "weights": put(normal(2).abs())}
            return [fused_rl.response_advantages(rewards, advantage, group_size=4, **given)], []


@case("tf_adam_epsilon")
def _tf_adam_epsilon(put):
    leaves = [put(normal(3, seed=i).requires_grad_()) for i in range(4)]
    optimizer = fused_rl.tf_adam_epsilon(
        torch.optim.Adam(leaves, lr=0.1, capturable=leaves[0].is_cuda, foreach=False)
    )
    for _ in range(2):
        sum(leaf.square().sum() for leaf in leaves).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [leaf.detach() for leaf in leaves], []
