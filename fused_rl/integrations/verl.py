"""verl 0.7 to 0.9 with our log-probabilities, entropies, k3 and fused head; its losses, masks and metrics stay.

    import fused_rl.integrations.verl
    fused_rl.integrations.verl.patch()

verl trains in Ray's worker processes, so these must be patched:
`+ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=fused_rl.integrations.verl.patch` on verl's command line.
Patch before an engine is built, because the engine compiles the entropy that it finds then.

Not replaced: Megatron's vocabulary-parallel functions (`verl.utils.megatron`), and everything on an NPU.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from fused_rl.base.checks import LOGITS_DTYPES
from fused_rl.integrations.patching import Patch, Replacement
from fused_rl.integrations.primitives import capped_kl, is_served, label_logprobs, row_entropy
from fused_rl.integrations.registries import register as register_in
from fused_rl.integrations.self_test import normal
from fused_rl.ops.linear import linear_token_logprobs

__all__ = ["patch", "register", "unpatch"]

_FUNCTIONAL = "verl.utils.torch_functional"
_KL = "verl.trainer.ppo.core_algos.kl_penalty_forward"
_EXPERIMENTAL = "verl.utils.experimental.torch_functional"
_FUSED_LINEAR = f"{_EXPERIMENTAL}.FusedLinearForPPOFunction"
_LIGER = "_LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY"
_LINEAR = "verl.utils.kernel.linear_cross_entropy.linear_cross_entropy"


def patch(*, logits_dtype: torch.dtype | None = None, strict: bool = False) -> ExitStack:
    """Replace verl's primitives in this process, unless they are replaced already; in a `with`, only until its end.

    Args:
        logits_dtype: of the fused heads' logits, as in `fused_rl.linear_token_logprobs`.
        strict: raise for a release that this integration does not know. Otherwise each function is tried beside verl's
            on a few numbers, and a warning names those that stay verl's.

    Raises:
        ImportError: verl is not installed; with `strict`, it differs from what this integration knows.
        ValueError: verl is patched with another logits_dtype; later, one that the head's dtype does not allow.
    """
    return _PATCH.apply(strict=strict, logits_dtype=logits_dtype)


def unpatch() -> None:
    """Put back every attribute of verl that `patch` replaced."""
    _PATCH.remove()


def register() -> None:
    """Add our losses and advantages to verl's, by the names that `fused_rl.integrations.registries` gives them."""
    register_in("verl")


def _takes_logprobs(logits, labels):
    # verl's path through flash-attn flattens both, and so takes labels of another shape.
    return is_served(logits, labels) and labels.shape == logits.shape[:-1]


def _flash_attn_is_used():
    """Return verl's own decision; only this path of verl heeds `inplace_backward`."""
    # The flag is set when verl is imported, and its name is spelt as in verl.
    from verl.utils import torch_functional

    disabled = os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") == "1"
    return torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE and not disabled


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """verl's function of this name, for logits (..., V) and labels (...).

    Differences: 16-bit logits give fp32, where verl without flash-attn returns the dtype of the logits, and labels of
        -100 give 0, which verl does only with flash-attn. `inplace_backward` has its effect if flash-attn is installed,
        as in verl; a backward pass that then needs the overwritten logits raises instead of using the gradient in their
        place.
    """
    if not _takes_logprobs(logits, labels):
        return _PATCH.original(f"{_FUNCTIONAL}.logprobs_from_logits")(
            logits, labels, inplace_backward
        )
    # Without flash-attn verl leaves the logits as they are, whatever `inplace_backward` says.
    return label_logprobs(logits, labels, inplace=inplace_backward and _flash_attn_is_used())


def logprobs_from_logits_flash_attn(
    logits: Tensor, labels: Tensor, inplace_backward: bool = True
) -> Tensor:
    """verl's function of this name; needs no flash-attn, and heeds `inplace_backward` as that does."""
    if not _takes_logprobs(logits, labels):
        return _PATCH.original(f"{_FUNCTIONAL}.logprobs_from_logits_flash_attn")(
            logits, labels, inplace_backward
        )
    return label_logprobs(logits, labels, inplace=inplace_backward)


def logprobs_from_logits_naive(logits: Tensor, labels: Tensor) -> Tensor:
    """verl's function of this name; fp32 for 16-bit logits."""
    if not _takes_logprobs(logits, labels):
        return _PATCH.original(f"{_FUNCTIONAL}.logprobs_from_logits_naive")(logits, labels)
    return label_logprobs(logits, labels)


def logprobs_from_logits_v2(logits: Tensor, labels: Tensor) -> Tensor:
    """verl's function of this name; fp32 for 16-bit logits."""
    if not _takes_logprobs(logits, labels):
        return _PATCH.original(f"{_FUNCTIONAL}.logprobs_from_logits_v2")(logits, labels)
    return label_logprobs(logits, labels)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """verl's function of this name, (..., V) -> (...).

    Differences: the entropy is never below 0, is finite for rows with -inf columns, where verl's is NaN, and is fp32
        for 16-bit logits.
    """
    if not is_served(logits):
        return _PATCH.original(f"{_FUNCTIONAL}.entropy_from_logits")(logits)
    return row_entropy(logits)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """verl's function of this name; `chunk_size` has no effect, since no chunk is ever copied."""
    if not is_served(logits):
        return _PATCH.original(f"{_FUNCTIONAL}.entropy_from_logits_with_chunking")(
            logits, chunk_size
        )
    return row_entropy(logits)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """verl's function of this name. low_var_kl and k3 are ours; kl, k1, abs, mse, k2 and full stay verl's.

    `kl_penalty` calls it, so that k3+ is k3's value here, and k2's gradient as before.

    Differences in k3: it does not cancel near 0, where fp32 loses most digits of exp(x) - x - 1, and it is fp32 for
        16-bit inputs. verl's value stops at 10 nats, and its gradient becomes 0 there, as soon as a token is 14 times
        less likely than under the reference. Here the value stops as well, but the gradient stays what it is at the cap
        (`capped_kl`).
    """
    # `capped_kl` takes the reference as a constant; where it has a gradient, verl's own is used.
    differentiated = ref_logprob.requires_grad and torch.is_grad_enabled()
    if (
        kl_penalty not in ("low_var_kl", "k3")
        or differentiated
        or not is_served(logprob, ref_logprob)
    ):
        return _PATCH.original(_KL)(logprob, ref_logprob, kl_penalty)
    # In 16 bits k3 would have no digits near 0.
    return capped_kl(
        logprob if logprob.dtype == torch.float64 else logprob.float(), ref_logprob, "k3"
    )


def _takes_head(hidden, weight, labels):
    # Autocast casts hidden states and weight to one dtype; without it verl has its own error.
    autocast = torch.is_autocast_enabled(hidden.device.type)
    fits = hidden.dtype in LOGITS_DTYPES and (hidden.dtype == weight.dtype or autocast)
    return is_served(hidden, weight, labels) and fits


def _scored(hidden, weight, labels, temperature):
    # The option is that of the patch which is in force at this call.
    options = {"temperature": temperature, "logits_dtype": _PATCH.options.get("logits_dtype")}
    return linear_token_logprobs(hidden, weight, labels, **options)[:2]


class FusedLinearForPPOFunction:
    """In place of verl's autograd function, which `FusedLinearForPPO` calls by `apply`."""

    @staticmethod
    def apply(
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float = 1.0,
        chunk_size: int = 512,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (...) of hidden states (..., H) under a head (V, H).

        Differences: the entropy is fp32, where verl rounds it to the dtype of the hidden states. Gradients of 16-bit
            inputs are rounded once, from sums in fp32. `chunk_size` has no effect, because tiles are cut by bytes and
            not by rows.
        """
        per_row = isinstance(temperature, Tensor) and temperature.dim() > 0
        if per_row or not _takes_head(hidden_states, vocab_weights, input_ids):
            host = _PATCH.original(_FUSED_LINEAR)
            return host.apply(hidden_states, vocab_weights, input_ids, temperature, chunk_size)
        return _scored(hidden_states, vocab_weights, input_ids, temperature)


class LigerFusedLinear:
    """In place of Liger's autograd function, which `FusedLinearForPPO` calls by `apply` with impl_backend="liger"."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: Tensor | None = None,
    ) -> tuple:
        """Negative log-probabilities and entropies (N,), of hidden states (N, H) under a head (V, H)."""
        # verl requests the entropy and nothing else, for targets that all count.
        if not return_entropy or selected_token_ids is not None:
            host = _PATCH.original(f"{_EXPERIMENTAL}.{_LIGER}")
            options = ignore_index, m_tiles_per_cluster, return_entropy, selected_token_ids
            return host.apply(_input, weight, target, temperature, *options)
        logprobs, entropy = FusedLinearForPPOFunction.apply(_input, weight, target, temperature)
        # Liger's function returns losses.
        return -logprobs, entropy


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """verl's fused head (`use_fused_kernels` with the Triton backend): (N,) log-probabilities, N the tokens of all
    leading dimensions, or their sum or mean; (N,) entropies.

    Differences: it also runs on CPU tensors, and for hidden sizes that 128 does not divide. A head that is split over
        the ranks of `dist_process_group` stays verl's.
    """
    # A rank of a split head has a part of the vocabulary, and the sums go over the ranks.
    split = dist_process_group is not None and dist.get_world_size(dist_process_group) > 1
    # A reduction that is none of these is verl's to refuse.
    reduce = _REDUCTIONS.get(reduction.lower()) if isinstance(reduction, str) else None
    is_number = isinstance(temperature, float)
    if split or reduce is None or not is_number or not _takes_head(hidden, weight, labels):
        return _PATCH.original(_LINEAR)(
            hidden, weight, labels, temperature, reduction, dist_process_group
        )
    logprobs, entropy = _scored(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), temperature
    )
    return reduce(logprobs), entropy


_REDUCTIONS = {"none": lambda logprobs: logprobs, "sum": Tensor.sum, "mean": Tensor.mean}


def _logits_samples(dtype: torch.dtype) -> Iterator[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    logits = normal(generator, dtype, 6, 37, scale=3)
    labels = torch.randint(37, (6,), generator=generator, device="cpu")
    yield {
        "logits": logits,
        "labels": labels,
        "inplace_backward": False,
        "chunk_size": 2,
    }


def _kl_samples(dtype: torch.dtype) -> Iterator[dict[str, object]]:
    logprob = (
        torch.linspace(-6, 0, 24, dtype=torch.float32, device="cpu").to(dtype).requires_grad_()
    )
    # Under the cap, beyond which the gradients differ, and where 16 bits have digits of k3.
    ref_logprob = (
        logprob.detach()
        + torch.tensor([-2.0, -1.0, 1.0, 2.0], dtype=torch.float32, device="cpu").repeat(6)
    ).to(dtype)
    yield {"logprob": logprob, "ref_logprob": ref_logprob, "kl_penalty": "low_var_kl"}


def _head_samples(dtype: torch.dtype) -> Iterator[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    # verl's Triton head takes hidden sizes that 128 divides.
    hidden = normal(generator, dtype, 6, 128)
    weight = normal(generator, dtype, 37, 128, scale=0.25)
    labels = torch.randint(37, (6,), generator=generator, device="cpu")
    # The same three under the names of each head.
    yield {
        **dict.fromkeys(("hidden_states", "hidden", "_input"), hidden),
        **dict.fromkeys(("vocab_weights", "weight"), weight),
        **dict.fromkeys(("input_ids", "labels", "target"), labels),
        "temperature": 0.7,
        "ignore_index": -100,
        "m_tiles_per_cluster": 1,
        "return_entropy": True,
    }


_TABLE = (
    *(
        Replacement(f"{_FUNCTIONAL}.{ours.__name__}", ours, samples=_logits_samples)
        for ours in (
            logprobs_from_logits,
            logprobs_from_logits_flash_attn,
            logprobs_from_logits_naive,
            logprobs_from_logits_v2,
            entropy_from_logits,
            entropy_from_logits_with_chunking,
        )
    ),
    Replacement(_KL, kl_penalty_forward, samples=_kl_samples),
    Replacement(_FUSED_LINEAR, FusedLinearForPPOFunction, samples=_head_samples),
    Replacement(_LINEAR, linear_cross_entropy, samples=_head_samples),
    # verl has this function from 0.9.1 on, and only where liger-kernel is installed.
    Replacement(
        f"{_EXPERIMENTAL}.{_LIGER}", LigerFusedLinear, samples=_head_samples, optional=True
    ),
)
_PATCH = Patch("verl", ">=0.7,<0.10", _TABLE)
