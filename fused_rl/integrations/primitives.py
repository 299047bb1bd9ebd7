"""Functions that several hosts replace: log-probabilities and entropies of logits, and KL estimates under a cap."""

import torch
from torch import Tensor

from fused_rl.objectives.estimators import KLEstimator, kl_estimate
from fused_rl.ops.logprobs import shares_leaf, token_logprobs

# The label to skip, of torch's cross-entropy, of transformers and of flash-attn.
IGNORED = -100

# Where an estimate reaches 10 nats, as (lowest, highest) d = logprobs - ref_logprobs.
# For k3 both ends solve expm1(-d) + d = 10.
CAPPED_AT_10 = {
    "k1": (-10.0, 10.0),
    "k2": (-(20.0**0.5), 20.0**0.5),
    "k3": (-2.610868638149876, 10.999983298020256),
}


def is_served(*tensors: Tensor) -> bool:
    """Return True if our kernels take them: dense tensors, no subclass such as DTensor, on a CPU, CUDA or ROCm GPU."""
    for x in tensors:
        plain = type(x) in (Tensor, torch.nn.Parameter) and not x.is_nested
        if not plain or x.device.type not in ("cpu", "cuda"):
            return False
    return True


def label_logprobs(logits: Tensor, labels: Tensor, inplace: bool = False) -> Tensor:
    """Log-probability of each label, (...) fp32 (fp64 of fp64 logits); 0, without gradient, for `IGNORED` labels.

    With `inplace` the gradient takes the logits' storage where autograd allows that: not a leaf's or of a view of one,
    not a strided view's, and not under torch.compile.
    """
    wanted = (
        inplace
        and not torch.compiler.is_compiling()
        and logits.requires_grad
        and torch.is_grad_enabled()
    )
    inplace = wanted and not shares_leaf(logits) and logits.is_contiguous()
    return token_logprobs(logits, labels, mask=labels != IGNORED, inplace=inplace).logprobs


def row_entropy(logits: Tensor) -> Tensor:
    """Entropy of each row of logits in nats, (...) fp32 (fp64 of fp64 logits)."""
    # The operator takes a target, and the entropy does not depend on it.
    any_target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return token_logprobs(logits, any_target).entropy


class _GradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, carrier):
        return value.clone()

    @staticmethod
    def backward(ctx, upstream):
        return None, upstream


def with_gradient_of(value: Tensor, carrier: Tensor) -> Tensor:
    """`value`, whose gradient is that of `carrier`. Unlike value + carrier - carrier.detach(), exact, and never NaN."""
    return _GradientOf.apply(value.detach(), carrier)


def capped_kl(logprobs: Tensor, ref_logprobs: Tensor, kl_estimator: KLEstimator) -> Tensor:
    """k1, k2 or k3 (`kl_estimate`) capped at 10 nats (k1 also at -10), with a gradient that the cap does not end.

    Beyond the cap the value is constant, and the gradient is that at the cap, which for k3 is -12.6 below and 1 above.
    A clamp would set it to 0, and so let go of exactly the tokens that the policy has moved furthest from the
    reference.

    Args:
        logprobs: (...) fp32 or fp64.
        ref_logprobs: same shape, a constant.
    """
    d = logprobs - ref_logprobs.detach()
    lowest, highest = CAPPED_AT_10[kl_estimator]
    within = with_gradient_of(d.clamp(lowest, highest), d)
    return kl_estimate(within, torch.zeros_like(within), kl_estimator)
