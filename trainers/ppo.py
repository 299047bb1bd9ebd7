"""PPO: sample responses, score them, estimate each token's advantage with a critic, and update both within a clip.

    fused-rl ppo --config recipes/demo_ppo.yaml
    fused-rl ppo --model M --dataset D.jsonl --verifiers reward_model:runs/reward/model --output_dir runs/ppo

Where arXiv:1707.06347, as in arXiv:1909.08593 and arXiv:2403.17031, is computed, of token t of N in all:

    advantage    policy/critic.py           A_t = sum_l (gamma lambda)^l (r_t+l + gamma V_t+l+1 - V_t+l)    (`gae`)
    ratio        objectives/surrogates.py   r_t = exp(log pi(o_t) - log pi_old(o_t))                     (RATIO_LEVELS)
    clip         objectives/surrogates.py   l_t = -min(r_t A_t, clip(r_t, 1 - e, 1 + e) A_t)             (SURROGATES)
    value clip   objectives/losses.py       v_t = 1/2 max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2)
    KL           objectives/estimators.py   k1 = log pi(o_t) - log pi_ref(o_t), in the reward of each token: -kl_coef k1
    aggregation  objectives/aggregation.py  1/N sum_t l_t, and 1/N sum_t v_t                             (LOSS_AGGS)

docs/trainers/ppo.md says what each option does. Left out: tools, a critic on other devices than the policy.
"""

import functools
import time
from typing import ClassVar

import torch

import fused_rl
from fused_rl.objectives.presets import PresetName

from .base import engine
from .base.options import NonNegative, Positive
from .base.ranks import global_counts, processes
from .base.text import InputError
from .models.reward_model import save_reward_model
from .policy.balance import plan_balanced
from .policy.before_update import measure, micro_batches
from .policy.critic import (
    CreditConfig,
    CriticRunConfig,
    Experience,
    KLController,
    advantages_and_returns,
    experience_metrics,
    load_critic,
    token_rewards,
    values_of,
)
from .policy.evaluate import evaluate
from .policy.options import MAIN, PolicyConfig, ScoredRunConfig, loss_options
from .policy.policy import (
    Policy,
    group_lengths,
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
from .run.metrics import PPO, Sums, means_of_updates, with_logged_names
from .scorers.load import check_scorers
from .scorers.options import ScorersLike


class PPOConfig(ScoredRunConfig, CreditConfig, CriticRunConfig, PolicyConfig):
    """Proximal policy optimisation of a causal language model against any scorers, with a critic."""

    command: ClassVar = "ppo"
    main: ClassVar = (*MAIN, "critic_lr", "kl_coef")
    preset: PresetName = "ppo"
    """A row of fused_rl.PRESETS whose advantages come from a critic: it chooses ratio, clipping and aggregation."""
    advantage: str = "gae"
    """Generalised advantage estimation, the only choice here; GRPO has the group advantages."""
    kl_coef: NonNegative = 0.05
    """Weight of the KL to the starting model; with kl_target, its first value."""
    target_kl: Positive | None = None
    """Stop the updates on a rollout after one with an approximate KL to the sampling policy above this, in nats."""

    def planned(self) -> "PPOConfig":
        """Return the config with the steps of `critic_only`, where they are given."""
        return (
            self.replace(steps=self.critic_only, num_train_epochs=None)
            if self.critic_only
            else self
        )


def batch_plan(config: PPOConfig, world: int) -> dict[str, object]:
    """How the batch divides; raises on what does not."""
    loss_options(config)
    advantage = fused_rl.PRESETS[config.preset].advantage
    if {advantage, config.advantage} != {"gae"}:
        raise InputError(
            f"preset={config.preset} takes its advantages from {advantage} and advantage={config.advantage}, but ppo "
            "has a critic and takes gae alone: use --preset ppo --advantage gae, or fused-rl grpo"
        )
    batch = rollout_batch_plan(config.planned(), world)
    updates = "optimizer updates per step"
    batch[updates] = f"{batch[updates]} (at most, with target_kl)"
    return {"processes": world, "reward": check_scorers(config)} | batch


@torch.no_grad()
def judge(
    policy: Policy[PPOConfig],
    critic,
    rollout: Rollout,
    first_pass: list[torch.Tensor],
    kl_coef: float,
) -> Experience:
    """Return what both models say before the update, in the micro-batches of the first pass, and what tokens earned."""
    # Both models before the update: https://arxiv.org/abs/1909.08593, section 2.2.
    config = policy.config
    batch = rollout.batch
    # In the micro-batches of the first pass rounding is the same, so its first ratio is exactly 1.
    measured = measure(policy, batch, first_pass)
    values = torch.zeros_like(measured.old_logprobs)
    for micro in micro_batches(batch, first_pass):
        values[micro.place] = values_of(critic, micro.batch)

    # Scores and the KL become the rewards of tokens (https://arxiv.org/abs/1909.08593, eq. 2), and
    # these advantages and returns (https://arxiv.org/abs/1506.02438, eq. 16).
    mask = batch.response_mask
    # If a missing EOS costs nothing, a policy may learn never to end: arXiv:2403.17031.
    cut_rewards = rollout.rewards
    if config.missing_eos_score is not None:
        cut_rewards = torch.full_like(cut_rewards, config.missing_eos_score)
    scores = torch.where(rollout.stopped, rollout.rewards, cut_rewards - config.missing_eos_penalty)
    assert measured.ref_logprobs is not None  # a reference is always loaded
    kl = config.kl_of_tokens(measured.old_logprobs, measured.ref_logprobs, mask)
    rewards = token_rewards(scores, kl, mask, kl_coef if config.kl_in == "reward" else 0.0)
    # What is not trained on must not move the mean of the advantages, so it is masked before.
    if config.mask_truncated:
        mask = mask & rollout.stopped.to(mask.device, non_blocking=True)[:, None]
    advantages, returns = advantages_and_returns(config, rewards, values, mask)
    return Experience(rollout, measured, mask, scores, kl, values, advantages, returns)


def update(
    policy: Policy[PPOConfig],
    critic,
    experience: Experience,
    updates: list[list[torch.Tensor]],
    kl_coef: float,
    step: int,
) -> dict[str, float]:
    """The optimizer steps on one rollout; returns metrics averaged over them and summed over ranks."""
    # Several minibatches and epochs on one rollout: https://arxiv.org/abs/1707.06347, algorithm 1.
    policy.model.train()
    history = []
    for minibatch in updates:
        sums = accumulate(policy, critic, experience, minibatch, kl_coef, step)
        critic_metrics = engine.optimizer_step(critic, step)
        history.append(with_logged_names(PPO, sums) | policy.optimizer_step(step))
        history[-1] |= {
            "optim/critic_lr": critic_metrics["lr"],
            "optim/critic_grad_norm": critic_metrics["optim/grad_norm"],
        }
        # Early stopping (https://github.com/openai/spinningup) by sums over ranks, so all of them
        # stop.
        if (
            policy.config.target_kl is not None
            and history[-1].get("policy/approxkl_avg", 0) > policy.config.target_kl
        ):
            break
    for _ in updates[len(history) :]:  # schedules count planned updates, and still end at zero
        policy.model.lr_scheduler.step()
        critic.lr_scheduler.step()

    # The step's metrics: means over its updates.
    last = {key: history[-1][key] for key in ("lr", "optim/critic_lr")}
    return means_of_updates(history) | last | {"optim/updates": len(history)}


def accumulate(
    policy: Policy[PPOConfig],
    critic,
    experience: Experience,
    minibatch: list[torch.Tensor],
    kl_coef: float,
    step: int,
) -> dict[str, float]:
    """Run forward and backward on a minibatch, by micro-batches; return both losses' metrics over all ranks."""
    config = policy.config
    rollout = experience.rollout
    rows = torch.cat(minibatch).to(policy.device, non_blocking=True)
    mask = experience.mask[rows]
    # The denominators are of the minibatch over all ranks: no split of it changes the loss.
    num_tokens, num_sequences = global_counts(mask.sum(), torch.tensor(len(rows)))
    loss_options = with_entropy_threshold(
        config.loss_options(kl_coef), experience.measured.entropy[rows], mask
    )
    lengths = group_lengths(experience.mask.sum(1), config.group_size)

    # Rows, loss, backward, sums: https://arxiv.org/abs/1707.06347, eq. 7 and 9.
    sums = Sums(step)
    for micro in micro_batches(rollout.batch, minibatch):
        before = experience.select(micro)
        output = policy.loss(
            micro.batch,
            before.measured.old_logprobs,
            before.advantages,
            before.mask,
            ref_logprobs=before.measured.ref_logprobs,
            rollout_logprobs=micro.select(rollout.rollout_logprobs),
            group_lengths=lengths[micro.rows],
            options=loss_options,
            num_tokens=max(num_tokens, 1),
            num_sequences=num_sequences,
            max_length=config.max_new_tokens,
        )
        value_loss, value_metrics = fused_rl.value_loss(
            values_of(critic, micro.batch),
            before.values,
            before.returns,
            before.mask,
            value_clip=config.value_clip,
            num_tokens=max(num_tokens, 1),
        )
        # The engine averages gradients over ranks, but num_tokens is already that of all ranks.
        critic.backward(value_loss * processes())
        policy.backward(output.loss)
        sums.add(output.metrics | value_metrics, micro.batch.where)
    return sums.over_ranks(num_tokens)


def train_step(
    policy: Policy[PPOConfig], critic, prompts: list[Prompt], step: int, kl_coef: float
) -> dict[str, float]:
    """Roll out, score, judge, update; returns the step's metrics."""
    # Sample and score: https://arxiv.org/abs/2403.17031.
    config = policy.config
    began = time.monotonic()
    rollout = policy.roll_out(prompts, policy.sampling, config.group_size)
    policy.rest()
    sampled_at = time.monotonic()

    # What was expected of each token, and what it earned: arXiv:1909.08593, section 2.2.
    rollout, updates, balance = plan_balanced(policy, rollout)
    first_pass = sum(updates[: config.minibatches], [])
    experience = judge(policy, critic, rollout, first_pass, kl_coef)
    mismatch = policy.mismatch(rollout, experience.measured.old_logprobs, loss_options(config))
    judged_at = time.monotonic()

    # Train; the sampler gets the new weights.
    metrics = update(policy, critic, experience, updates, kl_coef, step)
    trained_at = time.monotonic()
    metrics |= policy.publish(step)
    ended_at = time.monotonic()

    # Beside what the update measured: what was sampled, and what became of the reward.
    metrics |= experience_metrics(experience, config.group_size, step) | mismatch | balance
    tokens = metrics["completions/mean_length"] * config.prompts_per_step * config.group_size
    penalty = -kl_coef * metrics["objective/kl"]
    return metrics | {
        "time/measure": judged_at - sampled_at,
        "time/train": trained_at - judged_at,
        "perf/tokens_per_second": tokens / (ended_at - began),
        "perf/padding": policy.padding.fraction(),
        "objective/kl_coef": kl_coef,
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": metrics["objective/scores"] + penalty,
    }


def train(
    config: PPOConfig,
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
    config = config.planned()
    critics = {} if config.critic is None else {"critic": config.critic}
    rows = (dataset, eval_dataset)
    inputs = read_inputs(
        config, batch_plan, rows, scorers, sampler, critics, on_step, tools, environment_factory
    )
    config, run, held_out = inputs.config, inputs.run, inputs.held_out
    critic = load_critic(config, inputs.tokenizer, run.device, inputs.updates)
    policy = inputs.load_policy(frozen=config.critic_only > 0)

    # Where the run begins, or goes on.
    controller = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
    engines = {"policy": policy.model, "critic": critic}  # what checkpoints hold
    run.fit_micro_batches(*([critic] if config.critic_only else engines.values()))
    restored = run.start(
        engines,
        controller.state,
        policy.rank_state,
        evaluate=lambda: evaluate(policy, held_out, print_signal=run.is_start),
    )
    # A resumed run goes on with the weight as it was adapted so far.
    controller.kl_coef = restored.get("kl_coef", config.kl_coef)
    policy.publish(run.step)

    # Step by step; the weight of the KL may follow it: arXiv:1909.08593, section 2.2.
    for step, prompts in inputs.steps(policy):
        metrics = train_step(policy, critic, prompts, step, controller.kl_coef)
        responses = config.prompts_per_step * config.group_size
        controller.update(metrics["objective/kl"], responses)
        run.log(metrics)

    def save(model_folder):
        policy.save(model_folder, merged=config.save_merged)
        # The critic is saved beside the policy, so that another run can start from it.
        save_reward_model(critic, inputs.tokenizer, model_folder.with_name("critic"))

    return run.finish(save)


main = functools.partial(command.run, PPOConfig, train)

if __name__ == "__main__":
    main()
