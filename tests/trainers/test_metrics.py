"""Every metric of a step of GRPO and of PPO is its definition in fp64, where ratio and KL are far from 1 and 0.

The losses are transcribed from the papers; the norms of their gradients are metrics as well.
"""

import importlib
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from fused_rl.trainers import grpo, ppo
from fused_rl.trainers.base import engine
from fused_rl.trainers.data import encode
from fused_rl.trainers.policy import balance, before_update, setup
from fused_rl.trainers.policy.critic import Critic, load_critic
from fused_rl.trainers.rollouts.types import Prompt, Response
from tests.distributed import run_distributed
from tests.trainers import steps, tiny
from tests.trainers.steps import EOS, GROUP, LENGTH, TEMPERATURE

CPU = torch.device("cpu")
KL_COEF, ENTROPY_COEF, CLIP_LOW, CLIP_HIGH = 0.3, 0.05, 0.2, 0.3
BUFFER = 4
GAMMA, GAE_LAMBDA, DELTA, VALUE_CLIP, MISSING_EOS = 0.99, 0.9, 1.5, 0.15, 0.5
COMMON = {
    "prompts_per_step": 4,
    "group_size": GROUP,
    "minibatches": 1,
    "micro_batch_size": 4,  # two micro-batches on each rank
    "max_new_tokens": LENGTH,
    "temperature": TEMPERATURE,
    "kl_coef": KL_COEF,
    "entropy_coef": ENTROPY_COEF,
    "clip_low": CLIP_LOW,
    "clip_high": CLIP_HIGH,
    "lr": 1e-3,
    "steps": 4,
    "max_grad_norm": 0.0,
}
OPTIONS = {
    "grpo": {"overlong_buffer": BUFFER},
    "ppo": {
        "gamma": GAMMA,
        "gae_lambda": GAE_LAMBDA,
        "value_gae_lambda": 1.0,
        "missing_eos_score": 0.0,  # which is a score, and not that of the response
        "missing_eos_penalty": MISSING_EOS,
        "delta": DELTA,
        "value_clip": VALUE_CLIP,
        "critic_lr": 2e-3,
    },
}


def config_of(trainer: str, folders, options):
    critic = {"critic": folders[1]} if trainer == "ppo" else {}
    return tiny.config_of(trainer, folders[0], **COMMON | OPTIONS[trainer] | critic | options)


def case(rank: int, plain: bool) -> dict:
    """What one of two ranks sampled: 2 prompts x 4 responses, and made-up log-probabilities from before the update.

    Unless they are `plain`, some of the ids are another's, of one response all; and every other one has a set that it
    was drawn from: itself alone, some more, many, or (an empty one) the whole vocabulary.
    """
    made = torch.Generator().manual_seed(rank)
    lengths = torch.randint(1 + rank, LENGTH + rank, (8,), generator=made).tolist()
    scores = torch.randint(0, 3, (8,), generator=made).tolist()
    # So that every metric is another one than on rank 0, which has a group of equal rewards.
    if rank:
        scores[4:] = [0, 0, 0, None]
    else:
        lengths[4:], scores[4:] = [1, 1, 2, 2], [2, 2, 2, 2]
    responses = []
    for i, length in enumerate(lengths):
        ids = torch.randint(10, 200, (length,), generator=made).tolist()
        stops = length < LENGTH if rank else i != 1
        response = Response([*ids[:-1], EOS] if stops else ids, "stop" if stops else "length")
        if not plain:
            response.trained = [(rank or i != 5) and nth % 3 != i % 3 for nth in range(length)]
            response.support = []
            for nth, token in enumerate(response.ids):
                others = torch.randperm(250, generator=made)[: (9, 0, 100, 3)[nth % 4]].tolist()
                all_ids = nth % 4 == 3 or not response.trained[nth]
                response.support.append([] if all_ids else list({token, *others}))
        responses.append(response)
    shape = (8, 3 + LENGTH - 1)
    before = {
        "old_logprobs": -5.9 + 0.3 * torch.randn(shape, generator=made),
        "ref_logprobs": -5.4 + 0.3 * torch.randn(shape, generator=made),
        "entropy": torch.rand(shape, generator=made),
        "kl": torch.rand(shape, generator=made),
    }
    prompts = [Prompt([1, 70 + rank, 71], {}), Prompt([1, 80 + rank], {})]
    return {"prompts": prompts, "responses": responses, "scores": scores, "before": before}


# What is tested.


class Sampler(steps.Sampler):
    """The responses of the case."""

    def publish(self, step, save):
        self.published = step


class Scorer(steps.Scorer):
    """The scores of the case, twice as many as they count."""

    solved_at = 1.0


class Stale:
    """A critic whose values before the update are made up, so that clipping has something to clip."""

    def __init__(self, critic):
        self.critic = critic

    def __call__(self, input_ids, mask, **others):
        if torch.is_grad_enabled():
            return self.critic(input_ids, mask, **others)
        return torch.where(mask, stale_values(input_ids), 0)

    def __getattr__(self, name):
        return getattr(self.critic, name)


def stale_values(input_ids):
    """(B, T) -> (B, T - 1), of the two tokens around each position."""
    return 0.5 * torch.cos((input_ids[:, :-1] + 3 * input_ids[:, 1:]).double()).float()


def step_of_a_rank(rank, world, trainer, folders, options, plain):
    """The metrics of one `train_step`."""
    engine.setup(1)
    config, given = config_of(trainer, folders, options), case(rank, plain)
    tokenizer = encode.load_tokenizer(folders[0])
    run, scorers = SimpleNamespace(device=CPU), [Scorer(given["scores"])]
    inputs = setup.Inputs(run, config, tokenizer, scorers, given["prompts"], None)
    made = inputs.load_policy()
    made.sampler = Sampler(given["responses"])

    def measure(policy_, batch, parts, **options):
        mask, masked = batch.response_mask, {}
        for name, values in given["before"].items():
            masked[name] = torch.where(mask, values[:, : mask.shape[1]], 0)
        return before_update.BeforeUpdate(**masked)

    grpo.measure = ppo.measure = measure
    # What is made up is of this rank's responses.
    balance.deal = steps.left_where_sampled(balance.deal)
    if trainer == "ppo":
        critic = Stale(load_critic(config, tokenizer, CPU, 4))
        metrics = ppo.train_step(made, critic, given["prompts"], 3, config.kl_coef)
    else:
        # As in a later minibatch, whose ratio is not 1: the old log-probabilities are those that were measured.
        accumulate = grpo.accumulate
        grpo.accumulate = lambda *args, on_policy: accumulate(*args, on_policy=False)
        metrics = grpo.train_step(made, given["prompts"], 3)
    assert made.sampler.published == 3
    return metrics


# What it must be.


def rows_of(cases, lm, values_of) -> list[dict]:
    """Of each response of the cases, one by one and without padding: what the update reads, (T,) fp64 each."""
    rows = []
    for given in cases:
        prompts = sum(([prompt] * GROUP for prompt in given["prompts"]), [])
        for i, (prompt, response) in enumerate(zip(prompts, given["responses"], strict=True)):
            whole = torch.tensor([prompt.ids + response.ids])
            own = response.sampled(range(len(response.ids)))
            at = torch.tensor([len(prompt.ids) - 1 + nth for nth in own], dtype=torch.int64)
            logits = lm(input_ids=whole).logits[0, at] / TEMPERATURE
            left_out = torch.zeros(logits.shape, dtype=torch.bool)
            for of_token, nth in zip(left_out, own if response.support else [], strict=False):
                of_token[:] = bool(response.support[nth])
                of_token[response.support[nth]] = False
            logp = logits.masked_fill(left_out, -math.inf).log_softmax(-1)
            row = {name: values[i, at].double() for name, values in given["before"].items()}
            row["values"] = values_of(whole)[0, at]
            row["old_values"] = stale_values(whole)[0, at].double()
            row["logprobs"] = logp.gather(1, whole[0, at + 1, None])[:, 0]
            row["true_entropy"] = -(logp.exp() * logp.clamp(min=-1e9)).sum(-1)
            rows.append(row)
    return rows


def clip(t: dict[str, torch.Tensor], advantage: torch.Tensor):
    """PPO's surrogate of each token, and which tokens are clipped."""
    ratio = t["ratio"]
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    high, low = (advantage > 0) & (ratio > clipped), (advantage < 0) & (ratio < clipped)
    return torch.minimum(ratio * advantage, clipped * advantage), high | low


def of_grpo(rows, t, points, responses, kl_in) -> dict:
    """Sequences' means of clip + kl_coef rk3 - entropy_coef H, with rewards of groups."""
    lengths = torch.tensor([len(row["kl"]) for row in rows])
    scores = points.nan_to_num()
    beyond = torch.tensor([len(response.ids) for response in responses]) - (LENGTH - BUFFER)
    penalties = beyond.clamp(min=0) / BUFFER
    rewards = 0.5 * scores - penalties
    solved = (scores >= 1).view(-1, GROUP)
    groups = rewards.view(-1, GROUP)
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    advantages = torch.where(equal, 0, advantages).flatten()
    surrogate, clipped = clip(t, advantages.repeat_interleave(lengths))
    kl = t["ratio"] * t["k3"]
    total = -surrogate + KL_COEF * kl - ENTROPY_COEF * t["true_entropy"]
    weights = (1 / lengths.clamp(min=1)).repeat_interleave(lengths) / len(rows)
    charged = kl.sum() / len(rows)
    return {
        "loss/policy_avg": -(surrogate * weights).sum(),
        "loss/total_avg": (total * weights).sum(),
        "policy/clipfrac_avg": clipped.double().mean(),
        "objective/kl": charged,
        "objective/scores": 0.5 * scores.mean(),
        "objective/non_score_reward": -KL_COEF * charged - penalties.mean(),
        "reward": rewards.mean(),
        "reward_std": groups.std(1).mean(),
        "frac_reward_zero_std": equal.double().mean(),
        "frac_groups_all_solved": solved.all(1).double().mean(),
        "frac_groups_none_solved": (~solved.any(1)).double().mean(),
        "groups/sampled": len(groups),
        "groups/trained": len(groups),
        "overlong_penalty": penalties.mean(),
    }


def gae(rewards, values, gae_lambda):
    """arXiv:1506.02438, eq. 16, from the last token to the first."""
    advantages, following, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        following = reward + GAMMA * value_after - value + GAMMA * gae_lambda * following
        advantages, value_after = [following, *advantages], value
    return torch.tensor(advantages, dtype=torch.float64)


def of_ppo(rows, t, points, responses, kl_in) -> dict:
    """PPO as the papers write it, with a dual clip, means of tokens and the critic's loss."""
    stopped = torch.tensor([response.finish == "stop" for response in responses])
    scores = torch.where(stopped, 0.5 * points.nan_to_num(), -MISSING_EOS)
    advantages, returns, charged = [], [], []
    for row, score in zip(rows, scores, strict=True):
        d = row["old_logprobs"] - row["ref_logprobs"]
        rewards = -KL_COEF * d if kl_in == "reward" else torch.zeros_like(d)
        rewards[-1:] += score
        charged.append(d if kl_in == "reward" else torch.expm1(-d) + d)
        advantages.append(gae(rewards, row["old_values"], GAE_LAMBDA))
        returns.append(gae(rewards, row["old_values"], 1.0) + row["old_values"])
    advantage, target = torch.cat(advantages), torch.cat(returns)
    kl = torch.cat(charged).sum() / len(rows)

    # The policy.
    advantage = (advantage - advantage.mean()) / (advantage.var() + 1e-8).sqrt()
    surrogate, clipped = clip(t, advantage)
    dual = torch.maximum(surrogate, DELTA * advantage)
    surrogate = torch.where(advantage < 0, dual, surrogate)
    clipped |= (advantage < 0) & (t["ratio"] > DELTA)
    total = -surrogate - ENTROPY_COEF * t["true_entropy"]
    if kl_in == "loss":
        total = total + KL_COEF * t["ratio"] * t["k3"]

    # The critic.
    old = t["old_values"]
    near = old + (t["values"] - old).clamp(-VALUE_CLIP, VALUE_CLIP)
    unclipped, held = (t["values"] - target) ** 2, (near - target) ** 2

    # Groups: of each two responses one of which is solved, how often that one has the higher score; a tie is half.
    wins = []
    for first in range(0, len(rows), GROUP):
        for i, j in itertools.product(range(first, first + GROUP), repeat=2):
            if points[i] >= 1 and not points[j] >= 1:
                wins.append((1 + (scores[i] - scores[j]).sign().item()) / 2)
    return {
        "optim/critic_lr": 2e-3,
        "optim/updates": 1,
        "objective/kl": kl,
        "objective/scores": scores.mean(),
        "objective/non_score_reward": -KL_COEF * kl,
        "policy/clipfrac_avg": clipped.double().mean(),
        "loss/policy_avg": -surrogate.mean(),
        "loss/total_avg": total.mean(),
        "loss/value_avg": torch.maximum(unclipped, held).mean() / 2,
        "val/clipfrac_avg": (held > unclipped).double().mean(),
        "val/var_explained": 1 - (target - old).var() / target.var(),
        "val/win_rate": sum(wins) / len(wins),
    }


def definitions(trainer, folders, options, plain) -> dict[str, float]:
    """Every metric from its definition, in fp64, over the responses of both ranks at once.

    The policy and the critic have none of our code in their forward passes.
    """
    config = config_of(trainer, folders, options)
    lm = tiny.load_lm(config, trainable=False).base.double().requires_grad_(True)
    critic = Critic.from_pretrained(folders[1], dtype=torch.float64)

    def values_of(whole):
        states = critic.classifier.base_model(input_ids=whole).last_hidden_state
        return (critic.classifier.score(states)[..., 0] - 0.1) / 0.7

    cases = [case(rank, plain) for rank in range(2)]
    rows = rows_of(cases, lm, values_of)
    t = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    t["d"], log_ratio = t["logprobs"] - t["ref_logprobs"], t["logprobs"] - t["old_logprobs"]
    t["k3"], t["ratio"] = torch.expm1(-t["d"]) + t["d"], log_ratio.exp()
    scores = sum((given["scores"] for given in cases), [])
    points = torch.tensor([math.nan if score is None else score for score in scores]).double()
    responses = sum((given["responses"] for given in cases), [])
    stopped = torch.tensor([response.finish == "stop" for response in responses])
    own = {"grpo": of_grpo, "ppo": of_ppo}[trainer](rows, t, points, responses, config.kl_in)

    def per_response(values):
        return values.sum() / len(rows)

    def gradient_norm(loss, model):
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        return math.sqrt(sum(g.square().sum().item() for g in gradient))

    if trainer == "ppo":
        own["optim/critic_grad_norm"] = gradient_norm(own["loss/value_avg"], critic)
    lengths = torch.tensor([len(row["kl"]) for row in rows]).double()
    judged = points[~points.isnan()]
    found = own | {
        "lr": 1e-3,
        "optim/grad_norm": gradient_norm(own["loss/total_avg"], lm),
        "episode": 3 * len(rows),
        "objective/kl1_avg": per_response(t["d"]),
        "objective/kl2_avg": per_response(t["d"] ** 2 / 2),
        "objective/kl3_avg": per_response(t["k3"]),
        "objective/kl4_avg": per_response(t["ratio"] * t["d"]),
        "objective/kl_exact": per_response(t["kl"]),
        "objective/entropy": per_response(-t["old_logprobs"]),
        "objective/rlhf_reward": own["objective/scores"] + own["objective/non_score_reward"],
        "objective/kl_coef": KL_COEF,
        "policy/approxkl_avg": (log_ratio**2 / 2).mean(),
        "policy/entropy_avg": t["true_entropy"].mean(),
        "val/ratio": t["ratio"].mean(),
        "val/first_ratio": t["ratio"].mean(),
        "val/ratio_var": t["ratio"].var(unbiased=False),
        "val/num_eos_tokens": stopped.sum(),
        "val/stop_rate": stopped.double().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - stopped.double().mean(),
        "rewards/points/mean": judged.mean(),
        "rewards/points/std": judged.std(unbiased=False),
        "rewards/points/none": points.isnan().double().mean(),
    }
    return {key: torch.as_tensor(value).item() for key, value in found.items()}


CASES = [
    ("grpo", {"kl_in": "loss"}, True),
    ("grpo", {"loss_from": "logits"}, False),
    ("ppo", {"kl_in": "reward"}, True),
    ("ppo", {"kl_in": "loss"}, False),
]


@pytest.mark.parametrize(("trainer", "options", "plain"), CASES)
def test_every_metric_of_a_step_is_its_definition_in_two_micro_batches_on_two_ranks(
    trainer, options, plain, folders
):
    given = trainer, folders, options, plain
    first, second = run_distributed(step_of_a_rank, 2, *given, timeout=200)
    expected = definitions(*given)
    assert abs(expected["val/ratio"] - 1) > 0.05 < abs(expected["objective/kl1_avg"])
    assert all(0 < expected[key] < 1 for key in expected if "clipfrac" in key)
    named = {key for key in tiny.usual(trainer) if not key.startswith("eval/")} - {"time/save"}
    named |= {"perf/rank_imbalance"}
    assert {key for key in first if not key.startswith("rewards/")} == named
    of_time = {key for key in first if key.startswith(("time/", "perf/"))}
    assert first.keys() - of_time == expected.keys()
    for key, value in expected.items():
        assert first[key] == pytest.approx(value, rel=5e-5, abs=1e-7), key
        assert second[key] == first[key], key


class Silent(tiny.Sampler):
    """Nothing but empty responses."""

    def sample(self, prompts, sampling):
        return [Response([], "length") for _ in prompts]


def judge_none(response, row):
    return None


@pytest.mark.parametrize("trainer", ["grpo", "ppo", "distill"])
def test_a_mean_over_nothing_is_left_out(trainer, files, tmp_path):
    given = {"steps": 1, "eval_size": 2, "eval_samples": 2, "save_every": 0, "max_new_tokens": 4}
    given |= {"prompts_per_step": 2, "group_size": 2}
    if trainer == "distill":
        given |= {"teacher": files[0]}
    else:
        given |= {"verifiers": f"{__name__}:judge_none"}
    config = tiny.config_of(trainer, *files, tmp_path / "run", **given)
    train = importlib.import_module(f"fused_rl.trainers.{trainer}").train
    train(config, sampler=lambda *_: Silent())
    of_tokens = {"policy/entropy_avg", "val/ratio", "val/first_ratio", "policy/clipfrac_avg"}
    of_tokens |= {"distill/kl", "distill/top1_agreement", "eval/distill/kl", "eval/entropy"}
    of_tokens |= {"rewards/judge_none/mean", "rewards/judge_none/std"}
    for metrics in tiny.read_metrics(tmp_path / "run"):
        assert not metrics.keys() & of_tokens
        assert metrics.get("distill/num_tokens", 0) == 0
