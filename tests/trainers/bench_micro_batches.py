"""GRPO's passes over responses of 16 to 512 tokens, in micro-batches of 8 as they were sampled, and by tokens.

    python -m tests.trainers.bench_micro_batches

Tokens of the responses per CPU second, medians of rounds that alternate between the two in one process.
"""

import functools
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from fused_rl.trainers import grpo
from fused_rl.trainers.policy import groups, policy
from fused_rl.trainers.rollouts.types import Prompt, Response
from tests.device.steps import Engine, process_group
from tests.trainers import steps, tiny

DIVISIONS = {
    "micro_batch_size 8": {"micro_batch_size": 8},
    "micro_batch_tokens 2048": {"micro_batch_tokens": 2048},
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention"] * 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
}
PROMPTS, GROUP, ROUNDS = 4, 8, 3


def seconds(function, *arguments, **options):
    began = time.process_time()
    found = function(*arguments, **options)
    return time.process_time() - began, found


def one_round(model: str, responses: list[Response], division: dict) -> tuple[float, float, float]:
    """Return the seconds of measuring and of updating, and the share of pads."""
    options = {"prompts_per_step": PROMPTS, "group_size": GROUP, "share_prompts": False}
    config = steps.config_of(model, max_new_tokens=512, **options, **division)
    engine = Engine(tiny.load_lm(config), config)
    scores = [float(i % 2) for i in range(len(responses))]
    made = steps.fake_policy(config, engine, responses, scores)
    made.sampling = replace(made.sampling, max_new_tokens=512)
    prompts = [Prompt(list(range(5, 21)), {}, f"row {i}") for i in range(PROMPTS)]
    found = groups.collect(made, prompts, None, 1)
    torch.manual_seed(0)
    divide = functools.partial(made.divide, found.rollout.batch)
    updates = policy.plan(config, len(responses), divide)
    advantages = groups.advantages_of(config, found.rollout.rewards, found.included)
    measuring, measured = seconds(
        policy.measure, made, found.rollout.batch, updates[0], exact_kl=False
    )
    updating, _ = seconds(grpo.update, made, found, measured, advantages, updates, 1)
    return measuring, updating, made.padding.share()


def main() -> None:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, 513, (PROMPTS * GROUP,), generator=draw).tolist()
    drawn = [torch.randint(5, 90, (n - 1,), generator=draw).tolist() for n in lengths]
    responses = [Response([*ids, steps.EOS], "stop") for ids in drawn]
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in DIVISIONS}
    with tempfile.TemporaryDirectory() as folder, process_group():
        model = tiny.model_folder(Path(folder) / "model")
        config = transformers.AutoConfig.from_pretrained(model, **SIZES)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
        for name in [*DIVISIONS] * ROUNDS:
            rounds[name].append(one_round(model, responses, DIVISIONS[name]))
    for name, found in rounds.items():
        measuring, updating, padding = map(statistics.median, zip(*found, strict=True))
        measure, update = sum(lengths) / measuring, sum(lengths) / updating
        print(f"{name}: measure {measure:.0f} tokens/s, update {update:.0f}, padding {padding:.2f}")


if __name__ == "__main__":
    main()
