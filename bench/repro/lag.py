"""What sampling ahead does to learning: the demo's GRPO with `--lag` 0, 1, 2 and 8, three seeds.

    python -m bench.repro.lag                        trains what is not yet in runs/repro_lag, prints the table
    python -m bench.repro.lag --lags 0 1 --steps 60  fewer runs, shorter

The demo's task, model and recipe; all runs of a seed start from the same warm-started model. With another lag a run
samples other responses, so compare the spread of the seeds.
"""

import argparse
import statistics
from pathlib import Path

from bench import machine, results
from bench.repro import ppo_step
from fused_rl.trainers import grpo

LAGS = (0, 1, 2, 8)
SEEDS = (1, 2, 3)
LAST = 50  # steps whose mean reward is printed


def config_of(lag: int, steps: int, seed: int, folder: Path) -> grpo.GRPOConfig:
    """recipes/demo_grpo.yaml on the warm-started model of a seed."""
    return ppo_step.grpo_config(
        folder / f"seed{seed}", seed, f"lag{lag}-{steps}", lag=lag, steps=steps
    )


def row_of(lag: int, seed: int, history: list[dict]) -> dict:
    """What came of a run: accuracies and rewards are fractions, differences nats per token."""
    evaluated = [metrics for metrics in history if "eval/accuracy_greedy" in metrics]
    trained = [metrics for metrics in history if "reward" in metrics]

    def mean(key: str, of: list[dict]) -> float | None:
        found = [metrics[key] for metrics in of if key in metrics]
        return statistics.fmean(found) if found else None

    return {
        "lag": lag,
        "seed": seed,
        "before": evaluated[0]["eval/accuracy_greedy"],
        "after": evaluated[-1]["eval/accuracy_greedy"],
        "reward": mean("reward", trained[-LAST:]),
        "difference": mean("rollout/logprob_diff_abs", trained),
        "kl": mean("rollout/kl_k3", trained),
        "cut": mean("rollout/correction_cut", trained),
    }


def table(rows: list[dict]) -> str:
    """Markdown, a line per lag: each seed, and their mean."""
    lines = []
    for lag in dict.fromkeys(row["lag"] for row in rows):
        found = [row for row in rows if row["lag"] == lag]
        line = {"lag": lag}
        for name in ("before", "after"):
            line[f"greedy, {name}"] = ", ".join(f"{row[name]:.1%}" for row in found)
            line[f"mean {name}"] = f"{statistics.fmean(row[name] for row in found):.1%}"
        line[f"reward, last {LAST} steps"] = ", ".join(f"{row['reward']:.3f}" for row in found)
        line["mean reward"] = f"{statistics.fmean(row['reward'] for row in found):.3f}"
        for name, words in (
            ("difference", "nats from the policy, a token"),
            ("kl", "KL (k3)"),
            ("cut", "cut"),
        ):
            values = [row[name] for row in found if row[name] is not None]
            line[words] = f"{statistics.fmean(values):.2g}" if values else "—"
        lines.append(line)
    return results.table_of(lines, markdown=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--lags", type=int, nargs="+", default=LAGS)
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--folder", type=Path, default=Path("runs/repro_lag"), help="of the runs")
    given = parser.parse_args()
    commit = machine.environment("cpu")["commit"]  # before the runs: it may change while they last
    rows = []
    for seed in SEEDS:
        for lag in given.lags:
            config = config_of(lag, given.steps, seed, given.folder)
            history, spent = ppo_step.trained(config, given.folder / f"seed{seed}", seed)
            rows.append(row_of(lag, seed, history))
            change = f"{rows[-1]['before']:.1%} -> {rows[-1]['after']:.1%}, {spent} CPU seconds"
            print(f"seed {seed}, lag {lag}: {change}", flush=True)
    print(
        f"\ncommit {commit}, {given.steps} steps, one thread; seeds {', '.join(map(str, SEEDS))}\n"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
