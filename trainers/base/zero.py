"""The optimizer step of ZeRO 1 and 2 in one process on a CPU: DeepSpeed's bits and checkpoints, without its copies.

DeepSpeed's own step copies a gradient up to six times, and takes 13 to 19 times what Adam and the norm take. Here the
norm is one read of the gradient, and the rest is done span by span, in the cache. ZeRO 0 would be no replacement: with
bf16 weights its step over a head of 152k x 896 takes four times as long as this one, and begins with an update of its
own.
"""

import warnings
from collections.abc import Iterator

import torch

from fused_rl.optim import sum_of_squares
from fused_rl.trainers.base.ranks import processes

COMPARED = ("0.19.8",)  # versions of DeepSpeed whose step gives these bits
# Elements that stay in the cache; a multiple of whole vectors, which decide about a weight's last bit.
SPAN = 1 << 18


def own_step(zero_stage: int, *, offload: bool = False) -> bool:
    """Return True if the step of an engine is the one here; DeepSpeed is then told ZeRO 1."""
    on_cpu = not torch.cuda.is_available() and not offload
    if not on_cpu or processes() > 1 or zero_stage not in (1, 2):
        return False
    import deepspeed

    if deepspeed.__version__.split("+")[0] in COMPARED:
        return True
    what = f"DeepSpeed {deepspeed.__version__}: its own optimizer step, ten times as slow"
    warnings.warn(what, stacklevel=1)
    return False


class Step:
    """Replaces the step of a DeepSpeedZeroOptimizer."""

    def __init__(self, engine, *, widens_sums: bool = False):
        self.zero = zero = engine.optimizer
        self.weights = zero.single_partition_of_fp32_groups
        # What the model computes with; in fp32 one copy of the weights serves both.
        self.trained = [partitions[0] for partitions in zero.parallel_partitioned_bit16_groups]
        if self.trained[0].dtype == torch.float32:
            for weight, trained in zip(self.weights, self.trained, strict=True):
                weight.data = trained
            zero._link_all_hp_params()
        # Autograd casts the gradient of each micro-batch before it adds it.
        if widens_sums:
            for parameters in zero.bit16_groups:
                for p in parameters:
                    p.grad_dtype = torch.float32
        longest = max(map(len, self.weights))
        self.buffer = torch.empty(min(SPAN, longest))
        self.gradients: list[list[torch.Tensor]] = []
        engine.enable_backward_allreduce = False
        # A hook runs after those registered before it, which change the optimizer's options for this step.
        zero.optimizer.register_step_pre_hook(self._update)
        zero.step = self

    @torch.no_grad()
    def __call__(self) -> None:
        # The gradient's norm before clipping; where it is not finite nothing changes.
        zero = self.zero
        zero.micro_step_id = -1
        nothing = torch.zeros(1)  # expanded, it takes no memory
        norms = []
        for weight, parameters in zip(self.weights, zero.bit16_groups, strict=True):
            gradients = []
            for p in parameters:
                has_none = p.grad is None
                gradients.append(nothing.expand(p.numel()) if has_none else p.grad.reshape(-1))
            padding = len(weight) - sum(map(len, gradients))
            self.gradients.append([*gradients, nothing.expand(padding)])
            squares = sum(map(sum_of_squares, gradients), torch.zeros((), dtype=torch.float64))
            norms.append(squares.float().sqrt())
        norm = torch.linalg.vector_norm(torch.stack(norms))
        zero.overflow = not norm.isfinite()
        zero._global_grad_norm = float("inf") if zero.overflow else norm

        # Adam, inside of its hooks.
        if not zero.overflow:
            self.excess = torch.ones(())
            if zero.clip_grad:
                self.excess = (norm + 1e-6) / zero.clip_grad
            zero.optimizer.step()
            zero._lazy_init_hp_params_optimizer_state()
        self.gradients.clear()
        zero.averaged_gradients.clear()
        zero.all_grad_tensors.clear()

    def _update(self, optimizer, *_) -> None:
        """Do AdamW over the spans; `optimizer.step` itself sees no gradient and does nothing."""
        each = zip(optimizer.param_groups, self.weights, self.trained, self.gradients, strict=True)
        for group, weight, trained, gradients in each:
            state = optimizer.state[weight]
            if not state:
                moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                state.update(step=torch.zeros((), dtype=torch.float32), **moments)
            state["step"] += 1
            names = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
            options = {name: group[name] for name in names}
            options["beta1"], options["beta2"] = group["betas"]

            # A span's gradient, weights and moments are touched once.
            tensors = weight.detach(), state["exp_avg"], state["exp_avg_sq"], trained
            spans = zip(*(x.split(SPAN) for x in tensors), strict=True)
            for gradient, (master, first, second, rounded) in zip(
                self._spans(gradients), spans, strict=True
            ):
                if self.excess > 1:
                    gradient.mul_(1.0 / self.excess)
                torch._fused_adamw_(
                    [master], [gradient], [first], [second], [], [state["step"]], **options
                )
                if rounded.dtype != master.dtype:
                    rounded.copy_(master)

    def _spans(self, gradients: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the gradient in fp32, copied into the buffer a span at a time."""
        filled = 0
        for gradient in gradients:
            while len(gradient):
                # As much of this parameter's gradient as the buffer still has room for.
                room = len(self.buffer) - filled
                taken, gradient = gradient[:room], gradient[room:]
                self.buffer[filled : filled + len(taken)].copy_(taken)
                filled += len(taken)
                if filled == len(self.buffer):
                    yield self.buffer
                    filled = 0
        if filled:
            yield self.buffer[:filled]
