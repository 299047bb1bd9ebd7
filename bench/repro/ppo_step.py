"""What the reproductions train: the demo's model after its warm start, by PPO step by step, or by GRPO as a whole."""

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from fused_rl.recipes import demo
from fused_rl.trainers import grpo, ppo
from fused_rl.trainers.base import engine
from fused_rl.trainers.base.files import write_atomically
from fused_rl.trainers.data.encode import load_tokenizer
from fused_rl.trainers.data.order import RowOrder
from fused_rl.trainers.data.reading import load_train_eval
from fused_rl.trainers.policy import setup
from fused_rl.trainers.policy.critic import load_critic
from fused_rl.trainers.run.logger import read_metrics
from fused_rl.trainers.run.parse import parse
from fused_rl.trainers.scorers.load import load_scorers


def warm_start(folder: Path, seed: int = 1) -> Path:
    """The demo's problems and its model after `fused-rl sft`; made once, about a minute."""
    if not (folder / "sft" / "model").exists():
        demo.warm_start(folder, seed)
    return folder


def grpo_config(start: Path, seed: int, name: str, **options) -> grpo.GRPOConfig:
    """recipes/demo_grpo.yaml with other options, on a warm-started folder, into its folder `name`."""
    paths = {
        "model": start / "sft" / "model",
        "dataset": start / "data" / "train.jsonl",
        "eval_dataset": start / "data" / "eval.jsonl",
        "output_dir": start / name,
    }
    return parse(grpo.GRPOConfig, demo.arguments("demo_grpo.yaml", seed, paths | options))


def trained(config: grpo.GRPOConfig, start: Path, seed: int) -> tuple[list[dict], float]:
    """(metrics, CPU seconds) of a run on one thread; a run of the same options that has ended is not run again."""
    options = config.to_dict()
    kept = Path(f"{config.output_dir}.json")
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["options"] == options:
            return found["history"], found["seconds"]
    engine.silence_libraries()
    torch.set_num_threads(1)
    warm_start(start, seed)
    began = time.process_time()
    with Path(f"{config.output_dir}.log").open("w") as log, contextlib.redirect_stdout(log):
        grpo.train(config)
    spent = round(time.process_time() - began, 1)
    history = read_metrics(Path(config.output_dir) / "metrics.jsonl")
    write_atomically(kept, json.dumps({"options": options, "history": history, "seconds": spent}))
    return history, spent


def load(folder: Path, seed: int, **options):
    """Return (policy, critic, the prompts of the first step), scored by reasoning-gym."""
    paths = {
        "model": folder / "sft/model",
        "critic": folder / "sft/model",
        "dataset": folder / "data/train.jsonl",
        "eval_dataset": folder / "data/eval.jsonl",
        "output_dir": folder / "ppo",
        "verifiers": "fused_rl.recipes.gym:score",
        "verifier_weights": "[1]",
    }
    config = parse(ppo.PPOConfig, demo.arguments("demo_ppo.yaml", seed, paths | options))
    device = engine.setup(config.seed)
    ppo.batch_plan(config, 1)
    tokenizer = load_tokenizer(config.model)
    scorers = load_scorers(config)
    prompts, _ = setup.load_prompts(config, tokenizer, scorers, load_train_eval(config))
    run = SimpleNamespace(device=device)
    inputs = setup.Inputs(run, config, tokenizer, scorers, prompts, None)
    critic = load_critic(config, tokenizer, device, inputs.updates)
    order = RowOrder(len(prompts), config.prompts_per_step, config.seed)
    first = [prompts[i] for i in next(order)]
    return inputs.load_policy(), critic, first
