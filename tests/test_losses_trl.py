"""Policy losses against TRL's, in every feature of its trainer; docs/losses.md lists where they differ."""

import pytest
import torch

import fused_rl
from tests.papers import F64, B, T, batch


def trl_loss(lp, old, advantages, mask, level, o):
    """TRL 1.16's GRPO loss, transcribed from its trainer: mask float, `o` its config and per-token inputs."""
    a, mask = advantages[:, None], mask.to(lp.dtype)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    log_w = lp - old
    if level == "sequence":
        log_w = (log_w * mask).sum(1, keepdim=True) / lengths
    w = log_w.exp()
    capped = w if o.get("delta") is None else w.clamp(max=o["delta"])
    losses = -torch.min(capped * a, w.clamp(1 - o["epsilon"], 1 + o["epsilon_high"]) * a)
    if "off_policy_threshold" in o:
        gap = (o.get("rollout", old) - lp.detach()) * mask
        gap = gap.sum(1, keepdim=True) / lengths
        losses = losses * ((a >= 0) | (gap <= o["off_policy_threshold"]))
    if "top_entropy" in o:
        losses = losses * (
            o["entropy"] >= torch.quantile(o["entropy"][mask.bool()], 1 - o["top_entropy"])
        )
    losses = losses * o.get("importance", 1)
    if "beta" in o:
        kl = torch.exp(o["ref"] - lp) - (o["ref"] - lp) - 1
        losses = losses + o["beta"] * kl * (w if o.get("use_bias_correction_kl") else 1)
    return ((losses * mask).sum(1, keepdim=True) / lengths).mean()


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
# TRL weights a token's KL by the sequence's ratio.
CASES = [("grpo", feature) for feature in FEATURES]
CASES += [("gspo", feature) for feature in FEATURES if feature != "rk3"]


@pytest.mark.parametrize(("preset", "feature"), CASES)
def test_trl(preset, feature):
    """Every feature at both levels; docs/losses.md lists where ours is not TRL's, and why."""
    generator = torch.Generator().manual_seed(7)
    mask, _, advantages, _, drift = batch("partial")
    logprobs = torch.randn(B, T, generator=generator, dtype=F64).sub(3).requires_grad_()
    old = logprobs.detach() + drift[0]
    theirs, ours = trl_feature(feature, old, generator)
    if "correction" in theirs:
        theirs = {"importance": trl_importance(old, theirs["rollout"], mask, theirs["correction"])}
    clip = fused_rl.PRESETS[preset].options
    theirs |= {"epsilon": clip.get("clip_low", 0.2), "epsilon_high": clip.get("clip_high", 0.2)}
    level = "sequence" if preset == "gspo" else "token"
    want = trl_loss(logprobs, old, advantages, mask, level, theirs)
    loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, preset=preset, **ours)
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12)
    grads = [torch.autograd.grad(x, logprobs)[0] for x in (loss, want)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)
