"""Held-out accuracy of our GRPO and of TRL's over the steps of the demo's task, at equal settings, seed by seed.

    python -m bench.repro.trainers_quality --steps 120 --seeds 1 2 3

Both train the same warm-started model on the same rows in the same order, in turns in one process; each draws its own
responses. Greedy accuracy on 256 held-out problems, and the CPU seconds of the steps up to there.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from bench import trainer_peers, trainers
from bench.results import table
from bench.trainer_steps import Ours
from fused_rl.trainers.base import engine
from fused_rl.trainers.rollouts.generate import TransformersSampler
from fused_rl.trainers.rollouts.roll_out import roll_out
from fused_rl.trainers.rollouts.sampling import Sampling

EVERY = 20


def accuracy(lm, ours: Ours) -> float:
    """The share of our held-out problems that the most likely response of `lm` solves; it stays in its mode."""
    policy = ours.policy
    training = lm.training
    config = policy.config
    pad_id = policy.tokenizer.pad_token_id
    size = config.rollout_batch_size
    sampler = TransformersSampler(lm, pad_id=pad_id, batch_size=size, synced_gpus=False)
    sampling = Sampling(0.0, config.max_new_tokens, policy.sampling.stop_ids)
    found = roll_out(sampler, policy.scorers, ours.held_out, sampling, policy.tokenizer, policy.device)
    lm.train(training)
    return found.solved.double().mean().item()


def one_seed(seed: int, steps: int) -> list[list]:
    """Rows of step, our accuracy and CPU seconds, TRL's accuracy and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        config = replace(trainers.demo(Path(folder), seed), steps=steps, kl_every=0)  # TRL measures no exact KL
        ours = Ours(config)
        spent = {"ours": 0.0, "TRL": 0.0}
        lm = ours.policy.model.module.base
        start = accuracy(lm, ours)
        rows = [[seed, 0, start, 0.0, start, 0.0]]

        def between(taken: dict, theirs) -> bool:
            spent["TRL"] += sum(taken.values())
            spent["ours"] += sum(ours.step().values())
            if ours.number % EVERY == 0:
                found = [accuracy(lm, ours), spent["ours"], accuracy(theirs, ours), spent["TRL"]]
                rows.append([seed, ours.number, *found])
                print(*rows[-1], flush=True)
            return ours.number < steps

        trainer_peers.run_trl(ours, f"{folder}/trl", between)
    return rows


def main() -> None:
    """Prints the table of all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    trainer_peers.alone()
    engine.quiet()
    torch.set_num_threads(1)
    rows = []
    for seed in args.seeds:
        rows += one_seed(seed, args.steps)
    engine.teardown()
    print(table(["seed", "step", "ours", "CPU s", "TRL", "CPU s "], rows))


if __name__ == "__main__":
    main()
