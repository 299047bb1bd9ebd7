"""Checks of the public functions' arguments: each raises a ValueError that says what came and what to do about it."""

import difflib
import functools
import math
import os
from collections.abc import Callable, Collection, Iterable
from numbers import Real
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fused_rl.base.shards import check_gathered, is_dtensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOATING = (*LOGITS_DTYPES, torch.float64)
# Within these logits / temperature and its gradient stay far from the ends of fp32.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e6
MASKED = "Give positions to ignore False in mask"
CHECKED = os.environ.get("FUSED_RL_CHECKED") == "1"
_SHIFTED_MASK = "; shift=True takes mask[:, 1:] of a mask over all T tokens"
_SHIFTED_TARGETS = "; shift=True takes the targets of all T positions and drops the first itself"
# Tensors of exactly these types have memory of their own: the checks look no further. Nothing but a
# shard, a subclass or what is no tensor pays for the calls that find out what it is.
PLAIN = (Tensor, torch.nn.Parameter)


class Interval(NamedTuple):
    """The numbers between `low` and `high`, and those of the two that stand in `ends`; NaN is in none."""

    low: float
    high: float
    ends: tuple[float, ...] = ()


# What a number may be, in the words that say so.
RANGES = {
    "a finite number": Interval(-math.inf, math.inf),
    "a finite number above 0": Interval(0, math.inf),
    "a finite number, 0 or more": Interval(0, math.inf, (0,)),
    "a number, 0 or more, or inf": Interval(0, math.inf, (0, math.inf)),
    "a number from 0 to 1": Interval(0, 1, (0, 1)),
    "a number above 0, at most 1": Interval(0, 1, (1,)),
    "a number above 0, below 1": Interval(0, 1),
    "a number from 0 to below 0.5": Interval(0, 0.5, (0,)),
}
# The types of numbers with such a range.
Finite = Annotated[float, "a finite number"]
Positive = Annotated[float, "a finite number above 0"]
NonNegative = Annotated[float, "a finite number, 0 or more"]
MayBeInf = Annotated[float, "a number, 0 or more, or inf"]
Fraction = Annotated[float, "a number above 0, at most 1"]
_TEMPERATURE_RANGE = (
    "temperature must be a number from 1e-06 to 1e+06 (0.01 comes close to the greedy choice)"
)


def described(x: object) -> str:
    """Describe a value in a few words, with the tensor inside a model's output, a module or one of our tuples."""
    if isinstance(x, Tensor):
        kind = "DTensor " if is_dtensor(x) else ""
        layout = "" if x.layout == torch.strided else f" {x.layout}"
        return f"{kind}{x.dtype} {tuple(x.shape)}{layout}"
    # Whoever passes a whole output or module learns which of its attributes is the tensor.
    held = [
        name
        for name in ("logits", "logprobs", "weight")
        if isinstance(getattr(x, name, None), Tensor)
    ]
    if held:
        return f"{type(x).__name__}, whose .{held[0]} is a tensor"
    return f"{type(x).__name__} {_shortened(repr(x))}"


def _shortened(text):
    shown = " ".join(text.split())
    return shown if len(shown) <= 60 else shown[:60] + "…"


def check_tensor(name: str, x: Any, or_else: str = "") -> None:
    """`or_else`: what else it may have been, such as " or None"; the caller lets that pass."""
    if type(x) in PLAIN and x.layout == torch.strided:
        return
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor{or_else}, got {described(x)}")
    check_plain(name, x)


def check_plain(name: str, x: Tensor) -> None:
    """No DTensor: it has no memory of its own that a kernel could read."""
    if is_dtensor(x):
        remedy = "pass its to_local() or full_tensor()"
        raise ValueError(f"{name} must be a plain tensor, got {described(x)}; {remedy}")


def check_head_tensors(**named: object) -> None:
    """Weights and biases, which may be sharded; a bias may be None."""
    for name, x in named.items():
        if not isinstance(x, Tensor) and not (x is None and name.endswith("bias")):
            check_tensor(name, x, " or None" if name.endswith("bias") else "")
    check_gathered(**named)


def check_tensors(**named: object) -> None:
    for name, x in named.items():
        check_tensor(name, x)


def is_number(x: object) -> bool:
    """One of numpy, too; a bool is none."""
    return isinstance(x, (int, float, Real)) and not isinstance(x, bool)


def check_range(name: str, x: Any, words: str, remedy: str = "") -> None:
    """Check a number of `RANGES`, in this one call: a loss has twenty of them."""
    low, high, ends = RANGES[words]
    # The exact types come first, because they need no further call.
    number = type(x) in (int, float) or is_number(x)
    if not number or not (low < x < high or x in ends):
        raise ValueError(f"{name} must be {words}, got {x if number else described(x)}{remedy}")


def check_flag(name: str, x: object) -> None:
    """Else "no" and "none" would be yes."""
    if not isinstance(x, bool):
        raise ValueError(f"{name} must be True or False, got {described(x)}")


def check_count(name: str, count: object, mask: Tensor) -> None:
    """Check the whole step's denominator of a sum over `mask`: any finite number above 0, or 0 if nothing counts."""
    if count is None:
        return
    value, remedy = count, "; pass None for that of this batch"
    if isinstance(count, Tensor):
        if count.dim() or count.dtype.is_complex or count.dtype == torch.bool:
            raise ValueError(
                f"{name} must be a number or a tensor of one, (), got {described(count)}{remedy}"
            )
        # `item()` would break a compiled graph, and wait for a GPU.
        if torch.compiler.is_compiling() or not values_are_checked(count.device):
            return
        value = count.item()
    check_range(name, value, "a finite number, 0 or more", remedy)
    if (
        # For an empty batch `divisor` makes 1 of 0, and would do so for tokens that count, too.
        value == 0
        and not torch.compiler.is_compiling()
        and values_are_checked(mask.device)
        and mask.any()
    ):
        raise ValueError(
            f"{name} is 0, but {int(mask.sum())} places of the mask count; pass the whole step's, or None"
        )


def check_choice(name: str, value: object, valid: Iterable[str]) -> None:
    # Of a list, because a value without a hash, such as a dictionary, is none of them, too.
    if value not in (names := list(valid)):
        nearest = difflib.get_close_matches(str(value), names, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ValueError(
            f"{name} must be one of {', '.join(names)}; got {_shortened(repr(value))}{hint}"
        )


def check_floating(name: str, x: Tensor, shape: str = "") -> None:
    """`shape` as documented, such as "(B,)" or "(B, T)": it is the number of dimensions that is checked."""
    check_tensor(name, x)
    fits = not shape or x.dim() == sum(letter.isalpha() for letter in shape)
    if not fits or x.dtype not in FLOATING:
        wanted = f"{shape} floating point".strip()
        remedy = "" if x.dtype in FLOATING else f"; {name}.float() makes it so"
        raise ValueError(f"{name} must be {wanted}, got {tuple(x.shape)} {x.dtype}{remedy}")


def check_shape(name: str, x: Tensor, of: str, shape: Collection[int], hint: str = "") -> None:
    check_tensor(name, x)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{name} must have the shape of {of}, {tuple(shape)}, got {tuple(x.shape)}{hint}"
        )


def check_like(name: str, x: Tensor, of: str, like: Tensor) -> None:
    """Check that x is floating point, of the shape and on the device of `like`, which is called `of`."""
    # Every loss comes here with each of its tensors: the usual one passes on comparisons alone, and
    # the checks below are called for what is wrong with the others.
    if type(x) not in PLAIN or x.layout != torch.strided or x.dtype not in FLOATING:
        check_floating(name, x)
    if x.shape != like.shape or x.device != like.device:
        check_shape(name, x, of, like.shape)
        check_device(name, x, like.device, of)


def check_logits(
    name: str, logits: Tensor, dtypes: Collection[torch.dtype] = LOGITS_DTYPES
) -> None:
    if (
        not isinstance(logits, Tensor)
        or logits.dtype not in dtypes
        or logits.layout != torch.strided
    ):
        raise ValueError(
            f"{name} must be a bf16, fp16 or fp32 tensor, got {described(logits)}; convert it first"
        )
    if type(logits) not in PLAIN:
        check_plain(name, logits)
    if logits.dim() < 1 or logits.shape[-1] == 0:
        raise ValueError(f"{name} must be (..., V) with V >= 1, got {tuple(logits.shape)}")


def check_logits_dtype(logits_dtype: torch.dtype | None, operands: torch.dtype) -> None:
    """None, fp32, or the dtype of hidden states and head: nothing narrower, and fp32 is as wide as sums are."""
    if logits_dtype not in (None, torch.float32, operands):
        wanted = f"None, torch.float32 or the dtype of hidden and weight, {operands}"
        raise ValueError(f"logits_dtype must be {wanted}; got {logits_dtype!r}")


def check_mask(
    mask: Tensor, of: str, shape: Collection[int], device: torch.device, hint: str = ""
) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        remedy = "use mask.bool()" if isinstance(mask, Tensor) else "use torch.as_tensor(mask)"
        raise ValueError(
            f"mask must be a bool tensor, True where it counts, got {described(mask)}; {remedy}"
        )
    check_shape("mask", mask, of, shape, hint)
    check_device("mask", mask, device, of)


def check_device(name: str, x: Tensor, device: torch.device, of: str) -> None:
    if x.device != device:
        raise ValueError(
            f"{name} must be on the device of {of}, {device}, got {x.device}; move it there"
        )


def check_targets(targets: Tensor, name: str, x: Tensor, shift: bool) -> None:
    """One target per row of x (..., V), called `name`, or K: then the targets have as many dimensions."""
    if not isinstance(targets, Tensor) or targets.dtype not in INTEGERS:
        raise ValueError(
            f"targets must be an integer tensor (int64 or int32), got {described(targets)}"
        )
    if type(targets) not in PLAIN:
        check_plain("targets", targets)
    several = targets.dim() == x.dim()
    if (targets.shape[:-1] if several else targets.shape) == x.shape[:-1]:
        return
    of, shape = f"the rows of {name} {tuple(x.shape)}", tuple(x.shape[:-1])
    hint = _SHIFTED_TARGETS if shift else ""
    # One target per row has a shape to name; of K targets only the leading dimensions are known.
    if not several:
        check_shape("targets", targets, of, shape, hint)
    raise ValueError(
        f"targets (..., K) must begin with the shape of {of}, {shape}, got {tuple(targets.shape)}{hint}"
    )


def check_softcap(softcap: float | None) -> None:
    if softcap is not None:
        check_range("softcap", softcap, "a finite number above 0", "; pass None for no capping")


def check_rows(x: Tensor, mask: Tensor | None, shift: bool) -> tuple[int, ...]:
    """Return the shape (...) of x (..., V) or (..., H); (B, T - 1) for `shift`: the last position predicts no token."""
    if not isinstance(shift, bool):
        check_flag("shift", shift)
    if shift and x.dim() != 3:
        raise ValueError(
            f"shift=True takes (B, T, V) or (B, T, H), got {tuple(x.shape)}; add the batch dimension"
        )
    rows = (x.shape[0], max(x.shape[1] - 1, 0)) if shift else tuple(x.shape[:-1])
    if mask is not None:
        check_mask(mask, "the outputs", rows, x.device, _SHIFTED_MASK if shift else "")
    return rows


def check_temperature(
    temperature: float | Tensor, rows: tuple[int, ...], device: torch.device
) -> None:
    """A number, or a tensor that broadcasts to one per row; `check_temperature_values` looks at its values."""
    if not isinstance(temperature, Tensor):
        # The bounds are written out, because torch.compile(dynamic=True) makes a symbol of a
        # module's float, and with it another variant of the graph.
        if not is_number(temperature) or not 1e-6 <= temperature <= 1e6:
            shown = temperature if is_number(temperature) else described(temperature)
            raise ValueError(f"{_TEMPERATURE_RANGE}, or a tensor, got {shown}")
        return
    check_plain("temperature", temperature)
    # Broadcasting aligns shapes at their last dimension.
    sizes = zip(reversed(temperature.shape), reversed(rows), strict=False)
    fits = temperature.dim() <= len(rows) and all(size in (1, row) for size, row in sizes)
    if not fits or temperature.dtype.is_complex or temperature.dtype == torch.bool:
        raise ValueError(
            f"temperature must be a number or broadcastable to the outputs' shape {rows}, one per row, got "
            f"{described(temperature)}"
        )
    # A single number may come from anywhere: `split_temperature` moves it.
    if temperature.dim():
        check_device("temperature", temperature, device, "the rows")
    # The operators have no gradient for it, so a learned temperature would never change.
    if temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError("the gradient of temperature is not supported; pass temperature.detach()")


def split_temperature(
    temperature: float | Tensor, rows: tuple[int, ...], device: torch.device
) -> tuple[float, Tensor | None]:
    """Return a checked temperature for the operators: a number and None, or 1 and one per row, (...) fp32."""
    if type(temperature) is not float or not 1e-6 <= temperature <= 1e6:
        check_temperature(temperature, rows, device)
    if not isinstance(temperature, Tensor):
        if not torch.compiler.is_compiling():
            return float(temperature), None
        # In a compiled graph a number is a constant, and each value would be compiled anew.
        temperature = torch.ones((), dtype=torch.float32, device=device) * temperature
    return 1.0, temperature.to(device, torch.float32).expand(rows)


def check_finite(name: str, x: Tensor, remedy: str) -> None:
    """Refuse NaN and infinity, where reading values costs nothing."""
    if torch.compiler.is_compiling() or not values_are_checked(x.device):
        return
    # Of finite numbers the sum is finite, too, as a rule: one look at all of them.
    if math.isfinite(x.sum()):
        return
    bad = ~x.isfinite()
    if bad.any():
        i = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}{i} is {x[tuple(i)].item()}, {int(bad.sum())} of {x.numel()} are not finite; {remedy}"
        )


def values_are_checked(device: torch.device) -> bool:
    """Return True where reading a tensor's values costs nothing, or is switched on."""
    return CHECKED or device.type == "cpu"


def check_target_values(
    targets: Tensor, mask: Tensor | None, vocab: int, several: bool = False
) -> None:
    """`several`: the targets are (..., K), the mask (...)."""
    if targets.numel() == 0:
        return
    if targets.dim() == 1 and targets.numel() <= 64:
        # Of so few targets a list takes a quarter of the operators' time.
        ids = targets.tolist()
        least, most = min(ids), max(ids)
    else:
        least, most = torch.aminmax(targets)
        least, most = least.item(), most.item()
    if least >= 0 and most < vocab:
        return
    # Something lies outside; it is an error only where the mask counts it.
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
    # As a negation, so that NaN is refused, too.
    bad = ~((row_temperature >= LEAST_TEMPERATURE) & (row_temperature <= MOST_TEMPERATURE))
    bad = bad if mask is None else bad & mask
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{_TEMPERATURE_RANGE}, got {row_temperature[at].item()} for logits[{', '.join(map(str, at))}]"
        )


def check_process_group(group: object) -> None:
    """Refuse what `new_group` returns outside the group, a number, with which a reduction would reduce nothing."""
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        wanted = "a torch.distributed.ProcessGroup that this rank is in, or None"
        raise ValueError(
            f"process_group must be {wanted}, got {described(group)}; of a DeviceMesh take get_group()"
        )


def no_second_derivative(name: str) -> Callable[..., None]:
    """The gradient of an op's gradient: an error that says where second derivatives are."""

    def refuse(ctx, *_):
        remedy = f"For second derivatives use {_definition(name)}"
        raise RuntimeError(f"{name} is differentiable once: its gradient has no gradient. {remedy}")

    return refuse


def once_differentiable(name: str) -> Callable:
    """Decorate `backward`: a second derivative raises, where torch's decorator of this name may leave it out."""
    # An identity on a gradient, whose own derivative is the error.
    refusing = type(
        "Once", (torch.autograd.Function,), {"backward": staticmethod(no_second_derivative(name))}
    )
    refusing.forward = staticmethod(lambda ctx, gradient, *inputs: gradient.view_as(gradient))

    def decorate(backward):
        @functools.wraps(backward)
        def guarded(ctx, *upstream):
            with torch.no_grad():
                gradients = backward(ctx, *upstream)
            # Gradients are enabled in a backward pass for create_graph=True alone.
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return gradients
            # It hangs on all that the gradient depends on, so any second derivative meets it.
            inputs = [
                x for x in (*ctx.saved_tensors, *upstream) if x is not None and x.requires_grad
            ]
            return tuple(None if d is None else refusing.apply(d, *inputs) for d in gradients)

        return guarded

    return decorate


def check_transforms(name: str, *tensors: Tensor | None) -> None:
    """An operator without a rule for these transforms would return a derivative of 0."""
    if torch.compiler.is_compiling():
        return
    # As a rule no level is entered, and no tensor has to be unpacked.
    dual = forward_ad._current_level >= 0
    if dual:
        dual = any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    if torch._C._are_functorch_transforms_active() or dual:
        raise RuntimeError(
            f"{name} supports neither torch.func transforms (grad, vmap, jvp, ...) nor forward-mode differentiation; "
            f"use torch.autograd, or {_definition(name)}"
        )


def _definition(name):
    plain_name = name.removeprefix("vocab_parallel_")
    return f"fused_rl.reference.{plain_name}" + (
        " of the whole logits" if plain_name != name else ""
    )
