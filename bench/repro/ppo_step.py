"""PPO on the demo's warm-started model, step by step in the hands of the caller: what the reproductions measure on."""

from pathlib import Path

from fused_rl.recipes import demo
from fused_rl.trainers import ppo, sft
from fused_rl.trainers.base import engine
from fused_rl.trainers.data.encode import load_tokenizer
from fused_rl.trainers.data.order import RowOrder
from fused_rl.trainers.policy import policy, prepare
from fused_rl.trainers.policy.critic import load_critic
from fused_rl.trainers.run.parse import parse
from fused_rl.trainers.scorers.load import load_scorers


def warm_start(folder: Path, seed: int = 1) -> Path:
    """The demo's problems and its model after `fused-rl sft`; made once, about a minute."""
    if not (folder / "sft" / "model").exists():
        demo.prepare(folder, seed)
        paths = {
            "model": folder / "init",
            "dataset": folder / "data/demonstrations.jsonl",
            "output_dir": folder / "sft",
        }
        sft.train(parse(sft.SFTConfig, demo.arguments("demo_sft.yaml", seed, paths)))
    return folder


def load(folder: Path, seed: int, **options):
    """(policy, critic, an endless iterator over a step's prompts) against reasoning-gym's own scorer."""
    paths = {
        "model": folder / "sft/model",
        "critic": folder / "sft/model",
        "dataset": folder / "data/train.jsonl",
        "eval_dataset": folder / "data/eval.jsonl",
        "output_dir": folder / "ppo",
        "verifiers": "reasoning_gym",
        "verifier_weights": "[1]",
    }
    config = parse(ppo.PPOConfig, demo.arguments("demo_ppo.yaml", seed, paths | options))
    device = engine.setup(config.seed)
    ppo.arithmetic(config, 1)
    tokenizer = load_tokenizer(config.model)
    scorers = load_scorers(config)
    prompts, _ = prepare.load_prompts(config, tokenizer, scorers)
    updates = config.steps * config.minibatches * config.epochs
    critic = load_critic(config, tokenizer, device, updates)
    order = RowOrder(len(prompts), config.prompts_per_step, config.seed)
    steps = ([prompts[i] for i in indices] for indices in order)
    return policy.load_policy(config, tokenizer, scorers, device, updates), critic, steps
