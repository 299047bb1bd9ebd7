"""What the public functions check of their arguments: tensors, masks, targets, temperatures; one wording each.

Every check raises a ValueError that says what it got and what to do about it.
"""

import math
import os
from collections.abc import Callable, Collection, Iterable
from numbers import Real

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Within these logits / temperature and its gradient stay far from the ends of fp32.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e6
MASKED = "Give positions to ignore False in mask"
SHIFTED_MASK = "; shift=True takes mask[:, 1:] of a mask over all T tokens"


_TEMPERATURE_RANGE = (
    f"temperature must be a number from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g} (0.01 comes close to the greedy "
    "choice)"
)


def described(x: object) -> str:
    """What came, in a few words: of a model's output, a module or a tuple of ours also the tensor that it holds."""
    if isinstance(x, Tensor):
        return f"{x.dtype} {tuple(x.shape)}"
    held = [name for name in ("logits", "logprobs", "weight") if isinstance(getattr(x, name, None), Tensor)]
    if held:
        return f"{type(x).__name__}, whose .{held[0]} is a tensor"
    shown = " ".join(repr(x).split())
    return f"{type(x).__name__} {shown if len(shown) <= 60 else shown[:60] + '…'}"


def check_tensor(name: str, x: object, or_else: str = "") -> None:
    """`or_else`: what else it may have been, such as " or None"; the caller lets that pass."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor{or_else}, got {described(x)}")


def check_tensors(**named: object) -> None:
    for name, x in named.items():
        check_tensor(name, x)


def check_optional_tensors(**named: object) -> None:
    for name, x in named.items():
        if x is not None:
            check_tensor(name, x, " or None")


def check_number(name: str, x: object, or_else: str = "") -> None:
    """A number, or a tensor of one or more, where an argument takes both."""
    if not isinstance(x, (int, float, Tensor)) and not isinstance(x, Real):  # of numpy, too
        raise ValueError(f"{name} must be a number or a tensor{or_else}, got {described(x)}")


def check_choice(name: str, value: object, valid: Iterable[str]) -> None:
    if value not in list(valid):  # a list or dictionary, too, is none of them
        raise ValueError(f"{name} must be one of {', '.join(valid)}; got {value!r}")


def check_positive(name: str, value: float, remedy: str) -> None:
    """A finite number > 0; a bool is none."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}; {remedy}")


def check_floating(name: str, x: Tensor, shape: str) -> None:
    """`shape` as documented, such as "(B,)" or "(B, T)": it is the number of dimensions that is checked."""
    check_tensor(name, x)
    dimensions = sum(letter.isalpha() for letter in shape)
    if x.dim() != dimensions or not x.is_floating_point():
        raise ValueError(f"{name} must be {shape} floating point, got {tuple(x.shape)} {x.dtype}")


def check_shape(name: str, x: Tensor, of: str, shape: Collection[int], hint: str = "") -> None:
    check_tensor(name, x)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have the shape of {of}, {tuple(shape)}, got {tuple(x.shape)}{hint}")


def check_logits(name: str, logits: Tensor, dtypes: Collection[torch.dtype] = LOGITS_DTYPES) -> None:
    if not isinstance(logits, Tensor) or logits.dtype not in dtypes:
        raise ValueError(f"{name} must be a bf16, fp16 or fp32 tensor, got {described(logits)}; convert it first")
    if logits.dim() < 1 or logits.shape[-1] == 0:
        raise ValueError(f"{name} must be (..., V) with V >= 1, got {tuple(logits.shape)}")


def check_logits_dtype(logits_dtype: torch.dtype | None, operands: torch.dtype) -> None:
    """None, fp32, or the dtype of hidden states and head: nothing narrower, and fp32 is as wide as sums are."""
    if logits_dtype not in (None, torch.float32, operands):
        raise ValueError(
            f"logits_dtype must be None, torch.float32 or the dtype of hidden and weight, {operands}; got "
            f"{logits_dtype!r}"
        )


def check_mask(mask: Tensor, of: str, shape: Collection[int], hint: str = "") -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise ValueError(f"mask must be a bool tensor, True where it counts, got {described(mask)}; use mask.bool()")
    check_shape("mask", mask, of, shape, hint)


def check_targets(targets: Tensor, name: str, x: Tensor, hint: str = "") -> None:
    """One target per row of x (..., V), called `name`, or K: then the targets have as many dimensions."""
    if not isinstance(targets, Tensor) or targets.dtype not in INTEGERS:
        raise ValueError(f"targets must be an integer tensor (int64 or int32), got {described(targets)}")
    several = targets.dim() == x.dim()
    if (targets.shape[:-1] if several else targets.shape) == x.shape[:-1]:
        return
    of, shape = f"the rows of {name} {tuple(x.shape)}", tuple(x.shape[:-1])
    if not several:
        check_shape("targets", targets, of, shape, hint)
    raise ValueError(f"targets (..., K) must begin with the shape of {of}, {shape}, got {tuple(targets.shape)}{hint}")


def check_softcap(softcap: float | None) -> None:
    if softcap is not None:
        check_positive("softcap", softcap, "pass None for no capping")


def rows_shape(x: Tensor, shift: bool) -> tuple[int, ...]:
    """Of x (..., V) or (..., H): (...), and for `shift` (B, T - 1), as the last position predicts no token."""
    if not shift:
        return tuple(x.shape[:-1])
    if x.dim() != 3:
        raise ValueError(f"shift=True takes (B, T, V) or (B, T, H), got {tuple(x.shape)}; add the batch dimension")
    return x.shape[0], max(x.shape[1] - 1, 0)


def check_temperature(temperature: float | Tensor, rows: tuple[int, ...]) -> None:
    """A number, or a tensor that broadcasts to one per row; `check_temperature_values` looks at its values."""
    if not isinstance(temperature, Tensor):
        is_number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        # the numbers themselves: torch.compile(dynamic=True) makes a symbol of a module's float, and a variant of it
        if not is_number or not 1e-6 <= temperature <= 1e6:
            raise ValueError(
                f"{_TEMPERATURE_RANGE}, or a tensor, got {temperature if is_number else described(temperature)}"
            )
        return
    sizes = zip(reversed(temperature.shape), reversed(rows), strict=False)
    fits = temperature.dim() <= len(rows) and all(size in (1, row) for size, row in sizes)
    if not fits or temperature.dtype.is_complex or temperature.dtype == torch.bool:
        raise ValueError(
            f"temperature must be a number or broadcastable to the outputs' shape {rows}, one per row, got "
            f"{described(temperature)}"
        )
    if temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError("the gradient of temperature is not supported; pass temperature.detach()")


def split_temperature(
    temperature: float | Tensor, rows: tuple[int, ...], device: torch.device
) -> tuple[float, Tensor | None]:
    """What the operators take, checked: a number and None, or 1 and one per row, (...) fp32."""
    check_temperature(temperature, rows)
    if not isinstance(temperature, Tensor):
        if not torch.compiler.is_compiling():
            return float(temperature), None
        temperature = torch.ones((), dtype=torch.float32, device=device) * temperature  # a number: a variant per value
    return 1.0, temperature.to(device, torch.float32).expand(rows)


def values_are_checked(device: torch.device) -> bool:
    """Where reading a tensor's values costs nothing, or was asked for."""
    return device.type == "cpu" or os.environ.get("FUSED_RL_CHECKED") == "1"


def check_target_values(targets: Tensor, mask: Tensor | None, vocab: int, several: bool = False) -> None:
    """`several`: the targets are (..., K), the mask (...)."""
    if targets.numel() == 0:
        return
    least, most = torch.aminmax(targets)  # one pass, where nothing is wrong
    if least.item() >= 0 and most.item() < vocab:
        return
    bad = (targets < 0) | (targets >= vocab)
    if mask is not None:
        bad = bad & (mask[..., None] if several else mask)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        row, which = (at[:-1], f"target {at[-1]}") if several else (at, "the target")
        raise ValueError(
            f"{which} of logits[{', '.join(map(str, row))}] is {targets[at].item()}, outside the vocabulary of "
            f"{vocab} (0 to {vocab - 1}); {int(bad.sum())} of {bad.numel()} targets are. {MASKED}"
        )


def check_temperature_values(row_temperature: Tensor | None, mask: Tensor | None) -> None:
    if row_temperature is None:
        return
    bad = ~((row_temperature >= LEAST_TEMPERATURE) & (row_temperature <= MOST_TEMPERATURE))  # NaN too
    bad = bad if mask is None else bad & mask
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{_TEMPERATURE_RANGE}, got {row_temperature[at].item()} for logits[{', '.join(map(str, at))}]"
        )


def no_second_derivative(name: str) -> Callable[..., None]:
    """The gradient of an op's gradient: an error that says where second derivatives are."""

    def refuse(ctx, *_):
        raise RuntimeError(
            f"{name} is differentiable once: its gradient has no gradient. For second derivatives use "
            f"fused_rl.reference.{name}"
        )

    return refuse
