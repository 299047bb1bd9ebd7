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
from fused_rl.presets import resolve_options, wide_option
from fused_rl.trainers import checkpoint, cli, data, engine, models
from fused_rl.trainers.config import InputError, NonNegativeInt, PositiveInt, divide_over
from fused_rl.trainers.curves import Against
from fused_rl.trainers.evaluation import evaluate, share_of_rank
from fused_rl.trainers.loop import Loop
from fused_rl.trainers.metrics import KEYS, Sums, keyed, phase
from fused_rl.trainers.policy import (
    Measured,
    Policy,
    check_policy_fits,
    load_policy,
    load_prompts,
    measure,
    warn_if_off_policy,
)
from fused_rl.trainers.policy_config import PolicyConfig, loss_options
from fused_rl.trainers.rollout import Prompt, Rollout, rollout_metrics
from fused_rl.trainers.scorers import check_scorers, load_scorers

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
    "reward over response length": Against("completions/mean_length", "reward"),
    "reward over KL": Against("objective/kl_exact", "reward"),
    "groups that teach nothing": ["frac_groups_all_solved", "frac_groups_none_solved", "frac_reward_zero_std"],
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
    share_prompts: bool | None = None
    """Compute a prompt once for several of its responses, where that is cheaper; minibatches are then of whole groups,
    otherwise of responses drawn at random. None shares where the model's attention and minibatches allow it."""
    kl_every: NonNegativeInt = 1
    """Measure the exact KL to the starting model every so many steps, by one more pass of both models; 0 is never, and
    then the starting model is loaded only where kl_coef needs it."""


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
    prompts = divide_over("prompts_per_step", config.prompts_per_step, world)
    local = prompts * config.group_size
    if local % config.minibatches:
        raise InputError(f"minibatches={config.minibatches} does not divide the {local} responses of each process")
    if config.share_prompts and not _keeps_groups(config, world):
        raise InputError(
            f"minibatches={config.minibatches} would split groups, which share their prompt: it does not divide the "
            f"{prompts} prompts of each process; choose another number, or drop --share_prompts"
        )
    minibatch, responses = local // config.minibatches, local * world
    parts = math.ceil(minibatch / config.micro_batch_size)
    return {
        "processes": world,
        "reward": check_scorers(config),
        "advantage": advantage,
        "responses per step": f"{responses} = {config.prompts_per_step} prompts x {config.group_size}",
        "responses per process and step": local,
        "responses per process and minibatch": minibatch,
        "micro-batches per process and minibatch": f"{parts} of at most {config.micro_batch_size}",
        "optimizer updates per step": config.minibatches * config.epochs,
        "optimizer updates in the run": config.steps * config.minibatches * config.epochs,
        "responses in the run": config.steps * responses,
    }


def _keeps_groups(config: GRPOConfig, world: int) -> bool:
    """Whether every minibatch is of whole groups, as it is where prompts may be shared."""
    return config.share_prompts is not False and config.prompts_per_step // world % config.minibatches == 0


def plan(config: GRPOConfig, count: int, device) -> list[list[torch.Tensor]]:
    """For each update of a step the micro-batches of its minibatch, as indices into this rank's `count` responses."""
    unit = config.group_size if _keeps_groups(config, engine.world_size()) else 1  # responses that stay together
    responses = torch.arange(count).view(-1, unit)
    updates = []
    for _ in range(config.epochs):
        order = responses[torch.randperm(count // unit)].flatten()
        for minibatch in order.split(count // config.minibatches):
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

    # Before the first update: what the ratios and the KL are taken against. The first minibatch is trained on by the
    # policy that it is measured with, so its old log-probabilities are its own.
    first_pass = sum(updates[: config.minibatches], [])
    exact_kl = config.kl_every > 0 and step % config.kl_every == 0
    skipped = len(updates[0]) if rollout.rollout_logprobs is None else 0
    measured = measure(policy, rollout.batch, first_pass, exact_kl=exact_kl, skipped=skipped)

    # One optimizer step per minibatch.
    policy.model.train()
    history = []
    for parts in updates:
        sums = accumulate(policy, rollout, measured, advantages, parts, step, on_policy=not history)
        history.append(keyed(KEYS["grpo"], sums) | engine.optimizer_step(policy.model, step))

    # The step's metrics: means over its updates.
    warn_if_off_policy(history[0]["val/ratio"], engine.torch_dtype(config))
    means = {key: sum(metrics[key] for metrics in history) / len(history) for key in history[0]}
    means["objective/entropy"] = _per_response(-measured.old_logprobs)
    if measured.kl is not None:
        means["objective/kl_exact"] = _per_response(measured.kl)
    return means | {"lr": history[-1]["lr"]}


def _per_response(values: torch.Tensor) -> float:
    """The sum of (B, T - 1) of every rank, per response."""
    return (engine.global_sum(values.sum()) / (len(values) * engine.world_size())).item()


def accumulate(
    policy: Policy,
    rollout: Rollout,
    measured: Measured,
    advantages: torch.Tensor,
    parts: list[torch.Tensor],
    step: int,
    *,
    on_policy: bool,
) -> dict[str, float]:
    """Forward and backward of one minibatch, `parts` of it at a time; returns the loss's metrics over all ranks.

    On-policy, the old log-probabilities are those of this very forward pass, and are written to `measured`.
    """
    config, batch = policy.config, rollout.batch
    truncated = ~rollout.stopped.to(policy.device) if config.mask_truncated else None
    rollout_logprobs = rollout.rollout_logprobs

    # Denominators of the whole minibatch, over all ranks: then no split of it changes the gradient.
    counted = batch.response_mask if truncated is None else batch.response_mask & ~truncated[:, None]
    num_tokens = engine.global_sum(sum(counted[part].sum() for part in parts)).item()
    num_sequences = sum(map(len, parts)) * engine.world_size()

    options, sums = loss_options(config), Sums(step)
    own = on_policy and rollout_logprobs is None
    in_one_pass = rollout_logprobs is None and _is_token_level(options)
    for index in parts:
        part = batch.rows(index)
        width = part.response_mask.shape[1]
        inputs = policy.inputs(part)
        given = {
            "num_tokens": num_tokens,
            "num_sequences": num_sequences,
            "max_length": config.max_new_tokens,
            "ref_logprobs": None if measured.ref_logprobs is None else measured.ref_logprobs[index, :width],
            "rollout_logprobs": None if rollout_logprobs is None else rollout_logprobs[index, :width],
            "truncated": None if truncated is None else truncated[index],
            **options,
        }
        old_logprobs = None if own else measured.old_logprobs[index, :width]
        tokens = (old_logprobs, advantages[index], part.response_mask)

        if in_one_pass:  # the gradient is formed in the forward pass: a quarter less work in the head
            token_loss, per_token = fused_rl.policy_token_loss(*tokens, **given)
            loss, logprobs, entropy = policy.model(**inputs, token_loss=token_loss, per_token=per_token)
            _, metrics = fused_rl.policy_loss(logprobs, *tokens, entropy=entropy, **given)
        else:
            logprobs, entropy, _ = policy.model(**inputs)
            loss, metrics = fused_rl.policy_loss(logprobs, *tokens, entropy=entropy, **given)
        policy.model.backward(loss * engine.world_size())  # the engine averages over ranks
        sums.add(metrics, part.where)
        if own:
            measured.old_logprobs[index, :width] = logprobs.detach()
    return sums.over_ranks()


def _is_token_level(options: dict[str, object]) -> bool:
    """Whether a token's loss depends on nothing else in its sequence or batch; of a user's surrogate nobody knows."""
    chosen = resolve_options(options["preset"], {k: v for k, v in options.items() if k != "preset"})
    return wide_option(chosen) is None and not callable(chosen.surrogate)


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
    penalty = -config.kl_coef * metrics.get("objective/kl", 0.0)
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
        shared = config.share_prompts if _keeps_groups(config, engine.world_size()) else False
        needed = {"share_prompts": shared, "needs_reference": config.kl_coef > 0 or config.kl_every > 0}
        policy = load_policy(config, tokenizer, scorers, device, updates, **needed)
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
