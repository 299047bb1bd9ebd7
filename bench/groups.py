"""The groups of the suite: the module of each, and how long it takes."""

from typing import NamedTuple


class Group(NamedTuple):
    """What one process of the suite measures, and writes into one file."""

    module: str  # of this folder, with `command(name, words)`
    seconds: int  # of wall time at most, on 2 quiet cores: imports, compilers, checks and first runs are part of it
    dimensions: int = (
        0  # of its --shapes, 0 where it takes none: rows x vocabulary, rows x hidden x vocabulary
    )


# Together 16 minutes, which `make help` and docs/benchmarks.md say.
GROUPS = {
    "kernels": Group("run", 110, 2),
    "linear": Group("run", 95, 3),
    "support": Group("run", 50, 3),
    "topk": Group("run", 45),
    "kl": Group("run", 55),
    "traffic": Group("traffic", 30),
    "codegen": Group("compiled.codegen", 35),
    "numerics": Group("numerics", 40),
    "trainers": Group("trainers", 480),
}
MINUTES = 16
