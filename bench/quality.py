"""Held-out accuracy over the CPU seconds of the training steps: our GRPO and reward model beside TRL's, three seeds.

    python -m bench quality
    python -m bench quality --part grpo-1 --steps 40 --out runs/try

Both train from the same weights on the same rows in the same order with the same hyperparameters, in turns in one
process on one thread; GRPO's draw their own responses. Every so many steps the same code reads the same held-out rows
with both models, which does not count: greedy answers to 256 problems, or which of two answers scores higher. One part
is an algorithm and a seed, a process of its own; what an earlier call at the same commit has finished is not run again.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from bench import machine, pages, results, trainer_peers, trainer_tasks, trainers
from bench.trainer_ours import Reward
from bench.trainer_steps import GRPO
from fused_rl.trainers.models.reward_model import RewardModel
from fused_rl.trainers.rollouts.generate import TransformersSampler
from fused_rl.trainers.rollouts.roll_out import roll_out
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.scorers.reward_model import RewardScorer

WORK = machine.ROOT / "runs" / "bench-quality"
SEEDS = (1, 2, 3)
STEPS = {"grpo": 300, "reward": 600}
EVALUATIONS = 15  # of each model, beside the one before the first step
READ_AT_ONCE = 256


def grpo(folder: Path, seed: int, steps: int) -> GRPO:
    """The demo's reinforcement after its whole warm start, without the exact KL, which TRL does not measure."""
    config = trainer_tasks.demo_grpo(folder, seed, warm_steps=None)
    return GRPO(config.changed(steps=steps, kl_every=0))


def reward(folder: Path, seed: int, steps: int) -> Reward:
    """The reward demo."""
    return Reward(trainer_tasks.demo_rewards(folder, seed).changed(steps=steps))


RUNS = {"grpo": grpo, "reward": reward}


def solved(lm, run: GRPO) -> float:
    """The share of the held-out problems that the most likely response of a model solves."""
    policy, config = run.policy, run.config
    sampler = TransformersSampler(lm, pad_id=run.tokenizer.pad_token_id, batch_size=READ_AT_ONCE)
    greedy = Sampling(0.0, config.max_new_tokens, policy.sampling.stop_ids)
    found = roll_out(sampler, policy.scorers, run.held_out, greedy, run.tokenizer, run.device)
    return found.solved.double().mean().item()


def told_apart(classifier, run: Reward) -> float:
    """The share of the held-out pairs whose chosen side scores higher."""
    scorer = RewardScorer(RewardModel(classifier), READ_AT_ONCE)
    sides = []
    for name in ("chosen", "rejected"):
        prompts, responses = zip(*(getattr(pair, name) for pair in run.held_out), strict=True)
        sides.append(scorer(list(prompts), list(responses)))
    return (sides[0] > sides[1]).double().mean().item()


def accuracy(model, run) -> float:
    """Of a model on the held-out rows of a run; it stays in its mode."""
    training = model.training
    model.eval()
    found = solved(model, run) if run.op == "grpo" else told_apart(model, run)
    model.train(training)
    return found


def model_of(run):
    """The transformers model that a run of ours trains."""
    return run.policy.model.module.base if run.op == "grpo" else run.model.module.classifier


def train(op: str, seed: int, steps: int, folder: Path) -> list[dict]:
    """One part: a row for ours and one for TRL's, with its accuracy as [step, CPU seconds, accuracy]."""
    run = RUNS[op](folder, seed, steps)
    peer = trainer_peers.of(op, run, str(folder / "trl"))
    contenders = {"fused_rl": (run, model_of(run)), peer.name: (peer, peer.lm)}
    spent = dict.fromkeys(contenders, 0.0)
    points = {name: [[0, 0.0, accuracy(model, run)]] for name, (_, model) in contenders.items()}
    every = max(1, steps // EVALUATIONS)
    for step in range(1, steps + 1):
        for name, (contender, model) in contenders.items():
            spent[name] += sum(contender.step().values())
            if step % every == 0 or step == steps:
                points[name].append([step, spent[name], accuracy(model, run)])
        if step % every == 0:
            told = [f"{name} {found[-1][2]:.3f} after {found[-1][1]:.0f} s" for name, found in points.items()]
            print(f"{op}, seed {seed}, step {step}: {', '.join(told)}", flush=True)

    # What was compared, and the rows.
    checked = trainers.compared(peer)
    peer.close()
    run.close()
    rows = []
    for name, found in points.items():
        row = {"op": op, "seed": seed, "implementation": name, "status": results.OK, "accuracy": found}
        row["version"] = None if name == "fused_rl" else peer.version
        rows.append(row | ({} if name == "fused_rl" else checked))
    return rows


def part(name: str, steps: int | None, out: Path) -> None:
    """Run one part in this process, and write it down."""
    op, _, seed = name.partition("-")
    trainers.prepare()
    with tempfile.TemporaryDirectory() as folder:
        rows = train(op, int(seed), steps or STEPS[op], Path(folder))
    commit = machine.environment("cpu")["commit"]
    out.mkdir(parents=True, exist_ok=True)
    written = {"commit": commit, "steps": steps or STEPS[op], "rows": rows}
    (out / f"{name}.json").write_text(json.dumps(written))


def finished(name: str, steps: int | None, out: Path) -> list[dict]:
    """The rows of a part, if it was run at this commit with so many steps; else none."""
    path = out / f"{name}.json"
    if not path.exists():
        return []
    written = json.loads(path.read_text())
    here = machine.environment("cpu")
    same = (here["commit"], steps or STEPS[name.partition("-")[0]])
    known = here["commit"] and not here["modified"]
    return written["rows"] if known and (written["commit"], written["steps"]) == same else []


def run_part(name: str, args) -> bool:
    """Run one part as a process; whether it came to its end."""
    words = [sys.executable, "-m", "bench", "quality", "--part", name, "--work", str(args.work)]
    words += ["--steps", str(args.steps)] if args.steps else []
    return subprocess.run(words, cwd=machine.ROOT).returncode == 0


def run_all(args) -> int:
    """Every part that is not there yet, so many at a time; the whole result after each."""
    parts = [f"{op}-{seed}" for op, seed in itertools.product(STEPS, args.seeds)]
    waiting = [name for name in parts if not finished(name, args.steps, args.work)]
    broken = []

    def write() -> None:
        found = [finished(name, args.steps, args.work) for name in parts]
        rows = list(itertools.chain.from_iterable(found))
        if rows:
            results.save(args, rows)
            print(pages.quality_table(rows), flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run_part, name, args): name for name in waiting}
        for done in as_completed(running):
            broken += [] if done.result() else [running[done]]
            write()
    if not waiting:
        write()
    if broken:
        print(f"failed: {', '.join(broken)}")
    return int(bool(broken))


def command(group: str, words: list[str]) -> int:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--part", help="one algorithm and seed alone, in this process: grpo-1")
    made.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    made.add_argument("--steps", type=int, help="of each part (default: 300 for GRPO, 600 for the reward model)")
    made.add_argument("--jobs", type=int, default=2, help="parts at a time, each on one thread")
    made.add_argument("--work", type=Path, default=WORK, help="folder for what each part found")
    made.add_argument("--out", default="bench/results", help="folder for the JSON result")
    args = made.parse_args(words)
    args.group, args.device = group, "cpu"
    if args.part:
        part(args.part, args.steps, args.work)
        return 0
    return run_all(args)
