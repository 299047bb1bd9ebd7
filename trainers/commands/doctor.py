"""What is wrong with a run, or with this machine, and what to change.

    fused-rl doctor runs/demo/grpo              what its metrics show: exit status 0 healthy, 1 findings, 2 no run
    fused-rl doctor                             what this machine lacks
    fused-rl doctor --null --config x.yaml      how much of a config's ratio, clipping, KL and mismatch is noise

Nothing is imported here: the doctor of the machine must begin where packages are missing.
"""

import argparse
import sys
from pathlib import Path


def of_runs(folders: list[Path]) -> int:
    """Tell of each run what was read and what is wrong, in the order in which it began; 1 where anything is."""
    from fused_rl.trainers.base.screen import tell
    from fused_rl.trainers.commands.report import read_run
    from fused_rl.trainers.options.errors import InputError

    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if run.healthy is None:
            raise InputError(f"{run.name}: {run.verdict[0]}")
    for run in runs:
        made = run.history[-1]["step"] if run.history else 0
        tell(f"{run.name}: {run.command}, {made} of {run.config.get('steps') or '?'} steps")
        for line in run.verdict:
            tell(f"  {line}")
    return int(not all(run.healthy for run in runs))


def look(argv: list[str]) -> int:
    """The exit status of what is asked for."""
    parser = argparse.ArgumentParser(
        prog="fused-rl doctor",
        description=__doc__.split("\n", 1)[0],
        epilog="Without a run it looks at this machine; fused-rl doctor --null --help tells of the noise floor. The "
        "exit status is 0 where nothing is wrong, 1 with findings or unfinished, 2 for what is no run.",
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="the output_dir of a run")
    parser.add_argument("--null", action="store_true", help="train at learning rate 0, with the options that follow")
    folders = parser.parse_args(argv).runs
    if folders:
        return of_runs(folders)
    from fused_rl.trainers.doctor import machine

    return machine.look()


def main(argv: list[str] | None = None) -> None:
    """`fused-rl doctor`."""
    argv = sys.argv[1:] if argv is None else argv
    if "--null" in argv:
        from fused_rl.trainers.doctor import null

        null.main([word for word in argv if word != "--null"])
        return
    from fused_rl.trainers.base.screen import kept_up, tell
    from fused_rl.trainers.options.errors import InputError

    with kept_up():
        try:
            status = look(argv)
        except InputError as error:
            tell(f"fused-rl doctor: error: {error}", to_errors=True)
            status = 2
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
