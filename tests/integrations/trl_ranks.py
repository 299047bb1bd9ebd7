"""One rank of a TRL run: `torchrun --nproc_per_node 2 -m tests.integrations.trl_ranks RUN PRIMITIVE FOLDER`.

It leaves `FOLDER/PRIMITIVE.pt`: losses, metrics, the gradients of each step (none under ZeRO-3, which keeps them to
itself) and the parameters.
"""

import os
import sys
from pathlib import Path

import torch

from tests.integrations import trl_runs
from tests.integrations.trl_runs import Cell

ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1e9,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    # Without a threshold of 0 every tensor of a tiny model counts as small, and none is partitioned.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
# One step so long that nothing of where it began is left in the parameters' digits: they show the gradient.
STEEP = {"learning_rate": 1e4, "max_steps": 1}
RUNS = {
    "grpo": (Cell("GRPO", {"num_iterations": 2, "beta": 0.04, "entropy_coef": 0.1}), {}),
    "sft": (Cell("SFT", model="tied"), {"gradient_accumulation_steps": 2}),
    "sft-zero3": (Cell("SFT"), {"deepspeed": ZERO3, **STEEP}),
    "dpo-zero3": (Cell("DPO", model="tied"), {"deepspeed": ZERO3, **STEEP}),
    "distillation-zero3": (
        Cell("Distillation", {"beta": 0.5}),
        {"deepspeed": ZERO3, "scripted": True, **STEEP},
    ),
}


def main(name: str, primitive: str, folder: str) -> None:
    cell, how = RUNS[name]
    if "deepspeed" in how:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}  # else init_distributed compiles an op for shared memory
    run = trl_runs.train(cell, primitive, folder, **how)
    assert torch.distributed.get_world_size() == 2
    if torch.distributed.get_rank() == 0:
        found = {
            "losses": run.losses,
            "metrics": run.metrics,
            "grads": run.grads,
            "parameters": run.parameters,
        }
        torch.save({**found, "served": run.served, "host": run.host}, Path(folder) / f"{primitive}.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # an ordinary exit races with gloo's threads and aborts now and then


if __name__ == "__main__":
    main(*sys.argv[1:])
