"""GRPO: sample a group of responses per prompt, score them, prefer those that are better than the others.

    fused-rl grpo --config recipes/demo_grpo.yaml
    fused-rl grpo --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k --output_dir runs/gsm8k

The presets (grpo, dr_grpo, dapo, rloo, …) are rows of `fused_rl.PRESETS`: ratio, surrogate, clipping, aggregation and
advantages. Rewards and advantages of groups are in groups.py, dynamic sampling is in drawing.py, the reference in
reference.py; docs/training.md says what each option does. Left out: an inference server, several turns, tools.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

import fused_rl
from fused_rl.presets import resolve_options, wide_option
from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.order import RowOrder, in_run, in_steps
from fused_rl.trainers.models import language_model
from fused_rl.trainers.options.config import InputError, divide_over
from fused_rl.trainers.options.needs import check_needs
from fused_rl.trainers.policy import reference
from fused_rl.trainers.policy.credit import kl_estimator_of, warn_of_estimator
from fused_rl.trainers.policy.evaluate import evaluate, share_of_rank
from fused_rl.trainers.policy.groups import (
    GROUP_NEEDS,
    Drawn,
    GroupConfig,
    advantage_of,
    advantages_of,
    draw,
    keeps_groups,
)
from fused_rl.trainers.policy.options import POLICY_NEEDS, PolicyConfig, check_loss_options, loss_options
from fused_rl.trainers.policy.policy import (
    Measured,
    Policy,
    check_policy_fits,
    load_policy,
    load_prompts,
    measure,
    warn_if_off_policy,
)
from fused_rl.trainers.policy.reference import REFERENCE_NEEDS, ReferenceConfig, needs_reference
from fused_rl.trainers.rollouts.types import Prompt
from fused_rl.trainers.run import command
from fused_rl.trainers.run.beginning import begin
from fused_rl.trainers.run.curves import Against
from fused_rl.trainers.run.logger import phase
from fused_rl.trainers.run.loop import Loop
from fused_rl.trainers.run.metrics import KEYS, Sums, keyed
from fused_rl.trainers.scorers.load import check_scorers, load_scorers
from fused_rl.trainers.scorers.options import SCORER_NEEDS, ScorerConfig
from fused_rl.trainers.scorers.reward_model import Reader

KLS = ("kl", "kl1", "kl2", "kl3", "kl4")  # of `policy_loss`, nats per response
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


@dataclass(kw_only=True)
class GRPOConfig(ScorerConfig, GroupConfig, ReferenceConfig, PolicyConfig):
    """Group-relative policy optimisation of a causal language model on problems whose answers can be verified."""

    command: ClassVar[str] = "grpo"

    share_prompts: bool | None = None
    """Compute a prompt once for several of its responses, where that is cheaper; minibatches are then of whole groups,
    otherwise of responses drawn at random. None shares where the model's attention and minibatches allow it."""


NEEDS = (*POLICY_NEEDS, *SCORER_NEEDS, *GROUP_NEEDS, *REFERENCE_NEEDS)


def arithmetic(config: GRPOConfig, world: int) -> dict[str, object]:
    """How the batch divides; raises on what does not."""
    if config.preset not in fused_rl.PRESETS:
        raise InputError(f"preset={config.preset!r} is not one of {sorted(fused_rl.PRESETS)}")
    advantage = advantage_of(config)
    check_loss_options(config)
    check_needs(config, NEEDS)
    warn_of_estimator(config, config.kl_estimator)
    if config.group_size < 2:
        raise InputError(f"group_size={config.group_size}: a response needs others to be compared with; at least 2")
    prompts = divide_over("prompts_per_step", config.prompts_per_step, world)
    local = prompts * config.group_size
    if local % config.minibatches:
        what = f"does not divide the {local} responses of each process; choose a number that does"
        raise InputError(f"minibatches={config.minibatches} {what}")
    if config.share_prompts and not keeps_groups(config, world):
        raise InputError(
            f"minibatches={config.minibatches} would split groups, which share their prompt: it does not divide the "
            f"{prompts} prompts of each process; choose another number, or drop --share_prompts"
        )
    minibatch, responses = local // config.minibatches, local * world
    parts = math.ceil(minibatch / config.micro_batch_size)
    return {
        "processes": world,
        "reward": check_scorers(config, imports=config.dry_run),
        "advantage": advantage,
        "responses per step": f"{responses} = {config.prompts_per_step} prompts x {config.group_size}",
        "responses per process and step": local,
        "responses per process and minibatch": minibatch,
        "micro-batches per process and minibatch": f"{parts} of at most {config.micro_batch_size}",
        "optimizer updates per step": config.minibatches * config.epochs,
        "optimizer updates in the run": in_run(config, config.minibatches * config.epochs),
        "responses in the run": in_run(config, responses),
    }


def plan(config: GRPOConfig, count: int, device) -> list[list[torch.Tensor]]:
    """For each update of a step the micro-batches of its minibatch, as indices into this rank's `count` responses."""
    unit = config.group_size if keeps_groups(config, ranks.world_size()) else 1  # responses that stay together
    responses = torch.arange(count).view(-1, unit)
    updates = []
    for _ in range(config.epochs):
        order = responses[torch.randperm(count // unit)].flatten()
        for minibatch in order.split(count // config.minibatches):
            updates.append([part.to(device) for part in minibatch.split(config.micro_batch_size)])
    return updates


def measure_first(policy: Policy, drawn: Drawn, updates: list[list[torch.Tensor]], step: int) -> Measured:
    """What ratios and KL are taken against, before the first update.

    The first minibatch is trained on by the policy that it would be measured with, so its old log-probabilities are its
    own and need no pass, unless the rewards wait for them.
    """
    config, rollout = policy.config, drawn.rollout
    first_pass = sum(updates[: config.minibatches], [])
    exact_kl = config.kl_every > 0 and step % config.kl_every == 0
    own = rollout.rollout_logprobs is None and not _kl_in_reward(config)
    return measure(policy, rollout.batch, first_pass, exact_kl=exact_kl, skipped=len(updates[0]) if own else 0)


def _kl_in_reward(config: GRPOConfig) -> bool:
    return config.kl_in == "reward" and config.kl_coef > 0


def update(
    policy: Policy,
    drawn: Drawn,
    measured: Measured,
    advantages: torch.Tensor,
    updates: list[list[torch.Tensor]],
    step: int,
) -> dict[str, float]:
    """All minibatches of all epochs on one rollout; returns metrics averaged over them and summed over ranks.

    Args:
        policy: the policy.
        drawn: B responses of this rank.
        measured: of them, before this.
        advantages: (B,) of each response.
        updates: as `plan` makes them.
        step: which step of the run it is, for errors.
    """
    policy.model.train()
    history = []
    for parts in updates:
        sums = accumulate(policy, drawn, measured, advantages, parts, step, on_policy=not history)
        if not history:
            ratio = 1 + sums["ratio_minus_1"] + sums["again_minus_1"]
            warn_if_off_policy(ratio, engine.torch_dtype(policy.config))
        history.append(keyed(KEYS["grpo"], sums) | engine.optimizer_step(policy.model, step))

    # The step's metrics: means over its updates.
    means = {key: sum(metrics[key] for metrics in history) / len(history) for key in history[0]}
    means["objective/entropy"] = _per_response(-measured.old_logprobs.sum(1), drawn.counts)
    if measured.kl is not None:
        means["objective/kl_exact"] = _per_response(measured.kl.sum(1), drawn.counts)
    return means | {"lr": history[-1]["lr"]}


def _per_response(values: torch.Tensor, counts: torch.Tensor) -> float:
    """The mean of (B,) of every rank over the responses that count."""
    total, count = ranks.global_sum(torch.stack([values.cpu()[counts].sum().double(), counts.sum().double()]))
    return (total / count.clamp(min=1)).item()


def accumulate(
    policy: Policy,
    drawn: Drawn,
    measured: Measured,
    advantages: torch.Tensor,
    parts: list[torch.Tensor],
    step: int,
    *,
    on_policy: bool,
) -> dict[str, float]:
    """Forward and backward of one minibatch, `parts` of it at a time; returns the loss's metrics over all ranks.

    On-policy, the old log-probabilities are those of this very forward pass, and are written to `measured`;
    `again_minus_1` is how far its ratio to those that were there is from 1.
    """
    batch, rollout_logprobs, options = drawn.rollout.batch, drawn.rollout.rollout_logprobs, _options(policy.config)
    own = on_policy and rollout_logprobs is None
    in_one_pass = rollout_logprobs is None and _is_token_level(options)
    left_out = _left_out(policy, drawn)
    counted, per_trained = _counted(policy, drawn, left_out, parts)
    sums = Sums(step)
    for index in parts:
        part = batch.rows(index)
        inputs, width = policy.inputs(part), part.response_mask.shape[1]
        before = measured.old_logprobs[index, :width]
        tokens = (None if own else before, advantages[index], part.response_mask)
        given = options | counted
        for name, values in {"ref_logprobs": measured.ref_logprobs, "rollout_logprobs": rollout_logprobs}.items():
            given[name] = None if values is None else values[index, :width]
        given["truncated"] = None if left_out is None else left_out[index]

        if in_one_pass:  # the gradient is formed in the forward pass: a quarter less work in the head
            token_loss, per_token = fused_rl.policy_token_loss(*tokens, **given)
            rows = policy.model(**inputs, token_loss=token_loss, per_token=per_token)
            loss, logprobs = rows.loss, rows.logprobs
            _, metrics = fused_rl.policy_loss(logprobs, *tokens, entropy=rows.entropy, **given)
        else:
            rows = policy.model(**inputs)
            logprobs = rows.logprobs
            loss, metrics = fused_rl.policy_loss(logprobs, *tokens, entropy=rows.entropy, **given)
        policy.model.backward(loss * ranks.world_size())  # the engine averages over ranks

        again = _again(logprobs.detach(), before) if own else torch.zeros_like(metrics["loss"])
        sums.add(metrics | {"again_minus_1": again / counted["num_tokens"]}, part.where)
        if own:
            measured.old_logprobs[index, :width] = logprobs.detach()
    found = sums.over_ranks()
    # Of the responses trained on: one that is left out is no response with a KL of 0.
    return found | {name: found[name] * per_trained for name in KLS if name in found}


def _options(config: GRPOConfig) -> dict[str, object]:
    """Of the loss; what the rewards have paid for is not paid for again."""
    options = loss_options(config) | {"kl_estimator": kl_estimator_of(config, config.kl_estimator)}
    return options | {"kl_coef": 0.0} if _kl_in_reward(config) else options


def _left_out(policy: Policy, drawn: Drawn) -> torch.Tensor | None:
    """(B,) bool: responses of which no token counts; None where there are none."""
    left_out = ~drawn.counts
    if policy.config.mask_truncated:
        left_out = left_out | ~drawn.rollout.stopped
    return left_out.to(policy.device) if left_out.any() else None


def _counted(
    policy: Policy, drawn: Drawn, left_out: torch.Tensor | None, parts: list[torch.Tensor]
) -> tuple[dict[str, int], float]:
    """Denominators of the whole minibatch, over all ranks: then no split of it changes the gradient; and how many
    sequences there are for each of which tokens count. One sum on every rank, whatever it leaves out."""
    index, mask = torch.cat(parts), drawn.rollout.batch.response_mask
    trained = torch.tensor(len(index))
    if left_out is not None:
        mask, trained = mask & ~left_out[:, None], (~left_out)[index].sum().cpu()
    counts = mask[index].sum().cpu(), drawn.counts[index.cpu()].sum(), trained
    num_tokens, num_sequences, trained = ranks.global_sum(torch.stack(counts)).clamp(min=1).tolist()
    denominators = {"num_tokens": num_tokens, "num_sequences": num_sequences}
    return denominators | {"max_length": policy.config.max_new_tokens}, num_sequences / trained


def _again(logprobs: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The sum of ratio - 1 over the tokens that the policy was run on before, where it has not changed since."""
    run = (before != 0) & before.isfinite()
    return torch.where(run, torch.expm1((logprobs - before).double()), 0).sum()


def _is_token_level(options: dict[str, object]) -> bool:
    """Whether a token's loss depends on nothing else in its sequence or batch; of a user's surrogate nobody knows."""
    chosen = resolve_options(options["preset"], {k: v for k, v in options.items() if k != "preset"})
    return wide_option(chosen) is None and not callable(chosen.surrogate)


def train_step(
    policy: Policy, prompts: list[Prompt], step: int, more: Callable[[int], list[Prompt]] | None = None
) -> dict[str, float]:
    """Roll out, score, update; returns the step's metrics. `more` prompts are drawn for dynamic sampling."""
    config, began = policy.config, time.monotonic()
    drawn = draw(policy, prompts, more, step)
    policy.stuck.look(drawn.rollout, None if advantage_of(config) == "batch-std" else config.group_size)
    sampled = time.monotonic()

    # Rewards and advantages.
    updates = plan(config, len(drawn.counts), policy.device)
    measured = measure_first(policy, drawn, updates, step)
    rewards, charged = drawn.rollout.rewards.to(policy.device), None
    if _kl_in_reward(config):
        charged = reference.kl_charged(config, measured, drawn.rollout.batch.response_mask)
        rewards = rewards - config.kl_coef * charged
    advantages = advantages_of(config, rewards, drawn.counts.to(policy.device))

    metrics = update(policy, drawn, measured, advantages, updates, step)
    policy.sampler.publish(step)
    ended = time.monotonic()

    metrics |= drawn.metrics | {"time/train": ended - sampled}
    if charged is not None:
        metrics["objective/kl"] = _per_response(charged, drawn.counts)
    tokens = ranks.global_sum(drawn.rollout.lengths[drawn.counts].sum()).item()
    penalty = -config.kl_coef * metrics.get("objective/kl", 0.0) - metrics["overlong_penalty"]
    return metrics | {
        "perf/tokens_per_second": tokens / (ended - began),
        "objective/kl_coef": config.kl_coef,
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": metrics["objective/scores"] + penalty,
    }


def train(config: GRPOConfig) -> str:
    """Run the whole training; returns the folder of the trained model."""
    run = begin(config, arithmetic)

    # What is read: tokenizer, rows, models.
    with phase("read tokenizer and rows"), ranks.together():
        tokenizer = encode.load_tokenizer(config.model, config.revision)
        reader = Reader.beside(config, config, tokenizer, run.device, config.rollout_batch_size)
        scorers = load_scorers(config, reader)
        prompts, held_out = load_prompts(config, tokenizer, scorers)
    run.has_read(tokenizer, rows=prompts, held_out=held_out)
    config = in_steps(config, len(prompts))
    with phase("loaded the models"):
        updates = config.steps * config.minibatches * config.epochs
        shared = config.share_prompts if keeps_groups(config, ranks.world_size()) else False
        needed = {"share_prompts": shared, "needs_reference": needs_reference(config)}
        policy = load_policy(config, tokenizer, scorers, run.device, updates, **needed)
        check_policy_fits(policy, [*prompts, *held_out])
    evaluated, held_out = bool(held_out), share_of_rank(held_out)

    # The run.
    order = RowOrder(len(prompts), config.prompts_per_step, config.seed)
    engines = {"policy": policy.model}
    if config.ref_sync_every:
        engines["reference"] = reference.SavedReference(policy.reference)
    loop = Loop(config, run, engines, order, COLUMNS, CURVES)
    policy.sampler.publish(loop.step)
    if loop.begins and evaluated:
        loop.log(*evaluate(policy, held_out))

    def mine(indices: list[int]) -> list[Prompt]:
        return [prompts[i] for i in indices[ranks.rank() :: ranks.world_size()]]

    def more(count: int) -> list[Prompt]:
        return mine(order.take(math.ceil(count / ranks.world_size()) * ranks.world_size()))

    for step, indices in loop:
        metrics, samples = train_step(policy, mine(indices), step, more), []
        metrics["episode"] = order.position * config.group_size
        if loop.evaluates and evaluated:
            found, samples = evaluate(policy, held_out)
            metrics |= found
        loop.log(metrics, samples)
        if config.ref_sync_every and step % config.ref_sync_every == 0:
            reference.sync(policy.reference, policy.model, config.ref_mixup_alpha)
    return loop.finish(
        lambda folder: language_model.save_lm(policy.model, tokenizer, folder, merged=config.save_merged)
    )


def main(argv: list[str] | None = None) -> None:
    """`fused-rl grpo`."""
    command.run(GRPOConfig, arithmetic, train, argv)


if __name__ == "__main__":
    main()
