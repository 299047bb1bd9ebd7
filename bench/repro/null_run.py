"""Noise of the ratio: three steps at learning rate 0, where ratio, clip fraction and KL must be exactly 1, 0 and 0.

    python -m bench.repro.null_run                                the demo's GRPO recipe; makes its model once, a minute
    python -m bench.repro.null_run grpo --config my_run.yaml      the options of a run of your own, or ppo

The policy stays what it was, so whatever differs is noise between two computations of one log-probability. In process
there is none: the update repeats the pass before it bit for bit. With a server or a sampler, its mismatch is printed
too (`rollout/logprob_diff_*`); a server gets the weights of the starting model. The exit status is 1 where something is
not exact. The run's own folder is neither read nor written. Options that change no response, and those that leave
responses out of the loss, are dropped.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import yaml

from bench.repro import ppo_step
from fused_rl.recipes import demo
from fused_rl.trainers import grpo, ppo
from fused_rl.trainers.base import engine
from fused_rl.trainers.run.logger import read_metrics
from fused_rl.trainers.run.parse import parse

TRAINERS = {"grpo": (grpo, grpo.GRPOConfig), "ppo": (ppo, ppo.PPOConfig)}
STEPS = 3
DROPPED = {
    *(
        "output_dir",
        "overwrite",
        "resume",
        "resume_from",
        "push_to_hub",
        "hub_model_id",
        "hub_private_repo",
    ),
    *("wandb_project", "num_train_epochs", "lr_schedule", "warmup_steps", "keep_checkpoints"),
    *(
        "eval_dataset",
        "eval_split",
        "eval_every",
        "eval_samples",
    ),
    *("critic_lr", "critic_warmup_steps", "critic_only", "ref_sync_every", "ref_mixup_alpha"),
    *("target_kl", "zero_variance", "mask_truncated", "epochs"),
}
AT_REST = {"lr": 0.0, "steps": STEPS, "eval_size": 0, "save_every": 0}
# Metric -> its value where nothing is learned; those that a run does not log are not looked at.
STILL = {
    "val/ratio": 1.0,
    "val/ratio_var": 0.0,
    "policy/clipfrac_avg": 0.0,
    "policy/approxkl_avg": 0.0,
}
STILL |= {"val/first_ratio": 1.0, "objective/kl": 0.0, "objective/kl_exact": 0.0}
MISMATCH = ("rollout/logprob_diff_mean", "rollout/logprob_diff_abs", "rollout/logprob_diff_max")


def measured(trainer: str, options: dict[str, object]) -> list[dict]:
    """The metrics of a run with these options at learning rate 0, in a temporary folder."""
    module, config_class = TRAINERS[trainer]
    kept = {name: value for name, value in options.items() if name not in DROPPED}
    # A server reads the weights from a folder beside the run's own, which it sees.
    beside = (
        str(Path(str(options["output_dir"])).resolve().parent) if options.get("server") else None
    )
    with tempfile.TemporaryDirectory(prefix="fused-rl-null-", dir=beside) as folder:
        Path(folder).chmod(0o755)
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(kept | AT_REST | {"output_dir": f"{folder}/run"}))
        module.train(parse(config_class, ["--config", str(config)]))
        return read_metrics(Path(folder) / "run" / "metrics.jsonl")


def noise(history: list[dict]) -> dict[str, float]:
    """Metric -> its value furthest from that of a run without noise, of those that differ from it."""
    found = {}
    for key, still in STILL.items():
        values = [entry[key] for entry in history if key in entry]
        off = [value for value in values if value != still]
        if off:
            found[key] = max(
                off, key=lambda value: float("inf") if value is None else abs(value - still)
            )
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("trainer", nargs="?", choices=sorted(TRAINERS), default="grpo")
    parser.add_argument(
        "--config", type=Path, help="config of the run; none: recipes/demo_grpo.yaml"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/repro_kl/seed1"), help="of the demo's model"
    )
    given = parser.parse_args(argv)
    engine.silence_libraries()
    options = yaml.safe_load((given.config or demo.RECIPES / "demo_grpo.yaml").read_text())
    if given.config is None:
        folder = ppo_step.warm_start(given.folder)
        options |= {
            "model": str(folder / "sft" / "model"),
            "dataset": str(folder / "data" / "train.jsonl"),
        }
    history = measured(given.trainer, options)
    found = noise(history)
    for key, still in STILL.items():
        if any(key in entry for entry in history):
            print(
                f"{key:22} {found.get(key, still)!r:24} {'NOT exact' if key in found else 'exact'}"
            )
    for key in MISMATCH:
        values = [entry[key] for entry in history if key in entry]
        if values:
            print(f"{key:26} {max(values, key=abs):.2g} nats, between sampler and trainer")
    print(
        f"{STEPS} steps at learning rate 0: {'noise' if found else 'no noise, every value is exact'}"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
