"""Where Adam adds epsilon, and how far the first PPO update goes: PyTorch's form, and TensorFlow's (`--tf_adam`).

    python bench/repro/adam_epsilon.py         prints the table and draws docs/adam-epsilon.png

64 responses of the demo's warm-started model, one minibatch, one update; then the same responses are scored again, as
the second epoch does. Both forms start from the same weights, with the same responses, lr = epsilon = 1e-5. After
https://github.com/vwxyzjn/minimal-adam-difference, which reports it of GPT-2.

What differs is decided by the size of a weight's gradient in units of epsilon: for far larger ones the forms agree. A
model of 0.4 million weights has larger ones than GPT-2's 124 million, so the gradient's norm is clipped to several
values: a norm of 0.1 here is 1.6e-4 per weight, in GPT-2 a norm of 1 is 0.9e-4.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from bench.repro import ppo_step
from fused_rl.trainers import ppo
from fused_rl.trainers.base import engine
from fused_rl.trainers.commands.kl_report import table
from fused_rl.trainers.policy.policy import measure

FORMS = {"PyTorch Adam": False, "TF-style Adam": True}
CLIPS = (0.0, 0.5, 0.1)
SETTING = {"prompts_per_step": 64, "group_size": 1, "minibatches": 1, "epochs": 2}
SETTING |= {"lr": 1e-5, "adam_eps": 1e-5, "adam_beta2": 0.999, "lr_schedule": "constant", "warmup_steps": 0}


def log_ratios(folder: Path, seed: int, tf_adam: bool, clip: float) -> tuple[torch.Tensor, float]:
    """(tokens,) fp64: log-ratio of every response token after the first update; and the gradient's rms per weight."""
    policy, critic, steps = ppo_step.load(folder, seed, tf_adam=tf_adam, max_grad_norm=clip, **SETTING)
    rollout = policy.roll_out(next(steps), policy.sampling, 1)
    parts = list(torch.arange(len(rollout.samples)).split(policy.config.micro_batch_size))
    experience = ppo.judge(policy, critic, rollout, parts, policy.config.kl_coef)
    policy.model.train()
    ppo.accumulate(policy, critic, experience, parts, policy.config.kl_coef, 1)
    norm = engine.optimizer_step(policy.model, 1)["optim/grad_norm"]
    after = measure(policy, rollout.batch, parts).old_logprobs
    mask = rollout.batch.response_mask
    norm = min(norm, clip) if clip else norm
    weights = sum(parameter.numel() for parameter in policy.model.parameters())
    return (after - experience.measured.old_logprobs)[mask].double(), norm / weights**0.5


def row(name: str, log_ratio: torch.Tensor) -> list[str]:
    """The quantities of the report's table."""
    ratio = log_ratio.exp()
    clipped = ((ratio - 1).abs() > 0.2).double().mean()
    cells = [log_ratio.var(), ratio.var(), ratio.max(), ratio.min(), log_ratio.square().mean() / 2, clipped]
    return [name, *(f"{cell.item():.6f}" for cell in cells)]


HEADER = ["", "log-prob difference, variance", "ratio, variance", "max", "min", "approx. KL", "clip fraction"]


def draw(found: dict[str, dict[float, tuple[torch.Tensor, float]]], path: Path) -> None:
    """Left: ratios at the smallest gradient. Right: their variance over the size of the gradient."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    histogram, curve = figure.subplots(1, 2)
    widest = max((by_clip[CLIPS[-1]][0].exp() - 1).abs().max().item() for by_clip in found.values())
    edges = torch.linspace(1 - widest, 1 + widest, 61).tolist()
    for name, by_clip in found.items():
        histogram.hist(by_clip[CLIPS[-1]][0].exp().tolist(), bins=edges, alpha=0.6, label=name)
        sizes = [rms / SETTING["adam_eps"] for _, rms in by_clip.values()]
        curve.plot(sizes, [log_ratio.exp().var().item() for log_ratio, _ in by_clip.values()], "o-", label=name)
    curve.set(xscale="log", yscale="log", title="variance of the ratio", xlabel="gradient per weight (rms) / epsilon")
    curve.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    curve.minorticks_off()
    histogram.set(yscale="log", title="ratios after the first update", xlabel="ratio", ylabel="tokens")
    for axes in (histogram, curve):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the responses; all in one row")
    parser.add_argument("--folder", type=Path, default=Path("runs/repro"), help="of the warm-started model")
    parser.add_argument("--png", type=Path, default=Path(__file__).parents[2] / "docs" / "adam-epsilon.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder, found, rows = ppo_step.warm_start(arguments.folder), {name: {} for name in FORMS}, [HEADER]
    for clip in CLIPS:
        for name, tf_adam in FORMS.items():
            of_seeds = [log_ratios(folder, seed, tf_adam, clip) for seed in arguments.seeds]
            log_ratio, rms = torch.cat([x for x, _ in of_seeds]), sum(rms for _, rms in of_seeds) / len(of_seeds)
            found[name][clip] = log_ratio, rms
            clipped = f"norm clipped to {clip}" if clip else "not clipped"
            rows.append(row(f"{name}, {clipped} ({rms / SETTING['adam_eps']:.0f} eps per weight)", log_ratio))
    print(
        f"after the first update: {len(arguments.seeds)} x {SETTING['prompts_per_step']} responses, lr = eps = 1e-5\n"
    )
    print(table(rows))
    draw(found, arguments.png)
    print(f"\ndrew {arguments.png}")


if __name__ == "__main__":
    main()
