"""Held-out accuracy over the CPU seconds of the training steps: our GRPO and reward model beside TRL's, three seeds.

    python -m bench quality                                20 minutes on one core
    python -m bench quality --seeds 1 --steps 40 --out runs/try

Both trainers start from the same weights and take the same rows in the same order, one after the other in one process
on one thread (`bench/trainers.py`). Every so many steps the same code evaluates both on the same held-out rows: greedy
answers to 256 problems, or which of two answers scores higher. Evaluations do not count.
"""

import argparse
import itertools
import tempfile
from pathlib import Path
from unittest import mock

from bench import machine, results, trainers
from fused_rl.trainers import reward
from fused_rl.trainers.models.reward_model import RewardModel
from fused_rl.trainers.rollouts.generate import TransformersSampler
from fused_rl.trainers.rollouts.roll_out import roll_out
from fused_rl.trainers.rollouts.sampling import Sampling

STEPS = {"grpo": 300, "reward": 600}
EVALUATIONS = 15  # of each model, beside the one before the first step


def accuracy(run: trainers.Run, model, held_out) -> float:
    """Return the share of pairs whose chosen side scores higher, or of problems that the greedy response solves."""
    if run.op == "reward":
        scores = reward.score_pairs(RewardModel(model), held_out, 256)
        return (scores[:, 0] > scores[:, 1]).double().mean().item()
    policy = run.policy
    sampler = TransformersSampler(model, pad_id=policy.tokenizer.pad_token_id, batch_size=256)
    greedy = Sampling(0.0, run.config.max_new_tokens, policy.sampling.stop_ids)
    found = roll_out(
        sampler, policy.scorers, held_out.prompts, greedy, policy.tokenizer, policy.device
    )
    return found.solved.double().mean().item()


class Judge:
    """Notes [step, CPU seconds until then, accuracy] of a run, after every few steps.

    Args:
        held_out: a list that has the held-out rows by then.
    """

    def __init__(self, held_out: list):
        self.held_out = held_out
        self.points: list[list] = []

    def __call__(self, run: trainers.Run, model) -> None:
        step = len(run.steps)
        every = max(1, run.config.steps // EVALUATIONS)
        if step % every and step != run.config.steps:
            return
        # The transformers model: TRL's as it is, ours inside of its engine.
        if model is run.policy:
            model = model.model.module.base if run.op == "grpo" else model.module.classifier
        training = model.training
        model.eval()
        spent = sum(sum(parts.values()) for parts in run.steps)
        self.points.append([step, spent, accuracy(run, model, self.held_out[0])])
        model.train(training)


def rows_of(op: str, seed: int, steps: int) -> list[dict]:
    """Train both to the end; returns their rows."""
    made = {"grpo": trainers.demo_grpo, "reward": trainers.demo_rewards}[op]
    module = trainers.MODULES[op]
    evaluate, held_out = module.evaluate, []
    judges = Judge(held_out), Judge(held_out)

    def noted(*args, **options):
        held_out.append(args[1 if op == "grpo" else 2])
        return evaluate(*args, **options)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = made(folder, seed).replace(
            output_dir=str(folder / "ours"), steps=steps, eval_every=steps
        )
        if op == "grpo":  # the exact KL, which TRL does not measure
            config = config.replace(kl_every=0)
        with mock.patch.object(module, "evaluate", noted):
            ours = trainers.run_ours(op, config, watch=judges[0])
        theirs = trainers.run_trl(ours, folder / "trl", judges[1])
        checked = trainers.compared(ours, theirs)
    shared = {"op": op, "seed": seed}
    return [
        shared
        | {"implementation": trainers.OURS, "status": results.OK, "accuracy": judges[0].points},
        shared
        | {"implementation": f"TRL {trainers.TRAINERS[op]}", "accuracy": judges[1].points}
        | checked,
    ]


def command(group: str, words: list[str]) -> int:
    """Run every algorithm and seed; the results are written after each."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    made.add_argument(
        "--steps", type=int, help="of each run (default: 300 of GRPO, 600 of the reward model)"
    )
    made.add_argument("--out", default="bench/results", help="folder for the JSON result")
    args = made.parse_args(words)
    args.group, args.device = group, "cpu"
    trainers.prepare()
    print(machine.heading("cpu"), flush=True)
    rows = []
    for (op, steps), seed in itertools.product(STEPS.items(), args.seeds):
        rows += rows_of(op, seed, args.steps or steps)
        for row in rows[-2:]:
            step, seconds, share = row["accuracy"][-1]
            print(
                f"{op}, seed {seed}, {row['implementation']}: {share:.1%} after {seconds:.0f} CPU seconds",
                flush=True,
            )
        results.save(args, rows)
    return 0
