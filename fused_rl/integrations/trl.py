"""TRL's trainers on our log-probabilities, entropies and divergences: `patch()`, and `unpatch()` to go back.

TRL's trainers keep their losses, masks, auxiliary losses and metrics. What is replaced is what turns hidden states or
logits into numbers per token, in TRL 1.16:

    trl.kernels.chunked_logprob.ChunkedLogProbFunction             GRPO, RLOO, DPO, KTO, SFT
    trl.kernels.chunked_divergence.ChunkedDivergenceFunction       distillation
    trl.trainer.utils.selective_log_softmax, entropy_from_logits,
        selective_log_softmax_and_entropy                          the experimental trainers

Until 1.14 most trainers read the functions of logits, and the fused heads of these releases stay TRL's.

Each has TRL's signature and meaning. Inputs that our ops do not serve go to TRL's own function; the functions
`_serves*` say which these are.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

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
from fused_rl.base.graphs import breaks_graph
from fused_rl.integrations.patching import Patch, Replacement
from fused_rl.integrations.primitives import row_entropy
from fused_rl.integrations.trl_divergence import HeadDivergence, Pair, Scale
from fused_rl.integrations.trl_head import Head, HeadLogprobs
from fused_rl.integrations.trl_samples import (
    divergence_samples,
    head_samples,
    logits_samples,
    targets_samples,
)
from fused_rl.ops.logprobs import token_logprobs

__all__ = ["patch", "unpatch"]

_UTILS = "trl.trainer.utils"
_LOGPROB = "trl.kernels.chunked_logprob.ChunkedLogProbFunction"
_DIVERGENCE = "trl.kernels.chunked_divergence.ChunkedDivergenceFunction"
# The outputs that are served: a call that requests another one stays TRL's.
_OUTPUTS = {"log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"}


def patch(*, logits_dtype: torch.dtype | None = None, strict: bool = False) -> ExitStack:
    """Put fused_rl's log-probabilities, entropies and divergences into TRL, until `unpatch()`.

    Call it before training, either before or after importing TRL's trainers. `with patch():` undoes itself, also after
    an exception. A second call has no effect. A function that your own code imported from TRL by name is not replaced.

    Args:
        logits_dtype: dtype of the head's logits if its products are of 16 bits, as in `fused_rl.linear_token_logprobs`.
            With TRL's `cast_lm_head_to_fp32` the products themselves are in fp32, and so are the logits. The logits of
            the divergences are in fp32 in any case.
        strict: raise for a release that this integration does not know. Otherwise each function is tried beside TRL's
            on a few numbers, and a warning names those that stay TRL's.

    Raises:
        ImportError: TRL is not installed; with `strict`, it differs from what this integration knows.
        ValueError: a logits_dtype that no head can have; a patch with another logits_dtype is active; later, one that
            the products do not allow.
    """
    if logits_dtype not in (None, *LOGITS_DTYPES):
        allowed = "None, torch.float32, or the dtype of the head's products, torch.bfloat16 or torch.float16"
        raise ValueError(f"logits_dtype must be {allowed}; got {logits_dtype!r}")
    return _PATCH.apply(strict=strict, logits_dtype=logits_dtype)


def unpatch() -> None:
    """Put back every attribute that `patch()` replaced; nothing if TRL is not patched."""
    _PATCH.remove()


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    # Under autocast the products take its dtype, whatever the hidden states have.
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    # TRL rounds the logits of an fp64 head to fp32, and so are its results.
    return torch.float32 if hidden.dtype == torch.float64 else hidden.dtype


def _serves_temperature(temperature) -> bool:
    # Others, such as 0 or a tensor, keep TRL's own meaning.
    is_number = isinstance(temperature, (int, float))
    return is_number and LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE


def _serves_head(hidden: Tensor, dtype: torch.dtype, scale: float, softcap: float | None) -> bool:
    """CPU and CUDA, products in fp32, bf16 or fp16, finite scales, caps that are not 0."""
    fits = hidden.device.type in ("cpu", "cuda") and dtype in LOGITS_DTYPES
    numbers = (scale, 1.0 if softcap is None else softcap)
    fits = fits and all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers)
    return fits and softcap != 0


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
        of_head = final_logit_softcapping, logit_scale, outputs
        scored = _head_logprobs(hidden, weight, bias, targets, temperature, *of_head)
        if scored is not None:
            return scored
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


@breaks_graph
def _head_logprobs(
    hidden, weight, bias, targets, temperature, softcap, scale, outputs
) -> tuple[Any, ...] | None:
    """What `ChunkedLogProbFunction` returns; None for what is left to TRL."""
    dtype = _compute_dtype(hidden)
    if not _serves_head(hidden, dtype, scale, softcap) or not set(outputs) <= _OUTPUTS:
        return None
    if scale <= 0:
        # The temperature has to be positive, so the sign goes into the product, which that leaves exact.
        sign = -1.0 if scale < 0 else 0.0
        hidden, bias = hidden * sign, None if bias is None else bias * sign
        scale = -scale or 1.0
    if not _serves_temperature(temperature / scale):
        return None
    # On a GPU a target outside the vocabulary gives NaN; here an error names it.
    if values_are_checked(hidden.device):
        check_target_values(targets, None, weight.shape[0])
    logits_dtype = _PATCH.options.get("logits_dtype")
    check_logits_dtype(logits_dtype, dtype)
    # The logits scale * z / T and cap(scale * z) are written with a temperature and a cap of z.
    softcap = None if softcap is None else abs(softcap) / scale
    head = Head(scale / temperature, softcap, tuple(outputs), dtype, logits_dtype)
    return HeadLogprobs.apply(hidden, weight, bias, targets.long(), head, _gathering())


def _gathering() -> Callable[..., Any]:
    """TRL's context that gathers a ZeRO-3 head, for the backward pass; in the forward pass TRL has done it."""
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    return maybe_gather_lm_head_ctx


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
        divergence = _head_divergence(
            (student_hidden, student_weight, student_bias),
            (teacher_hidden, teacher_weight, teacher_bias),
            beta,
            temperature,
            (student_logit_scale, student_final_logit_softcapping),
            (teacher_logit_scale, teacher_final_logit_softcapping),
        )
        if divergence is not None:
            return divergence
        return _PATCH.original(_DIVERGENCE).apply(
            student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, beta,
            temperature, student_logit_scale, student_final_logit_softcapping, teacher_logit_scale,
            teacher_final_logit_softcapping,
        )  # fmt: skip


def _head_divergence(
    student, teacher, beta, temperature, of_student, of_teacher
) -> tuple[Tensor, Tensor] | None:
    """What `ChunkedDivergenceFunction` returns, of (hidden, weight, bias) twice; None for what is left to TRL."""
    # Outside of these TRL's beta names no divergence.
    if not 0 <= beta <= 1 or not _serves_temperature(temperature):
        return None
    scales = []
    for (hidden, *_), (scale, softcap) in ((student, of_student), (teacher, of_teacher)):
        dtype = _compute_dtype(hidden)
        if not _serves_head(hidden, dtype, scale, softcap):
            return None
        scales.append(Scale(scale, softcap, dtype))
    pair = Pair(float(beta), 1 / temperature, *scales)
    # ZeRO 3 may partition both heads: each is gathered while its tiles are formed.
    return HeadDivergence.apply(*student, *teacher, pair, _gathering())


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
    if row_mask is None:
        return token_logprobs(logits, index, temperature=temperature).logprobs
    # TRL's masks may hold numbers, and are broadcast to a place for every target.
    mask = (row_mask != 0).broadcast_to(index.shape)
    rows = mask.any(-1) if index.dim() == logits.dim() else mask
    logprobs = token_logprobs(logits, index, temperature=temperature, mask=rows).logprobs
    return logprobs if rows is mask else logprobs.masked_fill(~mask, 0.0)


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
    """TRL's: log-probabilities of index (...) or (..., K), entropies (...) of logits (..., V); 0 where row_mask is."""
    # TRL has one mask for both results, which fits one of them where there are K targets per row.
    ambiguous = row_mask is not None and index.shape != logits.shape[:-1]
    if not _serves_logits(logits, index, temperature) or ambiguous:
        theirs = _PATCH.original(f"{_UTILS}.selective_log_softmax_and_entropy")
        return theirs(logits, index, entropy_requires_grad, temperature, row_mask)
    mask = None if row_mask is None else (row_mask != 0).broadcast_to(index.shape)
    logprobs, entropy, _ = token_logprobs(logits, index, temperature=temperature, mask=mask)
    return logprobs, entropy if entropy_requires_grad else entropy.detach()


_TABLE = (
    Replacement(_LOGPROB, ChunkedLogProbFunction, ">=1.15", head_samples),
    Replacement(_DIVERGENCE, ChunkedDivergenceFunction, ">=1.15", divergence_samples),
    Replacement(f"{_UTILS}.selective_log_softmax", selective_log_softmax, "", targets_samples),
    Replacement(f"{_UTILS}.entropy_from_logits", entropy_from_logits, "", logits_samples),
    Replacement(
        f"{_UTILS}.selective_log_softmax_and_entropy",
        selective_log_softmax_and_entropy,
        ">=1.14",
        logits_samples,
    ),
)
_PATCH = Patch("trl", ">=1.0,<1.17", _TABLE)
