"""What an optimizer step costs beside Adam and the norm of the gradient alone: ZeRO 0 to 2, one process and two.

    python -m bench.repro.optimizer_step
    python -m bench.repro.optimizer_step --weights 2e7 --steps 3 --stages 1

CPU seconds of one process, one thread. A step is what a training step pays beyond its passes: `engine.backward` where
autograd hands over gradients that are there already, and `optimizer_step`. It takes turns with its yardstick: torch's
fused Adam and `vector_norm` over this process's share of the weights in fp32, and, in two processes, one all-reduce of
the gradient and, where the optimizer is partitioned, one all-gather of the weights.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench import machine, results
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.ranks import barrier, rank, world_size
from fused_rl.trainers.options import EngineConfig, OptimConfig

WEIGHTS = 165_000_000
LARGEST = 0.82  # share of the first weight, a head's
LAYERS = 24
STEPS = 7  # the first is not counted
CELLS = ((0, "float32"), (1, "float32"), (2, "float32"), (1, "bfloat16"), (2, "bfloat16"))
RESULTS = machine.ROOT / "bench" / "results" / "repro" / "optimizer_step.json"
seconds = time.process_time  # of all threads: gloo has its own


class Weights(torch.nn.Module):
    """A head and a few layers, with which nothing is computed."""

    def __init__(self, count: int, dtype: torch.dtype):
        super().__init__()
        head = int(count * LARGEST) // 896 * 896
        layer = (count - head) // LAYERS // 896 * 896
        sizes = [head, *[layer] * LAYERS]
        self.all = torch.nn.ParameterList(torch.randn(size // 896, 896).to(dtype) for size in sizes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return Handed.apply(gradients, *self.all)


class Handed(torch.autograd.Function):
    """0, whose backward hands over gradients that were made before."""

    @staticmethod
    def forward(ctx, gradients, *weights):
        ctx.gradients = gradients
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx, _):
        handed = tuple(ctx.gradients)
        ctx.gradients.clear()  # so that autograd need not copy them
        return None, *handed


class Yardstick:
    """Adam and the norm over `count` fp32 weights, and the bare collectives of a step."""

    def __init__(self, count: int, whole: int, dtype: torch.dtype, partitioned: bool):
        self.weight, *self.moments = (torch.zeros(count) for _ in range(3))
        self.gradient = torch.randn(count) * 1e-4
        self.step = torch.ones(())
        self.sent = torch.zeros(whole, dtype=dtype) if world_size() > 1 else None
        self.partitioned = partitioned

    def adam_and_norm(self) -> None:
        torch.linalg.vector_norm(self.gradient)
        options = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
        options |= {"amsgrad": False, "maximize": False}
        first, second = self.moments
        torch._fused_adamw_([self.weight], [self.gradient], [first], [second], [], [self.step], **options)

    def collectives(self) -> None:
        if self.sent is None:
            return
        dist.all_reduce(self.sent)
        if self.partitioned:
            dist.all_gather_into_tensor(self.sent, self.sent.chunk(world_size())[rank()])


def taken(work) -> float:
    began = seconds()
    work()
    return seconds() - began


def measure(stage: int, dtype: str, count: int, steps: int, clips: bool) -> dict:
    """A row: CPU seconds of steps and yardsticks in turns, of this process."""
    engine.setup(1)
    torch.set_num_threads(1)
    model = Weights(count, getattr(torch, dtype))
    whole = sum(weight.numel() for weight in model.all)
    share = -(-whole // world_size()) if stage else whole
    held = EngineConfig(zero_stage=stage, dtype=dtype)
    options = OptimConfig(lr=1e-6, lr_schedule="constant", max_grad_norm=1e-3 if clips else 1e9)
    trained = engine.initialize(model, options, held, steps)
    yardstick = Yardstick(share, whole, getattr(torch, dtype), stage > 0)
    found = {"step": [], "adam_and_norm": [], "collectives": []}

    def step() -> None:
        trained.backward(trained(gradients))
        engine.optimizer_step(trained, 1)

    for _ in range(steps):
        gradients = [torch.randn(weight.shape, dtype=weight.dtype).mul_(1e-4) for weight in model.all]
        found["step"].append(taken(step))
        found["adam_and_norm"].append(taken(yardstick.adam_and_norm))
        found["collectives"].append(taken(yardstick.collectives))
    medians = {name: statistics.median(each[1:]) for name, each in found.items()}
    return {
        "stage": stage,
        "dtype": dtype,
        "processes": world_size(),
        "clips": clips,
        "weights": whole,
        "seconds": medians,
        "samples": found,
        "over_adam_and_norm": (medians["step"] - medians["collectives"]) / medians["adam_and_norm"],
    }


def launched(processes: int, words: list[str]) -> dict:
    """The row that `processes` of this file measure, of the first of them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "bench.repro.optimizer_step", *words, "--row", str(path)]
        if processes > 1:
            together = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            command[2:3] = [*together, "-m", "bench.repro.optimizer_step"]
        done = subprocess.run(command, cwd=machine.ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} fails")
        return json.loads(path.read_text())


def shown(row: dict) -> dict:
    """Its line of the table."""
    return {
        "ZeRO": str(row["stage"]),
        "weights": row["dtype"],
        "processes": str(row["processes"]),
        "clipped": "yes" if row["clips"] else "no",
        "Adam + norm": f"{row['seconds']['adam_and_norm']:.3f}",
        "collectives": f"{row['seconds']['collectives']:.3f}",
        "step": f"{row['seconds']['step']:.3f}",
        "(step - collectives) / (Adam + norm)": f"{row['over_adam_and_norm']:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--weights", type=float, default=WEIGHTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clips", action="store_true", help="the norm is above its limit in every step")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--row", type=Path, help="measure one row in this process, and write it here")
    given = parser.parse_args()

    # One row, in the process that was started for it.
    if given.row:
        row = measure(given.stages[0], given.dtypes[0], int(given.weights), given.steps, given.clips)
        if rank() == 0:
            given.row.write_text(json.dumps(row))
        barrier()  # else two processes can abort at exit
        return

    # All rows, a process or two for each.
    print(machine.heading("cpu"), flush=True)
    rows = []
    for processes in given.processes:
        for stage, dtype in CELLS:
            if stage in given.stages and dtype in given.dtypes:
                words = ["--weights", str(given.weights), "--steps", str(given.steps)]
                words += ["--stages", str(stage), "--dtypes", dtype, *["--clips"] * given.clips]
                rows.append(launched(processes, words))
                print(shown(rows[-1]), flush=True)
    print(results.table_of([shown(row) for row in rows]))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"machine": machine.heading("cpu"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
