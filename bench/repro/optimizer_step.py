"""What an optimizer step in one process costs beside Adam and the norm of the gradient alone.

    python -m bench.repro.optimizer_step
    python -m bench.repro.optimizer_step --weights 2e7 --steps 3

CPU seconds of one thread. A step is what a training step pays beyond its passes: `engine.backward`, to which autograd
hands gradients that are there already, and `optimizer_step`. It takes turns with torch's fused Adam and `vector_norm`
over the same weights in fp32.
"""

import argparse
import statistics
import time

import torch

from bench import machine, results
from fused_rl.trainers.base import engine
from fused_rl.trainers.options.config import EngineConfig, OptimConfig

WEIGHTS = 165_000_000
LARGEST = 0.82  # share of the first weight, a head's
LAYERS = 24
CASES = ((0, "float32"), (1, "float32"), (1, "bfloat16"))  # ZeRO stage, dtype; ZeRO 2 runs as ZeRO 1
seconds = time.thread_time


class Weights(torch.nn.Module):
    """A head and a few layers, with which nothing is computed."""

    def __init__(self, count: int, dtype: torch.dtype):
        super().__init__()
        head = int(count * LARGEST) // 896 * 896
        layer = (count - head) // LAYERS // 896 * 896
        sizes = [head, *[layer] * LAYERS]
        self.all = torch.nn.ParameterList(torch.randn(size // 896, 896).to(dtype) for size in sizes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return Given.apply(gradients, *self.all)


class Given(torch.autograd.Function):
    """0, whose backward returns gradients that were made before."""

    @staticmethod
    def forward(ctx, gradients, *weights):
        ctx.gradients = gradients
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx, _):
        given = tuple(ctx.gradients)
        ctx.gradients.clear()  # so that autograd need not copy them
        return None, *given


def adam_and_norm(state: list[torch.Tensor], step: torch.Tensor) -> None:
    """Run fused Adam and the norm over (count,) fp32 weight, gradient and two moments."""
    weight, gradient, first, second = state
    torch.linalg.vector_norm(gradient)
    options = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}
    torch._fused_adamw_([weight], [gradient], [first], [second], [], [step], **options)


def measure(stage: int, dtype: str, count: int, steps: int) -> dict:
    """Return a row: CPU seconds of steps and of Adam and the norm, in turns; the first turn does not count."""
    engine.setup(1)
    model = Weights(count, getattr(torch, dtype))
    whole = sum(weight.numel() for weight in model.all)
    options = OptimConfig(lr=1e-6, lr_schedule="constant", max_grad_norm=1e9)
    trained = engine.initialize(model, options, EngineConfig(zero_stage=stage, dtype=dtype), steps)
    state = [torch.zeros(whole) for _ in range(4)]
    state[1].normal_(std=1e-4)
    found = {"step": [], "Adam + norm": []}
    for _ in range(steps):
        gradients = [torch.randn(weight.shape, dtype=weight.dtype).mul_(1e-4) for weight in model.all]
        began = seconds()
        trained.backward(trained(gradients))
        engine.optimizer_step(trained, 1)
        middle = seconds()
        adam_and_norm(state, torch.ones(()))
        found["step"].append(middle - began)
        found["Adam + norm"].append(seconds() - middle)
    medians = {name: statistics.median(samples[1:]) for name, samples in found.items()}
    ratio = medians["step"] / medians["Adam + norm"]
    return {"ZeRO": stage, "weights": dtype} | medians | {"step / (Adam + norm)": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--weights", type=float, default=WEIGHTS)
    parser.add_argument("--steps", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine.heading("cpu"), flush=True)
    rows = [measure(stage, dtype, int(given.weights), given.steps) for stage, dtype in CASES]
    print(results.table_of(rows))


if __name__ == "__main__":
    main()
