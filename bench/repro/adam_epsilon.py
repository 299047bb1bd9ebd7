"""Where Adam adds epsilon, and how far the first PPO update goes: PyTorch's form, and TensorFlow's (`--tf_adam`).

    python -m bench.repro.adam_epsilon         prints the table

64 responses of the demo's warm-started model, one minibatch, one update; then the same responses are scored again, as
the second epoch does. Both forms start from the same weights, with the same responses, lr = epsilon = 1e-5. After
https://github.com/vwxyzjn/minimal-adam-difference, which reports it of GPT-2.

What differs is decided by the size of a weight's gradient in units of epsilon: for far larger ones the forms agree. A
model of 0.4 million weights has larger ones than GPT-2's 124 million, so the gradient's norm is clipped to several
values: a norm of 0.1 here is 1.6e-4 per weight, in GPT-2 a norm of 1 is 0.9e-4.
"""

import argparse
import itertools
from pathlib import Path

import torch

from bench import results
from bench.repro import ppo_step
from fused_rl.trainers import ppo
from fused_rl.trainers.base import engine
from fused_rl.trainers.policy.before_update import measure

FORMS = {"PyTorch Adam": False, "TF-style Adam": True}
CLIPS = (0.0, 0.5, 0.1)
SETTING = {
    "prompts_per_step": 64,
    "group_size": 1,
    "minibatches": 1,
    "epochs": 2,
    "lr": 1e-5,
    "adam_eps": 1e-5,
    "adam_beta2": 0.999,
    "lr_schedule": "constant",
    "warmup_steps": 0,
}


def log_ratios(folder: Path, seed: int, tf_adam: bool, clip: float) -> tuple[torch.Tensor, float]:
    """(tokens,) fp64: log-ratio of every response token after the first update; and the gradient's rms per weight."""
    policy, critic, prompts = ppo_step.load(
        folder, seed, tf_adam=tf_adam, max_grad_norm=clip, **SETTING
    )
    rollout = policy.roll_out(prompts, policy.sampling, 1)
    parts = list(torch.arange(len(rollout.samples)).split(policy.config.micro_batch_size))
    experience = ppo.judge(policy, critic, rollout, parts, policy.config.kl_coef)
    policy.model.train()
    ppo.accumulate(policy, critic, experience, parts, policy.config.kl_coef, 1)
    norm = engine.optimizer_step(policy.model, 1)["optim/grad_norm"]
    after = measure(policy, rollout.batch, parts).old_logprobs
    log_ratio = (after - experience.measured.old_logprobs)[rollout.batch.response_mask]
    weights = sum(parameter.numel() for parameter in policy.model.parameters())
    norm = min(norm, clip) if clip else norm
    return log_ratio.double(), norm / weights**0.5


def row(name: str, log_ratio: torch.Tensor) -> dict:
    """The quantities of the report's table."""
    ratio = log_ratio.exp()
    clipped = (ratio - 1).abs() > 0.2
    cells = {
        "log-prob difference, variance": log_ratio.var(),
        "ratio, variance": ratio.var(),
        "max": ratio.max(),
        "min": ratio.min(),
        "approx. KL": log_ratio.square().mean() / 2,
        "clip fraction": clipped.double().mean(),
    }
    return {"": name} | {title: f"{cell.item():.6f}" for title, cell in cells.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the responses; all in one row"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/repro"), help="of the warm-started model"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    # Both forms at each size of the gradient, all seeds in one row.
    folder = ppo_step.warm_start(arguments.folder)
    rows = []
    for clip, (name, tf_adam) in itertools.product(CLIPS, FORMS.items()):
        of_seeds = [log_ratios(folder, seed, tf_adam, clip) for seed in arguments.seeds]
        ratios, sizes = zip(*of_seeds, strict=True)
        log_ratio = torch.cat(ratios)
        rms = sum(sizes) / len(sizes)
        clipped = f"norm clipped to {clip}" if clip else "not clipped"
        rows.append(
            row(f"{name}, {clipped} ({rms / SETTING['adam_eps']:.0f} eps per weight)", log_ratio)
        )
    print(
        f"first update: {len(arguments.seeds)} x {SETTING['prompts_per_step']} responses, lr = eps = 1e-5\n"
    )
    print(results.table_of(rows))


if __name__ == "__main__":
    main()
