"""How PPO and GRPO begin, alike: how the batch of a step divides, and what is read before the policy is trained."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.ranks import divide_over
from fused_rl.trainers.base.screen import phase
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.rows import Given, Rows, load_train_eval
from fused_rl.trainers.models.language_model import check_fits
from fused_rl.trainers.options import InputError
from fused_rl.trainers.policy.build import Make, check_own
from fused_rl.trainers.policy.options import PolicyConfig
from fused_rl.trainers.policy.policy import Policy, load_policy
from fused_rl.trainers.rollouts.roll_out import prompts_of
from fused_rl.trainers.rollouts.types import Prompt, Scorer
from fused_rl.trainers.run.loop import Run


def divided(config: PolicyConfig, world: int) -> dict[str, object]:
    """How the batch of a step divides over ranks, minibatches and micro-batches; raises where it does not."""
    local = divide_over("prompts_per_step", config.prompts_per_step, world) * config.group_size
    if local % config.minibatches:
        what = f"does not divide the {local} responses of each process; choose a number that does"
        raise InputError(f"minibatches={config.minibatches} {what}")
    minibatch = local // config.minibatches
    updates = config.minibatches * config.epochs
    parts = math.ceil(minibatch / config.micro_batch_size)
    return {
        "responses per step": f"{local * world} = {config.prompts_per_step} prompts x {config.group_size}",
        "responses per process and step": local,
        "responses per process and minibatch": minibatch,
        "micro-batches per process and minibatch": f"{parts} of at most {config.micro_batch_size}",
        "optimizer updates per step": updates,
        "optimizer updates in the run": config.in_run(updates),
        "responses in the run": config.in_run(local * world),
    } | ({} if config.server is None else {"servers, not asked yet": " ".join(config.server)})


@dataclass
class Read:
    """What a run has read before its models."""

    config: PolicyConfig
    """With the steps that its passes over the prompts come to, and the scorers that were chosen."""
    tokenizer: object
    scorers: Sequence[Scorer]
    prompts: list[Prompt]
    held_out: list[Prompt]
    device: torch.device
    own_sampler: Make | None = None

    @property
    def updates(self) -> int:
        """Of the optimizer, in the whole run."""
        return self.config.steps * self.config.minibatches * self.config.epochs

    def load_policy(self, **options) -> Policy:
        """The policy, which has room for every prompt and its response; options as of `policy.load_policy`."""
        made = (self.config, self.tokenizer, self.scorers, self.device, self.updates)
        policy = load_policy(*made, own_sampler=self.own_sampler, **options)
        rows = ((prompt.ids, prompt.where) for prompt in (*self.prompts, *self.held_out))
        new = self.config.max_new_tokens
        remedy = "max_new_tokens or max_prompt_length"
        check_fits(policy.model.module.base, self.tokenizer, rows, new, remedy)
        return policy

    def mine(self, indices: list[int]) -> list[Prompt]:
        """This rank's share of the prompts at `indices`."""
        return [self.prompts[i] for i in indices[ranks.rank() :: ranks.world_size()]]


def read(
    config: PolicyConfig,
    run: Run,
    load_scorers: Callable,
    reader: Callable,
    given: tuple[Given, Given] = (None, None),
    sampler: Make | None = None,
    critic: str | None = None,
) -> Read:
    """Read all but the models, and compare it with what the other processes and a resumed run have read."""
    with phase("read tokenizer, scorers and rows"):
        tokenizer = encode.load_tokenizer(config.model, config.revision)
        rows, judges = (
            load_train_eval(config, *given),
            reader(config, config, tokenizer, run.device, config.rollout_batch_size),
        )
        config, scorers = load_scorers(config, rows, judges, run.recorded)
        prompts, held_out = load_prompts(config, tokenizer, scorers, rows)
        check_own(config)
    models = config.reward_models() | ({} if critic is None else {"critic": critic})
    config = run.check_inputs(config, tokenizer, models, rows=prompts, held_out=held_out)
    return Read(config, tokenizer, scorers, prompts, held_out, run.device, sampler)


def load_prompts(
    config: PolicyConfig, tokenizer, scorers: Sequence[Scorer], rows: tuple[Rows, Rows] | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train on and the held-out ones; each row is checked by every scorer. `rows`: if read."""
    encoder, (train, held_out) = encode.Encoder.of(config, tokenizer), rows or load_train_eval(config)
    chosen = {"column": config.prompt_column, "max_length": config.max_prompt_length}
    return prompts_of(train, encoder, scorers, **chosen), prompts_of(held_out, encoder, scorers, **chosen)
