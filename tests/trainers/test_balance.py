"""Groups dealt over ranks: each is trained on once, in the updates that it had, and no rank has many more tokens."""

import copy
from dataclasses import replace

import numpy
import pytest
import torch

from fused_rl.trainers import grpo
from fused_rl.trainers.base import ranks
from fused_rl.trainers.models.packing import packing_costs
from fused_rl.trainers.policy import balance, policy
from fused_rl.trainers.rollouts.types import Prompt, Response
from tests.distributed import run_distributed
from tests.trainers import tiny
from tests.trainers.steps import EOS, GROUP, Plain, config_of, fake_policy, left_where_sampled

WORLD, PROMPTS = 2, 8


def dealt(tokens, updates, monkeypatch):
    """What `deal` returns if the ranks have tokens (world, N) and updates (world, N, K)."""
    of_ranks = [*zip(tokens.tolist(), updates.tolist(), strict=True)]
    monkeypatch.setattr(ranks, "gather", lambda mine: of_ranks)
    sources, metrics = balance.deal(*of_ranks[0])
    return numpy.array(sources), metrics["perf/rank_imbalance"]


def lengths(generator, world, prompts, size):
    """Tokens of groups (world, N): log-normal, as bench's, a prompt's mean and a spread inside the group."""
    means = generator.normal(0, 0.6, (prompts, 1))
    x = 1500 * numpy.exp(means + generator.normal(0, 0.5, (prompts, size)) - 0.305)
    tokens = (numpy.minimum(x, 8192) + 200).sum(1).astype(int)
    return tokens.reshape(-1, world).T


@pytest.mark.parametrize("seed", range(10))
def test_every_group_has_one_place_in_its_own_updates(seed, monkeypatch):
    generator = numpy.random.default_rng(seed)
    world, minibatches, epochs = generator.integers(1, 5, 3).tolist()
    tokens = lengths(generator, world, 4 * world * minibatches, 2)
    each = numpy.arange(4 * minibatches) // 4
    orders = [[generator.permutation(each) for _ in range(epochs)] for _ in range(world)]
    orders = numpy.array(orders) + minibatches * numpy.arange(epochs)[:, None]
    updates = orders.transpose(0, 2, 1)
    sources, imbalance = dealt(tokens, updates, monkeypatch)
    assert sorted(map(tuple, sources.reshape(-1, 2))) == [*numpy.ndindex(tokens.shape)]
    before = updates[sources[..., 0], sources[..., 1]]
    assert (before == updates).all()
    # The figure is of what each rank then has in each update, and no rank has much more than it must.
    placed = tokens[sources[..., 0], sources[..., 1]]
    loads = [(placed[..., None] * (updates == u)).sum((1, 2)) for u in range(minibatches * epochs)]
    expected = sum(map(max, loads)) / sum(load.mean() for load in loads)
    assert imbalance == pytest.approx(expected)
    if epochs == 1:
        assert all(load.max() <= load.mean() + tokens.max() / 2 for load in loads)


@pytest.mark.parametrize(("world", "prompts", "expected"), [(8, 32, 1.09), (32, 128, 1.16)])
def test_the_slowest_rank_has_few_tokens_more_than_the_mean(world, prompts, expected, monkeypatch):
    """As sampled it has 1.48 and 1.75 times the mean."""
    generator, found = numpy.random.default_rng(0), []
    for _ in range(200):
        tokens = lengths(generator, world, prompts, 8)
        found.append(dealt(tokens, numpy.zeros((*tokens.shape, 1), int), monkeypatch)[1])
    assert numpy.mean(found) == pytest.approx(expected, abs=0.02)


def sampled(rank):
    """This rank's prompts, responses with kept sets and log-probabilities, and scores: those of rank 0 are long."""
    drawn = torch.Generator().manual_seed(rank)
    prompts, responses, scores = [], [], []
    for _ in range(PROMPTS // WORLD):
        length = int(torch.randint(1, 5, (), generator=drawn))
        prompts.append(Prompt(torch.randint(10, 99, (length,), generator=drawn).tolist(), {}))
        for _ in range(GROUP):
            most = 6 if rank == 0 else 3
            length = int(torch.randint(1, most + 1, (), generator=drawn))
            ids = torch.randint(10, 200, (length,), generator=drawn).tolist()
            stops = length % 2 > 0
            ids = [*ids[:-1], EOS] if stops else ids
            support = [sorted({token, 3, 4, 5}) for token in ids]
            logprobs = (-torch.rand(length, generator=drawn, dtype=torch.float64)).tolist()
            responses.append(Response(ids, "stop" if stops else "length", logprobs, support))
            scores.append(float(torch.randint(0, 2, (), generator=drawn)))
    scores[:GROUP] = [1.0] * GROUP  # a group without a signal
    return prompts, responses, scores


REPORTED = "log-probabilities of the sampler"  # which are read in fp32
CASES = {
    "responses of a group in several updates": {"minibatches": 2, "share_prompts": False},
    "two epochs of two updates": {"minibatches": 2, "epochs": 2, "top_entropy": 0.5},
    "tokens": {"micro_batch_tokens": 30, "preset": "dapo", "epochs": 2},
    "drop": {"zero_variance": "drop", "mask_truncated": True},
    "of the batch": {"advantage": "batch-std", "preset": "gspo"},
    REPORTED: {"rollout_correction": "token-truncate", "loss_from": "linear"},
}


def steps(rank, world, folder):
    """The gradient of each update over both ranks, metrics, and imbalance, as sampled and dealt, of each case."""
    deal, found = balance.deal, {}

    def optimizer_step(self, step):
        weights = [p for p in self.model.parameters() if p.grad is not None]
        gradient = torch.cat([weight.grad.flatten() for weight in weights])
        torch.distributed.all_reduce(gradient)
        gradients.append((gradient / world).tolist())
        self.model.zero_grad()
        return {"lr": 0.0}

    policy.Policy.optimizer_step = optimizer_step
    for name, options in CASES.items():
        common = {"prompts_per_step": PROMPTS, "kl_every": 0, "top_k": 4, "loss_from": "logits"}
        config = config_of(folder, **common | options)
        for kind in (left_where_sampled(deal), deal):
            balance.deal, gradients = kind, []
            prompts, responses, scores = sampled(rank)
            lm = tiny.load_lm(config)
            if name == REPORTED:
                torch.set_default_dtype(torch.float32)
            else:
                torch.set_default_dtype(torch.float64)
                lm.double()
                responses = [replace(response, logprobs=None) for response in responses]
            made = fake_policy(config, Plain(lm), copy.deepcopy(responses), scores)
            if options.get("share_prompts") is None:
                words = {"option": "share_prompts", "otherwise": ""}
                made.costs = packing_costs(lm.base, 12, True, **words)
            made.reference, made.model.train = None, lambda: None
            made.sampler.reports_logprobs = name == REPORTED
            torch.manual_seed(rank)
            metrics = grpo.train_step(made, prompts, 1)
            imbalance = metrics.pop("perf/rank_imbalance")
            values = tiny.untimed([metrics])[0]
            found.setdefault(name, []).append((gradients, values, imbalance))
    return found


def test_dealt_groups_have_the_gradients_that_they_had(folder):
    for of_rank in run_distributed(steps, WORLD, folder):
        for name, (before, after) in of_rank.items():
            gradients = [torch.tensor(side[0], dtype=torch.float64) for side in (before, after)]
            error = 1e-5 if name == REPORTED else 1e-6
            scale = gradients[0].abs().max().item()
            assert scale > 1e-4, name
            torch.testing.assert_close(*gradients[::-1], atol=error * scale, rtol=0, msg=name)
            assert after[1] == pytest.approx(before[1], rel=error, abs=error), name
            assert 1 <= after[2] < 1.3, name
