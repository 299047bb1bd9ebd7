"""A step of our GRPO in its parts, and the bare passes of the model that each part cannot do without."""

import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from bench import plain
from fused_rl.trainers import grpo
from fused_rl.trainers.base import engine
from fused_rl.trainers.data import encode
from fused_rl.trainers.data.batch import pad
from fused_rl.trainers.models.packing import inputs_of
from fused_rl.trainers.policy.policy import load_policy
from fused_rl.trainers.policy.prepare import load_prompts
from fused_rl.trainers.run.logger import Logger
from fused_rl.trainers.scorers.load import load_scorers
from fused_rl.trainers.scorers.reward_model import Reader

PARTS = ("rollout", "score", "measure", "update", "optimizer", "log")
NEEDED = ("rollout", "measure", "update")
seconds = time.thread_time  # of the CPU, with one thread: what else runs on the machine counts little


class Watch:
    """Adds up the time of functions by name; of one inside another the time counts for the inner one alone."""

    def __init__(self):
        self.taken: dict[str, float] = {}
        self.inner = 0.0  # of what the running function has called that is watched too

    def around(self, name: str, function: Callable) -> Callable:
        """`function`, watched."""

        def watched(*args, **kwargs):
            outer = self.inner
            self.inner = 0.0
            began = seconds()
            try:
                return function(*args, **kwargs)
            finally:
                whole = seconds() - began
                self.taken[name] = self.taken.get(name, 0.0) + whole - self.inner
                self.inner = outer + whole

        return watched


class Seen(NamedTuple):
    """What the last step worked on."""

    rollout: object
    parts: list[torch.Tensor]
    """Indices of each micro-batch, those of all updates."""
    run_on: list[bool]
    """Whether `measure` ran the policy on them."""
    measured: object


class Ours:
    """A GRPO run that goes one step at a time.

    Args:
        config: of the run; its output folder is written to.
    """

    def __init__(self, config: grpo.GRPOConfig):
        device = engine.setup(config.seed)
        self.config = config
        self.number = 0
        self.watch = Watch()
        self.seen = None
        tokenizer = encode.load_tokenizer(config.model)
        reader = Reader.beside(config, config, tokenizer, device, config.rollout_batch_size)
        scorers = load_scorers(config, reader)
        self.prompts, self.held_out = load_prompts(config, tokenizer, scorers)
        updates = config.steps * config.minibatches * config.epochs
        needed = {"share_prompts": config.share_prompts, "needs_reference": config.kl_coef > 0 or config.kl_every > 0}
        self.policy = load_policy(config, tokenizer, scorers, device, updates, **needed)
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        self.logger = Logger(config, {}, 0)
        sampler = self.policy.sampler
        sampler.sample = self.watch.around("rollout", sampler.sample)
        self.policy.roll_out = self.watch.around("score", self._kept_rollout(self.policy.roll_out))

    def _kept_rollout(self, roll_out: Callable) -> Callable:
        def keeping(*args):
            self.rollout = roll_out(*args)
            return self.rollout

        return keeping

    def rows(self, number: int) -> list[int]:
        """Which prompts step `number` (from 1 on) is about: those of the file, in its order."""
        count = self.config.prompts_per_step
        first = (number - 1) * count
        return [i % len(self.prompts) for i in range(first, first + count)]

    def step(self) -> dict[str, float]:
        """One step; CPU seconds of its parts."""
        self.number += 1
        self.watch.taken = {}
        rows = [self.prompts[i] for i in self.rows(self.number)]
        optimizer = mock.patch.object(engine, "optimizer_step", self.watch.around("optimizer", engine.optimizer_step))
        with self._measure_seen(), optimizer:
            metrics = self.watch.around("update", grpo.train_step)(self.policy, rows, self.number)
        self.watch.around("log", self.logger.log)(self.number, metrics)
        self.metrics = metrics
        return self.watch.taken

    @contextmanager
    def _measure_seen(self):
        """A block in which `measure` is watched, and what it is called with is kept."""
        measure = grpo.measure

        def keeping(policy, batch, parts, *, exact_kl=True, skipped=0):
            measured = measure(policy, batch, parts, exact_kl=exact_kl, skipped=skipped)
            run_on = [exact_kl or number >= skipped for number in range(len(parts))]
            self.seen = Seen(self.rollout, parts, run_on, measured)
            return measured

        with mock.patch.object(grpo, "measure", self.watch.around("measure", keeping)):
            yield

    def needed(self) -> dict[str, float]:
        """CPU seconds of the model's passes in the last step, without the trainer around them."""
        policy, seen = self.policy, self.seen
        lm = policy.model.module.base
        ids = [sample.prompt_ids for sample in seen.rollout.samples]
        responses = [sample.response.ids for sample in seen.rollout.samples]
        taken = {"rollout": decode_passes(lm.eval(), ids, responses, policy.tokenizer.pad_token_id)}

        inputs = [policy.inputs(seen.rollout.batch.rows(part)) for part in seen.parts]
        began = seconds()
        with torch.no_grad():
            for given, run_on in zip(inputs, seen.run_on, strict=True):
                if run_on:
                    bare_logits(lm, given)
                if policy.reference is not None:
                    bare_logits(policy.reference.base, given)
        taken["measure"] = seconds() - began

        lm.train()
        taken["update"] = sum(bare_update(lm, given) for given in inputs)
        return taken

    @torch.no_grad()
    def passes_differ(self) -> float:
        """By how much, in nats, log-probabilities from the bare passes differ from those that the step measured.

        Of the reference, whose weights are still those of the step.
        """
        worst = 0.0
        seen = self.seen
        policy = self.policy
        for part in seen.parts:
            batch = seen.rollout.batch.rows(part)
            logits = bare_logits(policy.reference.base, policy.inputs(batch)).float()
            targets = batch.input_ids[:, 1:][batch.response_mask]
            found = plain.chosen(torch.log_softmax(logits / policy.config.temperature, -1), targets)
            width = batch.response_mask.shape[1]
            measured = seen.measured.ref_logprobs[part, :width][batch.response_mask]
            worst = max(worst, plain.largest(found, measured))
        return worst


def bare_logits(lm, inputs: dict) -> torch.Tensor:
    """(N, V): the model's logits where they predict tokens that count; `inputs` as `Policy.inputs` has them."""
    packed = inputs["packed"]
    if packed is None:
        states = lm.base_model(input_ids=inputs["input_ids"], use_cache=False).last_hidden_state
        states = states[:, :-1][inputs["mask"]]
    else:
        states = lm.base_model(**inputs_of(lm, packed), use_cache=False).last_hidden_state
        states = states.flatten(0, 1)[packed.states]
    return lm.get_output_embeddings()(states)


def bare_update(lm, inputs: dict) -> float:
    """CPU seconds of a forward and a backward pass; no gradient is kept."""
    packed = inputs["packed"]
    count = int(inputs["mask"].sum()) if packed is None else len(packed.states)
    vocab = len(lm.get_output_embeddings().weight)
    gradient = torch.randn(count, vocab, dtype=lm.dtype)
    weights = [weight for weight in lm.parameters() if weight.requires_grad]
    began = seconds()
    torch.autograd.grad(bare_logits(lm, inputs), weights, gradient)
    return seconds() - began


@torch.no_grad()
def decode_passes(
    lm,
    prompts: list[list[int]],
    responses: list[list[int]],
    pad_id: int,
    check=None,
) -> float:
    """CPU seconds of the passes that draw these responses: each distinct prompt once, then token by token.

    Args:
        lm: the model.
        prompts, responses: token ids; equal prompts are neighbours.
        pad_id: fills prompts on the left.
        check: is called with the (B, V) logits and (B,) token ids of each position.
    """
    runs = [list(run) for _, run in groupby(prompts)]
    distinct = [run[0] for run in runs]
    ids = pad(distinct, pad_id, left=True)
    mask = pad([[1] * len(prompt) for prompt in distinct], 0, left=True)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    row = torch.repeat_interleave(torch.tensor(list(map(len, runs))))

    # The prompts, each once; then each response goes on by itself.
    began = seconds()
    output = lm(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=True, logits_to_keep=1)
    taken = seconds() - began

    cache = output.past_key_values
    logits = output.logits[row, -1]
    mask = mask[row]
    cache.batch_select_indices(row)
    lengths = torch.tensor(list(map(len, responses)))
    length = mask.sum(1)
    tokens = pad(responses, pad_id)
    rows = torch.arange(len(responses))

    # A token of each at a time, without those that have ended.
    for step in range(1, tokens.shape[1] + 1):
        if check is not None:
            check(logits, tokens[rows, step - 1], rows, step)
        keep = (lengths[rows] > step).nonzero()[:, 0]
        if not len(keep):
            break
        if len(keep) < len(rows):
            cache.batch_select_indices(keep)
            mask = mask[keep]
            length = length[keep]
            rows = rows[keep]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        fed = {
            "input_ids": tokens[rows, step - 1][:, None],
            "attention_mask": mask,
            "position_ids": length[:, None],
        }
        began = seconds()
        output = lm(**fed, past_key_values=cache, use_cache=True)
        taken += seconds() - began
        cache = output.past_key_values
        logits = output.logits[:, -1]
        length = length + 1
    return taken
