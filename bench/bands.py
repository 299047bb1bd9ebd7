"""How far the metrics of healthy runs go: the demos over some seeds, and trainers/metrics/bands.json made of them.

    python -m bench bands                       about an hour on two cores
    python -m bench bands --demos grpo turns --seeds 1 2 3
    python -m bench bands --read                of the runs that are there

`grpo` and `sft` are of `make demo`, `turns` of `python -m fused_rl.recipes.turns`, `reward` of `make demo-reward` and
`ppo` of `make demo-ppo`. A run that is there is not made again. At the end every run is shown to the doctor, who must
find nothing.
"""

import argparse
import json
from pathlib import Path

import torch

from bench import machine
from fused_rl.recipes import demo, demo_ppo, demo_reward, turns
from fused_rl.trainers import grpo
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_atomically
from fused_rl.trainers.metrics import bands
from fused_rl.trainers.metrics.rules import examine
from fused_rl.trainers.run.logger import read_metrics

SEEDS = (1, 2, 3, 4, 5)
# Demo -> its trainer, and where its runs are.
DEMOS = {
    "sft": ("sft", "demo/seed-{seed}/sft"),
    "grpo": ("grpo", "demo/seed-{seed}/grpo"),
    "turns": ("grpo", "turns/seed-{seed}/grpo"),
    "reward": ("reward", "reward/seed-{seed}/reward"),
    "ppo": ("ppo", "ppo/seed-{seed}/ppo"),
}


def make(name: str, folder: Path, seed: int) -> None:
    """A run, with what comes before it in its demo."""
    place = (folder / DEMOS[name][1].format(seed=seed)).parent
    if name == "reward":
        demo_reward.run(place, seed)
    elif name == "ppo":
        demo_ppo.run(place, seed)
    elif name == "turns":
        turns.prepare(place, seed)
        grpo.train(turns.config_of(place, seed))
    elif finished(folder, "sft", seed) is None:
        demo.warm_start(place, seed)
    if name == "grpo":
        grpo.train(demo.grpo_config(place, seed))


def finished(folder: Path, name: str, seed: int) -> list[dict] | None:
    """What a run has left, where its model was saved."""
    run = folder / DEMOS[name][1].format(seed=seed)
    return read_metrics(run / "metrics.jsonl") if (run / "model").is_dir() else None


def edges(histories: list[list[dict]]) -> dict[str, list[float]]:
    """[least, largest] of each metric with a unit, over all steps of all seeds; four digits."""
    found: dict[str, list[float]] = {}
    for history in histories:
        values: dict[str, list[float]] = {}
        for entry in history:
            for key, value in entry.items():
                if value is not None:
                    values.setdefault(key, []).append(value)
            for key in bands.UNITS.keys() & entry.keys():
                value = None if entry[key] is None else bands.in_unit(key, values)
                found.setdefault(key, []).extend([] if value is None else [value])
    ordered = {key: found[key] for key in bands.UNITS if found.get(key)}
    return {key: [float(f"{edge:.4g}") for edge in (min(of_key), max(of_key))] for key, of_key in ordered.items()}


def command(name: str, words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--demos", nargs="+", choices=DEMOS, default=list(DEMOS))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--folder", type=Path, default=Path("runs/bands"))
    parser.add_argument("--read", action="store_true", help="make no run")
    args = parser.parse_args(words)
    engine.quiet()
    torch.set_num_threads(1)  # as the demos do
    for seed in args.seeds:
        for demo_name in () if args.read else args.demos:
            if finished(args.folder, demo_name, seed) is None:
                make(demo_name, args.folder, seed)

    # Of the runs that are there, each trainer's bands.
    histories: dict[str, list[list[dict]]] = {}
    here = machine.environment("cpu")
    measured = {"command": f"python -m bench {name}"} | {key: here[key] for key in ("commit", "device", "python")}
    measured |= {"torch": here["versions"]["torch"], "seeds": {}}
    for demo_name, (trainer, _) in DEMOS.items():
        there = {seed: finished(args.folder, demo_name, seed) for seed in args.seeds}
        there = {seed: history for seed, history in there.items() if history is not None}
        measured["seeds"][demo_name] = list(there)
        histories.setdefault(trainer, []).extend(there.values())
    measured["bands"] = {trainer: edges(of_trainer) for trainer, of_trainer in histories.items()}
    write_atomically(bands.FILE, json.dumps(measured, indent=1) + "\n")

    # What the doctor says of these runs by these bands.
    bands.BANDS |= bands.read()
    found = []
    for trainer, of_trainer in histories.items():
        for history in of_trainer:
            found += [f"{trainer}: {finding.told()}" for finding in examine(trainer, {"zero_stage": 0}, history).found]
    print("\n".join(found) or f"{sum(map(len, histories.values()))} runs, and nothing found")
    return int(bool(found))
