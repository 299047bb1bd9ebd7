"""GRPO: sample a group of responses per prompt, score them, prefer those that are better than the others.

    fused-rl grpo --config recipes/demo_grpo.yaml
    fused-rl grpo --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k --output_dir runs/gsm8k

The presets (grpo, dr_grpo, dapo, rloo, …) are rows of `fused_rl.PRESETS`: ratio, surrogate, clipping, aggregation and
advantages. Left out: an inference server, several turns, tools, dynamic sampling (dapo's refill of groups without a
signal).
"""

import math
import time
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

import fused_rl
from fused_rl.trainers import checkpoint, cli, data, engine, models
from fused_rl.trainers.config import InputError, PositiveInt, divide_over
from fused_rl.trainers.loop import Loop
from fused_rl.trainers.metrics import KEYS, Sums, keyed, phase
from fused_rl.trainers.policy import (
    Measured,
    Policy,
    PolicyConfig,
    check_policy_fits,
    evaluate,
    load_policy,
    load_prompts,
    loss_options,
    measure,
    share_of_rank,
    warn_if_off_policy,
)
from fused_rl.trainers.rollout import Prompt, Rollout, rollout_metrics
from fused_rl.trainers.scorers import load_scorers

COLUMNS = {
    "reward": "reward",
    "KL": "objective/kl_exact",
    "entropy": "policy/entropy_avg",
    "tokens/s": "perf/tokens_per_second",
    "held-out": "eval/accuracy_greedy",
}
CURVES = {
    "reward (mean of a step)": ["reward"],
    "held-out accuracy": ["eval/accuracy_greedy", "eval/accuracy_sampled", "eval/pass_at_k"],
    "KL to the reference (nats per response)": ["objective/kl1_avg", "objective/kl_exact"],
    "entropy (nats per token)": ["policy/entropy_avg"],
}
ADVANTAGES = ("group-std", "group-mean", "leave-one-out", "batch-std")


@dataclass(kw_only=True)
class GRPOConfig(PolicyConfig):
    """Group-relative policy optimisation of a causal language model on problems whose answers can be verified."""

    command: ClassVar[str] = "grpo"

    group_size: PositiveInt = 8
    """Responses per prompt."""
    advantage: Literal["group-std", "group-mean", "leave-one-out", "batch-std"] | None = None
    """Reward less the group's mean, divided by its standard deviation or not; less the mean of the others in the
    group; or whitened over the whole batch. None is the preset's."""


def advantage_of(config: GRPOConfig) -> str:
    """The advantage that the option names, else the preset's; refuses what needs a critic."""
    advantage = config.advantage or fused_rl.PRESETS[config.preset].advantage
    if advantage not in ADVANTAGES:
        raise InputError(
            f"preset={config.preset} takes its advantages from {advantage}, which needs a critic; grpo has none: "
            f"choose --advantage {' or '.join(ADVANTAGES)}, or another preset"
        )
    return advantage


def arithmetic(config: GRPOConfig, world: int) -> dict[str, object]:
    """How the batch divides; raises on what does not."""
    if config.preset not in fused_rl.PRESETS:
        raise InputError(f"preset={config.preset!r} is not one of {sorted(fused_rl.PRESETS)}")
    advantage = advantage_of(config)
    loss_options(config)
    if config.group_size < 2:
        raise InputError(f"group_size={config.group_size}: a response needs others to be compared with; at least 2")
    local = divide_over("prompts_per_step", config.prompts_per_step, world) * config.group_size
    if local % config.minibatches:
        raise InputError(f"minibatches={config.minibatches} does not divide the {local} responses of each process")
    minibatch, responses = local // config.minibatches, local * world
    parts = math.ceil(minibatch / config.micro_batch_size)
    return {
        "processes": world,
        "advantage": advantage,
        "responses per step": f"{responses} = {config.prompts_per_step} prompts x {config.group_size}",
        "responses per process and step": local,
        "responses per process and minibatch": minibatch,
        "micro-batches per process and minibatch": f"{parts} of at most {config.micro_batch_size}",
        "optimizer updates per step": config.minibatches * config.epochs,
        "optimizer updates in the run": config.steps * config.minibatches * config.epochs,
        "responses in the run": config.steps * responses,
    }


def plan(config: GRPOConfig, count: int, device) -> list[list[torch.Tensor]]:
    """For each update of a step the micro-batches of its minibatch, as indices into this rank's `count` responses."""
    size = count // config.minibatches
    updates = []
    for _ in range(config.epochs):
        for minibatch in torch.randperm(count).split(size):
            updates.append([part.to(device) for part in minibatch.split(config.micro_batch_size)])
    return updates


def update(policy: Policy, rollout: Rollout, advantages: torch.Tensor, step: int) -> dict[str, float]:
    """All minibatches of all epochs on one rollout; returns metrics averaged over them and summed over ranks.

    Args:
        policy: the policy.
        rollout: B responses of this rank.
        advantages: (B,) of each response.
        step: which step of the run it is, for errors.
    """
    config, count = policy.config, len(rollout.samples)
    updates = plan(config, count, policy.device)

    # Before the first update: what the ratios and the KL are taken against.
    first_pass = sum(updates[: config.minibatches], [])
    measured = measure(policy, rollout.batch, first_pass)

    # One optimizer step per minibatch.
    policy.model.train()
    history = []
    for parts in updates:
        sums = accumulate(policy, rollout, measured, advantages, parts, step)
        history.append(keyed(KEYS["grpo"], sums) | engine.optimizer_step(policy.model, step))

    # The step's metrics: means over its updates.
    warn_if_off_policy(history[0]["val/ratio"], engine.torch_dtype(config))
    means = {key: sum(metrics[key] for metrics in history) / len(history) for key in history[0]}
    before = torch.stack([measured.kl.sum(), -measured.old_logprobs.sum()])
    kl_exact, entropy = (engine.global_sum(before) / (count * engine.world_size())).tolist()
    return means | {"lr": history[-1]["lr"], "objective/kl_exact": kl_exact, "objective/entropy": entropy}


def accumulate(
    policy: Policy,
    rollout: Rollout,
    measured: Measured,
    advantages: torch.Tensor,
    parts: list[torch.Tensor],
    step: int,
) -> dict[str, float]:
    """Forward and backward of one minibatch, `parts` of it at a time; returns the loss's metrics over all ranks."""
    config, batch = policy.config, rollout.batch
    truncated = ~rollout.stopped.to(policy.device) if config.mask_truncated else None
    rollout_logprobs = rollout.rollout_logprobs

    # Denominators of the whole minibatch, over all ranks: then no split of it changes the gradient.
    counted = batch.response_mask if truncated is None else batch.response_mask & ~truncated[:, None]
    num_tokens = engine.global_sum(sum(counted[part].sum() for part in parts)).item()
    num_sequences = sum(map(len, parts)) * engine.world_size()

    options, sums = loss_options(config), Sums(step)
    for index in parts:
        part = batch.rows(index)
        width = part.response_mask.shape[1]
        rows = policy.model(part.input_ids, part.response_mask, config.temperature)
        loss, metrics = fused_rl.policy_loss(
            rows.logprobs,
            measured.old_logprobs[index, :width],
            advantages[index],
            part.response_mask,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            max_length=config.max_new_tokens,
            ref_logprobs=measured.ref_logprobs[index, :width],
            rollout_logprobs=None if rollout_logprobs is None else rollout_logprobs[index, :width],
            truncated=None if truncated is None else truncated[index],
            entropy=rows.entropy,
            **options,
        )
        policy.model.backward(loss * engine.world_size())  # the engine averages over ranks
        sums.add(metrics, part.where)
    return sums.over_ranks()


def train_step(policy: Policy, prompts: list[Prompt], step: int) -> dict[str, float]:
    """Roll out, score, update; returns the step's metrics."""
    config, began = policy.config, time.monotonic()
    rollout = policy.roll_out(prompts, policy.sampling, config.group_size)
    advantages = fused_rl.response_advantages(
        rollout.rewards, advantage_of(config), group_size=config.group_size, process_group=engine.all_ranks()
    )
    sampled = time.monotonic()
    metrics = update(policy, rollout, advantages.to(policy.device), step)
    policy.sampler.publish(step)
    ended = time.monotonic()

    metrics |= rollout_metrics(rollout, config.group_size, step) | {"time/train": ended - sampled}
    tokens = metrics["completions/mean_length"] * config.prompts_per_step * config.group_size
    penalty = -config.kl_coef * metrics["objective/kl"]
    return metrics | {
        "perf/tokens_per_second": tokens / (ended - began),
        "objective/kl_coef": config.kl_coef,
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": metrics["reward"] + penalty,
    }


def train(config: GRPOConfig) -> str:
    """Run the whole training; returns the folder of the trained model."""
    device = engine.setup(config.seed)
    arithmetic(config, engine.world_size())
    folder = checkpoint.open_run(config)

    # What is read: tokenizer, rows, models.
    with phase("read tokenizer and rows"):
        tokenizer = data.load_tokenizer(config.model, config.revision)
        scorers = load_scorers(config, tokenizer, device)
        prompts, held_out = load_prompts(config, tokenizer, scorers)
    with phase("loaded the models"):
        updates = config.steps * config.minibatches * config.epochs
        policy = load_policy(config, tokenizer, scorers, device, updates)
        check_policy_fits(policy, [*prompts, *held_out])
    evaluated, held_out = bool(held_out), share_of_rank(held_out)

    # The run.
    order = data.RowOrder(len(prompts), config.prompts_per_step, config.seed)
    loop = Loop(config, folder, {"policy": policy.model}, order, COLUMNS, CURVES)
    policy.sampler.publish(loop.step)
    if loop.begins and evaluated:
        loop.log(*evaluate(policy, held_out))
    for step, indices in loop:
        mine = indices[engine.rank() :: engine.world_size()]
        metrics, samples = train_step(policy, [prompts[i] for i in mine], step), []
        if loop.evaluates and evaluated:
            found, samples = evaluate(policy, held_out)
            metrics |= found
        loop.log(metrics, samples)
    return loop.finish(lambda model_folder: models.save_lm(policy.model, tokenizer, model_folder))


def main(argv: list[str] | None = None) -> None:
    """`fused-rl grpo`."""
    cli.run(GRPOConfig, arithmetic, train, argv)


if __name__ == "__main__":
    main()
