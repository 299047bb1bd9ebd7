"""OpenRLHF 0.10 and 0.11 with our log-probabilities, entropies and KL estimates; everything else stays its own.

    import fused_rl.integrations.openrlhf
    fused_rl.integrations.openrlhf.patch()

PPO trains in Ray's worker processes, so these must be patched. Start Ray yourself, before OpenRLHF does, with
`ray.init(runtime_env={"worker_process_setup_hook": "fused_rl.integrations.openrlhf.patch"})`. SFT, DPO and reward
modelling train in the process that deepspeed starts, so the two lines above belong there.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import torch
from torch import Tensor

from fused_rl.integrations.patching import Patch, Replacement
from fused_rl.integrations.primitives import (
    capped_kl,
    is_served,
    label_logprobs,
    row_entropy,
    with_gradient_of,
)
from fused_rl.integrations.self_test import normal
from fused_rl.objectives.estimators import KLEstimator

__all__ = ["patch", "unpatch"]

_UTILS = "openrlhf.models.utils"


def patch(*, strict: bool = False) -> ExitStack:
    """Replace OpenRLHF's primitives in this process, unless they are replaced already; in a `with`, until its end.

    Args:
        strict: raise for a release that this integration does not know. Otherwise each function is tried beside
            OpenRLHF's on a few numbers, and a warning names those that stay OpenRLHF's.

    Raises:
        ImportError: OpenRLHF is not installed; with `strict`, it differs from what this integration knows.
    """
    return _PATCH.apply(strict=strict)


def unpatch() -> None:
    """Put back every attribute of OpenRLHF that `patch` replaced."""
    _PATCH.remove()


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """OpenRLHF's function of this name, for logits (..., V) and labels (...); a temperature scales the logits in place.

    Differences: 16-bit logits give fp32, where OpenRLHF returns the dtype of the logits. Labels of -100 give 0, as with
        flash-attn, which OpenRLHF requires.
    """
    if not is_served(logits, labels) or labels.shape != logits.shape[:-1]:
        return _PATCH.original(f"{_UTILS}.log_probs_from_logits")(logits, labels, temperature)
    if temperature != 1.0:
        # OpenRLHF's contract: whoever reads the logits next finds them scaled.
        logits.div_(temperature)
    return label_logprobs(logits, labels)


def compute_entropy(logits: Tensor) -> Tensor:
    """OpenRLHF's function of this name, (..., V) -> (...), without its torch.compile.

    Differences: the entropy is never below 0, is finite for rows with -inf columns, where OpenRLHF's is NaN, and is
        fp32 for 16-bit logits.
    """
    if not is_served(logits):
        return _PATCH.original(f"{_UTILS}.compute_entropy")(logits)
    return row_entropy(logits)


def _takes_kl(log_probs, log_probs_base, kl_estimator):
    # `capped_kl` takes the base as a constant; where it has a gradient, the host's own is used.
    differentiated = log_probs_base.requires_grad and torch.is_grad_enabled()
    is_ours = kl_estimator in ("k1", "k2", "k3")
    return is_ours and not differentiated and is_served(log_probs, log_probs_base)


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    log_probs_old: Tensor | None = None,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
) -> Tensor:
    """OpenRLHF's function of this name: k1, k2 or k3 per token, fp32, capped at 10 nats (k1 also at -10).

    With `unbiased_gradient` the gradient is that of w k2, with w = exp(log_probs - log_probs_old) at most 10, as in
    OpenRLHF.

    Differences: k3 does not cancel near 0. Without `unbiased_gradient`, OpenRLHF's gradient is 0 where the value is
        capped, for k3 as soon as a token has become 14 times less likely than under the base; here it stays what it is
        at the cap (`capped_kl`).
    """
    if not _takes_kl(log_probs, log_probs_base, kl_estimator):
        host = _PATCH.original(f"{_UTILS}.compute_approx_kl")
        return host(log_probs, log_probs_base, log_probs_old, kl_estimator, unbiased_gradient)
    # In 16 bits the difference of two close log-probabilities has few digits.
    log_probs, log_probs_base = log_probs.float(), log_probs_base.float()
    # `_takes_kl` knows no other names
    value = capped_kl(log_probs, log_probs_base, cast(KLEstimator, kl_estimator))
    if not unbiased_gradient:
        return value
    # Straight-through: the estimate's value, the gradient of the importance-weighted k2.
    k2 = (log_probs - log_probs_base).square() / 2
    if log_probs_old is not None:
        # The bound is the host's own constant, so the two cannot differ.
        from openrlhf.models.utils import KL_IS_WEIGHT_CLIP

        k2 = (log_probs - log_probs_old.float()).exp().clamp(max=KL_IS_WEIGHT_CLIP).detach() * k2
    return with_gradient_of(value, k2)


def _older_approx_kl(log_probs: Tensor, log_probs_base: Tensor, kl_estimator: str = "k1") -> Tensor:
    """`compute_approx_kl` as OpenRLHF 0.10 and 0.11.0 call it, where the estimator comes third."""
    if not _takes_kl(log_probs, log_probs_base, kl_estimator):
        host = _PATCH.original(f"{_UTILS}.compute_approx_kl")
        return host(log_probs, log_probs_base, kl_estimator)
    return compute_approx_kl(log_probs, log_probs_base, kl_estimator=kl_estimator)


def _logits_samples(dtype: torch.dtype) -> Iterator[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    logits = normal(generator, dtype, 2, 3, 37, scale=3)
    labels = torch.randint(37, (2, 3), generator=generator, device="cpu")
    yield {"logits": logits, "labels": labels, "temperature": 0.7}


def _kl_samples(dtype: torch.dtype) -> Iterator[dict[str, object]]:
    log_probs = (
        torch.linspace(-6, 0, 24, dtype=torch.float32, device="cpu").to(dtype).requires_grad_()
    )
    # Under the cap, beyond which the gradients differ.
    base = log_probs.detach() + torch.tensor(
        [-2.0, -1.0, 1.0, 2.0], dtype=torch.float32, device="cpu"
    ).repeat(6)
    tensors: dict[str, object] = {
        "log_probs": log_probs,
        "log_probs_base": base.to(dtype),
        "log_probs_old": log_probs.detach() - 0.3,
    }
    for estimator, unbiased in (("k1", True), ("k2", False), ("k3", False)):
        yield tensors | {"kl_estimator": estimator, "unbiased_gradient": unbiased}


_TABLE = (
    Replacement(f"{_UTILS}.log_probs_from_logits", log_probs_from_logits, samples=_logits_samples),
    Replacement(f"{_UTILS}.compute_entropy", compute_entropy, samples=_logits_samples),
    # The parameters say which of the two a release has.
    Replacement(f"{_UTILS}.compute_approx_kl", compute_approx_kl, samples=_kl_samples),
    Replacement(f"{_UTILS}.compute_approx_kl", _older_approx_kl, samples=_kl_samples),
)
_PATCH = Patch("openrlhf", ">=0.10,<0.12", _TABLE)
