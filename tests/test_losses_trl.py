"""Policy losses against TRL's, in every feature of its trainer; docs/losses.md lists where they differ."""

import pytest
import torch

import fused_rl
from tests.papers import F64, B, T, batch


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
        k = torch.where(a >= 0, 2.0, 3.0)
        rate = torch.where(a >= 0, 3.0, 2.0)
        losses = -torch.exp(rate + k * log_sum - rate * log_sum.exp()) * a * lp
    else:
        capped = w if o.get("delta") is None else w.clamp(max=o["delta"])
        losses = -torch.min(capped * a, w.clamp(1 - o["epsilon"], 1 + o["epsilon_high"]) * a)
    if "off_policy_threshold" in o:
        gap = (o.get("rollout", old) - lp.detach()) * mask
        gap = gap.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        losses = losses * ((a >= 0) | (gap <= o["off_policy_threshold"]))
    if "top_entropy" in o:
        losses = losses * (
            o["entropy"] >= torch.quantile(o["entropy"][mask.bool()], 1 - o["top_entropy"])
        )
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
    items = (
        o["num_items_in_batch"]
        if loss_type in ("dapo", "cispo", "vespo")
        else mask.sum().clamp(min=1)
    )
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
        return given | {"rollout": rollout}, given | {
            "rollout_logprobs": rollout,
            "rollout_correction": None,
        }
    ours = {
        "rollout_logprobs": rollout,
        "rollout_correction": feature,
        "rollout_high": 1.3,
        "rollout_low": 0.6,
    }
    return {"rollout": rollout, "correction": feature}, ours


def trl_importance(old, rollout, mask, correction):
    level, how = correction.split("-")
    difference = (old - rollout) * mask
    ratio = (difference.sum(1, keepdim=True) if level == "sequence" else difference).exp()
    return (
        ratio.clamp(0.6, 1.3)
        if how == "truncate"
        else ratio.masked_fill((ratio < 0.6) | (ratio > 1.3), 0.0)
    )


FEATURES = ("delta", "k3", "rk3", "off-policy", "off-policy-sampler", "top-entropy")
FEATURES += ("token-truncate", "token-mask", "sequence-truncate", "sequence-mask")
# What docs/from_trl.md says to give beside a preset, for TRL's loss of that name with its defaults.
AS_TRL = {
    "grpo": {},
    "bnpo": {},
    "dapo": {"clip_high": 0.2},
    "dr_grpo": {},
    "luspo": {"ratio_level": "token", "clip_low": 0.2, "clip_high": 0.2},
    "sapo": {},
    "vespo": {},
    # TRL's is the bound itself, ours the offset from 1.
    "cispo": {"clip_high": 4.0},
}
# TRL weights a token's KL by the sequence's ratio.
CASES = [("grpo", feature) for feature in FEATURES]
CASES += [("gspo", feature) for feature in FEATURES if feature != "rk3"]
CASES += [(preset, None) for preset in AS_TRL]


@pytest.mark.parametrize(("preset", "feature"), CASES)
def test_trl(preset, feature):
    """Every feature at both levels, and every loss; docs/losses.md lists where ours is not TRL's, and why."""
    generator = torch.Generator().manual_seed(7)
    mask, _, advantages, _, drift = batch("partial")
    logprobs = torch.randn(B, T, generator=generator, dtype=F64).sub(3).requires_grad_()
    old = logprobs.detach() + drift[0]
    theirs, ours = trl_feature(feature, old, generator) if feature else ({}, AS_TRL[preset])
    if "correction" in theirs:
        theirs = {"importance": trl_importance(old, theirs["rollout"], mask, theirs["correction"])}
    options = fused_rl.PRESETS[preset].options | ours
    bounds = options.get("clip_low", 0.2), options.get("clip_high", 0.2) + (preset == "cispo")
    theirs |= dict(zip(("epsilon", "epsilon_high"), bounds, strict=True))
    theirs |= {"max_completion_length": 9, "num_items_in_batch": 40}
    loss_type, level = ("grpo", "sequence") if preset == "gspo" else (preset, "token")
    want = trl_loss(logprobs, old, advantages, mask, loss_type, level, theirs)
    num_tokens = 40 if preset in ("dapo", "cispo", "vespo") else None
    loss, _ = fused_rl.policy_loss(
        logprobs, old, advantages, mask, preset=preset, num_tokens=num_tokens, max_length=9, **ours
    )
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12)
    grads = [torch.autograd.grad(x, logprobs)[0] for x in (loss, want)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)
