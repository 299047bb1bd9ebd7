"""Which KL estimator in the loss holds a policy in training: GRPO with each of them, two coefficients, three seeds.

    make repro-kl        trains what is not yet in runs/repro_kl, prints the table, draws docs/kl-estimators.png
    python bench/repro/kl_estimators.py --draw        table and figure from the results that are there, in seconds

The demo's task, model and recipe. Four updates per rollout: the first is on-policy, the later ones are not, and there
k1's gradient points away from the KL's (bench/repro/kl_table.py has the expectations). A control takes one update per
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
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from bench import machine, plots, report, results
from bench.repro import ppo_step
from fused_rl.recipes import demo_ppo
from fused_rl.trainers import grpo
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_atomically
from fused_rl.trainers.options.parse import parse
from fused_rl.trainers.run.logger import read_metrics

ESTIMATORS = ("k1", "k2", "k3", "k4", "rk3")
HOLDING = ESTIMATORS[1:]
COEFFICIENTS = (0.3, 1.0)
SEEDS = (1, 2, 3)
OFF_POLICY, ON_POLICY = 4, 1  # updates per rollout
SETTING = {"steps": 60, "kl_every": 2, "eval_every": 20, "eval_samples": 1}
RESULTS = results.RESULTS / "repro" / "kl_estimators.json"
PICTURE = plots.DOCS / "kl-estimators.png"
HEADER = ["updates per rollout", "KL in the loss", "kl_coef", "exact KL, seeds 1, 2, 3", "mean", "held-out, greedy"]


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


def settings() -> list[Setting]:
    """Each estimator at each coefficient, and without a KL term; the control on-policy."""
    strongest = max(COEFFICIENTS)
    made = [Setting(OFF_POLICY, "rk3", 0.0)]
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
    return parse(grpo.GRPOConfig, demo_ppo.arguments("demo_grpo.yaml", seed, options), "fused-rl grpo")


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
    options, start = asdict(config), folder / f"seed{seed}"
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


def train_all(folder: Path, commit: str) -> list[dict]:
    """Every run of every seed, with a line for each; `commit` is of the code that trains them."""
    torch.set_num_threads(1)
    engine.quiet()
    warnings.filterwarnings("ignore", "k1 as a loss")  # that is what is shown
    rows, count = [], len(SEEDS) * len(settings())
    for seed in SEEDS:
        ppo_step.warm_start(folder / f"seed{seed}", seed)
        for setting in settings():
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


class Claim(NamedTuple):
    """That the exact KL in every seed of `lower` is below that in every seed of `higher`, by a factor."""

    says: str
    lower: list[float]
    higher: list[float]
    factor: float = 1.0

    def holds(self) -> bool:
        """Whether the figures bear it out."""
        return self.factor * max(self.lower) < min(self.higher)

    def text(self) -> str:
        """The claim with its figures."""
        lower, higher = (", ".join(f"{value:.3g}" for value in values) for values in (self.lower, self.higher))
        return f"{self.says}: {lower} should lie below {higher} by a factor of {self.factor:g}"


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
        values = [held(row) for row in found]
        greedy = statistics.fmean(row["accuracy_greedy"][-1] for row in found)
        seeds = ", ".join(f"{value:.2f}" for value in values)
        cells = [str(setting.minibatches), setting.label, f"{setting.kl_coef:g}", seeds]
        lines.append([*cells, f"{statistics.fmean(values):.2f}", f"{greedy:.0%}"])
    return report.table(HEADER, lines)


def check(rows: list[dict]) -> None:
    """What the runs must show, beyond the spread of the seeds.

    Raises:
        AssertionError: they do not; it names each claim that fails, with the figures.
    """
    kl = {}
    for setting in settings():
        kl[setting.minibatches, setting.label, setting.kl_coef] = [held(row) for row in of_setting(rows, setting)]
    weak, strong = COEFFICIENTS
    claims = []

    # Off-policy: the others hold the policy, the larger coefficient more; k1 drives it away.
    free = kl[OFF_POLICY, "none", 0.0]
    for estimator in HOLDING:
        at_weak, at_strong = kl[OFF_POLICY, estimator, weak], kl[OFF_POLICY, estimator, strong]
        claims.append(Claim(f"{estimator} at kl_coef {weak:g} holds the policy", at_weak, free))
        claims.append(Claim(f"{estimator} at kl_coef {strong:g} holds it nearer than at {weak:g}", at_strong, at_weak))
    for coefficient in COEFFICIENTS:
        away = kl[OFF_POLICY, "k1", coefficient]
        claims.append(Claim(f"k1 at kl_coef {coefficient:g} drives the policy away, off-policy", free, away, 5.0))

    # On-policy: k1 does not hold it where rk3 does.
    tight = kl[ON_POLICY, "rk3", strong]
    claims.append(Claim("on-policy rk3 holds the policy", tight, kl[ON_POLICY, "none", 0.0], 2.0))
    claims.append(Claim("on-policy k1 does not", tight, kl[ON_POLICY, "k1", strong], 2.0))
    failed = [claim.text() for claim in claims if not claim.holds()]
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
    for column, (title, (minibatches, coefficient)) in zip(grid.T, panels.items(), strict=True):
        for setting in settings():
            if setting.minibatches == minibatches and setting.kl_coef in (0.0, coefficient):
                _curves(column, of_setting(rows, setting), setting.label)
        column[0].set(title=title, yscale="log")
        column[1].set(xlabel="step", ylim=(0, 1))
    grid[0, 0].set_ylabel("exact KL, nats per response")
    grid[1, 0].set_ylabel("held-out accuracy, greedy")
    grid[0, 0].legend(ncols=2, fontsize=8)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _curves(column, found: list[dict], label: str) -> None:
    colour = "black" if label == "none" else plots.LOOKS[ESTIMATORS.index(label)][0]
    for axes, steps, key in zip(column, ("steps", "eval_steps"), ("kl_exact", "accuracy_greedy"), strict=True):
        over_seeds = list(zip(*(row[key] for row in found), strict=True))
        low, high = [min(values) for values in over_seeds], [max(values) for values in over_seeds]
        mean = [statistics.fmean(values) for values in over_seeds]
        axes.plot(found[0][steps], mean, color=colour, label=label, ls="--" if label == "none" else "-")
        axes.fill_between(found[0][steps], low, high, color=colour, alpha=0.15, lw=0)


def main() -> None:
    """`make repro-kl`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--draw", action="store_true", help="train nothing, take the results that are there")
    parser.add_argument("--folder", type=Path, default=Path("runs/repro_kl"), help="of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--png", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    if not arguments.draw:
        try:
            environment = machine.environment("cpu")  # before the runs: the commit may change while they last
            save(train_all(arguments.folder, environment["commit"]), environment, arguments.results)
        except KeyboardInterrupt:
            print("stopped; finished runs are kept, and the same command goes on after them")
            sys.exit(130)
        finally:
            engine.teardown()
    rows = results.load(arguments.results)["rows"]
    print(f"\nexact KL in nats per response, mean of the last quarter of {SETTING['steps']} steps\n\n{table(rows)}")
    draw(rows, arguments.png)
    print(f"drew {arguments.png.name}")
    check(rows)
    print("the runs show what they must")


if __name__ == "__main__":
    main()
