"""Which KL estimator in the loss holds a policy in training: GRPO with each of them, two coefficients, three seeds.

    make repro-kl        trains what is not yet in runs/repro_kl, prints the table, draws docs/kl-estimators.png
    python -m bench.repro.kl_estimators --draw        table and figure from the results that are there, in seconds

The demo's task, model and recipe. Four updates per rollout: the first is on-policy, the later ones are not, and there
k1's gradient points away from the KL's (docs/losses.md has the expectations). A control takes one update per
rollout, where k1's expected gradient is zero. What counts is the exact KL to the starting model, from the logits of
both; it steers nothing. Runs follow one another in one process on one core; finished ones are kept, so that the same
command goes on after an interruption.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from bench import machine, plots, results
from bench.repro import ppo_step
from fused_rl.recipes import demo
from fused_rl.trainers import grpo
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_atomically
from fused_rl.trainers.run.logger import read_metrics
from fused_rl.trainers.run.parse import parse

ESTIMATORS = ("k1", "k2", "k3", "k4", "rk3")
HOLDING = ESTIMATORS[1:]
COEFFICIENTS = (0.3, 1.0)
SEEDS = (1, 2, 3)
OFF_POLICY, ON_POLICY = 4, 1  # updates per rollout
SETTING = {"steps": 60, "kl_every": 2, "eval_every": 20, "eval_samples": 1}
RESULTS = results.RESULTS / "repro" / "kl_estimators.json"
PICTURE = plots.DOCS / "kl-estimators.png"


class Setting(NamedTuple):
    """What differs between runs of one seed."""

    minibatches: int
    kl_estimator: str
    kl_coef: float

    @property
    def label(self) -> str:
        """The estimator, where it acts."""
        return self.kl_estimator if self.kl_coef else "none"

    @property
    def name(self) -> str:
        """Of a folder."""
        return f"{self.minibatches}-{self.label}-{self.kl_coef:g}"


def settings(short: bool = False) -> list[Setting]:
    """Each estimator at each coefficient, and without a KL term; the control on-policy. Short: at the larger."""
    strongest = max(COEFFICIENTS)
    made = [Setting(OFF_POLICY, "rk3", 0.0)]
    if short:
        return made + [Setting(OFF_POLICY, estimator, strongest) for estimator in ESTIMATORS]
    for estimator in ESTIMATORS:
        made += [Setting(OFF_POLICY, estimator, coefficient) for coefficient in COEFFICIENTS]
    made.append(Setting(ON_POLICY, "rk3", 0.0))
    made += [Setting(ON_POLICY, estimator, strongest) for estimator in ("k1", "rk3")]
    return made


# The runs.


def config_of(setting: Setting, seed: int, folder: Path) -> grpo.GRPOConfig:
    """recipes/demo_grpo.yaml on the warm-started model of a seed."""
    start = folder / f"seed{seed}"
    options = {
        "model": start / "sft" / "model",
        "dataset": start / "data" / "train.jsonl",
        "eval_dataset": start / "data" / "eval.jsonl",
        "output_dir": start / setting.name,
        **setting._asdict(),
        **SETTING,
    }
    return parse(grpo.GRPOConfig, demo.arguments("demo_grpo.yaml", seed, options))


def row_of(setting: Setting, seed: int, history: list[dict]) -> dict:
    """A run's curves: lists over the steps at which they were measured."""
    measured = [metrics for metrics in history if "objective/kl_exact" in metrics]
    evaluated = [metrics for metrics in history if "eval/kl_exact" in metrics]
    return {
        **setting._asdict(),
        "seed": seed,
        "status": results.OK,
        "steps": [metrics["step"] for metrics in measured],
        "kl_exact": [metrics["objective/kl_exact"] for metrics in measured],
        "response_length": [metrics["completions/mean_length"] for metrics in measured],
        "eval_steps": [metrics["step"] for metrics in evaluated],
        "accuracy_greedy": [metrics["eval/accuracy_greedy"] for metrics in evaluated],
        "accuracy_sampled": [metrics["eval/accuracy_sampled"] for metrics in evaluated],
    }


def run(setting: Setting, seed: int, folder: Path, commit: str) -> dict:
    """The row of one run, trained unless a run of the same options is there already."""
    config = config_of(setting, seed, folder)
    options = config.plain()
    start = folder / f"seed{seed}"
    kept = start / f"{setting.name}.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["options"] == options:
            return found["row"]
    began = time.process_time()
    with (start / f"{setting.name}.log").open("w") as log, contextlib.redirect_stdout(log):
        grpo.train(config)
    row = row_of(setting, seed, read_metrics(Path(config.output_dir) / "metrics.jsonl"))
    row["cpu_seconds"] = round(time.process_time() - began, 1)
    row["commit"] = commit
    write_atomically(kept, json.dumps({"options": options, "row": row}))
    return row


def train_all(folder: Path, commit: str, short: bool = False) -> list[dict]:
    """Every run of every seed, with a line for each; `commit` is of the code that trains them."""
    torch.set_num_threads(1)
    engine.quiet()
    warnings.filterwarnings("ignore", "k1 as a loss")  # that is what is shown
    rows = []
    seeds = SEEDS[:1] if short else SEEDS
    count = len(seeds) * len(settings(short))
    for seed in seeds:
        ppo_step.warm_start(folder / f"seed{seed}", seed)
        for setting in settings(short):
            row = run(setting, seed, folder, commit)
            rows.append(row)
            print(f"{len(rows)}/{count} seed {seed}, {progress(setting, row)}", flush=True)
    return rows


def progress(setting: Setting, row: dict) -> str:
    """What came of a run, in a line."""
    chosen = f"updates per rollout {setting.minibatches}, {setting.label}, kl_coef {setting.kl_coef:g}"
    accuracy = row["accuracy_greedy"][-1]
    return f"{chosen}: exact KL {held(row):.3g} nats, held-out {accuracy:.0%}, {row['cpu_seconds']:.0f} CPU seconds"


def save(rows: list[dict], environment: dict, path: Path) -> None:
    """The results with command, commit and machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"group": "kl_estimators", "environment": environment, "setting": SETTING, "rows": rows}
    write_atomically(path, results.dumps(result))


# What they show.


def held(row: dict) -> float:
    """Nats per response: the mean exact KL of the last quarter of a run."""
    last = -(-len(row["kl_exact"]) // 4)
    return statistics.fmean(row["kl_exact"][-last:])


def of_setting(rows: list[dict], setting: Setting) -> list[dict]:
    """Its runs, one per seed."""
    found = []
    for row in rows:
        same = row["minibatches"] == setting.minibatches and row["kl_coef"] == setting.kl_coef
        if same and (row["kl_estimator"] == setting.kl_estimator or not setting.kl_coef):
            found.append(row)
    return found


def table(rows: list[dict]) -> str:
    """Markdown, a line per setting."""
    lines = []
    for setting in settings():
        found = of_setting(rows, setting)
        if not found:  # not of the short form
            continue
        values = [held(row) for row in found]
        seeds = ", ".join(str(row["seed"]) for row in found)
        greedy = statistics.fmean(row["accuracy_greedy"][-1] for row in found)
        line = {
            "updates per rollout": setting.minibatches,
            "KL in the loss": setting.label,
            "kl_coef": f"{setting.kl_coef:g}",
            f"exact KL, seeds {seeds}": ", ".join(f"{value:.2f}" for value in values),
            "mean": f"{statistics.fmean(values):.2f}",
            "held-out, greedy": f"{greedy:.0%}",
        }
        lines.append(line)
    return results.table_of(lines, markdown=True)


def check(rows: list[dict]) -> None:
    """What the runs must show, beyond the spread of the seeds: the exact KL of some lies below that of others.

    Raises:
        AssertionError: they do not; it names each claim that fails, with the figures.
    """
    kl = {}
    for setting in settings():
        found = of_setting(rows, setting)
        kl[setting.minibatches, setting.label, setting.kl_coef] = [held(row) for row in found]
    weak, strong = COEFFICIENTS
    failed = []

    def claim(says: str, lower: list, higher: list, factor: float = 1.0) -> None:
        if not (lower and higher) or factor * max(lower) < min(higher):  # the short form lacks some
            return
        below, above = (", ".join(f"{value:.3g}" for value in values) for values in (lower, higher))
        failed.append(f"{says}: {below} should lie below {above} by a factor of {factor:g}")

    # Off-policy: the others hold the policy, the larger coefficient more; k1 drives it away.
    free = kl[OFF_POLICY, "none", 0.0]
    for estimator in HOLDING:
        at_weak = kl[OFF_POLICY, estimator, weak]
        at_strong = kl[OFF_POLICY, estimator, strong]
        claim(f"{estimator} at kl_coef {weak:g} holds the policy", at_weak, free)
        claim(f"{estimator} at kl_coef {strong:g} holds it nearer than at {weak:g}", at_strong, at_weak)
    for coefficient in COEFFICIENTS:
        away = kl[OFF_POLICY, "k1", coefficient]
        claim(f"k1 at kl_coef {coefficient:g} drives the policy away, off-policy", free, away, 5.0)

    # On-policy: k1 does not hold it where rk3 does.
    tight = kl[ON_POLICY, "rk3", strong]
    claim("on-policy rk3 holds the policy", tight, kl[ON_POLICY, "none", 0.0], 2.0)
    claim("on-policy k1 does not", tight, kl[ON_POLICY, "k1", strong], 2.0)
    if failed:
        raise AssertionError("the runs do not show what they must:\n" + "\n".join(failed))


def draw(rows: list[dict], path: Path) -> None:
    """Exact KL (above) and held-out accuracy (below) over steps: the mean of the seeds in a band of all of them."""
    from matplotlib.figure import Figure

    weak, strong = COEFFICIENTS
    panels = {
        f"{OFF_POLICY} updates per rollout, kl_coef {weak:g}": (OFF_POLICY, weak),
        f"{OFF_POLICY} updates per rollout, kl_coef {strong:g}": (OFF_POLICY, strong),
        f"{ON_POLICY} update per rollout, kl_coef {strong:g}": (ON_POLICY, strong),
    }
    figure = Figure(figsize=(11, 6), layout="constrained")
    grid = figure.subplots(2, len(panels), sharex=True, sharey="row")
    for (upper, lower), (title, (minibatches, coefficient)) in zip(grid.T, panels.items(), strict=True):
        for setting in settings():
            found = of_setting(rows, setting)
            if found and setting.minibatches == minibatches and setting.kl_coef in (0.0, coefficient):
                draw_band(upper, found, setting.label, "steps", "kl_exact")
                draw_band(lower, found, setting.label, "eval_steps", "accuracy_greedy")
        upper.set(title=title, yscale="log")
        lower.set(xlabel="step", ylim=(0, 1))
    grid[0, 0].set_ylabel("exact KL, nats per response")
    grid[1, 0].set_ylabel("held-out accuracy, greedy")
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=6
    )
    plots.save(figure, path)


def draw_band(axes, found: list[dict], label: str, steps: str, key: str) -> None:
    colour = "black" if label == "none" else plots.LOOKS[ESTIMATORS.index(label)][0]
    over_seeds = list(zip(*(row[key] for row in found), strict=True))
    mean = [statistics.fmean(values) for values in over_seeds]
    axes.plot(
        found[0][steps],
        mean,
        color=colour,
        label=label,
        ls="--" if label == "none" else "-",
    )
    low = list(map(min, over_seeds))
    high = list(map(max, over_seeds))
    axes.fill_between(
        found[0][steps],
        low,
        high,
        color=colour,
        alpha=0.15,
        lw=0,
    )


def main() -> None:
    """`make repro-kl`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--draw", action="store_true", help="train nothing, take the results that are there")
    parser.add_argument("--short", action="store_true", help="one seed, the larger coefficient, off-policy: six runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/repro_kl"), help="of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--png", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    if arguments.short and arguments.results == RESULTS:
        arguments.results = arguments.folder / "short.json"  # not in the place of the whole
    if not arguments.draw:
        try:
            environment = machine.environment("cpu")  # before the runs: the commit may change while they last
            rows = train_all(arguments.folder, environment["commit"], arguments.short)
            save(rows, environment, arguments.results)
        except KeyboardInterrupt:
            print("stopped; finished runs are kept, and the same command goes on after them")
            sys.exit(130)
    rows = results.load(arguments.results)["rows"]
    print(f"\nexact KL in nats per response, mean of the last quarter of {SETTING['steps']} steps\n\n{table(rows)}")
    draw(rows, arguments.png)
    print(f"drew {arguments.png.name}")
    check(rows)
    print("the runs show what they must")


if __name__ == "__main__":
    main()
