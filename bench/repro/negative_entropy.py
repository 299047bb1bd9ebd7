"""Entropy that goes negative in a PPO step (TRL issue 2022): its two causes, beside what our trainer logs.

    python -m bench.repro.negative_entropy     prints the table and draws docs/negative-entropy.png

PPO on the demo's warm-started model, a step after the other. Of each step's own responses and logits:

- *fill*: padded log-probabilities set to 1.0 and then summed over 53 columns, so every pad takes one nat off. It
  reads h L - (53 - L) for L tokens of h nats each; `objective/entropy` is the sum over the response alone;
- *cancellation*: the entropy per token as lse - sum(p x), in the dtype of the logits: a difference of two numbers of
  the logits' size, whose rounding is larger than a sure token's entropy. `policy/entropy_avg` sums positive terms.
"""

import argparse
import itertools
from pathlib import Path

import torch

import fused_rl
from bench import plots, results
from bench.repro import ppo_step
from bench.repro.entropy import difference
from fused_rl.trainers import ppo
from fused_rl.trainers.policy.credit import experience_metrics

COLUMNS, OFFSET = 53, -100.0
SETTING = {
    "prompts_per_step": 64,
    "group_size": 1,
    "minibatches": 2,
    "epochs": 2,
    "kl_coef": 0.0,
    "kl_target": "null",  # the recipe's, and its horizon, mean nothing without a coefficient
    "kl_horizon": 10_000,
    "entropy_coef": 0.0,
    "lr": 1e-3,
    "warmup_steps": 0,
    "micro_batch_size": 32,
}


def filled(logprobs: torch.Tensor, mask: torch.Tensor) -> float:
    """The faulty metric: pads count as log-probabilities of 1.0, in a response of 53 columns."""
    total = torch.where(mask, -logprobs.double(), 0).sum()
    pads = COLUMNS * len(mask) - mask.sum()
    return ((total - pads) / len(mask)).item()


@torch.no_grad()
def entropies(policy, batch) -> dict[str, float]:
    """The smallest entropy of a token in `batch`, by each form, of the policy's logits."""
    logits = policy.model(batch.input_ids, batch.response_mask, policy.config.temperature, want_logits=True).logits
    logits = logits / policy.config.temperature + OFFSET  # softmax does not see it; GPT-2's logits stand about there
    targets = torch.zeros(len(logits), dtype=torch.int64)
    found = {}
    for name, x in {"bf16": logits.bfloat16(), "fp32": logits.float()}.items():
        found[f"ours, {name}"] = fused_rl.token_logprobs(x, targets).entropy.min().item()
        found[f"lse - sum(p x), {name}"] = difference(x).min().item()
    return found


def measured(folder: Path, steps: int) -> list[dict[str, float]]:
    """One row per PPO step: what the trainer logs, and what the two faults would have logged."""
    policy, critic, prompts = ppo_step.load(folder, 1, steps=steps, **SETTING)
    config, rows = policy.config, []
    for step in range(1, steps + 1):
        rollout = policy.roll_out(next(prompts), policy.sampling, 1)
        updates = ppo.plan(config, len(rollout.samples), config.micro_batch_size)
        first_pass = list(itertools.chain(*updates[: config.minibatches]))
        experience = ppo.judge(policy, critic, rollout, first_pass, config.kl_coef)
        row = entropies(policy, rollout.batch)
        row["filled with 1.0"] = filled(experience.measured.old_logprobs, rollout.batch.response_mask)
        row["objective/entropy"] = experience_metrics(experience, step)["objective/entropy"]
        logged = ppo.update(policy, critic, experience, updates, config.kl_coef, 1)
        row["policy/entropy_avg"] = logged["policy/entropy_avg"]
        rows.append({"step": step} | row)
    return rows


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Left: the fill. Right: the cancellation, on an axis that is linear around 0."""
    figure, panels = plots.panels(2, (10, 3.6), sharex=True)
    fill, cancellation = panels
    steps = [row["step"] for row in rows]
    for name in list(rows[0])[1:]:
        axes = cancellation if name.startswith(("ours", "lse")) else fill
        values = [row[name] for row in rows]
        axes.plot(steps, values, label=name)
    for axes in panels:
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(xlabel="PPO step")
    fill.set(title="entropy of a response, nats")
    cancellation.set(title="smallest entropy of a token, nats")
    cancellation.set_yscale("symlog", linthresh=1e-7)
    plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("runs/repro"), help="of the warm-started model")
    parser.add_argument("--png", type=Path, default=plots.DOCS / "negative-entropy.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measured(ppo_step.warm_start(arguments.folder), arguments.steps)
    print(results.table_of(rows[:: max(1, len(rows) // 6)]))
    draw(rows, arguments.png)
    print(f"\ndrew {arguments.png}")


if __name__ == "__main__":
    main()
