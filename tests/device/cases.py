"""Every public op on tensors of a device, in the forms that take other paths, and how often the host may wait.

A case takes `put`, which puts a CPU tensor where it is to run, and returns outputs and leaves; a public op without
a case fails tests/device/test_ops.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

import fused_rl
from fused_rl import TokenSupport, reference
from fused_rl.estimators import KL_ESTIMATORS

N, V, H, K = 6, 33, 16, 3
B, T = 4, 5
DIRECTIONS = ("reverse", "forward", "jensen-shannon")


class Case(NamedTuple):
    """A form of a public op."""

    op: str
    call: Callable
    reads: int = 0
    """Of forward and backward together."""


CASES: dict[str, Case] = {}


def case(op: str, form: str = "", reads: int = 0):
    """Lists a function of `put` under the op and its form."""

    def listed(call):
        CASES[f"{op}: {form}" if form else op] = Case(op, call, reads)
        return call

    return listed


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape, seed=0):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def some(*shape):
    """A mask that drops every third."""
    return (torch.arange(torch.Size(shape).numel()) % 3 > 0).view(shape)


def sets(targets) -> TokenSupport:
    """A few ids around each target, every fourth row whole."""
    rows = [sorted({t, (t + 1) % V, (t + 5) % V}) for t in targets.flatten().tolist()]
    return TokenSupport.from_lists([[] if i % 4 == 3 else row for i, row in enumerate(rows)])


# of logits

TOKEN_LOGPROBS = {
    "": {},
    "mask": {"mask": some(N)},
    "temperature per row": {"temperature": torch.linspace(0.5, 2, N)},
    "softcap": {"softcap": 3.0},
}
for form, options in TOKEN_LOGPROBS.items():
    for several in (False, True):

        @case("token_logprobs", f"{K} targets, {form}" if several else form)
        def _token_logprobs(put, options=options, several=several):
            given = {name: put(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            logits, targets = put(normal(N, V).requires_grad_()), put(ids(N, K) if several else ids(N))
            return fused_rl.token_logprobs(logits, targets, **given), [logits]


@case("token_logprobs", "shift")
def _shifted(put):
    logits = put(normal(B, T, V).requires_grad_())
    return fused_rl.token_logprobs(logits, put(ids(B, T)), shift=True, mask=put(some(B, T - 1))), [logits]


@case("token_logprobs", "inplace")
def _in_place(put):
    leaf = put(normal(N, V).requires_grad_())
    return fused_rl.token_logprobs(leaf * 1, put(ids(N)), inplace=True), [leaf]


@case("token_logprobs", "bf16, columns apart")
def _columns_apart(put):
    leaf = put(normal(N, 2 * V).bfloat16().requires_grad_())
    return fused_rl.token_logprobs(leaf[:, ::2], put(ids(N))), [leaf]


@case("token_logprobs", "support")
def _supported(put):
    logits, targets = put(normal(N, V).requires_grad_()), ids(N)
    kept = sets(targets)
    kept = TokenSupport(put(kept.ids), put(kept.offsets))
    return fused_rl.token_logprobs(logits, put(targets), support=kept), [logits]


for direction in DIRECTIONS:

    @case("token_kl", direction)
    def _token_kl(put, direction=direction):
        leaves = [put(normal(N, V, seed=i).requires_grad_()) for i in range(2)]
        return [fused_rl.token_kl(*leaves, direction=direction)], leaves

    @case("token_kl", f"{direction}, mask, temperature per row")
    def _masked_kl(put, direction=direction):
        leaves = [put(normal(N, V, seed=i).requires_grad_()) for i in range(2)]
        options = {"mask": put(some(N)), "temperature": put(torch.linspace(0.5, 2, N))}
        return [fused_rl.token_kl(*leaves, direction=direction, **options)], leaves

    @case("topk_kl", direction)
    def _topk_kl(put, direction=direction):
        leaves = [put((normal(N, V, seed=i).log_softmax(1)[:, :K]).detach().requires_grad_()) for i in range(2)]
        return [fused_rl.topk_kl(*leaves, direction=direction, mask=put(some(N)))], leaves

    @case("vocab_parallel_token_kl", direction)
    def _parallel_kl(put, direction=direction):
        leaves = [put(normal(N, V, seed=i).requires_grad_()) for i in range(2)]
        return [fused_rl.vocab_parallel_token_kl(*leaves, direction=direction, mask=put(some(N)))], leaves


@case("vocab_parallel_token_logprobs")
def _parallel_logprobs(put):
    logits = put(normal(N, V).requires_grad_())
    return fused_rl.vocab_parallel_token_logprobs(logits, put(ids(N)), 0, mask=put(some(N))), [logits]


@case("vocab_parallel_token_logprobs", "support")
def _parallel_supported(put):
    logits, targets = put(normal(N, V).requires_grad_()), ids(N)
    kept = sets(targets)
    kept = TokenSupport(put(kept.ids), put(kept.offsets))
    return fused_rl.vocab_parallel_token_logprobs(logits, put(targets), 0, support=kept), [logits]


# of hidden states


def head(put):
    return [put(values.requires_grad_()) for values in (normal(N, H), normal(V, H, seed=1), normal(V, seed=2))]


# one tile; several
WORKSPACES = {"": 512.0, ", tiles": 0.002}
for form, size in WORKSPACES.items():
    for masked in (False, True):
        masks = {"mask": some(N)} if masked else {}
        named = ("mask" if masked else "") + form

        @case("linear_token_logprobs", named, reads=int(masked))
        def _linear(put, masks=masks, size=size):
            hidden, weight, bias = leaves = head(put)
            options = {name: put(mask) for name, mask in masks.items()} | {"workspace_mb": size}
            return fused_rl.linear_token_logprobs(hidden, weight, put(ids(N)), bias=bias, **options), leaves

        @case("linear_token_loss", named, reads=int(masked))
        def _linear_loss(put, masks=masks, size=size):
            hidden, weight, bias = leaves = head(put)
            options = {name: put(mask) for name, mask in masks.items()} | {"workspace_mb": size}
            advantages = put(normal(N, seed=3))

            def loss(logprobs, entropy, advantages):
                return -logprobs * advantages - 0.1 * entropy

            found = fused_rl.linear_token_loss(hidden, weight, put(ids(N)), loss, advantages, bias=bias, **options)
            return found, leaves

        for direction in DIRECTIONS:

            @case("linear_token_kl", f"{direction}{', ' if named else ''}{named}", reads=int(masked))
            def _linear_kl(put, masks=masks, size=size, direction=direction):
                hidden, weight, bias = leaves = head(put)
                others = put(normal(N, H, seed=4)), put(normal(V, H, seed=5))
                options = {name: put(mask) for name, mask in masks.items()} | {"workspace_mb": size}
                found = fused_rl.linear_token_kl(hidden, weight, *others, bias=bias, direction=direction, **options)
                return [found], leaves


@case("linear_token_logprobs", f"{K} targets")
def _linear_several(put):
    hidden, weight, bias = leaves = head(put)
    return fused_rl.linear_token_logprobs(hidden, weight, put(ids(N, K)), bias=bias, softcap=3.0), leaves


# how many rows are gathered; in the backward pass, how many different ids
@case("linear_token_logprobs", "support", reads=2)
def _linear_supported(put):
    hidden, weight, bias = leaves = head(put)
    targets = ids(N)
    kept = sets(targets)
    kept = TokenSupport(put(kept.ids), put(kept.offsets))
    return fused_rl.linear_token_logprobs(hidden, weight, put(targets), bias=bias, support=kept), leaves


# losses and what goes into them


def tokens(put):
    """Log-probabilities of the policy, which are a leaf, those of before and of the reference, and entropies."""
    logprobs = put(-normal(B, T).abs().requires_grad_())
    return logprobs, *(put(-normal(B, T, seed=i).abs()) for i in (1, 2)), put(normal(B, T, seed=3).abs())


for preset in fused_rl.PRESETS:

    @case("policy_loss", preset)
    def _policy_loss(put, preset=preset):
        logprobs, old, ref, entropy = tokens(put)
        options = {"ref_logprobs": ref, "entropy": entropy, "kl_coef": 0.1, "entropy_coef": 0.01, "max_length": T}
        found, metrics = fused_rl.policy_loss(
            logprobs, old, put(normal(B, seed=5)), put(some(B, T)), preset=preset, **options
        )
        return [found, *metrics.values()], [logprobs]


@case("policy_loss", "top entropy, denominators, sampler's log-probabilities")
def _corrected_loss(put):
    logprobs, old, ref, entropy = tokens(put)
    options = {"entropy": entropy, "top_entropy": 0.4, "num_tokens": 17, "num_sequences": B, "rollout_logprobs": ref}
    options |= {"rollout_correction": "token-truncate"}
    found, metrics = fused_rl.policy_loss(
        logprobs, old, put(normal(B, seed=5)), put(some(B, T)), preset="grpo", **options
    )
    return [found, *metrics.values()], [logprobs]


@case("policy_token_loss")
def _policy_token_loss(put):
    logprobs, old, ref, entropy = tokens(put)
    mask = put(some(B, T))
    options = {"ref_logprobs": ref, "kl_coef": 0.1, "entropy_coef": 0.01, "preset": "grpo"}
    loss, per_token = fused_rl.policy_token_loss(old, put(normal(B, seed=5)), mask, **options)
    return [loss(logprobs, entropy, *per_token)], [logprobs]


for level in ("token", "sequence", "sequence-sum"):

    @case("importance_ratio", level)
    def _importance_ratio(put, level=level):
        logprobs, old, *_ = tokens(put)
        return [fused_rl.importance_ratio(logprobs, old, put(some(B, T)), ratio_level=level)], [logprobs]


for estimator in KL_ESTIMATORS:

    @case("kl_estimate", estimator)
    def _kl_estimate(put, estimator=estimator):
        logprobs, old, ref, _ = tokens(put)
        return [fused_rl.kl_estimate(logprobs, ref, estimator, old_logprobs=old)], [logprobs]


@case("entropy_bonus")
def _entropy_bonus(put):
    entropy = put(normal(B, T).abs().requires_grad_())
    loss, metrics = fused_rl.entropy_bonus(entropy, put(some(B, T)), 0.1)
    return [loss, *metrics.values()], [entropy]


@case("value_loss")
def _value_loss(put):
    values = put(normal(B, T).requires_grad_())
    loss, metrics = fused_rl.value_loss(values, put(normal(B, T, seed=1)), put(normal(B, T, seed=2)), put(some(B, T)))
    return [loss, *metrics.values()], [values]


@case("preference_loss")
def _preference_loss(put):
    leaves = [put(normal(B, seed=i).requires_grad_()) for i in range(2)]
    options = {"margin": put(normal(B, seed=2).abs()), "label_smoothing": 0.1, "centering": 0.1}
    loss, metrics = fused_rl.preference_loss(*leaves, **options)
    return [loss, *metrics.values()], leaves


for advantage in fused_rl.ADVANTAGES:
    if advantage != "gae":

        @case("response_advantages", advantage)
        def _response_advantages(put, advantage=advantage):
            return [fused_rl.response_advantages(put(normal(8)), advantage, group_size=4)], []


@case("group_advantages")
def _group_advantages(put):
    return [fused_rl.group_advantages(put(normal(8)), 4)], []


@case("gae")
def _gae(put):
    values = put(normal(B, T)), put(normal(B, T, seed=1)), put(some(B, T))
    return fused_rl.gae(*values, gamma=0.99, gae_lambda=0.95), []


for name in ("masked_sum", "masked_mean", "masked_var", "whiten"):

    @case(name)
    def _masked(put, name=name):
        values = put(normal(B, T).requires_grad_())
        return [getattr(fused_rl, name)(values, put(some(B, T)))], [values] if name != "whiten" else []


# the count of steps before the second one, once for a group of parameters
@case("tf_adam_epsilon", reads=1)
def _tf_adam_epsilon(put):
    leaves = [put(normal(3, seed=i).requires_grad_()) for i in range(4)]
    optimizer = fused_rl.tf_adam_epsilon(torch.optim.Adam(leaves, lr=0.1, capturable=leaves[0].is_cuda, foreach=False))
    for _ in range(2):
        sum(leaf.square().sum() for leaf in leaves).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [leaf.detach() for leaf in leaves], []


# the references, where no mask tells them their device


@case("reference", "token_logprobs")
def _reference_logprobs(put):
    logits = put(normal(N, V).requires_grad_())
    return reference.token_logprobs(logits, put(ids(N))), [logits]


@case("reference", "token_kl, linear_token_kl, topk_kl")
def _reference_kl(put):
    hidden, weight, bias = leaves = head(put)
    logits, others = hidden @ weight.t() + bias, put(normal(N, V, seed=3))
    found = reference.linear_token_kl(hidden, weight, put(normal(N, H, seed=4)), put(normal(V, H, seed=5)))
    logprobs = [x.log_softmax(1)[:, :K] for x in (logits, others)]
    return [reference.token_kl(logits, others), found, reference.topk_kl(*logprobs, direction="forward")], leaves
