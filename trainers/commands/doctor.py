"""Findings about a run, or about this machine, and what to change.

    fused-rl doctor runs/demo/grpo              whether it learned, and what its metrics show
    fused-rl doctor                             what this machine lacks

Imports are inside of functions, because the doctor of the machine must start even where packages are missing.
"""

import argparse
import re
import sys
from pathlib import Path


def report_run(folder: Path) -> bool:
    """Print whether a run learned, what was examined, and the findings; return True if it has ended without a finding.

    Raises:
        InputError: the folder is not the output_dir of a run.
    """
    import yaml

    from ..base.screen import print_line
    from ..base.text import InputError
    from ..run.logger import read_metrics, rows_by_step
    from ..run.rules import Watch

    # What the run has left: its options, with the dtype that `auto` was on its machine, and its metrics.
    for name in ("metrics.jsonl", "config.yaml"):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder} is not a run: it holds no {name}; give the output_dir of a run"
            )
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    _, _, command, *_ = text.split()  # of "# fused-rl sft --config <this file>"
    config = yaml.safe_load(text)
    if precision := re.search(r"^# precision: (\w+)$", text, re.MULTILINE):
        config["dtype"] = precision[1]

    # The watch reads the same entries in the same order as while the run trained, so it finds the same again.
    history = read_metrics(folder / "metrics.jsonl")
    by_row = rows_by_step(read_metrics(folder / "held_out.jsonl"))
    watch = Watch(config)
    for entry in history:
        watch.update(entry, by_row.get(entry["step"], {}))
    watch.conclude()

    # Print the one figure that says whether the run learned, then what was examined, then the findings.
    steps = history[-1]["step"] if history else 0
    has_model = (folder / "model").exists()
    print_line(f"{folder}: {watch.learned(ended=has_model)}")
    print_line(
        f"  {command}, {steps} of {config.get('steps') or '?'} steps; "
        f"examined: {len(history)} lines of metrics.jsonl"
    )
    if not has_model:
        print_line(
            "  unfinished: the run has no model/ yet; one that was stopped continues with --resume"
        )
    findings = [*watch.findings.values()]
    for finding in findings:
        print_line(f"  finding: {finding}")
    if not findings:
        print_line("  no problems found")
    return not findings and has_model


def main(argv: list[str] | None = None) -> None:
    """Run `fused-rl doctor`."""
    parser = argparse.ArgumentParser(
        prog="fused-rl doctor",
        description=str(__doc__).split("\n", 1)[0],
        epilog="Without a run it looks at this machine. The exit status is 0 without findings, 1 with findings or "
        "unfinished, 2 for what is no run.",
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="the output_dir of a run")
    # The machine is examined without importing what a run needs, because that may be what is missing.
    folders = parser.parse_args(argv).runs
    if not folders:
        from . import machine

        sys.exit(machine.report())
    from ..base.screen import print_line
    from ..base.text import InputError

    try:
        sys.exit(int(False in [report_run(folder) for folder in folders]))
    except InputError as error:
        print_line(f"fused-rl doctor: error: {error}", to_errors=True)
        sys.exit(2)
    except BrokenPipeError:  # whoever read the output has ended, such as head
        sys.stdout = None
        sys.exit(141)


if __name__ == "__main__":
    main()
