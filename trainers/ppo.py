"""PPO: sample responses, score them, estimate each token's advantage with a critic, and update both within a clip.

    fused-rl ppo --config recipes/demo_ppo.yaml
    fused-rl ppo --model M --dataset D.jsonl --verifiers reward_model:runs/reward/model --output_dir runs/ppo

arXiv:1707.06347 as in arXiv:1909.08593 and arXiv:2403.17031; docs/ppo.md says what each option does. What tokens earn
is computed in credit.py. Left out: several turns, tools, a critic on other devices than the policy.
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

import fused_rl
from fused_rl.trainers.base import engine, ranks
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.order import RowOrder, in_run, in_steps
from fused_rl.trainers.models import language_model
from fused_rl.trainers.models.reward_model import save_reward_model
from fused_rl.trainers.options.config import InputError, NonNegative, Positive, PositiveInt, divide_over
from fused_rl.trainers.options.needs import Needs, check_needs
from fused_rl.trainers.policy.credit import (
    CREDIT_NEEDS,
    CreditConfig,
    Experience,
    adapted,
    advantages_and_returns,
    check_credit,
    experience_metrics,
    final_scores,
    kl_estimator_of,
    token_rewards,
    warn_of_estimator,
    win_rate,
)
from fused_rl.trainers.policy.critic import (
    CRITIC_NEEDS,
    SHARED,
    CriticConfig,
    PolicyWithValues,
    Watch,
    check_critic,
    load_critic,
    planned,
)
from fused_rl.trainers.policy.evaluate import evaluate, share_of_rank
from fused_rl.trainers.policy.options import POLICY_NEEDS, PolicyConfig, check_loss_options, loss_options
from fused_rl.trainers.policy.policy import (
    Policy,
    check_policy_fits,
    load_policy,
    load_prompts,
    measure,
    tell_if_all_left_out,
    warn_if_off_policy,
)
from fused_rl.trainers.rollouts.types import Prompt, Rollout
from fused_rl.trainers.run import command
from fused_rl.trainers.run.beginning import begin
from fused_rl.trainers.run.curves import Against
from fused_rl.trainers.run.logger import phase
from fused_rl.trainers.run.loop import Loop
from fused_rl.trainers.run.metrics import KEYS, Sums, keyed
from fused_rl.trainers.scorers.load import check_scorers, load_scorers
from fused_rl.trainers.scorers.options import SCORER_NEEDS, ScorerConfig
from fused_rl.trainers.scorers.reward_model import Reader

COLUMNS = {
    "score": "objective/scores",
    "KL": "objective/kl_exact",
    "entropy": "policy/entropy_avg",
    "explained": "val/var_explained",
    "held-out": "eval/score",
    "tokens/s": "perf/tokens_per_second",
}
CURVES = {
    "score and reward (mean of a step)": ["objective/scores", "objective/rlhf_reward"],
    "held-out score and accuracy": ["eval/score", "eval/accuracy_greedy", "eval/accuracy_sampled"],
    "KL to the reference (nats per response)": ["objective/kl", "objective/kl_exact"],
    "explained variance of the returns": ["val/var_explained"],
    "score over response length": Against("completions/mean_length", "objective/scores"),
    "score over KL": Against("objective/kl_exact", "objective/scores"),
}


@dataclass(kw_only=True)
class PPOConfig(ScorerConfig, CreditConfig, CriticConfig, PolicyConfig):
    """Proximal policy optimisation of a causal language model against any scorers, with a critic."""

    command: ClassVar[str] = "ppo"

    preset: str = "ppo"
    """A row of fused_rl.PRESETS whose advantages come from a critic: it chooses ratio, clipping and aggregation."""
    advantage: str = "gae"
    """Generalised advantage estimation, the only one here; group advantages are GRPO's."""
    group_size: PositiveInt = 1
    """Responses per prompt; each has its own advantages."""
    kl_coef: NonNegative = 0.05
    """Weight of the KL to the starting model; with kl_target the first value of it."""
    kl_estimator: Literal["k1", "k2", "k3", "k4", "rk3", "k1+", "k3+"] | None = None
    """None is k1 in the reward, rk3 in the loss; k3 in the reward and k1 in the loss do not do what they seem to."""
    target_kl: Positive | None = None
    """Stop the updates on a rollout after one whose approximate KL to the sampling policy was above this, in nats."""
    stop_token: str | None = None
    """A further token that ends a response, beside EOS; given as text."""


NEEDS = (
    *POLICY_NEEDS,
    *SCORER_NEEDS,
    *CREDIT_NEEDS,
    *CRITIC_NEEDS,
    Needs(
        "target_kl",
        lambda config: config.minibatches * config.epochs > 1,
        "has no meaning with one update per step, after which none is left to stop; give more --minibatches or epochs",
    ),
)


def arithmetic(config: PPOConfig, world: int) -> dict[str, object]:
    """How the batch divides; raises on what does not."""
    if config.preset not in fused_rl.PRESETS:
        raise InputError(f"preset={config.preset!r} is not one of {sorted(fused_rl.PRESETS)}")
    advantage = fused_rl.PRESETS[config.preset].advantage
    if {advantage, config.advantage} != {"gae"}:
        raise InputError(
            f"preset={config.preset} takes its advantages from {advantage} and advantage={config.advantage}, but ppo "
            "has a critic and takes gae alone: use --preset ppo --advantage gae, or fused-rl grpo"
        )
    check_needs(config, NEEDS)
    check_credit(config)
    warn_of_estimator(config, config.kl_estimator)
    check_loss_options(config)
    check_critic(config)
    local = divide_over("prompts_per_step", config.prompts_per_step, world) * config.group_size
    if local % config.minibatches:
        raise InputError(f"minibatches={config.minibatches} does not divide the {local} responses of each process")
    minibatch, responses = local // config.minibatches, local * world
    parts = math.ceil(minibatch / config.micro_batch_size)
    config = planned(config)
    return {
        "processes": world,
        "reward": check_scorers(config, imports=config.dry_run),
        "responses per step": f"{responses} = {config.prompts_per_step} prompts x {config.group_size}",
        "responses per process and step": local,
        "responses per process and minibatch": minibatch,
        "micro-batches per process and minibatch": f"{parts} of at most {config.micro_batch_size}",
        "optimizer updates per step": f"{config.minibatches * config.epochs} (at most, with target_kl)",
        "optimizer updates in the run": in_run(config, config.minibatches * config.epochs),
        "responses in the run": in_run(config, responses),
    }


@torch.no_grad()
def judge(policy: Policy, critic, rollout: Rollout, parts: list[torch.Tensor], kl_coef: float) -> Experience:
    """Log-probabilities and values before the update, in the first pass's `parts`; from them what each token earned."""
    config, batch = policy.config, rollout.batch
    measured = measure(policy, batch, parts)
    values = torch.zeros_like(measured.old_logprobs)
    for index in parts:
        part = batch.rows(index)
        if critic is None:
            found = policy.model(**policy.inputs(part), want_values=True).values
        else:
            found = critic(part.input_ids, part.response_mask)
        values[index, : found.shape[1]] = found

    mask = batch.response_mask
    old, ref = measured.old_logprobs, measured.ref_logprobs
    estimated = fused_rl.kl_estimate(old, ref, kl_estimator_of(config, config.kl_estimator), old_logprobs=old)
    kl, scores = torch.where(mask, estimated, 0), final_scores(config, rollout)
    rewards = token_rewards(scores, kl, mask, kl_coef if config.kl_in == "reward" else 0.0)
    if config.mask_truncated:
        mask = mask & rollout.stopped.to(mask.device)[:, None]
    advantages, returns = advantages_and_returns(config, rewards, values, mask)
    return Experience(rollout, measured, mask, scores, kl, values, advantages, returns)


def plan(config: PPOConfig, count: int, device) -> list[list[torch.Tensor]]:
    """For each update of a step the micro-batches of its minibatch, as indices into this rank's `count` responses."""
    updates = []
    for _ in range(config.epochs):
        for minibatch in torch.randperm(count).split(count // config.minibatches):
            updates.append([part.to(device) for part in minibatch.split(config.micro_batch_size)])
    return updates


def update(
    policy: Policy, critic, experience: Experience, updates: list[list[torch.Tensor]], kl_coef: float, step: int
) -> dict[str, float]:
    """The optimizer steps on one rollout; returns metrics averaged over them and summed over ranks."""
    config = policy.config
    engines = [trained for trained in (None if config.critic_only else policy.model, critic) if trained is not None]
    policy.model.train()
    history = []
    for parts in updates:
        sums = accumulate(policy, critic, experience, parts, kl_coef, step)
        history.append(keyed(KEYS["ppo"], sums) | optimizer_steps(policy, critic, step))
        # From sums over all ranks, so all of them stop here.
        if config.target_kl is not None and history[-1]["policy/approxkl_avg"] > config.target_kl:
            break
    for _ in updates[len(history) :]:  # the schedule counts planned updates: it still ends at zero
        for trained in engines:
            trained.lr_scheduler.step()

    warn_if_off_policy(history[0]["val/ratio"], engine.torch_dtype(config))
    means = {key: sum(metrics[key] for metrics in history) / len(history) for key in history[0]}
    last = {key: history[-1][key] for key in history[-1] if key.endswith("lr")}
    return means | last | {"optim/updates": len(history)}


def accumulate(
    policy: Policy, critic, experience: Experience, parts: list[torch.Tensor], kl_coef: float, step: int
) -> dict[str, float]:
    """Forward and backward of one minibatch, `parts` of it at a time; returns both losses' metrics over all ranks."""
    config, batch, measured = policy.config, experience.rollout.batch, experience.measured
    rollout_logprobs = experience.rollout.rollout_logprobs
    options = loss_options(config) | {"kl_estimator": kl_estimator_of(config, config.kl_estimator)}
    options["kl_coef"] = kl_coef if config.kl_in == "loss" else 0.0

    # Denominators of the whole minibatch, over all ranks: then no split of it changes the gradient.
    num_tokens = ranks.global_sum(sum(experience.mask[part].sum() for part in parts)).item()
    num_sequences = sum(map(len, parts)) * ranks.world_size()

    sums = Sums(step)
    for index in parts:
        part = batch.rows(index)
        inputs, width = policy.inputs(part), part.response_mask.shape[1]
        if critic is None:
            rows = policy.model(**inputs, want_values=True)
            values = rows.values
        else:
            with torch.set_grad_enabled(not config.critic_only):
                rows = policy.model(**inputs)
            values = critic(part.input_ids, part.response_mask)
        mask = experience.mask[index, :width]
        loss, metrics = fused_rl.policy_loss(
            rows.logprobs,
            measured.old_logprobs[index, :width],
            experience.advantages[index, :width],
            mask,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            max_length=config.max_new_tokens,
            ref_logprobs=measured.ref_logprobs[index, :width],
            rollout_logprobs=None if rollout_logprobs is None else rollout_logprobs[index, :width],
            entropy=rows.entropy,
            **options,
        )
        fitted, value_metrics = fused_rl.value_loss(
            values,
            experience.values[index, :width],
            experience.returns[index, :width],
            mask,
            value_clip=config.value_clip,
            num_tokens=num_tokens,
        )
        # The engines average over ranks.
        if critic is None:
            loss = loss + config.value_coef * fitted
        else:
            critic.backward(fitted * ranks.world_size())
        if not config.critic_only:
            policy.model.backward(loss * ranks.world_size())
        sums.add(metrics | value_metrics, part.where)
    return sums.over_ranks()


def optimizer_steps(policy: Policy, critic, step: int) -> dict[str, float]:
    """One optimizer step of each model that is trained; returns learning rates and gradient norms."""
    metrics = {"lr": 0.0, "optim/grad_norm": 0.0}
    if not policy.config.critic_only:
        metrics = engine.optimizer_step(policy.model, step)
    if critic is not None:
        found = engine.optimizer_step(critic, step)
        metrics |= {"optim/critic_lr": found["lr"], "optim/critic_grad_norm": found["optim/grad_norm"]}
    return metrics


def train_step(policy: Policy, critic, prompts: list[Prompt], step: int, kl_coef: float) -> dict[str, float]:
    """Roll out, score, judge, update; returns the step's metrics."""
    config, began = policy.config, time.monotonic()
    rollout = policy.roll_out(prompts, policy.sampling, config.group_size)
    policy.stuck.look(rollout, None)
    sampled = time.monotonic()
    updates = plan(config, len(rollout.samples), policy.device)
    first_pass = sum(updates[: config.minibatches], [])
    experience = judge(policy, critic, rollout, first_pass, kl_coef)
    judged = time.monotonic()
    metrics = update(policy, critic, experience, updates, kl_coef, step)
    policy.sampler.publish(step)
    ended = time.monotonic()

    metrics |= experience_metrics(experience, step) | win_rate(experience.scores, rollout.solved, config.group_size)
    tokens = metrics["completions/mean_length"] * config.prompts_per_step * config.group_size
    penalty = -kl_coef * metrics["objective/kl"]
    return metrics | {
        "time/measure": judged - sampled,
        "time/train": ended - judged,
        "perf/tokens_per_second": tokens / (ended - began),
        "objective/kl_coef": kl_coef,
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": metrics["objective/scores"] + penalty,
    }


def stop_ids_of(config: PPOConfig, tokenizer, stop_ids: tuple[int, ...]) -> tuple[int, ...]:
    """What ends a response: EOS, and the token that the option names."""
    if config.stop_token is None:
        return stop_ids
    ids = tokenizer(config.stop_token, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise InputError(f"stop_token={config.stop_token!r} is {len(ids)} tokens of {config.model!r}; it must be one")
    return (*stop_ids, *ids)


def train(config: PPOConfig) -> str:
    """Run the whole training; returns the folder of the trained model."""
    config = planned(config)
    run = begin(config, arithmetic)

    # What is read: tokenizer, rows, models.
    with phase("read tokenizer, scorers and rows"), ranks.together():
        tokenizer = encode.load_tokenizer(config.model, config.revision)
        reader = Reader.beside(config, config, tokenizer, run.device, config.rollout_batch_size)
        scorers = load_scorers(config, reader)
        prompts, held_out = load_prompts(config, tokenizer, scorers)
    run.has_read(tokenizer, rows=prompts, held_out=held_out)
    config = in_steps(config, len(prompts))
    with phase("loaded the models"):
        updates, shared = config.steps * config.minibatches * config.epochs, config.critic == SHARED
        critic = None if shared else load_critic(config, tokenizer, run.device, updates)
        extend = PolicyWithValues if shared else (lambda lm: lm)
        policy = load_policy(config, tokenizer, scorers, run.device, updates, extend=extend)
        check_policy_fits(policy, [*prompts, *held_out])
    stop_ids = stop_ids_of(config, tokenizer, policy.sampling.stop_ids)
    policy.sampling = dataclasses.replace(policy.sampling, stop_ids=stop_ids)
    evaluated, held_out = bool(held_out), share_of_rank(held_out)

    # The run.
    order = RowOrder(len(prompts), config.prompts_per_step, config.seed)
    engines = {"policy": policy.model} | ({} if shared else {"critic": critic})
    kl_coef, watch = config.kl_coef, Watch()
    loop = Loop(config, run, engines, order, COLUMNS, CURVES, lambda: {"kl_coef": kl_coef})
    kl_coef = loop.restored.get("kl_coef", kl_coef)
    policy.sampler.publish(loop.step)
    if loop.begins and evaluated:
        loop.log(*evaluate(policy, held_out))
    for step, indices in loop:
        mine = indices[ranks.rank() :: ranks.world_size()]
        metrics, samples = train_step(policy, critic, [prompts[i] for i in mine], step, kl_coef), []
        if not tell_if_all_left_out(config, metrics["val/stop_rate"], step):
            watch.look(metrics.get("optim/critic_grad_norm"), metrics["val/var_explained"])
        if config.kl_target is not None:
            responses = config.prompts_per_step * config.group_size
            kl_coef = adapted(kl_coef, metrics["objective/kl"], responses, config.kl_target, config.kl_horizon)
        if loop.evaluates and evaluated:
            found, samples = evaluate(policy, held_out)
            metrics |= found
        loop.log(metrics, samples)

    def save(model_folder):
        language_model.save_lm(policy.model, tokenizer, model_folder, merged=config.save_merged)
        if critic is not None:
            save_reward_model(critic, tokenizer, model_folder.with_name("critic"))

    return loop.finish(save)


def main(argv: list[str] | None = None) -> None:
    """`fused-rl ppo`."""
    command.run(PPOConfig, arithmetic, train, argv)


if __name__ == "__main__":
    main()
