"""Every problem of docs/problems.md that this machine can show by itself: a line each; the status is 1 where one fails.

    make repro                                  all of them, at most 15 minutes on two cores
    python -m bench.repro entropy padding       some of them

What each prints goes to runs/repro/NAME.log, and its figure to runs/repro. Left out is what needs a server, another
library or more time: `LEFT_OUT` says why.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from bench import machine

FOLDER = Path("runs") / "repro"
# Of one warm-started model, which the first that needs it trains.
RUNS = Path("runs") / "repro_kl"


class Repro(NamedTuple):
    """The arguments of a module of this package, and whether it draws."""

    arguments: tuple[str, ...] = ()
    draws: bool = False


REPROS = {
    "entropy": Repro(draws=True),
    "kl_estimators": Repro(("--short", "--folder", str(RUNS)), draws=True),
    "two_rewards": Repro(),
    "padding": Repro(),
    "adam_epsilon": Repro(("--seeds", "1", "--folder", str(RUNS / "seed1"))),
    "truncated_sampling": Repro(),
    "head_precision": Repro(),
    "distillation": Repro(),
    "sequence_weights": Repro(draws=True),
    "null_run": Repro(("--folder", str(RUNS / "seed1"))),
    "accumulation": Repro(),
}
LEFT_OUT = {
    "stale_server": "needs a vLLM of its own (make test-server installs it)",
    "lag": "trains twelve runs, an hour",
    "integrations": "needs TRL, verl and OpenRLHF, each in an environment of its own",
}


def command_of(name: str, repro: Repro) -> list[str]:
    """As a shell would have it, but for the interpreter."""
    words = ["-m", f"bench.repro.{name}", *repro.arguments]
    return [*words, "--png", str((FOLDER / f"{name}.png").resolve())] if repro.draws else words


def show(name: str, repro: Repro) -> bool:
    """Runs it and says how it went, in a line."""
    log, began, cpu = FOLDER / f"{name}.log", time.monotonic(), os.times().children_user
    with log.open("w") as out:
        command = [sys.executable, *command_of(name, repro)]
        status = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=machine.ROOT
        ).returncode
    word = "shown " if status == 0 else "FAILED"
    seconds = f"{time.monotonic() - began:4.0f} s, {os.times().children_user - cpu:4.0f} of a CPU"
    print(f"{word} {name:18} {seconds}   {log}", flush=True)
    if status:
        print("  " + "\n  ".join(log.read_text().splitlines()[-5:]), flush=True)
    return status == 0


def main() -> int:
    """`make repro`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(REPROS)}; none: all"
    )
    names = parser.parse_args().names
    unknown = [name for name in names if name not in REPROS]
    if unknown:
        why = "".join(f"; {name} {LEFT_OUT[name]}" for name in unknown if name in LEFT_OUT)
        parser.error(f"{', '.join(unknown)}: not among {', '.join(REPROS)}{why}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    shown = [show(name, REPROS[name]) for name in names or REPROS]
    if not names:
        for name, reason in LEFT_OUT.items():
            print(f"left out {name}: {reason}")
    print(f"{sum(shown)} of {len(shown)} shown in {time.monotonic() - began:.0f} s")
    return 0 if all(shown) else 1


if __name__ == "__main__":
    sys.exit(main())
