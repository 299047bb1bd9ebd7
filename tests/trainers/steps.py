"""A step on responses and scores that were decided before, without DeepSpeed; and what GRPO's must be, in fp64."""

import functools
import math

import pytest
import torch

from fused_rl.trainers import grpo
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.optim import OptimConfig
from fused_rl.trainers.data import encode
from fused_rl.trainers.options import EngineConfig
from fused_rl.trainers.policy import before_update, groups, policy
from tests.trainers import tiny

EOS, LENGTH, TEMPERATURE = 3, 6, 0.8
GROUP = 4


class TrainingConfig(EngineConfig, OptimConfig):
    """The options of an engine and of its optimizer."""


class Sampler(tiny.Sampler):
    """Responses that were decided before."""

    def __init__(self, responses):
        self.responses = responses

    def sample(self, prompts, sampling):
        return self.responses


class Scorer:
    """Scores that were decided before."""

    name, weight, solved_at = "points", 0.5, 2.0

    def __init__(self, scores):
        self.scores = scores

    def check(self, row):
        pass

    def __call__(self, samples):
        return self.scores


class Plain:
    """A model with its own backward pass, where DeepSpeed's engine would stand; it takes no step."""

    def __init__(self, module):
        self.module, self.training = module, True

    def __call__(self, *inputs, **options):
        return self.module(*inputs, **options)

    def __getattr__(self, name):
        return getattr(self.module, name)

    def backward(self, loss):
        loss.backward()


def left_where_sampled(deal):
    """`balance.deal`, except that every group stays on its rank."""

    def stay(tokens, updates):
        places = [[(rank, i) for i in range(len(tokens))] for rank in range(ranks.world_size())]
        return places, deal(tokens, updates)[1]

    return stay


def assert_gradients_close(module, exact, prefix=""):
    exact = dict(exact.named_parameters())
    for name, parameter in module.named_parameters():
        expected = exact[name.removeprefix(prefix)].grad
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            found.double(), expected, atol=2e-5 * scale + 1e-8, rtol=1e-4, msg=name
        )


config_of = functools.partial(
    tiny.config_of,
    "grpo",
    prompts_per_step=2,
    group_size=GROUP,
    minibatches=1,
    micro_batch_size=3,
    max_new_tokens=LENGTH,
    temperature=TEMPERATURE,
    lr=1e-3,
    max_grad_norm=0.0,
    steps=4,
)


def fake_policy(config, module, responses, scores) -> policy.Policy:
    tokenizer, sampling = (
        encode.load_tokenizer(config.model),
        policy.Sampling(TEMPERATURE, LENGTH, (EOS,)),
    )
    scorers, device = [Scorer(scores)], torch.device("cpu")
    return policy.Policy(
        config, module, None, Sampler(responses), sampling, scorers, tokenizer, device
    )


def measured_of(exact, batch) -> before_update.BeforeUpdate:
    """Log-probabilities of a policy that sampled and of a reference, a little off those of the policy."""
    found = []
    for values in (exact.old, exact.entropy, exact.ref):
        found.append(torch.zeros(batch.response_mask.shape))
        there = exact.there[: len(batch.response_mask)]
        found[-1][batch.response_mask] = values.detach()[: len(there)][there].float()
    return before_update.BeforeUpdate(*found, None)


def accumulated(folder, exact, **options):
    """The sums of one minibatch in three micro-batches, and the model with its gradients."""
    config = config_of(folder, **options)
    lm = tiny.load_lm(config)
    made = fake_policy(config, Plain(lm), exact.responses, exact.scores)
    drawn = groups.collect(made.config, made, exact.prompts, None, 1)
    advantages = groups.advantages_of(
        config, drawn.rollout.rewards, drawn.included, drawn.rollout, ()
    )
    measured = measured_of(exact, drawn.rollout.batch)
    parts = list(torch.arange(len(drawn.included)).split(3))
    sums = grpo.accumulate(made, drawn, measured, advantages, parts, 1, on_policy=False)
    return sums, lm, advantages


def assert_step_is(exact, found, lm, loss):
    assert found == pytest.approx(loss.item(), rel=2e-5, abs=1e-7)
    exact.lm.zero_grad()
    loss.backward(retain_graph=True)
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in exact.lm.parameters()))
    assert norm > 1e-3 and math.isfinite(norm)
    assert_gradients_close(lm, exact.lm, "lm.")


def clipped(exact, advantages):
    """(8, T): PPO's surrogate of each token."""
    ratio, a = (exact.logprobs - exact.old).exp(), advantages.double()[:, None]
    return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
