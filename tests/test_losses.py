"""Losses: values and gradients in every cell against the papers' formulas, TRL's and Liger's, and their denominators."""

import functools
import itertools
import re
from pathlib import Path

import pytest
import torch

import fused_rl
from fused_rl import reference
from fused_rl.losses import aggregate, policy_token_loss
from fused_rl.surrogates import LOSS_AGGS, RATIO_LEVELS

F64 = torch.float64
B, T, V, H = 4, 6, 11, 5
MASKS = ("none", "partial", "one-sequence-masked", "packed")
KLS = (None, "k2", "k3", "rk3")
# Written from the papers, not read from PRESETS: surrogate, ratio level, aggregation, clip_low, clip_high.
PAPERS = {
    "ppo": ("clip", "token", "token-mean", 0.2, 0.2),
    "grpo": ("clip", "token", "seq-mean-token-mean", 0.2, 0.2),
    "bnpo": ("clip", "token", "token-mean", 0.2, 0.2),
    "dr_grpo": ("clip", "token", "seq-mean-token-sum-norm", 0.2, 0.2),
    "dapo": ("clip", "token", "token-mean", 0.2, 0.28),
    "gspo": ("clip", "sequence", "seq-mean-token-mean", 3e-4, 4e-4),
    "cispo": ("cispo", "token", "token-mean", 1.0, 4.0),
    "sapo": ("sapo", "token", "seq-mean-token-mean", 0.2, 0.2),
    "luspo": ("clip", "sequence", "seq-mean-token-sum", 2e-3, 2.5e-3),
    "vespo": ("vespo", "sequence-sum", "token-mean", 0.2, 0.2),
    "rloo": ("policy-gradient", "token", "seq-mean-token-sum", 0.2, 0.2),
    "reinforce++": ("clip", "token", "token-mean", 0.2, 0.2),
    "gmpo": ("geo-mean", "token", "seq-mean-token-mean", 0.4, 0.4),
}


@functools.cache
def batch(kind):
    """mask, sequence_ids (B, T), advantages per sequence and spread (B, T), old and ref logprobs' distances."""
    generator = torch.Generator().manual_seed(MASKS.index(kind))
    mask = torch.ones(B, T, dtype=torch.bool)
    ids = torch.arange(B)[:, None].expand(B, T).clone()
    if kind != "none":
        mask[:3] = torch.rand(3, T, generator=generator) < 0.7
        mask[:, 0] = True
    if kind == "one-sequence-masked":
        mask[1] = False
    if kind == "packed":  # sequences of 1 to 4 tokens, pads (-1), and one that goes on in the next row
        ids = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 3, 3, 3, 3, 4], [4, 4, -1, 5, 5, 5], [6, 6, 7, 7, 7, -1]])
    count = 8 if kind == "packed" else B
    advantages = torch.randn(count, generator=generator, dtype=F64)
    spread = advantages[ids.clamp(min=0)]
    drift = 0.3 * torch.randn(2, B, T, generator=generator, dtype=F64)  # both sides of every clip range
    return mask, ids, advantages, spread, drift


@functools.cache
def head():
    """hidden (B, T, H), weight (V, H), targets (B, T), in fp32."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(B, T, H, generator=generator).requires_grad_()
    weight = torch.randn(V, H, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(V, (B, T), generator=generator)


@functools.cache
def paths(kind):
    """Per path: the leaves, logprobs in fp32, logprobs in fp64 of the same rounded inputs, and their fp64 leaves."""
    mask = batch(kind)[0]
    hidden, weight, targets = head()
    logits = (hidden @ weight.T).detach().requires_grad_()
    logits64, hidden64, weight64 = (t.detach().double().requires_grad_() for t in (logits, hidden, weight))
    linear = fused_rl.linear.linear_token_logprobs(hidden, weight, targets, mask=mask)
    linear64 = reference.linear_token_logprobs(hidden64, weight64, targets, mask=mask)
    return {
        "logits": (
            [logits],
            fused_rl.token_logprobs(logits, targets, mask=mask).logprobs,
            reference.token_logprobs(logits64, targets, mask=mask).logprobs,
            [logits64],
        ),
        "linear": ([hidden, weight], linear.logprobs, linear64.logprobs, [hidden64, weight64]),
    }


def cell_options(kind, kl, logprobs64):
    """Constants of a cell: old and ref logprobs near the policy's, denominators of some larger step."""
    mask, ids, advantages, _, drift = batch(kind)
    old, ref = (logprobs64.detach() + drift).unbind()
    shared = {"num_tokens": 50, "num_sequences": 9, "max_length": 16}
    if kl is not None:
        shared |= {"kl_coef": 0.3, "kl_estimator": kl, "ref_logprobs": ref}
    return mask, ids, advantages, old, shared


def expected(preset, level, loss_agg, kind, kl, logprobs64):
    mask, ids, _, old, shared = cell_options(kind, kl, logprobs64)
    surrogate, _, _, clip_low, clip_high = PAPERS[preset]
    choices = {"ratio_level": level, "surrogate": surrogate, "loss_agg": loss_agg}
    choices |= {"clip_low": clip_low, "clip_high": clip_high, "sequence_ids": ids}
    return reference.policy_loss(logprobs64, old, batch(kind)[3], mask, **choices, **shared)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("preset", PAPERS)
def test_gradient_matrix(preset, kind, monkeypatch):
    """Every ratio level x aggregation x KL, in fp64 on (B, T) and in fp32 from logits and from hidden states."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the CPU path; the kernels have their own tests
    generator = torch.Generator().manual_seed(0)
    for level, loss_agg, kl in itertools.product(RATIO_LEVELS, LOSS_AGGS, KLS):
        upstream = torch.randn((), generator=generator, dtype=F64)
        for name, (leaves, logprobs, logprobs64, leaves64) in paths(kind).items():
            mask, ids, advantages, old, shared = cell_options(kind, kl, logprobs64)
            shared |= {"preset": preset, "ratio_level": level, "loss_agg": loss_agg}
            want = expected(preset, level, loss_agg, kind, kl, logprobs64)
            want_grads = torch.autograd.grad(want, [logprobs64, *leaves64], upstream, retain_graph=True)
            if name == "logits":
                poison = torch.where(mask, 0, torch.nan)  # what is masked reaches nothing
                exact = logprobs64.detach().requires_grad_()
                tensors = {k: v + poison if isinstance(v, torch.Tensor) else v for k, v in shared.items()}
                tensors |= {"sequence_ids": ids} if kind == "packed" else {}
                loss, _ = fused_rl.policy_loss(exact + poison, old + poison, advantages, mask, **tensors)
                (grad,) = torch.autograd.grad(loss, exact, upstream)
                torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(grad, want_grads[0], rtol=1e-9, atol=1e-12)
                assert (grad[~mask] == 0).all()

            shared |= {"sequence_ids": ids} if kind == "packed" else {}
            loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, **shared)
            torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
            for _ in range(2):  # the graph is retained: by this second use, and by all the cells before
                grads = torch.autograd.grad(loss, leaves, upstream.float(), retain_graph=True)
                for grad, want_grad in zip(grads, want_grads[1:], strict=True):
                    atol = 1e-5 * want_grad.abs().max().item() + 1e-9
                    torch.testing.assert_close(grad.double(), want_grad, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("preset", PAPERS)
def test_gradient_matrix_in_one_pass(preset, kind, monkeypatch):
    """As above from hidden states with the gradient formed in the forward pass; what cannot be, is refused."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    generator = torch.Generator().manual_seed(0)
    (hidden, weight), _, logprobs64, leaves64 = paths(kind)["linear"]
    targets = head()[2]
    for level, loss_agg, kl in itertools.product(RATIO_LEVELS, LOSS_AGGS, KLS):
        mask, ids, advantages, old, shared = cell_options(kind, kl, logprobs64)
        shared |= {"preset": preset, "ratio_level": level, "loss_agg": loss_agg}
        shared |= {"sequence_ids": ids} if kind == "packed" else {}
        if level != "token" or preset == "gmpo":
            with pytest.raises(ValueError, match="needs more than one token"):
                policy_token_loss(old, advantages, mask, **shared)
            continue
        token_loss, per_token = policy_token_loss(old, advantages, mask, **shared)
        out = fused_rl.linear.linear_token_loss(hidden, weight, targets, token_loss, *per_token, mask=mask)
        want = expected(preset, level, loss_agg, kind, kl, logprobs64)
        torch.testing.assert_close(out.loss.double(), want, rtol=1e-5, atol=1e-5)
        for _ in range(2):
            upstream = torch.randn((), generator=generator, dtype=F64)
            want_grads = torch.autograd.grad(want, leaves64, upstream, retain_graph=True)
            grads = torch.autograd.grad(out.loss, (hidden, weight), upstream.float(), retain_graph=True)
            for grad, want_grad in zip(grads, want_grads, strict=True):
                atol = 1e-5 * want_grad.abs().max().item() + 1e-9
                torch.testing.assert_close(grad.double(), want_grad, rtol=0, atol=atol)


@pytest.mark.parametrize("preset", PAPERS)
def test_presets_are_the_papers(preset):
    """The preset alone, with local denominators, equals the same formula with the paper's numbers."""
    mask, ids, advantages, spread, drift = batch("partial")
    logprobs = torch.randn(B, T, dtype=F64).sub(3).requires_grad_()
    old = logprobs.detach() + drift[0]
    surrogate, level, loss_agg, clip_low, clip_high = PAPERS[preset]
    want = reference.policy_loss(
        logprobs,
        old,
        spread,
        mask,
        sequence_ids=ids,
        ratio_level=level,
        surrogate=surrogate,
        loss_agg=loss_agg,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, preset=preset)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    same, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, **fused_rl.PRESETS[preset].options)
    assert same == loss
    assert set(PAPERS) == set(fused_rl.PRESETS)
