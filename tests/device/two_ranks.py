"""One of two ranks, each with a device of its own: `torchrun --nproc-per-node 2 -m tests.device.two_ranks FOLDER`.

It takes a step of each trainer on its share of the batch, as test_trainers.py describes in FOLDER, and leaves there
what rank 0 found; a rank whose weights differ from those of rank 0 fails.
"""

import os
import sys
from pathlib import Path

from tests.device import process

process.begin()

import torch  # noqa: E402

from fused_rl.trainers.base import engine, ranks  # noqa: E402
from tests.device import tensors, twins  # noqa: E402


def main(folder: Path) -> None:
    device = engine.setup(1)
    assert device.index == int(os.environ["LOCAL_RANK"])
    asked = torch.load(folder / "asked.pt", weights_only=False)
    found = {}
    with twins.in_place_of_kernels(), tensors.present():
        for name, (make, options) in asked["steps"].items():
            torch.manual_seed(0)
            step = make(asked["model"], device, asked["responses"], **options)
            torch.manual_seed(1)
            done = step()
            weights = [weight for module in done.modules for weight in module.parameters()]
            assert {weight.device for weight in weights} == {device}
            first, other = ranks.gather([tensors.values(weight.detach()) for weight in weights])
            torch.testing.assert_close(first, other, rtol=0, atol=0)
            found[name] = done.metrics, first
    ranks.barrier()
    if ranks.rank() == 0:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
