"""The optimizer step of ZeRO 0 to 2 on a CPU: DeepSpeed's bits and checkpoints, without its copies.

DeepSpeed's own step copies a gradient into fresh memory up to six times, once of them in fp64 for the norm: 13 to 19
times what Adam and the norm take (`python -m bench.repro.optimizer_step`). Here the norm is one read of the gradient,
and what else there is to do is done span by span, in the cache: fp32 gradient, clipping, Adam, weights of 16 bits.

DeepSpeed's own step stays on a GPU, with offload and under ZeRO 3, and for a version of it that was never compared.
"""

import functools
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist

from fused_rl.optim import sum_of_squares
from fused_rl.trainers.base.ranks import rank, world_size
from fused_rl.trainers.options.config import EngineConfig

COMPARED = ("0.19.8",)  # versions of DeepSpeed whose step gives these bits
SPAN = 1 << 18  # elements that stay in the cache; of whole vectors, which decide about a weight's last bit

_log = logging.getLogger(__name__)


def own_step(config: EngineConfig) -> bool:
    """Whether the step of an engine of ZeRO 0 to 2 is the one here."""
    served = not torch.cuda.is_available() and not config.offload and config.zero_stage < 3
    return served and _compared()


@functools.cache
def _compared() -> bool:
    """Whether this version of DeepSpeed is one of `COMPARED`; a warning says where it is not."""
    import deepspeed

    known = deepspeed.__version__.split("+")[0] in COMPARED
    if not known:
        _log.warning("DeepSpeed %s: its own optimizer step, which takes ten times as long", deepspeed.__version__)
    return known


def stage(config: EngineConfig) -> int:
    """The ZeRO stage that DeepSpeed is told: one process has nobody to share gradients with."""
    alone = config.zero_stage == 2 and world_size() == 1 and own_step(config)
    return 1 if alone else config.zero_stage


class Average:
    """The gradient's average over all ranks, in memory that is kept."""

    def __init__(self, weights: list[torch.Tensor], size: int):
        """size: elements, those that only fill up included."""
        self.weights = weights
        self.flat = torch.zeros(size, dtype=weights[0].dtype)
        self.parts = self.flat[: sum(w.numel() for w in weights)].split([w.numel() for w in weights])

    def __call__(self, *, divide_first: bool) -> torch.Tensor:
        """(size,); divided by the number of ranks before the sum, as ZeRO 1 does, or after it, as ZeRO 0."""
        for weight, part in zip(self.weights, self.parts, strict=True):
            if weight.grad is None:
                part.zero_()
            elif divide_first:
                torch.div(weight.grad.view(-1), float(world_size()), out=part)
            else:
                part.copy_(weight.grad.view(-1))
            weight.grad = None
        dist.all_reduce(self.flat)
        return self.flat if divide_first else self.flat.mul_(1 / world_size())


class WholeStep:
    """ZeRO 0 in several processes: averages the gradient, which DeepSpeed would copy twice."""

    def __init__(self, engine):
        engine.enable_backward_allreduce = False
        self.weights = [p for p in engine.module.parameters() if p.requires_grad]
        self.average = Average(self.weights, sum(w.numel() for w in self.weights))

    def __call__(self) -> None:
        self.average(divide_first=False)
        for weight, part in zip(self.weights, self.average.parts, strict=True):
            weight.grad = part.view_as(weight)


class PartitionedStep:
    """ZeRO 1 and 2: the step of a DeepSpeedZeroOptimizer with one group of weights."""

    def __init__(self, engine):
        self.zero = zero = engine.optimizer
        self.optimizer = zero.optimizer
        self.weight = zero.single_partition_of_fp32_groups[0]
        self.trained = zero.parallel_partitioned_bit16_groups[0][rank()]  # what the model computes with
        if self.trained.dtype == torch.float32:  # one copy of the weights serves both
            self.weight.data = self.trained
            zero._link_all_hp_params()
        self.buffer = torch.empty(min(SPAN, len(self.weight)))
        self.average = None
        if not zero.partition_gradients:
            engine.enable_backward_allreduce = False
            if world_size() > 1:
                self.average = Average(zero.bit16_groups[0], len(zero.bit16_groups_flat[0]))
        self.pieces: list[torch.Tensor] = []
        self.scale: torch.Tensor | None = None
        self.optimizer.register_step_pre_hook(self._update)  # after those that change its options for this step
        zero.step = self

    @torch.no_grad()
    def __call__(self) -> None:
        # The gradient's norm before clipping, over all ranks; where it is not finite nothing changes.
        zero = self.zero
        zero.micro_step_id = -1
        self.pieces = self._gradient()
        squares = sum(map(sum_of_squares, self.pieces), torch.zeros((), dtype=torch.float64)).float()
        if world_size() > 1:
            dist.all_reduce(squares)
        norm = squares.sqrt()
        zero.overflow = not norm.isfinite()
        zero._global_grad_norm = float("inf") if zero.overflow else norm

        # Adam on this rank's share, inside of its hooks; then everybody's weights.
        if not zero.overflow:
            self.scale = 1.0 / ((norm + 1e-6) / zero.clip_grad).clamp(min=1.0) if zero.clip_grad else None
            self.optimizer.step()
            zero._lazy_init_hp_params_optimizer_state()
            if world_size() > 1:
                dist.all_gather_into_tensor(zero.bit16_groups_flat[0], self.trained)
        self.pieces = []
        zero.averaged_gradients.clear()
        zero.all_grad_tensors.clear()

    def _gradient(self) -> list[torch.Tensor]:
        """This rank's share of the gradient, flat pieces in the order of its weights."""
        if self.average is not None:
            share = len(self.weight)
            return [self.average(divide_first=True).narrow(0, rank() * share, share)]
        if self.zero.partition_gradients:
            found = self.zero.averaged_gradients[0]
        else:
            found = [_gradient_of(weight) for weight in self.zero.bit16_groups[0]]
        pieces = [piece.reshape(-1) for piece in found]
        left = len(self.weight) - sum(map(len, pieces))
        return [*pieces, _zeros(left)] if left else pieces

    def _update(self, optimizer, *_) -> None:
        """AdamW over the spans; `optimizer.step` itself sees no gradient and does nothing."""
        # What torch keeps, and when.
        weight, group = self.weight, optimizer.param_groups[0]
        state = optimizer.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        options |= {"beta1": beta1, "beta2": beta2}

        # A span's gradient, weights and moments are touched once.
        scale = None if self.scale is None or self.scale == 1 else self.scale
        tensors = weight.detach(), state["exp_avg"], state["exp_avg_sq"], self.trained
        spans = zip(*(x.split(SPAN) for x in tensors), strict=True)
        for gradient, (master, first, second, trained) in zip(self._spans(), spans, strict=True):
            if scale is not None:
                gradient.mul_(scale)
            torch._fused_adamw_([master], [gradient], [first], [second], [], [state["step"]], **options)
            if trained.dtype != master.dtype:
                trained.copy_(master)

    def _spans(self) -> Iterator[torch.Tensor]:
        """The gradient in fp32, a span at a time; one that lies in a piece as it must be is not copied."""
        pieces, begin = iter(self.pieces), 0
        piece = next(pieces)
        for span in range(0, len(self.weight), SPAN):
            wanted = min(SPAN, len(self.weight) - span)
            filled = 0
            while filled < wanted:
                if begin == len(piece):
                    piece, begin = next(pieces), 0
                    continue
                part = piece[begin : begin + wanted - filled]
                begin += len(part)
                if len(part) == wanted and part.dtype == torch.float32 and part.is_contiguous():
                    break
                self.buffer[filled : filled + len(part)].copy_(part)
                filled += len(part)
            yield part if filled < wanted else self.buffer[:wanted]


def _gradient_of(weight: torch.Tensor) -> torch.Tensor:
    return _zeros(weight.numel()) if weight.grad is None else weight.grad


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(1).expand(count)  # no memory
