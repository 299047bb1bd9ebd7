"""Against Liger's two GRPO losses, where liger-kernel is installed: equal, but for the cells of docs/losses.md."""

import itertools

import pytest
import torch

import fused_rl
from fused_rl import reference

pytest.importorskip("liger_kernel")

F64 = torch.float64
B, T, H, V = 4, 6, 8, 19
# loss type of Liger's -> surrogate, aggregation
KINDS = {
    "grpo": ("clip", "seq-mean-token-mean"),
    "bnpo": ("clip", "token-mean"),
    "dr_grpo": ("clip", "seq-mean-token-sum-norm"),
    "dapo": ("clip", "token-mean"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "luspo": ("clip", "seq-mean-token-sum"),
    "vespo": ("vespo", "token-mean"),
}
FEATURES = ("none", "k3", "rk3", "delta", "token-weights", "sequence-weights", "one-masked")
REFUSED = {(kind, "sequence") for kind in ("cispo", "sapo", "vespo")}


def differs(fused_linear, kind, level, feature):
    """The cells of docs/losses.md."""
    if kind == "luspo":  # weights the loss of every token, padding included, by the sequence's length over T
        plain = feature not in (
            "k3",
            "rk3",
            "token-weights",
        )  # one loss per sequence: nothing at a token to get wrong
        return not (fused_linear and level == "sequence" and plain)
    if kind == "vespo":  # multiplies the rollout weights into W
        return feature in ("token-weights", "sequence-weights")
    return level == "sequence" and feature == "rk3"  # weights a token's KL by the sequence's ratio


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)
    targets = torch.randint(V, (B, T), generator=generator)
    mask = torch.rand(B, T, generator=generator) < 0.7
    mask[:, 0] = True
    logprobs = reference.token_logprobs((hidden @ weight.T).double(), targets).logprobs
    old, ref = (logprobs + 0.3 * torch.randn(2, B, T, generator=generator)).float()
    weights = (1 + 0.3 * torch.randn(2, B, T, generator=generator)).clamp(0.6, 1.4)
    return hidden, weight, targets, mask, torch.tensor([1.0, -0.5, 0.7, -1.2]), old, ref, weights


def ours(inputs, kind, level, feature, mask):
    hidden, weight, targets, _, advantages, old, ref, (token_weights, sequence_weights) = inputs
    hidden = hidden.double().requires_grad_()
    weight = weight.double().requires_grad_()
    old = old.double()
    logits = hidden @ weight.T
    surrogate, loss_agg = KINDS[kind]
    options = {
        "surrogate": surrogate,
        "loss_agg": loss_agg,
        "clip_low": 0.2,
        "clip_high": 0.25,
        "max_length": 9,
    }
    options["ratio_level"] = "sequence-sum" if kind == "vespo" else level
    options |= {"clip_low": 1.0} if kind == "cispo" else {}
    if feature in ("k3", "rk3"):
        options |= {"kl_coef": 0.2, "kl_estimator": feature, "ref_logprobs": ref}
    if feature == "delta":
        options["delta"] = 1.5
    if feature.endswith("weights"):
        spread = sequence_weights[:, :1].log() / mask.sum(1, keepdim=True)  # so that their product is the weight
        log_weight = token_weights.log() if feature == "token-weights" else spread.expand(B, T)
        correction = feature.replace("weights", "truncate")
        options |= {
            "rollout_logprobs": old - log_weight,
            "rollout_correction": correction,
            "rollout_high": 9.0,
        }
    logprobs = reference.token_logprobs(logits, targets).logprobs
    loss, _ = fused_rl.policy_loss(logprobs, old, advantages, mask, **options)
    return loss.detach(), torch.autograd.grad(loss, (hidden, weight, logits))


def liger(inputs, fused_linear, kind, level, feature, mask):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    hidden, weight, targets, _, advantages, old, ref, (token_weights, sequence_weights) = inputs
    weights = {"token-weights": token_weights, "sequence-weights": sequence_weights[:, :1]}.get(feature)
    options = {
        "beta": 0.2 if feature in ("k3", "rk3") else 0.0,
        "use_bias_correction_kl": feature == "rk3",
    }
    options |= {"delta": 1.5 if feature == "delta" else None, "max_completion_length": 9}
    options |= {"loss_type": kind, "importance_sampling_level": level}
    high = 1.25 if kind == "cispo" else 0.25
    if fused_linear:
        hidden = hidden.clone().requires_grad_()
        weight = weight.clone().requires_grad_()
        options |= {"compiled": False, "use_ref_model": options["beta"] > 0, "chunk_size": 2}
        op = LigerFusedLinearGRPOLoss(epsilon_low=0.2, epsilon_high=high, **options)
        loss = op(hidden, weight, targets, mask.float(), advantages, None, ref, old, vllm_is_ratio=weights)[0]
        return loss.detach(), torch.autograd.grad(loss, (hidden, weight))
    logits = torch.cat([hidden @ weight.T, torch.zeros(B, 1, V)], 1).requires_grad_()
    options |= {
        "temperature": 1.0,
        "eps_low": 0.2,
        "eps_high": high,
        "inplace": False,
        "reduce": True,
    }
    loss, _ = triton_grpo_loss(logits, old, ref, targets, advantages, mask.int(), vllm_is_ratio=weights, **options)
    return loss.detach(), [torch.autograd.grad(loss, logits)[0][:, :-1]]


@pytest.mark.parametrize("fused_linear", [True, False], ids=["fused-linear", "logits"])
@pytest.mark.parametrize("kind", KINDS)
def test_liger(inputs, kind, fused_linear):
    for level, feature in itertools.product(("token", "sequence"), FEATURES):
        if feature == "delta" and KINDS[kind][0] != "clip":
            continue
        mask = inputs[3].clone()
        mask[1] &= feature != "one-masked"
        if (kind, level) in REFUSED:
            with pytest.raises(ValueError):
                liger(inputs, fused_linear, kind, level, feature, mask)
            continue
        loss, (*linear, logits) = ours(inputs, kind, level, feature, mask)
        value, grads = liger(inputs, fused_linear, kind, level, feature, mask)
        want = linear if fused_linear else [logits]
        errors = [(g - w).norm() / w.norm() for g, w in zip(grads, want, strict=True)]
        error = max([*errors, (value - loss).abs() / loss.abs().clamp(min=0.01)])
        cell = f"{kind}, {level}, {feature}: relative error {error:.1e}"
        equal = error < 1e-5  # and not nan
        assert equal or error > 1e-2 or error.isnan(), cell
        assert equal != differs(fused_linear, kind, level, feature), cell
