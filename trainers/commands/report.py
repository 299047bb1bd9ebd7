"""One HTML page of one run or several: curves over each other, samples over time, configs and their difference.

    fused-rl report runs/demo/grpo
    fused-rl report runs/a runs/b --output compare.html

The page holds its pictures and needs no network; no script can run in it. Left out: checkpoints, TensorBoard's files.
"""

import argparse
import json
import re
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import yaml

from fused_rl.trainers.base.files import storing, write_atomically
from fused_rl.trainers.base.screen import tell
from fused_rl.trainers.commands.report_page import Panel, against, over_steps, page
from fused_rl.trainers.metrics.metric import Metric
from fused_rl.trainers.metrics.rules import WINDOW, Watch, examine
from fused_rl.trainers.metrics.table import KEYS
from fused_rl.trainers.options.config import InputError
from fused_rl.trainers.options.text import in_a_line, shown
from fused_rl.trainers.run.checkpoint import steps_in
from fused_rl.trainers.run.command import around
from fused_rl.trainers.run.folder import in_use
from fused_rl.trainers.run.logger import read_metrics

FIRST = (
    *("reward", "objective/scores", "eval/accuracy_greedy", "eval/accuracy_sampled", "eval/score"),
    *("objective/kl_exact", "policy/entropy_avg", "completions/mean_length", "val/var_explained"),
    *("train/loss", "eval/loss", "eval/accuracy", "train/rm/loss", "eval/rm/loss", "eval/rm/accuracy"),
)
AGAINST = ("completions/mean_length", "objective/kl_exact")  # what a reward may have been bought with
REWARDS = ("reward", "objective/scores")
MOST_SAMPLES = 400  # of a run, the last ones: a page of more is not read


@dataclass
class RunRead:
    """What a run has left, as a page shows it."""

    name: str
    history: list[dict]
    """The lines of metrics.jsonl."""
    command: str
    config: dict[str, object]
    samples: list[dict] = field(default_factory=list)
    """The lines of samples.jsonl, the same prompts together."""
    columns: list[str] = field(default_factory=list)
    """Of the samples."""
    verdict: list[str] = field(default_factory=list)
    """What the doctor says, in lines."""
    healthy: bool | None = None
    """None where no rule can say."""


def read_run(folder: Path) -> RunRead:
    """A run's folder; refuses one that holds none."""
    if not folder.exists():
        raise InputError(f"there is no folder {folder}; give the output_dir of a run")
    if not (folder / "metrics.jsonl").is_file():
        raise InputError(f"{folder} is no run: it holds no metrics.jsonl; give the output_dir of a run")
    command, config = _read_config(folder / "config.yaml")
    samples = read_metrics(folder / "samples.jsonl")[-MOST_SAMPLES:]
    samples.sort(key=lambda row: (str(row.get("of", "")), row.get("of") != "training" and str(row.get("prompt", ""))))
    columns = list(dict.fromkeys(chain.from_iterable(samples)))
    history = read_metrics(folder / "metrics.jsonl")
    verdict = _verdict(command, examine(command, config, history), _unfinished(folder))
    return RunRead(str(folder), history, command, config, samples, columns, *verdict)


def _unfinished(folder: Path) -> list[str]:
    """A line on a run that ended without its model, with the way on that there is."""
    if (folder / "model").exists() or in_use(folder):
        return []
    way = "--resume goes on" if steps_in(folder / "checkpoints") else "there is no checkpoint: --overwrite starts anew"
    return [f"unfinished: it ended without its model; why was said on its screen, and {way}"]


def _verdict(command: str, watch: Watch, unfinished: list[str]) -> tuple[list[str], bool | None]:
    """What is wrong, in the order in which it began, and whether nothing is; None where no rule can say."""
    if command not in KEYS:
        of = f"it is of {command!r}" if command else "its config.yaml does not say of which trainer it is"
        return [f"{of}; the doctor knows runs of {', '.join(KEYS)}"], None
    if watch.now and not watch.looked_at:
        return ["no rule looks at any metric of its metrics.jsonl; is it of another version?"], None
    lines = [f"{'then' if number else 'first'}: {finding.told()}" for number, finding in enumerate(watch.found)]
    lines += unfinished
    if lines:
        return lines, False
    if not watch.now:
        return ["its metrics.jsonl holds no step yet; look again after the first one"], None
    made = watch.now["step"]
    few = f"; of {made} steps, and some rules need {WINDOW}" if made < WINDOW else ""
    return [f"healthy: {len(watch.looked_at)} metrics within their bands{few}"], True


def _read_config(path: Path) -> tuple[str, dict[str, object]]:
    """The command, which its first line tells, and the options, with what dtype auto was; nothing without a file."""
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else "{}"
        config = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {in_a_line(error)}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} is no config of a run: expected lines of `option: value`")
    told, precision = re.match(r"# fused-rl (\S+)", text), re.search(r"^# precision: (\w+)$", text, re.MULTILINE)
    if precision and config.get("dtype") == "auto":
        config["dtype"] = precision[1]
    return told[1] if told else "", config


def text_of(value: object) -> str:
    """A cell: numbers short, control characters shown."""
    return f"{value:.4g}" if isinstance(value, float) else shown(value, keep="\n\t")


def panels(runs: list[RunRead]) -> tuple[list[Panel], list[Panel]]:
    """The pictures that come first, and those of all other metrics."""
    histories = {run.name: run.history for run in runs}
    entries = chain.from_iterable(histories.values())
    keys = dict.fromkeys(chain.from_iterable(entries))
    keys.pop("step", None)
    described = {key: _described(key) for key in keys}
    drawn = {key: over_steps(key, told, histories) for key, told in described.items()}
    first = [drawn.pop(key) for key in FIRST if key in drawn]
    for reward in [key for key in REWARDS if key in keys][:1]:  # ppo has both, which are the same
        first += [against(x, reward, histories) for x in AGAINST if x in keys]
    return first, list(drawn.values())


def _described(key: str) -> str:
    """Unit and definition of a metric; nothing for one whose name is made of a scorer's."""
    metric = next((table[key] for table in KEYS.values() if key in table), Metric("", "", ""))
    return f"{metric.definition} ({metric.unit})" if metric.unit else ""


def differences(runs: list[RunRead]) -> dict[str, list[str]]:
    """The options in which the runs differ, with the value of each as JSON; one that a run does not have is `—`."""
    names = dict.fromkeys(chain.from_iterable(run.config for run in runs))
    rows = {}
    for name in names:
        rows[name] = [_spelled(run.config[name]) if name in run.config else "—" for run in runs]
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _spelled(value: object) -> str:
    return shown(json.dumps(value, ensure_ascii=False, default=str))


def report(folders: list[Path], output: Path) -> None:
    """Write the page of these runs."""
    repeated = [folder for folder in folders if folders.count(folder) > 1]
    if repeated:
        raise InputError(f"{repeated[0]} is named twice; name each run once")
    if output.is_dir():
        raise InputError(f"output={output} is a folder; name a file, such as {output / 'report.html'}")
    runs = [read_run(folder) for folder in folders]
    first, others = panels(runs)
    configs = {run.name: {name: _spelled(value) for name, value in run.config.items()} for run in runs}
    made = page(runs, first, others, differences(runs), configs, text_of)
    with storing("the report", output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, made)
    tell(f"report: {output}")


@around("fused-rl report")
def main(argv: list[str] | None = None) -> None:
    """`fused-rl report`."""
    parser = argparse.ArgumentParser(prog="fused-rl report", description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the output_dir of a run")
    parser.add_argument("--output", type=Path, help="the file to write; default: report.html in the first run's folder")
    options = parser.parse_args(argv)
    report(options.runs, options.output or options.runs[0] / "report.html")


if __name__ == "__main__":
    main()
