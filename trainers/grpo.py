"""GRPO: sample a group of responses per prompt, score them, prefer those that are better than the others.

    fused-rl grpo --config recipes/demo_grpo.yaml
    fused-rl grpo --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k --verifiers math --output_dir runs/gsm8k

Where arXiv:2402.03300 (eq. 3 and 4) is computed, of token t in response i of n_i tokens, B responses in all:

    advantage    policy/groups.py           A_i = (R_i - mean R) / std R, over the group's rewards R (`advantages_of`)
    ratio        objectives/surrogates.py   r_it = exp(log pi(o_it) - log pi_old(o_it))             (RATIO_LEVELS)
    clip         objectives/surrogates.py   l_it = -min(r_it A_i, clip(r_it, 1 - e, 1 + e) A_i)     (SURROGATES)
    KL           objectives/estimators.py   k_it = exp(-d) - 1 + d, d = log pi(o_it) - log pi_ref(o_it); rk3 = r_it k_it
    aggregation  objectives/aggregation.py  1/B sum_i 1/n_i sum_t (l_it + kl_coef k_it)             (LOSS_AGGS)
    presets      objectives/presets.py      the same five of dr_grpo, dapo, rloo, gspo, …           (PRESETS)

docs/trainers/grpo.md says what each option does.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import torch

import fused_rl

from .base import ranks
from .base.options import PositiveInt
from .base.text import InputError
from .models import language_model, lora
from .policy.balance import plan_balanced
from .policy.before_update import BeforeUpdate, measure, micro_batches
from .policy.evaluate import evaluate
from .policy.groups import (
    GroupConfig,
    Groups,
    advantage_of,
    advantages_of,
    collect,
    included_of,
    keeps_groups,
)
from .policy.options import (
    MAIN,
    PolicyConfig,
    ReferenceConfig,
    ScoredRunConfig,
    loss_options,
)
from .policy.policy import (
    Policy,
    group_lengths,
    needed_passes,
    with_entropy_threshold,
)
from .policy.setup import (
    EnvironmentFactory,
    RowsLike,
    SamplerFactory,
    ToolsLike,
    read_inputs,
    rollout_batch_plan,
)
from .rollouts.types import Prompt, Rollout
from .run import command
from .run.hooks import OnStep
from .run.metrics import POLICY, Sums, means_of_updates, with_logged_names
from .scorers.load import check_scorers
from .scorers.options import ScorersLike

KLS = ("kl", "kl1", "kl2", "kl3", "kl4")  # of `policy_loss`, nats per response


class GRPOConfig(ScoredRunConfig, GroupConfig, ReferenceConfig, PolicyConfig):
    """Group-relative policy optimisation of a causal language model on problems whose answers can be verified."""

    command: ClassVar = "grpo"
    main: ClassVar = (*MAIN, "group_size", "preset", "kl_coef")
    # Of an option that several groups declare, pydantic takes the first group's.
    group_size: PositiveInt = 8
    """Responses per prompt."""
    old_logprobs: Literal["sampler"] | None = None
    """Compute ratios to the log-probabilities that the sampler reported, as dppo-tv, dppo-kl and ipo expect, without
    rollout_correction; None takes those of the policy before the update."""


def batch_plan(config: GRPOConfig, world: int) -> dict[str, object]:
    """How the batch divides; raises on what does not."""
    loss_options(config)
    advantage = advantage_of(config)
    if config.group_size < 2:
        raise InputError(
            f"group_size={config.group_size}: a response needs others to be compared with; at least 2"
        )
    batch = rollout_batch_plan(config, world)
    if config.share_prompts and not keeps_groups(config, world):
        raise InputError(
            f"minibatches={config.minibatches} would split groups, which share their prompt: it does not divide the "
            f"{config.prompts_per_step // world} prompts of each process; choose another number, or drop "
            "--share_prompts"
        )
    if config.ref_sync_every and lora.find(config.model, config.revision) is not None:
        raise InputError(
            f"ref_sync_every={config.ref_sync_every} needs a reference of its own, but model={config.model} holds "
            "adapters, and the reference is the weights under them; merge them first, or leave the option out"
        )
    reward = check_scorers(config)
    return {"processes": world, "reward": reward, "advantage": advantage} | batch


def trains_before_measuring(config: GRPOConfig, rollout: Rollout) -> bool:
    """Return True if the training pass of the first minibatch gives its old log-probabilities and its exact KL.

    It is trained on by the policy that it would be measured with. Rewards that pay for the KL, a threshold of
    `top_entropy`, and log-probabilities to compare with those of the sampler need them before.
    """
    needed_before = config.kl_in == "reward" or config.top_entropy is not None
    return rollout.rollout_logprobs is None and not needed_before


def measure_first(
    policy: Policy[GRPOConfig], groups: Groups, updates: list[list[torch.Tensor]], step: int
) -> BeforeUpdate:
    """The baselines of ratios and KL, measured before the first update unless its pass gives them."""
    config = policy.config
    rollout = groups.rollout
    first_pass = sum(updates[: config.minibatches], [])
    exact_kl = config.kl_every > 0 and step % config.kl_every == 0
    skipped = len(updates[0]) if trains_before_measuring(config, rollout) else 0
    return measure(policy, rollout.batch, first_pass, exact_kl=exact_kl, skipped=skipped)


def update(
    policy: Policy[GRPOConfig],
    groups: Groups,
    measured: BeforeUpdate,
    advantages: torch.Tensor,
    updates: list[list[torch.Tensor]],
    step: int,
) -> dict[str, float]:
    """Train on all minibatches of all epochs of a rollout; return metrics averaged over them and summed over ranks."""
    # Several minibatches and epochs on one rollout: https://arxiv.org/abs/2402.03300, algorithm 1.
    policy.model.train()
    history = []
    for minibatch in updates:
        is_first = not history
        sums = accumulate(policy, groups, measured, advantages, minibatch, step, on_policy=is_first)
        history.append(with_logged_names(POLICY, sums) | policy.optimizer_step(step))

    # The step's metrics: means over its updates; entropy and exact KL are of before them.
    means = means_of_updates(history) | {"lr": history[-1]["lr"]}
    before = {"objective/entropy": -measured.old_logprobs}
    if measured.kl is not None:
        before["objective/kl_exact"] = measured.kl
    return means | _per_response(before, groups.included)


def _per_response(columns: dict[str, torch.Tensor], included: torch.Tensor) -> dict[str, float]:
    """The means over all ranks of the sums of (B, T), of the responses that count; {} if none does."""
    sums = {name: values.sum(1).cpu()[included].sum() for name, values in columns.items()}
    totals = ranks.global_sums(sums | {"": included.sum()})
    count = totals.pop("")
    return {name: total / count for name, total in totals.items() if count}


class Included(NamedTuple):
    """The tokens of a rollout that are trained on, and the denominators of a minibatch over all ranks."""

    mask: torch.Tensor
    """(B, T - 1) bool."""
    trained: torch.Tensor
    """(B,) bool on the CPU: the responses with tokens that are trained on."""
    num_tokens: int
    num_sequences: int
    """Responses that count in the loss's mean, truncated ones among them."""
    num_trained: int
    """Responses with a token that is trained on."""


def loss_mask_and_denominators(
    policy: Policy[GRPOConfig], groups: Groups, minibatch: torch.Tensor
) -> Included:
    """Return what is trained on of the responses at the CPU indices `minibatch`."""
    # Responses that were cut may be left out: https://arxiv.org/abs/2503.14476, section 3.4.
    batch = groups.rollout.batch
    trained = groups.included
    if policy.config.mask_truncated:
        trained = trained & groups.rollout.stopped
    mask = batch.response_mask & trained.to(policy.device, non_blocking=True)[:, None]
    tokens = (batch.token_counts * trained)[minibatch].sum()
    counts = ranks.global_counts(tokens, groups.included[minibatch].sum(), trained[minibatch].sum())
    return Included(mask, trained, *counts)


def accumulate(
    policy: Policy[GRPOConfig],
    groups: Groups,
    measured: BeforeUpdate,
    advantages: torch.Tensor,
    minibatch: list[torch.Tensor],
    step: int,
    *,
    on_policy: bool,
) -> dict[str, float]:
    """Run forward and backward on a minibatch, by micro-batches; return the loss's metrics over all ranks."""
    config = policy.config
    rollout_logprobs = groups.rollout.rollout_logprobs
    # A sampler that reports log-probabilities may be another policy, even in the first update.
    ratio_is_one = on_policy and rollout_logprobs is None
    is_unmeasured = on_policy and trains_before_measuring(config, groups.rollout)
    with_reference = is_unmeasured and measured.kl is not None
    if config.old_logprobs == "sampler":
        rollout_logprobs = None  # they are the old ones, so that nothing is left to correct

    # The denominators and the entropies' threshold are of the whole minibatch, over all ranks.
    indices = torch.cat(minibatch)
    mask, trained, num_tokens, num_sequences, num_trained = loss_mask_and_denominators(
        policy, groups, indices
    )
    rows = indices.to(policy.device, non_blocking=True)
    loss_options = with_entropy_threshold(
        config.loss_options(config.kl_coef), measured.entropy[rows], mask[rows]
    )
    lengths = group_lengths(mask.sum(1), config.group_size)

    # Rows, loss, backward, sums; the loss is arXiv:2402.03300, eq. 3, or the preset's.
    sums = Sums(step)
    # Groups with equal rewards have no gradient. The first pass is also read for the entropy.
    read = groups.included if ratio_is_one else trained
    running, backward = needed_passes(loss_options, advantages, trained, read, minibatch)
    passes = zip(micro_batches(groups.rollout.batch, running), backward, strict=True)
    for micro, has_gradient in passes:
        before = measured.select(micro)
        with torch.set_grad_enabled(has_gradient):
            output = policy.loss(
                micro.batch,
                before.old_logprobs,
                advantages[micro.rows],
                micro.select(mask),
                on_policy=ratio_is_one,
                with_reference=with_reference,
                ref_logprobs=before.ref_logprobs,
                rollout_logprobs=micro.select(rollout_logprobs),
                group_lengths=lengths[micro.rows],
                options=loss_options,
                num_tokens=max(num_tokens, 1),
                num_sequences=max(num_sequences, 1),
                max_length=config.max_new_tokens,
            )
        if has_gradient:
            policy.backward(output.loss)
        sums.add(output.metrics, micro.batch.where)
        # Later epochs are measured against this pass: arXiv:2402.03300, algorithm 1.
        if ratio_is_one:
            measured.old_logprobs[micro.place] = output.logprobs
        if with_reference:
            assert measured.ref_logprobs is not None and measured.kl is not None
            assert output.ref_logprobs is not None and output.kl is not None
            measured.ref_logprobs[micro.place] = output.ref_logprobs
            measured.kl[micro.place] = output.kl

    # Of the responses trained on: one that is left out is no response with a KL of 0.
    metrics = sums.over_ranks(num_tokens)
    kls = {name: metrics[name] for name in KLS if name in metrics}
    return metrics | {name: kl * (num_sequences / num_trained) for name, kl in kls.items()}


def train_step(
    policy: Policy[GRPOConfig],
    prompts: list[Prompt],
    step: int,
    draw_more: Callable[[int], list[Prompt]] | None = None,
) -> dict[str, float]:
    """Roll out, score, update; returns the step's metrics. `draw_more` returns prompts for dynamic sampling."""
    # Sample and score groups; new ones for those without a signal: arXiv:2503.14476, section 3.2.
    config = policy.config
    began = time.monotonic()
    groups = collect(config, policy, prompts, draw_more, step)
    policy.rest()
    sampled_at = time.monotonic()

    # What ratios and KL are taken against: https://arxiv.org/abs/2402.03300, algorithm 1.
    together = config.group_size if keeps_groups(config, ranks.world_size()) else 1
    rollout, updates, balance = plan_balanced(policy, groups.rollout, together)
    groups = Groups(rollout, included_of(config, rollout.rewards), groups.metrics)
    measured = measure_first(policy, groups, updates, step)
    mismatch = policy.mismatch(groups.rollout, measured.old_logprobs, loss_options(config))

    # Rewards, less the KL if they pay for it, as in arXiv:2402.14740; and advantages.
    rewards = groups.rollout.rewards.to(policy.device, non_blocking=True)
    kl_of_responses = None
    if config.kl_in == "reward":  # with a coefficient, as the config has checked
        mask = groups.rollout.batch.response_mask
        assert measured.ref_logprobs is not None
        token_kl = config.kl_of_tokens(measured.old_logprobs, measured.ref_logprobs, mask)
        kl_of_responses = fused_rl.masked_sum(token_kl, mask, 1)
        rewards = rewards - config.kl_coef * kl_of_responses
    advantages = advantages_of(config, rewards, groups.included, groups.rollout, policy.scorers)
    # DPPO, arXiv:2602.04879: the trust region is the sampler's.
    if config.old_logprobs == "sampler":
        assert groups.rollout.rollout_logprobs is not None  # the sampler was checked
        measured.old_logprobs = groups.rollout.rollout_logprobs

    # Train; the sampler gets the new weights.
    metrics = update(policy, groups, measured, advantages, updates, step)
    metrics["time/train"] = time.monotonic() - sampled_at
    metrics |= policy.publish(step)
    ended_at = time.monotonic()

    # Beside what the update measured: what was sampled, and what became of the reward.
    metrics |= groups.metrics | mismatch | balance
    if kl_of_responses is not None:
        metrics |= _per_response({"objective/kl": kl_of_responses[:, None]}, groups.included)
    tokens = ranks.global_sum(groups.rollout.lengths[groups.included].sum()).item()
    penalty = -config.kl_coef * metrics.get("objective/kl", 0.0) - metrics["overlong_penalty"]
    return metrics | {
        "perf/tokens_per_second": tokens / (ended_at - began),
        "perf/padding": policy.padding.fraction(),
        "objective/kl_coef": config.kl_coef,
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": metrics["objective/scores"] + penalty,
    }


def train(
    config: GRPOConfig,
    *,
    dataset: RowsLike = None,
    eval_dataset: RowsLike = None,
    scorers: ScorersLike = None,
    sampler: SamplerFactory | None = None,
    on_step: OnStep | None = None,
    tools: ToolsLike = None,
    environment_factory: EnvironmentFactory = None,
) -> str:
    """Run the whole training, on what is given or on what the config names; return the trained model's folder."""
    # Tokenizer, scorers, rows, models.
    rows = (dataset, eval_dataset)
    inputs = read_inputs(
        config, batch_plan, rows, scorers, sampler, {}, on_step, tools, environment_factory
    )
    config, run, held_out = inputs.config, inputs.run, inputs.held_out
    shared = config.share_prompts if keeps_groups(config, ranks.world_size()) else False
    policy = inputs.load_policy(
        packing_option="share_prompts", packing=shared, needs_reference=config.needs_reference
    )

    # Where the run begins, or goes on.
    engines = {"policy": policy.model}  # what checkpoints hold
    synced_reference = policy.reference if config.ref_sync_every else None
    if synced_reference is not None:
        engines["reference"] = language_model.SavedReference(synced_reference.model)
    run.fit_micro_batches(policy.model)
    run.start(
        engines,
        rank_state=policy.rank_state,
        evaluate=lambda: evaluate(policy, held_out, print_signal=run.is_start),
    )
    policy.publish(run.step)

    def draw_more(count: int) -> list[Prompt]:
        return inputs.prompts_of_rank(
            run.order.take(math.ceil(count / ranks.world_size()) * ranks.world_size())
        )

    # Step by step; the reference may follow the policy: https://arxiv.org/abs/2404.09656.
    for step, prompts in inputs.steps(policy):
        metrics = train_step(policy, prompts, step, draw_more)
        metrics["episode"] = run.order.position * config.group_size
        run.log(metrics)
        if synced_reference is not None and step % config.ref_sync_every == 0:
            language_model.sync(synced_reference.model, policy.model, config.ref_mixup_alpha)
    return run.finish(lambda folder: policy.save(folder, merged=config.save_merged))


main = functools.partial(command.run, GRPOConfig, train)

if __name__ == "__main__":
    main()
