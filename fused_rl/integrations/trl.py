"""TRL's trainers on our log-probabilities, entropies and divergences: `patch()`, and `unpatch()` to go back.

TRL's trainers keep their losses, masks, auxiliary losses and metrics. What is replaced is what turns hidden states or
logits into numbers per token:

    trl.kernels.chunked_logprob.ChunkedLogProbFunction             GRPO, RLOO, DPO, KTO, SFT
    trl.kernels.chunked_divergence.ChunkedDivergenceFunction       distillation
    trl.trainer.utils.selective_log_softmax, entropy_from_logits,
        selective_log_softmax_and_entropy                          the experimental trainers

Each has TRL's signature and meaning. What an op here does not serve, TRL's own function does; the functions `_serves*`
say what that is.
"""

import math

import torch
from torch import Tensor

from fused_rl.base.checks import (
    LEAST_TEMPERATURE,
    LOGITS_DTYPES,
    MOST_TEMPERATURE,
    check_logits_dtype,
    check_target_values,
    values_are_checked,
)
from fused_rl.integrations.patching import Applied, Patch
from fused_rl.integrations.primitives import row_entropy
from fused_rl.integrations.trl_divergence import DIRECTIONS, HeadDivergence, Pair, Scale
from fused_rl.integrations.trl_head import Head, HeadLogprobs
from fused_rl.ops.logprobs import token_logprobs

__all__ = ["patch", "unpatch"]

_UTILS = "trl.trainer.utils"
_LOGPROB = "trl.kernels.chunked_logprob.ChunkedLogProbFunction"
_DIVERGENCE = "trl.kernels.chunked_divergence.ChunkedDivergenceFunction"
# The outputs that are served: a call that requests another one stays TRL's.
_OUTPUTS = {"log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"}


def patch(*, logits_dtype: torch.dtype | None = None) -> Applied:
    """Put fused_rl's log-probabilities, entropies and divergences into TRL, until `unpatch()`.

    Call it before or after importing TRL's trainers, and before training; `with patch():` undoes itself, also when it
    raises. Patching twice is patching once. A function that your own code imported from TRL by name stays what it was.

    Args:
        logits_dtype: of the head's logits where its products are of 16 bits, as in `fused_rl.linear_token_logprobs`.
            With TRL's `cast_lm_head_to_fp32` the products themselves are in fp32, and so are the logits. Those of the
            divergences are in fp32 in any case.

    Raises:
        ImportError: TRL is not installed, or is of a version that this integration does not know.
        ValueError: TRL is patched with another logits_dtype; later, one that the products do not allow.
    """
    return _PATCH.apply(logits_dtype=logits_dtype)


def unpatch() -> None:
    """Put back every attribute that `patch()` replaced; nothing if TRL is not patched."""
    _PATCH.remove()


def _replacements() -> dict[str, object]:
    of_logits = selective_log_softmax, entropy_from_logits, selective_log_softmax_and_entropy
    of_heads: dict[str, object] = {
        _LOGPROB: ChunkedLogProbFunction,
        _DIVERGENCE: ChunkedDivergenceFunction,
    }
    return of_heads | {f"{_UTILS}.{ours.__name__}": ours for ours in of_logits}


_PATCH = Patch("trl", ">=1.16,<1.17", _replacements)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    # Under autocast the products take its dtype, whatever the hidden states have.
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _serves_temperature(temperature) -> bool:
    # Others, such as 0 or a tensor, keep TRL's own meaning.
    is_number = isinstance(temperature, (int, float))
    return is_number and LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE


def _serves_head(hidden: Tensor, scale: float, softcap: float | None) -> bool:
    """CPU and CUDA, products in fp32, bf16 or fp16, scales and caps that leave the order of logits as it is."""
    # A scale becomes part of the temperature, which has to be positive.
    fits = hidden.device.type in ("cpu", "cuda") and _compute_dtype(hidden) in LOGITS_DTYPES
    numbers = (scale, 1.0 if softcap is None else softcap)
    return fits and all(isinstance(x, (int, float)) and 0 < x < math.inf for x in numbers)


class ChunkedLogProbFunction:
    """In the place of TRL's autograd function of this name, of which its trainers use `apply` alone."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> tuple[Tensor | None, ...]:
        """log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1 of hidden (N, H) under the head, (N,) each.

        `chunk_size`, the width of TRL's tiles, has no effect: tiles here follow from a budget in bytes.
        """
        served = (
            _serves_head(hidden, logit_scale, final_logit_softcapping) and set(outputs) <= _OUTPUTS
        )
        if not served or not _serves_temperature(temperature / logit_scale):
            return _PATCH.original(_LOGPROB).apply(
                hidden,
                weight,
                bias,
                targets,
                temperature,
                chunk_size,
                final_logit_softcapping,
                logit_scale,
                outputs,
            )
        # The backward pass gathers a ZeRO-3 head; in the forward pass TRL has done it.
        from trl.trainer.utils import maybe_gather_lm_head_ctx

        # On a GPU a target outside the vocabulary gives NaN; here an error names it.
        if values_are_checked(hidden.device):
            check_target_values(targets, None, weight.shape[0])
        # The logits scale * z / T and cap(scale * z) are written with a temperature and a cap of z.
        softcap = None if final_logit_softcapping is None else final_logit_softcapping / logit_scale
        dtype = _compute_dtype(hidden)
        logits_dtype = _PATCH.options.get("logits_dtype")
        check_logits_dtype(logits_dtype, dtype)
        head = Head(logit_scale / temperature, softcap, tuple(outputs), dtype, logits_dtype)
        return HeadLogprobs.apply(
            hidden, weight, bias, targets.long(), head, maybe_gather_lm_head_ctx
        )


class ChunkedDivergenceFunction:
    """In the place of TRL's autograd function of this name, of which its trainer uses `apply` alone."""

    @staticmethod
    def apply(
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Divergence of student and teacher, and the student's entropy (no gradient), (N,) each."""
        # The row functions here are for both directions of the KL and for the even mixture; every
        # other beta stays TRL's.
        served = beta in DIRECTIONS and _serves_temperature(temperature)
        served &= _serves_head(student_hidden, student_logit_scale, student_final_logit_softcapping)
        served &= _serves_head(teacher_hidden, teacher_logit_scale, teacher_final_logit_softcapping)
        if not served:
            return _PATCH.original(_DIVERGENCE).apply(
                student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, beta,
                temperature, student_logit_scale, student_final_logit_softcapping, teacher_logit_scale,
                teacher_final_logit_softcapping,
            )  # fmt: skip
        # ZeRO 3 may partition both heads: each is gathered while its tiles are formed.
        from trl.trainer.utils import maybe_gather_lm_head_ctx

        pair = Pair(
            DIRECTIONS[beta],
            1 / temperature,
            Scale(
                student_logit_scale, student_final_logit_softcapping, _compute_dtype(student_hidden)
            ),
            Scale(
                teacher_logit_scale, teacher_final_logit_softcapping, _compute_dtype(teacher_hidden)
            ),
        )
        student = student_hidden, student_weight, student_bias
        teacher = teacher_hidden, teacher_weight, teacher_bias
        return HeadDivergence.apply(*student, *teacher, pair, maybe_gather_lm_head_ctx)


def _serves_logits(logits: Tensor, index: Tensor | None, temperature: float) -> bool:
    """CPU and CUDA, floating point, one target per row or K of them."""
    # TRL's own function takes whatever does not fit, with its own errors.
    fits = logits.device.type in ("cpu", "cuda") and logits.dtype in (*LOGITS_DTYPES, torch.float64)
    fits = fits and logits.dim() > 0 and logits.shape[-1] > 0 and _serves_temperature(temperature)
    rows = logits.shape[:-1]
    return fits and (index is None or rows in (index.shape, index.shape[:-1]))


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """TRL's: log-probabilities of index (...) or (..., K) of logits (..., V), 0 where row_mask is; as `index`.

    fp32, and of fp64 logits fp64, as TRL's kernel on GPUs returns them; TRL on a CPU rounds to the dtype of the logits.
    """
    if not _serves_logits(logits, index, temperature):
        return _PATCH.original(f"{_UTILS}.selective_log_softmax")(
            logits, index, temperature, row_mask
        )
    # TRL's masks may hold numbers.
    mask = None if row_mask is None else row_mask != 0
    several = index.dim() == logits.dim()
    # TRL's mask has a place for every target, and that of the op one for every row.
    if several and mask is not None:
        return token_logprobs(logits, index, temperature=temperature).logprobs.masked_fill(
            ~mask, 0.0
        )
    return token_logprobs(logits, index, temperature=temperature, mask=mask).logprobs


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """TRL's: entropy in nats of each row of logits (..., V), fp32, of fp64 logits fp64; `chunk_size` has no effect."""
    if not _serves_logits(logits, None, 1.0):
        return _PATCH.original(f"{_UTILS}.entropy_from_logits")(logits, chunk_size)
    return row_entropy(logits)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """TRL's: log-probabilities of index (...) and entropies of logits (..., V), in one pass; 0 where row_mask is."""
    # With K targets per row there is one entropy for all of them, a case that is left to TRL.
    if not _serves_logits(logits, index, temperature) or index.shape != logits.shape[:-1]:
        theirs = _PATCH.original(f"{_UTILS}.selective_log_softmax_and_entropy")
        return theirs(logits, index, entropy_requires_grad, temperature, row_mask)
    mask = None if row_mask is None else row_mask != 0
    logprobs, entropy, _ = token_logprobs(logits, index, temperature=temperature, mask=mask)
    return logprobs, entropy if entropy_requires_grad else entropy.detach()
