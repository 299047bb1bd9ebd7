"""The groups of the suite: the module of each, and how long it takes."""

from typing import NamedTuple


class Group(NamedTuple):
    """What one process of the suite measures, and writes into one file."""

    module: str  # with `command(name, words)`
    seconds: int  # of wall time at most, on 2 quiet cores: imports, compilers, checks and first runs are part of it
    # Of its --shapes, 0 where it takes none: rows x vocabulary, rows x hidden x vocabulary.
    dimensions: int = 0


# Together 16 minutes, which `make help` and docs/benchmarks.md say.
GROUPS = {
    "kernels": Group("bench.run", 110, 2),
    "linear": Group("bench.run", 95, 3),
    "support": Group("bench.run", 50, 3),
    "topk": Group("bench.run", 45),
    "kl": Group("bench.run", 55),
    "traffic": Group("bench.traffic", 30),
    "codegen": Group("tests.tools.codegen", 35),
    "numerics": Group("bench.numerics", 40),
    "trainers": Group("bench.trainer_steps", 480),
}
MINUTES = 16
