"""Losses: values and gradients in every cell against the papers' formulas and TRL's; denominators, options, metrics."""

import functools
import itertools
import re
from pathlib import Path

import pytest
import torch

import fused_rl
from fused_rl import reference, surrogates
from fused_rl.aggregation import LOSS_AGGS, aggregate
from fused_rl.surrogates import RATIO_LEVELS

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


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


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
def graphs(kind):
    """One graph in fp64, (logprobs, [logits, hidden, weight]), and two in fp32, (logprobs, leaves)."""
    mask = batch(kind)[0]
    hidden, weight, targets = head()
    hidden64, weight64 = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits64 = hidden64 @ weight64.T
    exact = reference.token_logprobs(logits64, targets, mask=mask).logprobs
    logits = logits64.detach().float().requires_grad_()
    from_logits = fused_rl.token_logprobs(logits, targets, mask=mask).logprobs
    from_hidden = fused_rl.linear_token_logprobs(hidden, weight, targets, mask=mask).logprobs
    return (exact, [logits64, hidden64, weight64]), [(from_logits, [logits]), (from_hidden, [hidden, weight])]


def cell(kind, kl):
    """Arguments and options of policy_loss: old and ref logprobs near the policy's, denominators of a larger step."""
    mask, ids, advantages, _, drift = batch(kind)
    old, ref = (graphs(kind)[0][0].detach() + drift).unbind()
    options = {"num_tokens": 50, "num_sequences": 9, "max_length": 16}
    options |= {"sequence_ids": ids} if kind == "packed" else {}
    if kl is not None:
        options |= {"kl_coef": 0.3, "kl_estimator": kl, "ref_logprobs": ref}
    return (old, advantages, mask), options


@functools.cache
def expected(surrogate, level, loss_agg, clip_low, clip_high, kind, kl):
    """The plain formula in fp64: its value, and its gradients on logprobs, logits, hidden states and weight."""
    logprobs, leaves = graphs(kind)[0]
    (old, _, mask), options = cell(kind, kl)
    options |= {"ratio_level": level, "surrogate": surrogate, "loss_agg": loss_agg, "sequence_ids": batch(kind)[1]}
    options |= {"clip_low": clip_low, "clip_high": clip_high}
    loss = reference.policy_loss(logprobs, old, batch(kind)[3], mask, **options)
    return loss.detach(), torch.autograd.grad(loss, [logprobs, *leaves], retain_graph=True)


def cells(preset, kind):
    """Every ratio level x aggregation x KL: what is expected, a random upstream gradient, arguments and options."""
    generator = torch.Generator().manual_seed(0)
    for level, loss_agg, kl in itertools.product(RATIO_LEVELS, LOSS_AGGS, KLS):
        surrogate, _, _, *clip = PAPERS[preset]
        want = expected(surrogate, level, loss_agg, *clip, kind, kl)
        upstream = torch.randn((), generator=generator, dtype=F64)
        arguments, options = cell(kind, kl)
        yield *want, upstream, arguments, options | {"preset": preset, "ratio_level": level, "loss_agg": loss_agg}


def assert_grads_close(grads, wants, upstream):
    for grad, want in zip(grads, wants, strict=True):
        want = want * upstream
        atol = 1e-5 * want.abs().max().item() + 1e-9
        torch.testing.assert_close(grad.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("preset", PAPERS)
def test_gradient_matrix(preset, kind, monkeypatch):
    """In fp64 on (B, T), and in fp32 from logits and from hidden states."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the CPU path; the kernels have their own tests
    (exact, _), fp32 = graphs(kind)
    exact = exact.detach().requires_grad_()
    for want, want_grads, upstream, (old, advantages, mask), options in cells(preset, kind):
        poison = torch.where(mask, 0, torch.nan)  # what is masked reaches nothing
        poisoned = (
            options | {"ref_logprobs": options["ref_logprobs"] + poison} if "ref_logprobs" in options else options
        )
        loss, _ = fused_rl.policy_loss(exact + poison, old + poison, advantages, mask, **poisoned)
        (grad,) = torch.autograd.grad(loss, exact, upstream)
        torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(grad, want_grads[0] * upstream, rtol=1e-9, atol=1e-12)
        assert (grad[~mask] == 0).all()

        for (logprobs, leaves), leaf_grads in zip(fp32, (want_grads[1:2], want_grads[2:]), strict=True):
            loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, **options)
            torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
            for _ in range(
                2 if options.get("kl_estimator") == "rk3" else 1
            ):  # every cell uses the logprobs' graph again
                grads = torch.autograd.grad(loss, leaves, upstream.float(), retain_graph=True)
                assert_grads_close(grads, leaf_grads, upstream)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("preset", PAPERS)
def test_gradient_matrix_in_one_pass(preset, kind, monkeypatch):
    """From hidden states with the gradient formed in the forward pass; what cannot be formed so is refused."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    hidden, weight, targets = head()
    for want, want_grads, upstream, (old, advantages, mask), options in cells(preset, kind):
        if options["ratio_level"] != "token" or preset == "gmpo":
            with pytest.raises(ValueError, match="needs more than one token"):
                fused_rl.policy_token_loss(old, advantages, mask, **options)
            continue
        token_loss, per_token = fused_rl.policy_token_loss(old, advantages, mask, **options)
        out = fused_rl.linear_token_loss(hidden, weight, targets, token_loss, *per_token, mask=mask)
        torch.testing.assert_close(out.loss.double(), want, rtol=1e-5, atol=1e-5)
        for up in (upstream, 1 - upstream):  # the retained graph used twice
            grads = torch.autograd.grad(out.loss, (hidden, weight), up.float(), retain_graph=True)
            assert_grads_close(grads, want_grads[2:], up)


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
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-13)
    same, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, **fused_rl.PRESETS[preset].options)
    assert same == loss
    assert set(PAPERS) == set(fused_rl.PRESETS)


def test_clip_bounds_are_not_symmetric():
    mask, ids, advantages, spread, drift = batch("partial")
    logprobs = (torch.randn(B, T, dtype=F64) - 3).requires_grad_()
    for surrogate in ("clip", "cispo", "geo-mean"):
        choices = {"surrogate": surrogate, "clip_low": 0.1, "clip_high": 0.3, "loss_agg": "token-mean"}
        choices["ratio_level"] = "token"
        old = logprobs.detach() + drift[0]
        want = reference.policy_loss(logprobs, old, spread, mask, sequence_ids=ids, **choices)
        loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, **choices)
        torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(*(torch.autograd.grad(x, logprobs)[0] for x in (loss, want)))


def trl_loss(lp, old, advantages, mask, loss_type, level, o):
    """TRL 1.16's GRPO losses, transcribed from its trainer: mask float, `o` its config and per-token inputs."""
    a, mask = advantages[:, None], mask.to(lp.dtype)
    log_w = lp - old
    if level == "sequence":
        log_w = (log_w * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    w = log_w.exp()
    if loss_type == "cispo":
        losses = -w.clamp(max=o["epsilon_high"]).detach() * a * lp
    elif loss_type == "sapo":
        tau = torch.where(a > 0, torch.tensor(1.0, dtype=F64), torch.tensor(1.05, dtype=F64))
        losses = -torch.sigmoid(tau * (w - 1)) * 4 / tau * a
    elif loss_type == "vespo":
        log_sum = ((lp - old).detach() * mask).sum(1, keepdim=True)
        k, rate = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
        losses = -torch.exp(rate + k * log_sum - rate * log_sum.exp()) * a * lp
    else:
        capped = w if o.get("delta") is None else w.clamp(max=o["delta"])
        losses = -torch.min(capped * a, w.clamp(1 - o["epsilon"], 1 + o["epsilon_high"]) * a)
    if "off_policy_threshold" in o:
        gap = (o.get("rollout", old) - lp.detach()) * mask
        gap = gap.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        losses = losses * ((a >= 0) | (gap <= o["off_policy_threshold"]))
    if "top_entropy" in o:
        losses = losses * (o["entropy"] >= torch.quantile(o["entropy"][mask.bool()], 1 - o["top_entropy"]))
    losses = losses * o.get("importance", 1)
    if "beta" in o:
        kl = torch.exp(o["ref"] - lp) - (o["ref"] - lp) - 1
        losses = losses + o["beta"] * kl * (w if o.get("use_bias_correction_kl") else 1)
    if loss_type in ("grpo", "sapo"):
        return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    if loss_type == "luspo":
        return (losses * mask).sum(1).mean()
    if loss_type == "dr_grpo":
        return (losses * mask).sum() / (len(mask) * o["max_completion_length"])
    items = o["num_items_in_batch"] if loss_type in ("dapo", "cispo", "vespo") else mask.sum().clamp(min=1)
    return (losses * mask).sum() / items


def trl_feature(feature, old, generator):
    """(TRL's inputs, ours) of one feature."""
    if feature == "delta":
        return {"delta": 1.5}, {"delta": 1.5}
    if feature in ("k3", "rk3"):
        ref = old + 0.3 * torch.randn(B, T, generator=generator, dtype=F64)
        ours = {"kl_coef": 0.2, "kl_estimator": feature, "ref_logprobs": ref}
        return {"beta": 0.2, "ref": ref, "use_bias_correction_kl": feature == "rk3"}, ours
    if feature == "off-policy":
        return {"off_policy_threshold": 0.05}, {"off_policy_threshold": 0.05}
    if feature == "top-entropy":
        entropy = torch.rand(B, T, generator=generator, dtype=F64)
        return {"top_entropy": 0.4, "entropy": entropy}, {"top_entropy": 0.4, "entropy": entropy}
    rollout = old + 0.5 * torch.randn(B, T, generator=generator, dtype=F64)
    if feature == "off-policy-sampler":  # half a nat a token from the trainer's policy, either way
        rollout = old + torch.randn(B, 1, generator=generator, dtype=F64).sign() / 2
        given = {"off_policy_threshold": 0.05}
        return given | {"rollout": rollout}, given | {"rollout_logprobs": rollout, "rollout_correction": None}
    ours = {"rollout_logprobs": rollout, "rollout_correction": feature, "rollout_high": 1.3, "rollout_low": 0.6}
    return {"rollout": rollout, "correction": feature}, ours


def trl_importance(old, rollout, mask, correction):
    level, how = correction.split("-")
    difference = (old - rollout) * mask
    ratio = (difference.sum(1, keepdim=True) if level == "sequence" else difference).exp()
    return ratio.clamp(0.6, 1.3) if how == "truncate" else ratio.masked_fill((ratio < 0.6) | (ratio > 1.3), 0.0)


TRL = {"grpo": "token", "bnpo": "token", "dr_grpo": "token", "dapo": "token", "gspo": "sequence", "cispo": "token"}
TRL |= {"sapo": "token", "luspo": "sequence", "vespo": "token"}
FEATURES = ("none", "delta", "k3", "rk3", "off-policy", "off-policy-sampler", "top-entropy")
FEATURES += ("token-truncate", "token-mask", "sequence-truncate", "sequence-mask")


# TRL weights a token's KL by the sequence's ratio, and multiplies the rollout weights into VESPO's W
NOT_TRL = {(p, "rk3") for p in ("gspo", "luspo")} | {("vespo", f) for f in FEATURES if f[-4:] in ("cate", "mask")}


@pytest.mark.parametrize(("preset", "feature"), [c for c in itertools.product(TRL, FEATURES) if c not in NOT_TRL])
def test_trl(preset, feature):
    """Where ours must be TRL's; docs/losses.md lists where it is not, and why."""
    if feature == "delta" and preset in ("cispo", "sapo", "vespo"):
        with pytest.raises(ValueError, match="delta belongs to the surrogate"):
            fused_rl.policy_loss(*torch.zeros(2, B, T), torch.ones(B), batch("none")[0], preset=preset, delta=1.5)
        return
    generator = torch.Generator().manual_seed(7)
    mask, _, advantages, _, drift = batch("partial")
    logprobs = torch.randn(B, T, generator=generator, dtype=F64).sub(3).requires_grad_()
    old = logprobs.detach() + drift[0]
    theirs, ours = trl_feature(feature, old, generator) if feature != "none" else ({}, {})
    if "correction" in theirs:
        theirs = {"importance": trl_importance(old, theirs["rollout"], mask, theirs["correction"])}
    clip = fused_rl.PRESETS[preset].options
    theirs |= {"epsilon": clip.get("clip_low", 0.2), "epsilon_high": clip.get("clip_high", 0.2)}
    theirs |= {"epsilon_high": 5.0} if preset == "cispo" else {}  # TRL's is the bound itself, ours the offset from 1
    theirs |= {"max_completion_length": 9, "num_items_in_batch": 40}
    loss_type = "grpo" if preset == "gspo" else preset
    want = trl_loss(logprobs, old, advantages, mask, loss_type, TRL[preset], theirs)
    num_tokens = 40 if preset in ("dapo", "cispo", "vespo") else None
    loss, _ = fused_rl.policy_loss(
        logprobs, old, advantages, mask, preset=preset, num_tokens=num_tokens, max_length=9, **ours
    )
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12)
    upstream = torch.randn((), generator=generator, dtype=F64)
    grads = [torch.autograd.grad(x, logprobs, upstream)[0] for x in (loss, want)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def micro_batches(parts, generator):
    """A random split of the rows, each part cut to its own longest sequence."""
    cuts = torch.randperm(B - 1, generator=generator)[: parts - 1].add(1).sort().values.tolist()
    return [slice(i, j) for i, j in zip([0, *cuts], [*cuts, B], strict=True)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_micro_batches_add_up(loss_agg, parts, dtype, tolerance):
    """Loss, gradient and metrics of the parts, with global denominators, sum to those of the batch without any."""
    generator = torch.Generator().manual_seed(parts)
    for preset, kind in itertools.product(("grpo", "gspo", "vespo", "gmpo"), ("partial", "one-sequence-masked")):
        mask, _, advantages, _, drift = batch(kind)
        leaf = torch.randn(B, T, generator=generator, dtype=dtype).sub(3).requires_grad_()
        tensors = {"ref_logprobs": leaf.detach() + drift[1], "entropy": torch.rand(B, T, generator=generator)}
        old, options = leaf.detach() + drift[0], {"preset": preset, "loss_agg": loss_agg, "kl_coef": 0.1}
        options["entropy_coef"] = 0.01
        whole, metrics = fused_rl.policy_loss(leaf, old, advantages, mask, **tensors, **options)
        options |= {"num_tokens": mask.sum(), "num_sequences": B, "max_length": T}
        total, summed = 0, dict.fromkeys(metrics, 0)
        for rows in micro_batches(parts, generator):
            length = max(1, int((mask[rows].any(0) * torch.arange(1, T + 1)).max()))
            at = (rows, slice(0, length))
            extra = {name: tensor[at] for name, tensor in tensors.items()}
            loss, part = fused_rl.policy_loss(leaf[at], old[at], advantages[rows], mask[at], **extra, **options)
            total = total + loss
            summed = {name: summed[name] + part[name] for name in part}
        want, got = (torch.autograd.grad(x, leaf)[0] for x in (whole, total))
        torch.testing.assert_close(total, whole, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance * want.abs().max().item())
        torch.testing.assert_close(summed, metrics, rtol=10 * tolerance, atol=10 * tolerance)


def test_aggregations_of_a_worked_example():
    losses = torch.tensor([[1.0, 1, 7, 7], [3, 3, 3, 3]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    for loss_agg, value in zip(LOSS_AGGS, (14 / 6, 2.0, 7.0, 0.875), strict=True):
        torch.testing.assert_close(aggregate(losses, mask, loss_agg, max_length=8).item(), value)
    per_sequence = {"num_tokens": 12, "num_sequences": 4, "max_length": 8}  # twice as many in the whole step
    for loss_agg, value in zip(LOSS_AGGS, (14 / 12, 1.0, 3.5, 0.4375), strict=True):
        torch.testing.assert_close(aggregate(losses, mask, loss_agg, **per_sequence).item(), value)


def test_padding_changes_no_loss_and_no_metric():
    mask, _, advantages, _, drift = batch("partial")
    logprobs = torch.randn(B, T, dtype=F64) - 3
    tensors = {"old_logprobs": logprobs + drift[0], "ref_logprobs": logprobs + drift[1], "entropy": drift[0].abs()}
    options = {"advantages": advantages, "kl_coef": 0.1, "entropy_coef": 0.01, "top_entropy": 0.5, "max_length": T}

    def pad(tensor, fill):
        return torch.nn.functional.pad(tensor, (0, 100), value=fill)

    for preset in PAPERS:
        want = fused_rl.policy_loss(logprobs, mask=mask, preset=preset, **tensors, **options)
        padded = {name: pad(tensor, torch.nan) for name, tensor in tensors.items()}
        got = fused_rl.policy_loss(pad(logprobs, 1.0), mask=pad(mask, False), preset=preset, **padded, **options)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_packing_changes_no_loss_and_no_metric():
    """Four sequences in rows of their own, and the same in one row, in another order of ids."""
    mask, _, advantages, _, drift = batch("partial")
    logprobs = torch.randn(B, T, dtype=F64) - 3
    old, ids = logprobs + drift[0], torch.tensor([2, 0, 3, 1])[:, None].expand(B, T)
    packed_advantages = advantages[torch.tensor([1, 3, 0, 2])]
    for preset, loss_agg in itertools.product(PAPERS, LOSS_AGGS):
        options = {"preset": preset, "loss_agg": loss_agg, "max_length": 7}
        want = fused_rl.policy_loss(logprobs, old, advantages, mask, **options)
        rows = [t.reshape(1, B * T) for t in (logprobs, old, mask)]
        got = fused_rl.policy_loss(*rows[:2], packed_advantages, rows[2], sequence_ids=ids.reshape(1, -1), **options)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_truncated_responses_count_as_masked():
    mask, _, advantages, _, drift = batch("partial")
    logprobs = torch.randn(B, T, dtype=F64) - 3
    cut = torch.tensor([False, True, False, False])
    for preset in PAPERS:
        want = fused_rl.policy_loss(logprobs, logprobs + drift[0], advantages, mask & ~cut[:, None], preset=preset)
        got = fused_rl.policy_loss(logprobs, logprobs + drift[0], advantages, mask, preset=preset, truncated=cut)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("preset", PAPERS)
def test_far_from_the_old_policy_nothing_overflows(preset):
    """100 nats either way, where exp() is inf in fp32: finite, and a ratio that must fall still has a gradient."""
    logprobs = torch.tensor([[-100.0, -1, -2], [-1, -100, -0.5]], requires_grad=True)
    old = torch.tensor([[-1.0, -100, -2.5], [-100, -2, -90]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    options = {"ref_logprobs": old, "kl_coef": 0.1, "rollout_logprobs": -old, "preset": preset}
    for advantages in (torch.tensor([1.0, -1]), torch.tensor([-1.0, 1])):
        loss, metrics = fused_rl.policy_loss(logprobs, old, advantages, mask, **options)
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert loss.isfinite() and grad.isfinite().all() and all(m.isfinite() for m in metrics.values())
    if preset in ("ppo", "grpo"):
        loss, _ = fused_rl.policy_loss(logprobs, old, -torch.ones(2), mask, preset=preset)
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert (grad[logprobs - old > 0] > 0).all()


def test_an_empty_batch_keeps_the_graph():
    logprobs = torch.zeros(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for preset in PAPERS:
        loss, metrics = fused_rl.policy_loss(logprobs, None, torch.ones(2), mask, preset=preset)
        assert loss == 0 and all(m == 0 for m in metrics.values())
        assert (torch.autograd.grad(loss, logprobs)[0] == 0).all()


def test_a_surrogate_of_ones_own_and_per_token_advantages():
    mask, ids, _, _, drift = batch("partial")
    logprobs = (torch.randn(B, T, dtype=F64) - 3).requires_grad_()
    advantages = drift[1]
    loss, _ = fused_rl.policy_loss(
        logprobs,
        logprobs.detach(),
        advantages,
        mask,
        surrogate=lambda log_ratio, advantages, *_: log_ratio * advantages,
    )
    (grad,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(grad, torch.where(mask, advantages, 0) / mask.sum(), rtol=1e-12, atol=1e-13)


def needs_lengths(log_ratio, advantages, logprobs, sequences, options):
    means = sequences.mean(log_ratio)
    return -sequences.expand(means) * advantages


@pytest.mark.parametrize(
    ("surrogate", "message"),
    [
        ("geo-mean", "surrogate='geo-mean' needs more than one token at a time"),
        (surrogates.needs_sequences(lambda *arguments: needs_lengths(*arguments)), "needs more than one token"),
    ],
    ids=["built-in", "declared"],
)
def test_a_surrogate_that_needs_sequences_is_refused_at_once_where_there_are_none(surrogate, message):
    mask, _, advantages, _, drift = batch("partial")
    with pytest.raises(ValueError, match=message):
        fused_rl.policy_token_loss(drift[0], advantages, mask, surrogate=surrogate)
    fused_rl.policy_loss(drift[1], drift[0], advantages, mask, surrogate=surrogate)


def test_an_undeclared_surrogate_that_reaches_for_sequences_hears_what_to_do():
    hidden, weight, targets = head()
    mask, _, advantages, _, drift = batch("partial")
    token_loss, per_token = fused_rl.policy_token_loss(drift[0], advantages, mask, surrogate=needs_lengths)
    with pytest.raises(
        ValueError, match="uses sequences.mean, but .* single tokens: use linear_token_logprobs and pol"
    ):
        fused_rl.linear_token_loss(hidden, weight, targets, token_loss, *per_token, mask=mask)


def test_a_surrogate_of_ones_own_in_one_pass():
    hidden, weight, targets = head()
    mask, _, advantages, _, drift = batch("partial")

    def tanh_surrogate(log_ratio, advantages, logprobs, sequences, options):
        return -torch.tanh(log_ratio.exp() - 1) * advantages

    token_loss, per_token = fused_rl.policy_token_loss(drift[0], advantages, mask, surrogate=tanh_surrogate)
    one_pass = fused_rl.linear_token_loss(hidden, weight, targets, token_loss, *per_token, mask=mask)
    logprobs = fused_rl.linear_token_logprobs(hidden, weight, targets, mask=mask).logprobs
    want, _ = fused_rl.policy_loss(logprobs, drift[0], advantages, mask, surrogate=tanh_surrogate)
    torch.testing.assert_close(one_pass.loss, want)


def test_one_pass_with_every_option_it_has():
    """policy_token_loss summed is policy_loss, with rollout weights, truncation, a threshold and an entropy bonus."""
    mask, _, advantages, _, drift = batch("partial")
    logprobs = (torch.randn(B, T) - 3).requires_grad_()
    entropy = torch.rand(B, T).requires_grad_()
    options = {"ref_logprobs": logprobs.detach() + drift[1], "kl_coef": 0.1, "entropy_coef": 0.05, "preset": "grpo"}
    options |= {"rollout_logprobs": logprobs.detach() - drift[1], "rollout_correction": "sequence-truncate"}
    options |= {"truncated": torch.tensor([False, True, False, False]), "entropy_threshold": 0.3}
    for old in (logprobs.detach() + drift[0], None):
        if old is None:
            options["rollout_logprobs"] = None
        want, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, entropy=entropy, **options)
        token_loss, per_token = fused_rl.policy_token_loss(old, advantages, mask, **options)
        loss = token_loss(logprobs[mask], entropy[mask], *(tensor[mask] for tensor in per_token)).sum()
        torch.testing.assert_close(loss, want)
        grads = [torch.autograd.grad(x, (logprobs, entropy)) for x in (loss, want)]
        torch.testing.assert_close(*grads)


def test_importance_ratio_by_level():
    logprobs = torch.tensor([[0.1, 0.3, 5.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    for level, want in (("token", [0.1, 0.3]), ("sequence", [0.2, 0.2]), ("sequence-sum", [0.4, 0.4])):
        ratio = fused_rl.importance_ratio(logprobs, torch.zeros(1, 3), mask, ratio_level=level)
        torch.testing.assert_close(ratio[0, :2], torch.tensor(want).exp())
        assert torch.autograd.grad(ratio[mask].sum(), logprobs)[0][0, 2] == 0


def test_entropy_bonus():
    entropy = torch.tensor([[0.5, 1.5, torch.nan], [2.0, torch.nan, torch.nan]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    loss, metrics = fused_rl.entropy_bonus(entropy, mask, 0.1, loss_agg="seq-mean-token-mean")
    torch.testing.assert_close(loss.item(), -0.15)
    torch.testing.assert_close(metrics["entropy"].item(), 4 / 3)
    (grad,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(grad, torch.tensor([[-0.025, -0.025, 0], [-0.05, 0, 0]]))
    logprobs, advantages = torch.zeros(2, 3), torch.ones(2)
    options = {"preset": "grpo", "entropy": entropy}
    with_bonus, _ = fused_rl.policy_loss(logprobs, None, advantages, mask, **options, entropy_coef=0.1)
    without, _ = fused_rl.policy_loss(logprobs, None, advantages, mask, **options)
    torch.testing.assert_close(with_bonus, without + loss)
    torch.testing.assert_close(torch.autograd.grad(with_bonus, entropy)[0], grad)


def test_value_loss():
    one = torch.ones(1, 1)
    loss, metrics = fused_rl.value_loss(one, 0 * one, 2 * one, one.bool(), value_clip=0.2)
    torch.testing.assert_close(loss.item(), 1.62)
    assert metrics["value_clipfrac"] == 1
    generator = torch.Generator().manual_seed(0)
    old, returns, noise = torch.randn(3, B, T, generator=generator, dtype=F64)
    values = (old + 0.3 * noise).requires_grad_()
    mask = batch("partial")[0]
    for value_clip, num_tokens in itertools.product((0.2, None), (None, 77)):
        per_token = (values - returns) ** 2
        if value_clip is not None:
            near = torch.minimum(torch.maximum(values, old - value_clip), old + value_clip)
            per_token = torch.maximum(per_token, (near - returns) ** 2)
        want = 0.5 * per_token[mask].sum() / (num_tokens or mask.sum())
        poison = torch.where(mask, 0, torch.nan)
        loss, metrics = fused_rl.value_loss(
            values + poison, old + poison, returns + poison, mask, value_clip=value_clip, num_tokens=num_tokens
        )
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(metrics["value_loss"], want.detach())
        torch.testing.assert_close(*(torch.autograd.grad(x, values)[0] for x in (loss, want)))


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [0.693147, 0.313262, 1.313262, 0.006715]),
        ({"margin": 1.0}, [1.313262, 0.693147, 2.126928, 0.018150]),
        ({"label_smoothing": 0.1}, [0.693147, 0.413262, 1.213262, 0.506715]),  # .9 l(d) + .1 l(-d)
        ({"centering": 0.01}, [0.693147, 0.323262, 1.323262, 0.256715]),  # + .01 (chosen + rejected)^2
    ],
)
def test_preference_loss(options, want):
    for lead, value in zip((0.0, 1.0, -1.0, 5.0), want, strict=True):
        loss, _ = fused_rl.preference_loss(torch.tensor([lead]), torch.zeros(1), **options)
        torch.testing.assert_close(loss.item(), value, rtol=0, atol=1.5e-6)
    leads = torch.tensor([0.0, 1.0, -1.0, 5.0], dtype=F64, requires_grad=True)
    loss, metrics = fused_rl.preference_loss(leads, torch.zeros(4, dtype=F64), **options)
    torch.testing.assert_close(loss.item(), sum(want) / 4, rtol=0, atol=1.5e-6)
    halves = [
        fused_rl.preference_loss(leads[i:j], torch.zeros(2), num_sequences=4, **options)[0] for i, j in ((0, 2), (2, 4))
    ]
    torch.testing.assert_close(sum(halves), loss)
    assert torch.autograd.gradcheck(
        lambda x, y: fused_rl.preference_loss(x, y, **options)[0], (leads, leads.detach().flip(0).requires_grad_())
    )
    assert metrics["accuracy"] == 0.5 and metrics["reward_margin"] == 1.25
    assert metrics["min_reward"] == -1 and metrics["max_reward"] == 5


def test_k1_as_a_loss_warns_and_says_what_to_use():
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.warns(UserWarning, match="expected gradient is zero.*rk3"):
        fused_rl.policy_loss(x, x, torch.ones(1), mask, ref_logprobs=x, kl_coef=0.1, kl_estimator="k1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "grop"}, "preset must be one of ppo, grpo.*got 'grop'"),
        ({"clip": 0.2}, "option must be one of .*clip_low, clip_high.*got 'clip'"),
        ({"ratio_level": "row"}, "ratio_level must be one of token, sequence, sequence-sum"),
        ({"loss_agg": "mean"}, "loss_agg must be one of token-mean"),
        ({"surrogate": "ppo"}, "surrogate must be one of clip"),
        ({"kl_estimator": "k9"}, "kl_estimator must be one of"),
        ({"rollout_correction": "clip"}, "rollout_correction must be one of"),
        ({"kl_coef": 0.1}, "needs ref_logprobs"),
        ({"entropy_coef": 0.1}, "need entropy"),
        ({"delta": 1.1}, r"delta must lie above 1 \+ clip_high"),
        ({"clip_low": -0.1}, "offsets >= 0"),
        ({"top_entropy": 2.0}, "fraction"),
        ({"mask": torch.ones(2, 3)}, "mask must be a bool tensor, .* got .*float32 .*; use mask.bool"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, r"\(2, 4\)"),
        ({"advantages": torch.ones(3)}, r"advantages must have the shape of the mask, \(2, 3\), got \(3,\)"),
        ({"old_logprobs": torch.ones(2, 1)}, "old_logprobs must have the shape"),
        ({"logprobs": torch.ones(2, 3, 4)}, r"losses take \(B, T\) floating point tensors"),
        ({"sequence_ids": torch.ones(2, 3)}, "sequence_ids must be .* int64"),
    ],
)
def test_bad_arguments_say_what_came_and_what_is_expected(changes, message):
    x = torch.zeros(2, 3)
    arguments = {"logprobs": x, "old_logprobs": x, "advantages": torch.ones(2), "mask": x == 0, **changes}
    with pytest.raises(ValueError, match=message):
        fused_rl.policy_loss(**arguments)


def test_the_losses_of_the_documentation_run(monkeypatch):
    """Every Python block of docs/losses.md, one after the other, in one namespace."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    text = (Path(__file__).parent.parent / "docs" / "losses.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    namespace = {}
    exec("\n".join(blocks), namespace)
    loss, advantages, ratio = (namespace[name] for name in ("loss", "advantages", "ratio"))
    want = (torch.tanh(ratio - 1) * -advantages[:, None])[namespace["mask"]].mean()
    torch.testing.assert_close(loss, want)


BAD_SURROGATES = {
    "a sum": lambda r, a, lp, s, o: -(r.exp() * a).sum(),
    "a mean of sequences": lambda r, a, lp, s, o: -(r.exp() * a).mean(1),
    "a column": lambda r, a, lp, s, o: -(r.exp() * a).sum(1, keepdim=True),
    "another dtype": lambda r, a, lp, s, o: -(r.exp() * a).bfloat16(),
    "complex": lambda r, a, lp, s, o: -(r.exp() * a).to(torch.complex64),
    "a tuple": lambda r, a, lp, s, o: (-(r.exp() * a), {}),
    "nothing": lambda r, a, lp, s, o: None,
    "another signature": lambda r, a: -(r.exp() * a),
    "a class": torch.nn.Linear,
}


@pytest.mark.parametrize("surrogate", BAD_SURROGATES.values(), ids=BAD_SURROGATES)
def test_a_surrogate_that_is_none_is_refused_in_one_line(surrogate):
    """Each would broadcast into a loss of B T times the size, or end somewhere inside."""
    mask, logprobs = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3, requires_grad=True)
    options = {"preset": "grpo", "surrogate": surrogate}
    with pytest.raises(ValueError, match=r"^the surrogate [^\n]*\(2, 3\)[^\n]*$"):
        fused_rl.policy_loss(logprobs, None, torch.ones(2), mask, **options)


@pytest.mark.parametrize("name", ["a sum", "another dtype", "nothing", "another signature"])
def test_and_so_it_is_token_by_token(name):
    mask, options = torch.ones(2, 3, dtype=torch.bool), {"preset": "grpo", "surrogate": BAD_SURROGATES[name]}
    token_loss, per_token = fused_rl.policy_token_loss(None, torch.ones(2), mask, **options)
    with pytest.raises(ValueError, match=r"^the surrogate [^\n]*\(6,\)[^\n]*$"):
        token_loss(torch.zeros(6, requires_grad=True), torch.zeros(6), *(x.flatten() for x in per_token))


def test_gspo_with_an_advantage_per_token_is_gspo_token():
    """arXiv:2507.18071, eq. 13 and 14: s_it = sg(s_i) p_it / sg(p_it), so that token t's gradient has its own A_t."""
    generator = torch.Generator().manual_seed(0)
    logprobs = (torch.randn(3, 5, dtype=F64, generator=generator) - 3).requires_grad_()
    old = logprobs.detach() + 1e-4 * torch.randn(3, 5, dtype=F64, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 1, 0, 1, 1]]).bool()
    advantages = torch.randn(3, 5, dtype=F64, generator=generator)
    loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, preset="gspo")
    (gradient,) = torch.autograd.grad(loss, logprobs)
    counts = mask.sum(1, keepdim=True)
    ratio = (((logprobs - old).detach() * mask).sum(1, keepdim=True) / counts).exp()
    free = torch.where(advantages > 0, ratio <= 1 + 4e-4, ratio >= 1 - 3e-4)
    torch.testing.assert_close(gradient, torch.where(mask & free, -ratio * advantages / counts / 3, 0.0))

    # one advantage for all tokens of a sequence, in either shape: one loss and one gradient
    same = advantages[:, :1].expand(3, 5)
    for given in (advantages[:, 0], same):
        loss, _ = fused_rl.policy_loss(logprobs, old, given, mask, preset="gspo")
        (gradient,) = torch.autograd.grad(loss, logprobs)
        free = torch.where(same > 0, ratio <= 1 + 4e-4, ratio >= 1 - 3e-4)
        torch.testing.assert_close(gradient, torch.where(mask & free, -ratio * same / counts / 3, 0.0))
