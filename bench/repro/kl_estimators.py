"""Which KL estimator in the loss holds a policy in training: GRPO with each of them, two coefficients, three seeds.

    make repro-kl        trains what is not yet in runs/repro_kl, prints the table, draws docs/kl-estimators.svg
    python -m bench.repro.kl_estimators --draw        table and figure from the results that are there, in seconds

The demo's task, model and recipe. Four updates per rollout: the first is on-policy, the later ones are not, and there
k1's gradient points away from the KL's (docs/losses.md has the expectations). A control takes one update per
rollout, where k1's expected gradient is zero. What counts is the exact KL to the starting model, from the logits of
both, which the training does not use.
"""

import argparse
import statistics
import warnings
from pathlib import Path
from typing import NamedTuple

from bench import machine, plots, results
from bench.repro import ppo_step
from fused_rl.trainers import grpo
from fused_rl.trainers.base.files import write_atomically

ESTIMATORS = ("k1", "k2", "k3", "k4", "rk3")
COEFFICIENTS = (0.3, 1.0)
SEEDS = (1, 2, 3)
OFF_POLICY, ON_POLICY = 4, 1  # updates per rollout
SETTING = {"steps": 60, "kl_every": 2, "eval_every": 20, "eval_samples": 1}
RESULTS = results.RESULTS / "repro" / "kl_estimators.json"
CURVES = {  # name in a row -> metric
    "kl_exact": "objective/kl_exact",
    "response_length": "completions/mean_length",
    "accuracy_greedy": "eval/accuracy_greedy",
    "accuracy_sampled": "eval/accuracy_sampled",
}


class Setting(NamedTuple):
    """What differs between runs of one seed."""

    minibatches: int
    kl_estimator: str
    kl_coef: float

    @property
    def label(self) -> str:
        """The estimator, where it acts."""
        return self.kl_estimator if self.kl_coef else "none"


def settings(short: bool = False) -> list[Setting]:
    """Each estimator at each coefficient, and without a KL term; the control on-policy. Short: at the larger."""
    weak, strong = COEFFICIENTS
    made = [Setting(OFF_POLICY, "rk3", 0.0)]
    for estimator in ESTIMATORS:
        made += [
            Setting(OFF_POLICY, estimator, coef) for coef in ([strong] if short else COEFFICIENTS)
        ]
    if short:
        return made
    made.append(Setting(ON_POLICY, "rk3", 0.0))
    return made + [Setting(ON_POLICY, estimator, strong) for estimator in ("k1", "rk3")]


def config_of(setting: Setting, seed: int, folder: Path) -> grpo.GRPOConfig:
    """recipes/demo_grpo.yaml on the warm-started model of a seed."""
    name = f"{setting.minibatches}-{setting.label}-{setting.kl_coef:g}"
    return ppo_step.grpo_config(folder / f"seed{seed}", seed, name, **setting._asdict(), **SETTING)


def row_of(setting: Setting, seed: int, history: list[dict]) -> dict:
    """A run's curves: lists over the steps at which they were measured."""
    measured = [metrics for metrics in history if "objective/kl_exact" in metrics]
    evaluated = [metrics for metrics in history if "eval/kl_exact" in metrics]
    row = {**setting._asdict(), "seed": seed, "status": results.OK}
    row["steps"] = [metrics["step"] for metrics in measured]
    row["eval_steps"] = [metrics["step"] for metrics in evaluated]
    for name, key in CURVES.items():
        row[name] = [
            metrics[key] for metrics in (evaluated if key.startswith("eval/") else measured)
        ]
    return row


def train_all(folder: Path, commit: str, short: bool) -> list[dict]:
    """Every run of every seed, with a line for each; `commit` is of the code that trains them."""
    warnings.filterwarnings("ignore", "k1 as a loss")  # that is what is shown
    rows = []
    for seed in SEEDS[:1] if short else SEEDS:
        for setting in settings(short):
            history, spent = ppo_step.trained(
                config_of(setting, seed, folder), folder / f"seed{seed}", seed
            )
            row = row_of(setting, seed, history) | {"cpu_seconds": spent, "commit": commit}
            rows.append(row)
            label = f"updates per rollout {setting.minibatches}, {setting.label}, kl_coef {setting.kl_coef:g}"
            result = f"exact KL {held(row):.3g} nats, held-out {row['accuracy_greedy'][-1]:.0%}"
            print(f"seed {seed}, {label}: {result}, {spent:.0f} CPU seconds", flush=True)
    return rows


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
    """Markdown, a line per setting that was run, of coefficients the larger one."""
    lines = []
    for setting in settings():
        if setting.kl_coef == COEFFICIENTS[0]:
            continue
        found = of_setting(rows, setting)
        values = [held(row) for row in found]
        if found:
            seeds = ", ".join(str(row["seed"]) for row in found)
            greedy = statistics.fmean(row["accuracy_greedy"][-1] for row in found)
            line = {
                "updates per rollout": setting.minibatches,
                "KL in the loss": setting.label,
                "kl_coef": f"{setting.kl_coef:g}",
                f"exact KL, mean of seeds {seeds}": f"{statistics.fmean(values):.2f}",
                "held-out, greedy": f"{greedy:.0%}",
            }
            lines.append(line)
    return results.table_of(lines, markdown=True)


def check(rows: list[dict]) -> None:
    """Raise AssertionError unless the exact KL of some runs lies below that of others, beyond the seeds' spread."""
    kl = {
        (s.minibatches, s.label, s.kl_coef): [held(row) for row in of_setting(rows, s)]
        for s in settings()
    }
    weak, strong = COEFFICIENTS
    free = kl[OFF_POLICY, "none", 0.0]
    tight = kl[ON_POLICY, "rk3", strong]

    # Off-policy the others hold the policy, the larger coefficient more; k1 drives it away. On-policy k1 does not hold.
    claims = []
    for estimator in ESTIMATORS[1:]:
        at_weak, at_strong = kl[OFF_POLICY, estimator, weak], kl[OFF_POLICY, estimator, strong]
        claims.append((f"{estimator} at kl_coef {weak:g} holds the policy", at_weak, free, 1))
        claims.append((f"{estimator} at kl_coef {strong:g} holds it nearer", at_strong, at_weak, 1))
    for coef in COEFFICIENTS:
        claims.append(
            (f"k1 at kl_coef {coef:g} drives the policy away", free, kl[OFF_POLICY, "k1", coef], 5)
        )
    claims.append(("on-policy rk3 holds the policy", tight, kl[ON_POLICY, "none", 0.0], 2))
    claims.append(("on-policy k1 does not", tight, kl[ON_POLICY, "k1", strong], 2))
    failed = []
    for says, lower, higher, factor in claims:
        if lower and higher and factor * max(lower) >= min(higher):  # the short form lacks some
            failed.append(f"{says}: {lower} should lie below {higher} by a factor of {factor}")
    if failed:
        raise AssertionError("the runs do not show what they must:\n" + "\n".join(failed))


def draw(rows: list[dict], path: Path) -> None:
    """Exact KL (above) and held-out accuracy (below) over steps: the mean of the seeds in a band of all of them."""
    weak, strong = COEFFICIENTS
    panels = ((OFF_POLICY, weak), (OFF_POLICY, strong), (ON_POLICY, strong))
    figure = plots.empty((9, 5.6))
    grid = figure.subplots(2, len(panels), sharex=True, sharey="row")
    for (upper, lower), (minibatches, coefficient) in zip(grid.T, panels, strict=True):
        for setting in settings():
            found = of_setting(rows, setting)
            if (
                found
                and setting.minibatches == minibatches
                and setting.kl_coef in (0.0, coefficient)
            ):
                draw_band(upper, found, setting.label, "steps", "kl_exact")
                draw_band(lower, found, setting.label, "eval_steps", "accuracy_greedy")
        upper.set(title=f"updates: {minibatches}, kl_coef {coefficient:g}", yscale="log")
        lower.set(xlabel="step", ylim=(0, 1))
    grid[0, 0].set_ylabel("exact KL, nats per response")
    grid[1, 0].set_ylabel("held-out accuracy, greedy")
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6)
    plots.save(figure, path)


def draw_band(axes, found: list[dict], label: str, steps: str, key: str) -> None:
    colour = "black" if label == "none" else plots.LOOKS[ESTIMATORS.index(label)][0]
    over_seeds = list(zip(*(row[key] for row in found), strict=True))
    mean = [statistics.fmean(values) for values in over_seeds]
    x = found[0][steps]
    axes.plot(x, mean, color=colour, label=label, ls="--" if label == "none" else "-")
    axes.fill_between(
        x, list(map(min, over_seeds)), list(map(max, over_seeds)), color=colour, alpha=0.15, lw=0
    )


def main() -> None:
    """`make repro-kl`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--draw", action="store_true", help="train nothing, take the results that are there"
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="one seed, the larger coefficient, off-policy: six runs",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/repro_kl"), help="of the runs")
    parser.add_argument("--png", type=Path, default=plots.DOCS / "kl-estimators.svg")
    arguments = parser.parse_args()
    path = arguments.folder / "short.json" if arguments.short else RESULTS
    if not arguments.draw:
        # Before the runs: the commit may change while they last.
        environment = machine.environment("cpu")
        rows = train_all(arguments.folder, environment["commit"], arguments.short)
        result = {
            "group": "kl_estimators",
            "environment": environment,
            "setting": SETTING,
            "rows": rows,
        }
        write_atomically(path, results.dumps(result))
    rows = results.load(path)["rows"]
    print(
        f"\nexact KL in nats per response, mean of the last quarter of {SETTING['steps']} steps\n\n{table(rows)}"
    )
    draw(rows, arguments.png)
    print(f"drew {arguments.png.name}")
    check(rows)
    print("the runs show what they must")


if __name__ == "__main__":
    main()
