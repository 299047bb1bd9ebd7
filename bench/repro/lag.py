"""What drawing ahead does to learning: the demo's GRPO with `--lag` 0, 1, 2 and 8, three seeds.

    python -m bench.repro.lag                        trains what is not yet in runs/repro_lag, prints the table
    python -m bench.repro.lag --lags 0 1 --steps 60  fewer of them, shorter

The demo's task, model and recipe. All starts from the same warm-started model of its seed; with another lag it draws
other responses, so one run says little beside another: look at the spread of the seeds. Runs follow one another on one
core; finished ones are kept, so that the same command goes on after an interruption.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from bench import machine, results
from bench.repro import ppo_step
from fused_rl.recipes import demo
from fused_rl.trainers import grpo
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_atomically
from fused_rl.trainers.run.logger import read_metrics
from fused_rl.trainers.run.parse import parse

LAGS = (0, 1, 2, 8)
SEEDS = (1, 2, 3)
LAST = 50  # steps whose mean reward is told


def config_of(lag: int, steps: int, seed: int, folder: Path) -> grpo.GRPOConfig:
    """recipes/demo_grpo.yaml on the warm-started model of a seed."""
    start = folder / f"seed{seed}"
    options = {
        "model": start / "sft" / "model",
        "dataset": start / "data" / "train.jsonl",
        "eval_dataset": start / "data" / "eval.jsonl",
        "output_dir": start / f"lag{lag}-{steps}",
        "lag": lag,
        "steps": steps,
    }
    return parse(grpo.GRPOConfig, demo.arguments("demo_grpo.yaml", seed, options))


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


def run(lag: int, steps: int, seed: int, folder: Path) -> dict:
    """The row of one run, trained unless it is there already."""
    config = config_of(lag, steps, seed, folder)
    kept = Path(f"{config.output_dir}.json")
    if kept.exists():
        return json.loads(kept.read_text())
    began = time.process_time()
    with Path(f"{config.output_dir}.log").open("w") as log, contextlib.redirect_stdout(log):
        grpo.train(config)
    row = row_of(lag, seed, read_metrics(Path(config.output_dir) / "metrics.jsonl"))
    row["cpu_seconds"] = round(time.process_time() - began, 1)
    write_atomically(kept, json.dumps(row))
    return row


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
        for name, words in (("difference", "nats from the policy, a token"), ("kl", "KL (k3)"), ("cut", "cut")):
            values = [row[name] for row in found if row[name] is not None]
            line[words] = f"{statistics.fmean(values):.2g}" if values else "—"
        lines.append(line)
    return results.table_of(lines, markdown=True)


def main() -> None:
    """`python -m bench.repro.lag`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--lags", type=int, nargs="+", default=LAGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--folder", type=Path, default=Path("runs/repro_lag"), help="of the runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine.quiet()
    commit, rows = machine.environment("cpu")["commit"], []  # before the runs: it may change while they last
    try:
        for seed in arguments.seeds:
            ppo_step.warm_start(arguments.folder / f"seed{seed}", seed)
            for lag in arguments.lags:
                rows.append(run(lag, arguments.steps, seed, arguments.folder))
                told = f"{rows[-1]['before']:.1%} -> {rows[-1]['after']:.1%}, {rows[-1]['cpu_seconds']} CPU seconds"
                print(f"seed {seed}, lag {lag}: {told}", flush=True)
    except KeyboardInterrupt:
        print("stopped; finished runs are kept, and the same command goes on after them")
        sys.exit(130)
    print(f"\ncommit {commit}, {arguments.steps} steps, one thread; seeds {', '.join(map(str, arguments.seeds))}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
