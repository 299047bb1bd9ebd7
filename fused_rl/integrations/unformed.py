"""Logits of which only hidden states and LM head exist: what a patched model of transformers returns, and makes its
loss of.
"""

import contextlib
import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fused_rl.ops.linear_cross_entropy import linear_cross_entropy

__all__ = ["INSTEAD", "Call", "UnformedLogits", "attribute"]

INSTEAD = "or use Trainer(compute_loss_func=causal_lm_loss) instead of patch(model)"


@dataclass
class Call:
    """One forward of a patched model with labels."""

    # True for a forward that a backward pass may follow.
    recorded: bool = field(default_factory=torch.is_grad_enabled)
    running: bool = True
    # Held by whoever replaces a module's forward for a while.
    lock: Any = field(default_factory=threading.RLock)
    # The loss function leaves its results here: none means that the forward took another way.
    losses: list[Tensor] = field(default_factory=list)


@dataclass
class _Source:
    """What the logits are made of, and they themselves once something has used them."""

    call: Call
    head: nn.Linear
    hidden: Tensor  # (B, T, H)
    autocast: torch.dtype | None
    sample: list[Tensor | None]  # as `_sample` has it
    dtype: torch.dtype
    # What the forward did to the logits: a function and its further arguments each.
    steps: tuple[tuple, ...] = ()
    formed: Tensor | None = field(default=None, init=False)

    def then(self, function, *arguments, dtype: torch.dtype | None = None) -> "_Source":
        steps = (*self.steps, (function, *arguments))
        return replace(self, steps=steps, dtype=dtype or self.dtype)

    def form(self) -> Tensor:  # (B, T, V)
        device = self.hidden.device.type
        with torch.no_grad(), torch.autocast(device, self.autocast, self.autocast is not None):
            with self.call.lock:
                logits = _called(self.head, self.hidden)
            for function, *arguments in self.steps:
                logits = function(logits, *arguments)
        return logits


@contextlib.contextmanager
def attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """An attribute of the instance, for a while."""
    held = vars(owner)
    # None may be the value that is put back.
    missing = object()
    before = held.get(name, missing)
    held[name] = value
    try:
        yield
    finally:
        if before is missing:
            del held[name]
        else:
            held[name] = before


def _called(head: nn.Linear, hidden: Tensor) -> Tensor:
    """The head's product; its hooks, which may gather its weights, run again, and what they return is dropped."""
    forward = head.forward
    thread = threading.get_ident()
    returned = []

    def once(given: Tensor) -> Tensor:
        # A call without labels may run in another thread.
        if threading.get_ident() != thread:
            return forward(given)
        returned.append(forward(hidden))
        return returned[0]

    with attribute(head, "forward", once):
        head(hidden)
    return returned[0]


def _sample(head: nn.Linear) -> list[Tensor | None]:
    """About a thousand numbers of each of the head's tensors, since PyTorch does not count every write."""
    tensors = [p.detach() for p in head.parameters()]
    return [_part(x) if type(x) is Tensor else None for x in tensors]


def _part(x):
    steps = [max(1, n // 32) for n in x.shape]
    return x[tuple(slice(None, None, step) for step in steps)].clone()


def _same(before: Tensor | None, now: Tensor | None) -> bool:
    # A sharded weight has another form outside the forward than in it.
    if before is None or now is None or before.shape != now.shape:
        return True
    return before.dtype == now.dtype and torch.allclose(before, now, 0, 0, equal_nan=True)


class UnformedLogits(Tensor):
    """Logits (B, T, V) of which only hidden states and head exist, until something uses them.

    In the forward they take what models do to logits on the way to the loss: a number as factor or divisor, tanh, a
    cast; any other use is an error. After a forward under `torch.no_grad()` the first use forms them, once and in the
    dtype that the model gives them, and from then on they are that tensor. After a training step every use is an error.
    """

    @staticmethod
    def __new__(cls, source: _Source):
        shape = (*source.hidden.shape[:-1], source.head.out_features)
        device = source.hidden.device
        return Tensor._make_wrapper_subclass(cls, shape, dtype=source.dtype, device=device)

    def __init__(self, source: _Source):
        super().__init__()
        self.source = source

    @classmethod
    def of_head(cls, call: Call, head: nn.Linear, hidden: Tensor) -> "UnformedLogits":
        """What the head of a patched model returns for hidden states (B, T, H)."""
        device = hidden.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        dtype = autocast or hidden.dtype
        sample = [] if call.recorded else _sample(head)
        return cls(_Source(call, head, hidden, autocast, sample, dtype))

    def _product(self, function, other, name):
        # After the forward they are a tensor as any other.
        if not self.source.call.running:
            return function(self._formed(name), other)
        if not isinstance(other, Real):
            self._refuse(f"a {name} with a tensor")
        return UnformedLogits(self.source.then(function, float(other)))

    def __mul__(self, other: Any) -> Tensor:
        return self._product(operator.mul, other, "product")

    def __truediv__(self, other: Any) -> Tensor:
        return self._product(operator.truediv, other, "quotient")

    def __imul__(self, other: Any) -> Tensor:
        return self * other if self.source.call.running else super().__imul__(other)

    def __itruediv__(self, other: Any) -> Tensor:
        return self / other if self.source.call.running else super().__itruediv__(other)

    __rmul__ = __mul__

    def tanh(self) -> Tensor:
        if not self.source.call.running:
            return self._formed("tanh").tanh()
        if any(function is torch.tanh for function, *_ in self.source.steps):
            self._refuse("a second tanh")
        return UnformedLogits(self.source.then(torch.tanh))

    def to(self, *arguments: Any, **options: Any) -> Tensor:
        if self.source.formed is not None:
            return self.source.formed.to(*arguments, **options)
        # PyTorch's parser does not take this one.
        copy = options.pop("copy", False)
        device, dtype, *_ = torch._C._nn._parse_to(*arguments, **options)
        # The loss is made where the hidden states are.
        moved = copy or device not in (None, self.device)
        if moved and not self.source.call.running:
            return self._formed("to").to(*arguments, **options, copy=copy)
        if dtype in (None, self.dtype):
            return self
        return UnformedLogits(self.source.then(Tensor.to, dtype, dtype=dtype))

    def float(self) -> Tensor:
        return self.to(torch.float32)

    def half(self) -> Tensor:
        return self.to(torch.float16)

    def bfloat16(self) -> Tensor:
        return self.to(torch.bfloat16)

    def double(self) -> Tensor:
        return self.to(torch.float64)

    def contiguous(self, **options: Any) -> Tensor:
        return self

    def clone(self, **options: Any) -> Tensor:
        # DDP clones all that a model returns.
        if self.source.call.recorded:
            return UnformedLogits(self.source)
        return self._formed("clone").clone(**options)

    def detach(self) -> Tensor:
        # DeepSpeed's hooks detach all that a module returns. Both are one tensor.
        formed = self.source.formed
        return UnformedLogits(self.source) if formed is None else formed.detach()

    def __repr__(self, **options: Any) -> str:
        call = self.source.call
        if call.recorded or call.running:
            return f"UnformedLogits(shape={tuple(self.shape)})"
        return self._formed("repr").__repr__(**options)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _METADATA and args[0].source.formed is None:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function is torch.tanh:
            return args[0].tanh()
        return cls._formed_first(function, torch.overrides.resolve_name(function), args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return cls._formed_first(operator, str(operator), args, kwargs or {})

    @classmethod
    def _formed_first(cls, function, name, args, kwargs):
        args, kwargs = tree_map_only(cls, lambda logits: logits._formed(name), (args, kwargs))
        return function(*args, **kwargs)

    def _refuse(self, operation: str) -> NoReturn:
        raise RuntimeError(
            f"these logits were not formed, and {operation} needs them. On the way to the loss a patched model may "
            "only scale, cap (tanh) and cast its logits, and after a forward that records gradients there are none: "
            f"call the model under torch.no_grad() to read them, {INSTEAD}"
        )

    def _formed(self, operation: str) -> Tensor:  # (B, T, V)
        source = self.source
        if source.call.recorded or source.call.running:
            self._refuse(operation)
        if source.formed is None:
            now = _sample(source.head)
            if not all(map(_same, source.sample, now)):
                raise RuntimeError(
                    "the LM head was changed after the forward that returned these logits, which are formed at their "
                    "first use; use them, or clone() them, before the weights change"
                )
            source.formed = source.form()
        return source.formed

    def mean_loss(
        self, targets: Tensor, count: Tensor | int | None = None, **options: Any
    ) -> Tensor:
        """fp32: the mean of -log p(target), or the sum over `count`; `targets` (B, T), `options` of the op."""
        source = self.source
        # scale * tanh(inside * z), or without a cap scale * z
        scale, inside = 1.0, None
        for function, *arguments in source.steps:
            if function is torch.tanh:
                scale, inside = 1.0, scale
            elif function is not Tensor.to:
                scale = function(scale, *arguments)
        temperature, softcap = 1 / scale, None
        if inside is not None:
            # With cap(z) = tanh(inside * z) / inside, these logits are cap(z) * scale * inside.
            temperature = 1 / (scale * inside)
            softcap = 1 / inside
            if options.get("label_smoothing"):
                raise ValueError(
                    "this model caps its logits (tanh), and label_smoothing of a patched model needs logits without a "
                    "cap; pass it to causal_lm_loss, as Trainer(compute_loss_func=partial(causal_lm_loss, "
                    "label_smoothing=...)), instead of patch(model)"
                )
        # Read here and not earlier: DeepSpeed gathers a partitioned weight at this access.
        head, bias = source.head.weight, source.head.bias
        return linear_cross_entropy(
            source.hidden,
            head,
            targets,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
            num_tokens=count,
            **options,
        )


# Reading these forms no logits, so they pass where every other function is refused.
_PROPERTIES = (
    "shape",
    "ndim",
    "dtype",
    "device",
    "layout",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "requires_grad",
    "grad_fn",
)
_METHODS = ("size", "dim", "numel", "nelement", "element_size", "get_device", "is_floating_point")
_METADATA = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_METADATA |= {getattr(Tensor, name) for name in _METHODS}
