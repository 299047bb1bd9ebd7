"""open-instruct: its two functions between logits and loss, with their signatures; assign them.

    from open_instruct import model_utils
    from fused_rl.integrations import open_instruct

    model_utils.log_softmax_and_gather = open_instruct.log_softmax_and_gather
    model_utils.estimate_kl = open_instruct.estimate_kl

open-instruct is on no package index, so nothing here is run against it: what the functions stand for is transcribed
from `open_instruct/model_utils.py` of https://github.com/allenai/open-instruct, and the tests compare with that.
"""

import torch
from torch import Tensor

from fused_rl.objectives.estimators import kl_estimate
from fused_rl.ops.logprobs import token_logprobs


def log_softmax_and_gather(logits: Tensor, index: Tensor) -> Tensor:
    """Log-probability in nats of the tokens at `index`: `logits.log_softmax(-1)` gathered there, never held in full.

    Args:
        logits: (..., V), which the host has divided by its temperature and shifted already.
        index: (...) int64.

    Returns:
        (...) fp32, also of bf16 logits, where the host's own is rounded to bf16; fp64 of fp64 logits. Differentiable
        once with respect to the logits.

    Raises:
        ValueError: as `fused_rl.token_logprobs`.
    """
    return token_logprobs(logits, index).logprobs


def estimate_kl(ref_logprobs_diff: Tensor, ratio: Tensor) -> Tensor:
    """Four estimates of KL(policy || reference) per token; the host's `kl_estimator`, from 0, picks one.

    With d = ref_logprobs_diff and r = ratio, transcribed from the host: 0: d; 1: d^2 / 2; 2: expm1(-d) + d; 3: r d.
    They are k1, k2, k3 and k4 of `fused_rl.kl_estimate`, all differentiable in d, and 3 in r.

    Args:
        ref_logprobs_diff: (B, T), log-probability under the policy less that under the reference; the host clamps it
            to 40 nats either way, beyond which it has no gradient.
        ratio: (B, T), the policy's probability over that of the policy which sampled.

    Returns:
        (4, B, T), at least fp32. Number 2 differs from the host's in two places: near 0 it does not cancel (the host's
        loses about 1e-7 / |d| of it in fp32), and below d = -20 it goes on as a tangent, not exponentially.
    """
    reference = torch.zeros_like(ref_logprobs_diff)
    k1, k2, k3 = (kl_estimate(ref_logprobs_diff, reference, name) for name in ("k1", "k2", "k3"))
    # The ratio may be of another dtype than the estimates; `stack` promotes them to one.
    return torch.stack([k1, k2, k3, ratio * k1])
