"""TRL's chunked divergence of a student's and a teacher's head on our KL and Jensen-Shannon row functions.

As `fused_rl.ops.linear_kl`, and beyond it what TRL's function has: logits in fp32 from 16-bit products, a scale and a
soft cap for each head, and the student's entropy beside the divergence.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fused_rl.base.backend import backend_of
from fused_rl.kernels.states import JensenShannonSums, shares_of
from fused_rl.ops import tiles

# At once there are four of one size: the logits of both heads in fp32, and one gradient in fp32 and
# in the dtype of the products.
_TILES = 4


class Scale(NamedTuple):
    """How a head's products become logits: cap(scale * product)."""

    scale: float
    softcap: float | None
    dtype: torch.dtype  # of the products' factors


class Pair(NamedTuple):
    """Two heads, and what is taken of them: KL(teacher || student) at beta 0, KL(student || teacher) at 1.

    Between them the Jensen-Shannon divergence, in whose mixture the teacher has a weight of beta.
    """

    beta: float
    inv_temperature: float
    student: Scale
    teacher: Scale

    @property
    def is_mixture(self) -> bool:
        return 0 < self.beta < 1


def project(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Scale, buffer: Tensor
) -> Tensor:
    """(n, H), (V, H), (V,) | None -> logits (n, V) fp32 in the storage of `buffer`."""
    n, vocab = hidden.shape[0], weight.shape[0]
    out = buffer[: n * vocab].view(n, vocab)
    # Of 16-bit operands torch would round the product to 16 bits.
    if hidden.dtype == torch.float32:
        torch.mm(hidden, weight.t(), out=out)
    else:
        tiles.product(hidden, weight, out)
    if bias is not None:
        out.add_(bias)
    if scale.scale != 1:
        out.mul_(scale.scale)
    if scale.softcap is not None:
        out.div_(scale.softcap).tanh_().mul_(scale.softcap)
    return out


def unscaled(dlogits: Tensor, logits: Tensor, scale: Scale) -> Tensor:
    """The gradient of the products from that of the logits, in its place."""
    if scale.softcap is not None:
        dlogits.mul_(1 - (logits / scale.softcap).square_())
    return dlogits if scale.scale == 1 else dlogits.mul_(scale.scale)


def cast(scale: Scale, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple:
    # The bias is added to fp32 logits, so it is not rounded.
    return hidden.to(scale.dtype), weight.to(scale.dtype), None if bias is None else bias.float()


class _Tiles:
    """Blocks of rows with the logits of both heads, the same in the forward and in the backward pass."""

    def __init__(self, student, teacher, pair):
        self.student = cast(pair.student, *student)
        self.teacher = cast(pair.teacher, *teacher)
        self.pair = pair
        hidden, weight = student[:2]
        # States are kept by block, so both passes have to cut the same blocks.
        budget = tiles.budget(None, hidden, len(weight), False, torch.float32)
        self.rows = tiles.tile_rows(
            hidden, len(weight) * _TILES * budget.dtype.itemsize, budget.bytes
        )
        self.buffers = hidden.new_empty(2, self.rows * len(weight), dtype=torch.float32)

    def __iter__(self):
        """(rows, the student's logits, x and y of which KL(x || y) is the divergence)."""
        hidden, weight, bias = self.student
        other_hidden, other_weight, other_bias = self.teacher
        for rows in tiles.blocks(len(hidden), self.rows):
            logits = project(hidden[rows], weight, bias, self.pair.student, self.buffers[0])
            teacher_logits = project(
                other_hidden[rows], other_weight, other_bias, self.pair.teacher, self.buffers[1]
            )
            x, y = (teacher_logits, logits) if self.pair.beta == 0 else (logits, teacher_logits)
            yield rows, logits, x[None], y[None]


class HeadDivergence(torch.autograd.Function):
    """Twice (N, H), (V, H), (V,) | None -> divergence (N,) and the student's entropy (N,), fp32.

    The divergence is differentiable with respect to the student's, whose gradients are summed in fp32 and come in the
    dtypes of those.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, t_hidden, t_weight, t_bias, pair, gathered):
        ctx.set_materialize_grads(False)
        n, backend = len(hidden), backend_of(hidden.device)
        # The operator takes targets, and none of them is looked at.
        targets = torch.zeros(n, dtype=torch.long, device=hidden.device)
        divergence, entropy = (hidden.new_zeros(n, dtype=torch.float32) for _ in range(2))
        states, sums = [], []
        with gathered(weight, bias), gathered(t_weight, t_bias):
            for rows, logits, x, y in _Tiles(
                (hidden, weight, bias), (t_hidden, t_weight, t_bias), pair
            ):
                # The divergence, and what a row leaves for its gradient.
                divergence[rows], state = backend.kl.kl_fwd(x, y, None, pair.inv_temperature)
                states.append(state)
                if pair.is_mixture:
                    options = None, shares_of(pair.beta)  # no soft cap: the tiles have theirs
                    sums.append(
                        backend.jensen_shannon.js_fwd(
                            x, y, None, pair.inv_temperature, state, *options
                        )
                    )
                    divergence[rows] = JensenShannonSums(*sums[-1]).divergence
                # The student's entropy is a metric, for which its logits are at hand.
                entropy[rows] = backend.logprob.logprob_fwd(
                    logits, targets[rows], None, pair.inv_temperature, None
                ).entropy
        inputs = hidden, weight, bias, t_hidden, t_weight, t_bias
        # A caller may change the returned divergence in place, hence the clone.
        ctx.save_for_backward(*inputs, divergence.clone(), *states, *sums)
        ctx.options = pair, gathered, len(states)
        ctx.mark_non_differentiable(entropy)
        return divergence, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, _):
        pair, gathered, count = ctx.options
        if g is None:
            return (None,) * 8
        *inputs, divergence = ctx.saved_tensors[:7]
        student, teacher = inputs[:3], inputs[3:]
        states = ctx.saved_tensors[7 : 7 + count]
        sums = ctx.saved_tensors[7 + count :]
        # ZeRO 3 has partitioned the heads again since the forward pass.
        with gathered(*student[1:]), gathered(*teacher[1:]):
            gradients = _gradients(
                ctx.needs_input_grad,
                g.contiguous(),
                student,
                teacher,
                pair,
                divergence,
                states,
                sums,
            )
        return *gradients.take(), *(None,) * 5


def _gradients(needs, g, student, teacher, pair, divergence, states, sums):
    both_heads = _Tiles(student, teacher, pair)
    hidden, head, bias = both_heads.student
    dtypes = tuple(None if x is None else x.dtype for x in student)
    gradients = tiles.Gradients(needs, hidden, head, bias, (both_heads.rows, len(head)), dtypes)
    kl_bwd = backend_of(hidden.device).kl.kl_bwd
    # The kernel has a gradient for either side; the teacher's is not needed.
    wants = (False, True) if pair.beta == 0 else (True, False)
    options = None, shares_of(pair.beta) if pair.is_mixture else None
    for i, (rows, logits, x, y) in enumerate(both_heads):
        of_rows = divergence[rows], states[i], sums[i] if sums else None
        both = kl_bwd(g[rows], x, y, None, pair.inv_temperature, *of_rows, *wants, *options)
        dlogits = unscaled(both[wants.index(True)][0], logits, pair.student)
        gradients.add(dlogits, hidden[rows], head, rows, slice(0, len(head)))
        # Otherwise they would stay while those of the next tile are formed.
        del both, dlogits
    return gradients
