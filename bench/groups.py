"""The groups of the suite: the module of each, and how long it takes."""

from typing import NamedTuple


class Group(NamedTuple):
    """What one process of the suite measures, and writes into one file."""

    module: str  # with `command(name, words)`
    seconds: int  # of wall time at most, on 2 quiet cores: imports, compilers, checks and first runs are part of it
    gigabytes: float  # of memory that must be free
    # Of its --shapes, 0 where it takes none: rows x vocabulary, rows x hidden x vocabulary.
    dimensions: int = 0


# Together 21 minutes, which `make help` and docs/benchmarks.md say.
GROUPS = {
    "kernels": Group("bench.run", 110, 3, 2),
    "linear": Group("bench.run", 95, 3, 3),
    "support": Group("bench.run", 50, 2, 3),
    "topk": Group("bench.run", 45, 2),
    "kl": Group("bench.run", 55, 2),
    "traffic": Group("bench.traffic", 30, 2),
    "codegen": Group("tests.tools.codegen", 35, 2),
    "numerics": Group("bench.numerics", 40, 2),
    "trainers": Group("bench.trainer_steps", 800, 3),
}
MINUTES = 21
