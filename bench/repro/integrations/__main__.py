"""Somebody else's trainer, patched beside unpatched: the tables of docs/integrations.md.

    python -m bench.repro.integrations trl                 lost digits, then what the functions cost
    python -m bench.repro.integrations transformers        a step of a causal LM
    make test-integrations                                 makes the environments of
    OMP_NUM_THREADS=1 .venv-verl/bin/python -m bench.repro.integrations verl
    OMP_NUM_THREADS=1 .venv-openrlhf/bin/python -m bench.repro.integrations openrlhf

Ways of doing the same thing take turns in one process, on one thread. Time is CPU seconds of a forward and a backward
pass, the median; memory is the resident set at its peak beyond what was there before; errors are against fp64 of the
same rounded inputs.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from bench import machine, results
from bench.repro.integrations import hosts, transformers, trl


class Case(NamedTuple):
    """What is compared of a host: rows of tables, {title: cell}."""

    costs: Callable  # (rounds) -> rows
    errors: Callable | None = None  # () -> rows


CASES = {
    "trl": Case(trl.costs, trl.hard_cases),
    "transformers": Case(transformers.costs, transformers.errors),
    "verl": Case(hosts.verl_costs, hosts.verl_errors),
    "openrlhf": Case(hosts.openrlhf_costs, hosts.openrlhf_errors),
}


def show(rows) -> None:
    """Print a table of the rows."""
    print(results.table_of(list(rows), markdown=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument(
        "--rounds", type=int, default=5, help="of every way, after one more; 0: no costs"
    )
    args = parser.parse_args()
    if args.case in ("verl", "openrlhf"):
        # What needs a GPU to build or to run.
        sys.path.append(str(machine.ROOT / "tests" / "hosts" / "stubs"))
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}\n")
    case = CASES[args.case]
    if case.errors:
        show(case.errors())
    if args.rounds:
        show(case.costs(args.rounds))


if __name__ == "__main__":
    main()
