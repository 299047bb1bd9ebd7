"""The loss of a GRPO step and its gradients, against fp64."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fused_rl
from fused_rl.objectives.presets import PRESETS, resolve_options
from fused_rl.trainers import grpo
from fused_rl.trainers.base import ranks
from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.policy import groups, policy
from fused_rl.trainers.rollouts.types import Prompt, Response
from tests.drawn import SEED
from tests.trainers import tiny
from tests.trainers.steps import (
    EOS,
    GROUP,
    LENGTH,
    TEMPERATURE,
    Plain,
    accumulated,
    assert_step_is,
    clipped,
    config_of,
    fake_policy,
    measured_of,
)


@pytest.fixture(scope="module")
def exact(folder):
    """8 responses to 2 prompts, scored; and (8, T) fp64 of their tokens by the policy, the one before, a reference."""
    made = torch.Generator().manual_seed(0)
    responses, values = [], []
    for i, length in enumerate(torch.randint(2, LENGTH + 1, (8,), generator=made).tolist()):
        ids = torch.randint(10, 200, (length,), generator=made).tolist()
        stops = i % 3 > 0
        responses.append(
            Response([*ids[:-1], EOS] if stops else ids, "stop" if stops else "length")
        )
    prompts = [Prompt([1, 70, 71], {}), Prompt([1, 80], {})]
    lm = tiny.load_lm(config_of(folder), trainable=False).base.double().requires_grad_(True)
    for i, response in enumerate(responses):
        prompt = prompts[i // GROUP].ids
        logits = lm(input_ids=torch.tensor([prompt + response.ids])).logits[0, len(prompt) - 1 : -1]
        logp = (logits / TEMPERATURE).log_softmax(-1)
        taken = logp.gather(1, torch.tensor(response.ids)[:, None])[:, 0]
        values.append(torch.stack([taken, -(logp.exp() * logp).sum(-1)], -1))
    logprobs, entropy = torch.nn.utils.rnn.pad_sequence(values, batch_first=True).unbind(-1)
    lengths = torch.tensor([len(response.ids) for response in responses])
    there = torch.arange(logprobs.shape[1]) < lengths[:, None]
    drift = 0.2 * torch.randn(2, *there.shape, generator=made) * there
    old, ref = (logprobs.detach().float() + drift).double()  # as the step reads them
    return SimpleNamespace(
        lm=lm,
        prompts=prompts,
        responses=responses,
        scores=[0.0, 2, 1, 2, 3, 0, 1, 1],
        logprobs=logprobs,
        entropy=entropy,
        old=old,
        ref=ref,
        there=there,
    )


# Beside a preset, which the number of a draw chooses.
OPTIONS = {
    "kl_coef": [0.0, 0.1],
    "kl_estimator": ["k2", "k3", "k4", "rk3"],
    "entropy_coef": [0.0, 0.05],
    "top_entropy": [None, 0.3],
    "mask_truncated": [False, True],
    "zero_variance": ["keep", "drop"],
}


@pytest.mark.parametrize("number", range(2 * len(PRESETS)))
def test_a_step_of_drawn_options_is_the_loss_of_its_tokens_in_fp64(folder, exact, number):
    source = random.Random(f"{SEED}{number}")
    options = {name: source.choice(values) for name, values in OPTIONS.items()}
    options |= {"preset": [*PRESETS][number // 2], "advantage": "group-std"}
    print("drawn:", options)  # shown if it fails
    sums, lm, advantages = accumulated(folder, exact, **options)
    # In one batch, and not in three micro-batches.
    there = exact.there & ~(options["mask_truncated"] & (torch.arange(8) % 3 == 0))[:, None]
    lengths = there.double().sum(1).view(2, GROUP).mean(1).repeat_interleave(GROUP)
    chosen = config_of(folder, **options).loss_options(options["kl_coef"])
    terms = exact.logprobs, exact.old, advantages.double(), there
    loss, metrics = fused_rl.policy_loss(
        *terms,
        options=chosen,
        ref_logprobs=exact.ref,
        entropy=exact.entropy,
        group_lengths=lengths,
        max_length=LENGTH,
    )
    assert_step_is(exact, loss.item(), lm, loss)
    for name, value in metrics.items():  # the loss among them
        # Of the responses that are trained on.
        scale = 8 / there.any(1).sum() if name.startswith("kl") else 1
        assert sums[name] == pytest.approx((value * scale).item(), rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize(("world", "size", "minibatches"), [(1, 3, 1), (2, 8, 2)])
def test_covariances_are_of_a_whole_update(world, size, minibatches):
    """Micro-batches of 8 responses are refused, and so are two processes."""
    options = {"micro_batch_size": size, "minibatches": minibatches}
    with pytest.raises(InputError, match="kl-cov compares all tokens of an update, [48]"):
        grpo.batch_plan(config_of(surrogate="kl-cov", verifiers=["math"], **options), world)


def test_ratios_to_the_samplers_log_probabilities(folder, exact, monkeypatch):
    """What the sampler reported is old in the loss, and there is no correction beside it."""
    given = {"preset": "dapo", "surrogate": "dppo-tv", "clip_low": 1e-3}
    config = config_of(folder, old_logprobs="sampler", kl_every=0, **given)
    reported = []
    for response, values in zip(exact.responses, exact.ref, strict=True):
        reported.append(replace(response, logprobs=values[: len(response.ids)].tolist()))
    lm = tiny.load_lm(config)
    made = fake_policy(config, Plain(lm), reported, exact.scores)
    made.reference, made.sampler.reports_logprobs, made.published = None, True, 0
    made.model.train = lambda: None
    monkeypatch.setattr(policy.Policy, "optimizer_step", lambda self, step: {"lr": 0.0})
    metrics = grpo.train_step(made, exact.prompts, 1)
    rewards = 0.5 * torch.tensor(exact.scores)
    advantages = groups.advantages_of(config, rewards, torch.ones(8) > 0, None, ())
    terms = exact.logprobs, exact.ref, advantages.double(), exact.there
    loss, wanted = fused_rl.policy_loss(*terms, **given)
    assert 0 < wanted["clipfrac"] < 1
    assert metrics["policy/clipfrac_avg"] == pytest.approx(wanted["clipfrac"].item())
    assert_step_is(exact, metrics["loss/total_avg"], lm, loss)
    assert metrics["rollout/logprob_diff_abs"] > 0.05


def test_tokens_per_second_are_of_the_responses_that_are_trained_on(folder, exact, monkeypatch):
    config = config_of(folder, zero_variance="drop", minibatches=2, kl_every=0)
    clock = itertools.count()
    for module in (grpo, policy):  # threads of the process read the time as well
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    scores = [0.0, 2, 1, 2, 1, 1, 1, 1]  # the second group has no signal, and fills up a minibatch
    made = fake_policy(config, Plain(tiny.load_lm(config)), exact.responses, scores)
    made.reference, made.model.train = None, lambda: None
    monkeypatch.setattr(policy.Policy, "optimizer_step", lambda self, step: {"lr": 0.0})
    metrics = grpo.train_step(made, exact.prompts, 1)
    seconds = next(clock) - 1
    tokens = sum(len(response.ids) for response in exact.responses[:GROUP])
    assert metrics["perf/tokens_per_second"] * seconds == pytest.approx(tokens)
    assert (
        metrics["time/publish"] == 2
    )  # that of the rest and that of the weights, each from one call to the next


def test_the_quantile_of_entropy_is_that_of_all_ranks_and_of_tokens_that_count(monkeypatch):
    entropy, other = torch.tensor([[0.0, 3.0, 9.0, 1.0]]), torch.tensor([0.0, 0.5, 2.0, 4.0])
    monkeypatch.setattr(ranks, "gather", lambda part: [part, other])
    mask = entropy != 9
    every = torch.cat([entropy[mask], other])
    for share in (0.2, 0.5, 0.9, 1.0):
        options = resolve_options("grpo", {"top_entropy": share})
        threshold = policy.with_entropy_threshold(options, entropy, mask).entropy_threshold
        assert torch.equal(every >= threshold, every >= every.quantile(1 - share)), share


# With 2 the group that is dropped fills up the second one.
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_dropped_group_is_as_if_it_had_not_been_drawn(folder, exact, minibatches):
    given = SimpleNamespace(**vars(exact) | {"scores": [0.0, 2, 1, 2, 1, 1, 1, 1]})
    options = {"zero_variance": "drop", "minibatches": minibatches, "mask_truncated": True}
    options |= {"kl_coef": 0.1, "kl_estimator": "k3"}
    sums, lm, advantages = accumulated(folder, given, **options)
    assert len(advantages) == 4 * minibatches
    # A mean over the four responses of the first group, of which those that were cut count 0.
    d, there = exact.logprobs - exact.ref, exact.there & (torch.arange(8) % 3 != 0)[:, None]
    losses = clipped(exact, torch.cat([advantages[:4], torch.zeros(4)]))
    losses = losses + 0.1 * (torch.expm1(-d) + d)
    per_response = (losses * there).sum(1) / there.sum(1).clamp(min=1)
    assert_step_is(exact, sums["loss"], lm, per_response[:4].sum() / 4)
    kl1 = (d * there)[:4].sum() / there[:4].any(1).sum()  # of those that are trained on
    assert sums["kl1"] == pytest.approx(kl1.item(), rel=1e-4)


def test_an_update_without_tokens_changes_no_mean_of_tokens(folder, exact):
    """Of responses that were all cut, and are left out."""
    config = config_of(folder, mask_truncated=True, kl_coef=0.1)
    cut, others = [torch.tensor([0, 3, 6])], [torch.tensor([1, 2, 4, 5, 7])]
    found = []
    for updates in ([others], [others, cut], [cut, others]):
        made = fake_policy(config, Plain(tiny.load_lm(config)), exact.responses, exact.scores)
        made.optimizer_step = lambda step: {"lr": 0.0}
        drawn = groups.collect(made.config, made, exact.prompts, None, 1)
        measured = measured_of(exact, drawn.rollout.batch)
        found.append(grpo.update(made, drawn, measured, torch.ones(8), updates, 1))
    alone, before, after = found
    # The update that comes first is no longer the one whose ratio is 1.
    assert after["val/first_ratio"] == after["val/ratio"] and alone["policy/entropy_avg"] > 1
    for key in ("policy/entropy_avg", "objective/kl1_avg"):
        assert (before[key], after[key]) == pytest.approx((alone[key],) * 2, rel=1e-4)
    # The loss of the update without a token was 0.
    assert before["loss/total_avg"] == pytest.approx(alone["loss/total_avg"] / 2, rel=1e-4)


# The KL in the reward, and the reference.


@pytest.mark.parametrize(("estimator", "power"), [(None, 1), ("k2", 2)])
def test_the_kl_in_the_reward_is_its_sum_over_the_response(folder, exact, estimator, power):
    """Less in the reward before the advantages are taken, and nothing of it in the loss."""
    config = config_of(folder, kl_in="reward", kl_coef=0.3, kl_estimator=estimator)
    lm = tiny.load_lm(config)
    made = fake_policy(config, Plain(lm), exact.responses, exact.scores)
    drawn = groups.collect(made.config, made, exact.prompts, None, 1)
    mask, measured = drawn.rollout.batch.response_mask, measured_of(exact, drawn.rollout.batch)
    charged = config.kl_of_tokens(measured.old_logprobs, measured.ref_logprobs, mask).sum(1)
    expected = ((exact.old - exact.ref) ** power / power).sum(1)
    torch.testing.assert_close(charged.double(), expected, rtol=1e-5, atol=1e-6)

    parts = list(torch.arange(8).split(3))
    sums = grpo.accumulate(made, drawn, measured, torch.zeros(8), parts, 1, on_policy=False)
    assert sums["loss"] == 0 and sums["kl1"] != 0
    assert all((p.grad == 0).all() for p in lm.parameters() if p.grad is not None)
