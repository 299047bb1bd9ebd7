"""Logits of which only hidden states and LM head exist: what the head of a patched model of transformers returns in a
training step, and makes its loss of.
"""

from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fused_rl.ops.linear_cross_entropy import linear_cross_entropy

INSTEAD = "or use Trainer(compute_loss_func=causal_lm_loss) instead of patch(model)"


def _refusal(operation: str | None) -> str:
    return (
        f"these logits were not formed, and {operation} needs them: a patched model has none in a training step with "
        "labels, and may only scale, cap (tanh) and cast them on the way to the loss; call the model under "
        f"torch.no_grad() to read them, {INSTEAD}"
    )


class UnformedLogits:
    """Logits (B, T, V) that take what models do to them on the way to the loss: a number as factor or divisor, tanh, a
    cast. Any other use is an error.
    """

    def __init__(
        self, head: nn.Linear, hidden: Tensor, scale: float = 1.0, inside: float | None = None
    ):
        self.head = head
        self.hidden = hidden  # (B, T, H)
        # The logits are scale * tanh(inside * z), or without a cap scale * z.
        self.scale = scale
        self.inside = inside
        self.shape = torch.Size((*hidden.shape[:-1], head.out_features))
        self.device = hidden.device
        self.dtype = hidden.dtype

    @property
    def softcap(self) -> float | None:
        """The cap of the head's logits z, or None: cap(z) = tanh(inside * z) / inside."""
        return None if self.inside is None else 1 / self.inside

    @property
    def temperature(self) -> float:
        """What cap(z), or z without a cap, is divided by: these logits are cap(z) * scale * inside, or z * scale."""
        return 1 / (self.scale * (self.inside or 1))

    def _scaled(self, other, operation, scale):
        if not isinstance(other, Real):
            raise RuntimeError(_refusal(f"a {operation} with a tensor"))
        return UnformedLogits(self.head, self.hidden, scale(float(other)), self.inside)

    def __mul__(self, other: Any) -> "UnformedLogits":
        return self._scaled(other, "product", lambda factor: self.scale * factor)

    def __truediv__(self, other: Any) -> "UnformedLogits":
        return self._scaled(other, "quotient", lambda divisor: self.scale / divisor)

    __rmul__ = __mul__

    def tanh(self) -> "UnformedLogits":
        if self.inside is not None:
            raise RuntimeError(_refusal("a second tanh"))
        return UnformedLogits(self.head, self.hidden, inside=self.scale)

    # The loss is made in fp32, where the hidden states are.
    def to(self, *arguments: Any, **options: Any) -> "UnformedLogits":
        return self

    float = half = bfloat16 = double = contiguous = to

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.tanh:
            return args[0].tanh()
        raise RuntimeError(_refusal(torch.overrides.resolve_name(function)))

    def __getattr__(self, name: str) -> NoReturn:
        # So that hasattr is False.
        raise AttributeError(_refusal(name))

    def mean_loss(
        self, targets: Tensor, count: Tensor | int | None = None, **options: Any
    ) -> Tensor:
        """fp32: the mean of -log p(target), or the sum over `count`; `targets` (B, T), `options` of the op."""
        if self.inside is not None and options.get("label_smoothing"):
            raise ValueError(
                "this model caps its logits (tanh), and label_smoothing of a patched model needs logits without a "
                "cap; pass it to causal_lm_loss, as Trainer(compute_loss_func=partial(causal_lm_loss, "
                "label_smoothing=...)), instead of patch(model)"
            )
        # Read here and not earlier: DeepSpeed gathers a partitioned weight at this access.
        head, bias = self.head.weight, self.head.bias
        return linear_cross_entropy(
            self.hidden,
            head,
            targets,
            bias=bias,
            temperature=self.temperature,
            softcap=self.softcap,
            num_tokens=count,
            **options,
        )


def _refuse(operation):
    def refused(*_):
        raise RuntimeError(_refusal(operation))

    return refused


# Python looks these up in the class alone.
for _name in ("getitem", "setitem", "iter", "add", "radd", "sub", "rsub", "neg", "pow", "lt", "gt"):
    setattr(UnformedLogits, f"__{_name}__", _refuse(_name))
