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


class Ours:
    """A run of ours that goes one step at a time.

    Args:
        config: of the run; its output folder is written to.
    """

    op: str
    loss_key: str
    """Of its metrics."""

    def __init__(self, config):
        self.config = config
        self.device = engine.setup(config.seed)
        self.tokenizer = encode.load_tokenizer(config.model)
        self.number = 0
        self.losses: list[float] = []
        self.watch = Watch()
        self.read()
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        self.logger = Logger(config, 0)

    def read(self) -> None:
        """Rows and models."""
        raise NotImplementedError

    def train(self, number: int) -> dict[str, float]:
        """Step `number`, from 1 on; its metrics."""
        raise NotImplementedError

    def ids(self, number: int) -> list[tuple]:
        """What step `number` reads: token ids of each sequence, and which of them count."""
        raise NotImplementedError

    def taken(self, rows: list, number: int, count: int) -> list:
        """The rows of step `number`, so many: those of the file, in its order."""
        first = (number - 1) * count
        return [rows[i % len(rows)] for i in range(first, first + count)]

    def whole_steps(self, rows: list) -> list:
        """As many of the rows as make whole steps: where they end, trainers go on in different ways."""
        count = getattr(self.config, self.config.batch_option)
        return rows[: len(rows) // count * count]

    def step(self) -> dict[str, float]:
        """One step; CPU seconds of its parts."""
        self.number += 1
        self.watch.taken = {}
        optimizer = mock.patch.object(engine, "optimizer_step", self.watch.around("optimizer", engine.optimizer_step))
        with optimizer:
            metrics = self.watch.around("update", self.train)(self.number)
        self.watch.around("log", self.logger.log)(self.number, metrics)
        self.metrics = metrics
        self.losses.append(metrics[self.loss_key])
        return self.watch.taken

    def close(self) -> None:
        """Nothing is written any more."""
        self.logger.file.close()
        self.logger.board.close()


class Seen(NamedTuple):
    """What the last step worked on."""

    rollout: object
    parts: list[torch.Tensor]
    """Indices of each micro-batch, those of all updates."""
    run_on: list[bool]
    """Whether `measure` ran the policy on them."""
    measured: object


class GRPO(Ours):
    """Our GRPO."""

    op = "grpo"
    loss_key = "loss/policy_avg"

    def read(self):
        config, tokenizer = self.config, self.tokenizer
        reader = Reader.beside(config, config, tokenizer, self.device, config.rollout_batch_size)
        scorers = load_scorers(config, reader)
        prompts, self.held_out = load_prompts(config, tokenizer, scorers)
        self.prompts = self.whole_steps(prompts)
        updates = config.steps * config.minibatches * config.epochs
        needed = {"share_prompts": config.share_prompts, "needs_reference": config.kl_coef > 0 or config.kl_every > 0}
        self.policy = load_policy(config, tokenizer, scorers, self.device, updates, **needed)
        self.seen = None
        sampler = self.policy.sampler
        sampler.sample = self.watch.around("rollout", sampler.sample)
        self.policy.roll_out = self.watch.around("score", self._kept_rollout(self.policy.roll_out))

    def _kept_rollout(self, roll_out: Callable) -> Callable:
        def keeping(*args):
            self.rollout = roll_out(*args)
            return self.rollout

        return keeping

    def train(self, number):
        with self._measure_seen():
            return grpo.train_step(self.policy, self._prompts(number), number)

    def _prompts(self, number: int) -> list:
        return self.taken(self.prompts, number, self.config.prompts_per_step)

    def ids(self, number):
        """Of the prompts, each as often as it is answered; the responses are drawn."""
        return [(tuple(prompt.ids), 0) for prompt in self._prompts(number)] * self.config.group_size

    @torch.no_grad()
    def mean_logprob(self, batch) -> float:
        """Of the responses in a batch, by the starting model, nats per token."""
        scored = self.policy.reference(**self.policy.inputs(batch))
        return scored.logprobs[batch.response_mask].mean().item()

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
