"""A whole PPO step on two ranks against a literal transcription of the published algorithm, in fp64: every metric."""

import itertools
import math

import pytest
import torch

from fused_rl.trainers import ppo
from fused_rl.trainers.base import engine
from fused_rl.trainers.data import encode
from fused_rl.trainers.policy import policy, setup
from fused_rl.trainers.policy.critic import Critic, load_critic
from fused_rl.trainers.rollouts.types import Prompt, Response
from tests.distributed import run_distributed
from tests.trainers import tiny
from tests.trainers.steps import EOS, LENGTH, TEMPERATURE, Sampler, Scorer


class Stale:
    """A critic whose values before the update are made up, so that clipping has something to clip."""

    def __init__(self, critic):
        self.critic = critic

    def __call__(self, input_ids, mask):
        if torch.is_grad_enabled():
            return self.critic(input_ids, mask)
        return torch.where(mask, stale_values(input_ids), 0)

    def __getattr__(self, name):
        return getattr(self.critic, name)


def stale_values(input_ids):
    """(B, T) -> (B, T - 1), of the two tokens around each position."""
    return 0.5 * torch.cos((input_ids[:, :-1] + 3 * input_ids[:, 1:]).double()).float()


OPTIONS = {
    "prompts_per_step": 4,
    "group_size": 4,
    "minibatches": 1,
    "micro_batch_size": 4,
    "max_new_tokens": LENGTH,
    "temperature": TEMPERATURE,
    "gamma": 0.99,
    "gae_lambda": 0.9,
    "value_gae_lambda": 1.0,
    "kl_coef": 0.3,
    "missing_eos_score": 0.0,  # which is a score, and not that of the response
    "missing_eos_penalty": 0.5,
    "entropy_coef": 0.05,
    "clip_high": 0.3,
    "delta": 1.5,
    "value_clip": 0.25,
    "lr": 1e-3,
    "critic_lr": 2e-3,
    "steps": 4,
    "max_grad_norm": 0.0,
}


def case(rank: int, sets: bool) -> dict:
    """What one of two ranks sampled: 2 prompts x 4 responses, and made-up log-probabilities from before the update.

    With `sets` every token has one: itself alone, some more, many, or (an empty one) the whole vocabulary.
    """
    made = torch.Generator().manual_seed(rank)
    responses = []
    for i, length in enumerate(torch.randint(1, LENGTH + 1, (8,), generator=made).tolist()):
        ids = torch.randint(10, 200, (length,), generator=made).tolist()
        stops = i % 3 != 0
        response = Response([*ids[:-1], EOS] if stops else ids, "stop" if stops else "length")
        for nth, token in enumerate(response.ids if sets else ()):
            others = torch.randperm(250, generator=made)[: (9, 0, 100, 3)[nth % 4]].tolist()
            kept = [] if nth % 4 == 3 else list({token, *others})
            response.support = [*(response.support or ()), kept]
        responses.append(response)
    shape = (8, 3 + LENGTH - 1)
    before = {
        "old_logprobs": -5.9 + 0.3 * torch.randn(shape, generator=made),
        "ref_logprobs": -5.4 + 0.3 * torch.randn(shape, generator=made),
        "entropy": torch.rand(shape, generator=made),
        "kl": torch.rand(shape, generator=made),
    }
    scores = torch.randint(0, 4, (8,), generator=made).tolist()
    return {
        "prompts": [Prompt([1, 70 + rank, 71], {}), Prompt([1, 80 + rank], {})],
        "responses": responses,
        "scores": scores,
        "before": before,
    }


def made_up(given):
    """`measure`, with the log-probabilities of the case."""

    def measure(policy_, batch, parts):
        width = batch.response_mask.shape[1]
        masked = {
            k: torch.where(batch.response_mask, v[:, :width], 0) for k, v in given["before"].items()
        }
        return policy.BeforeUpdate(**masked)

    return measure


def rows_of(lm, critic, cases) -> list[dict]:
    """Of each response of the cases, one by one and without padding: what the update reads, (T,) fp64 each."""
    rows = []
    for given in cases:
        prompts = sum(([prompt] * 4 for prompt in given["prompts"]), [])
        for i, (prompt, response) in enumerate(zip(prompts, given["responses"], strict=True)):
            whole = torch.tensor([prompt.ids + response.ids])
            at = slice(len(prompt.ids) - 1, len(prompt.ids) + len(response.ids) - 1)
            output = lm(input_ids=whole, output_hidden_states=True)
            logits = output.logits[0, at] / TEMPERATURE
            left_out = torch.zeros(logits.shape, dtype=torch.bool)
            for of_token, kept in zip(left_out, response.support or [], strict=False):
                of_token[:] = bool(kept)
                of_token[kept] = False
            logp = logits.masked_fill(left_out, -math.inf).log_softmax(-1)
            row = {name: values[i, at].double() for name, values in given["before"].items()}
            row["values"] = critic(whole, output.hidden_states[-1])[0, at]
            row["old_values"] = stale_values(whole)[0, at].double()
            row["logprobs"] = logp.gather(1, torch.tensor(response.ids)[:, None])[:, 0]
            row["true_entropy"] = -(logp.exp() * logp.clamp(min=-1e9)).sum(-1)
            stopped = response.finish == "stop"
            row["score"] = 0.5 * given["scores"][i] if stopped else -OPTIONS["missing_eos_penalty"]
            rows.append(row)
    return rows


def gae(rewards, values, gae_lambda):
    """arXiv:1506.02438, eq. 16, from the last token to the first."""
    advantages, following, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        delta = reward + OPTIONS["gamma"] * value_after - value
        following = delta + OPTIONS["gamma"] * gae_lambda * following
        advantages, value_after = [following, *advantages], value
    return torch.tensor(advantages, dtype=torch.float64)


def published(rows: list[dict], kl_in: str) -> dict[str, torch.Tensor]:
    """The losses and what they are made of, each over the tokens of all responses; PPO as the papers write it."""
    o = OPTIONS
    for row in rows:
        # Rewards, returns and advantages of one response.
        d_old = (row["old_logprobs"] - row["ref_logprobs"]).double()
        rewards = -o["kl_coef"] * d_old if kl_in == "reward" else torch.zeros_like(d_old)
        rewards[-1] += row["score"]
        row["kl_charged"] = d_old if kl_in == "reward" else torch.expm1(-d_old) + d_old
        row["advantage"] = gae(rewards, row["old_values"], o["gae_lambda"])
        row["return"] = gae(rewards, row["old_values"], o["value_gae_lambda"]) + row["old_values"]
    t = {name: torch.cat([row[name] for row in rows]) for name in rows[0] if name != "score"}
    advantage = (t["advantage"] - t["advantage"].mean()) / (t["advantage"].var() + 1e-8).sqrt()

    # The policy: clip, dual clip, entropy, KL.
    log_ratio, d = t["logprobs"] - t["old_logprobs"], t["logprobs"] - t["ref_logprobs"]
    ratio, k3 = log_ratio.exp(), torch.expm1(-d) + d
    clipped = ratio.clamp(1 - 0.2, 1 + o["clip_high"])
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    dual = torch.maximum(surrogate, o["delta"] * advantage)
    surrogate = -torch.where(advantage < 0, dual, surrogate)
    total = surrogate - o["entropy_coef"] * t["true_entropy"]
    if kl_in == "loss":
        total = total + o["kl_coef"] * ratio * k3

    # The critic.
    v, old, target = t["values"], t["old_values"], t["return"]
    near = old + (v - old).clamp(-o["value_clip"], o["value_clip"])
    unclipped, held = (v - target) ** 2, (near - target) ** 2
    high, low = (advantage > 0) & (ratio > 1 + o["clip_high"]), (advantage < 0) & (ratio < 1 - 0.2)
    beyond = (advantage < 0) & (ratio > o["delta"])
    return t | {
        "policy_loss": surrogate.mean(),
        "loss": total.mean(),
        "value_loss": torch.maximum(unclipped, held).mean() / 2,
        "value_clipped": (held > unclipped).double(),
        "ratio": ratio,
        "d": d,
        "k3": k3,
        "log_ratio": log_ratio,
        "clipped": (high | low | beyond).double(),
    }


def load_fp64(folders):
    """The same policy and critic without any of our code in their forward passes, in fp64."""
    config = tiny.config_of("ppo", folders[0], critic=folders[1])
    lm = tiny.load_lm(config, trainable=False).base.double().requires_grad_(True)
    critic = Critic.from_pretrained(folders[1], dtype=torch.float64)

    def values(whole, hidden):
        states = critic.classifier.base_model(input_ids=whole).last_hidden_state
        return (critic.classifier.score(states)[..., 0] - 0.1) / 0.7

    return lm, critic, values


def step_of_a_rank(rank, world, folders, kl_in, sets):
    """The metrics of one `train_step`."""
    engine.setup(1)
    config = tiny.config_of("ppo", folders[0], critic=folders[1], kl_in=kl_in, **OPTIONS)
    given = case(rank, sets)
    tokenizer = encode.load_tokenizer(folders[0])
    made = setup.load_policy(
        config, tokenizer, [Scorer(given["scores"])], torch.device("cpu"), updates=4
    )
    made.sampler, ppo.measure = Sampler(given["responses"]), made_up(given)
    critic = Stale(load_critic(config, tokenizer, torch.device("cpu"), 4))
    return ppo.train_step(made, critic, given["prompts"], 3, config.kl_coef)


def definitions(folders, kl_in, sets) -> dict[str, float]:
    """Every metric from its definition, in fp64, over all 16 responses at once."""
    lm, critic, values = load_fp64(folders)
    cases = [case(0, sets), case(1, sets)]
    rows = rows_of(lm, values, cases)
    t, per = published(rows, kl_in), torch.tensor([float(len(row["values"])) for row in rows])
    assert 0 < t["clipped"].mean() < 1 and 0 < t["value_clipped"].mean() < 1

    def gradient_norm(loss, model):
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        return math.sqrt(sum(g.square().sum().item() for g in gradient))

    def per_response(values):
        return values.sum() / len(rows)

    # What groups of responses to one prompt are compared by.
    scores = torch.tensor([row["score"] for row in rows])
    points = torch.tensor(sum((given["scores"] for given in cases), []), dtype=torch.float32)
    responses = sum((given["responses"] for given in cases), [])
    stopped = [response.finish == "stop" for response in responses]
    charged = per_response(t["kl_charged"])
    wins = []
    for prompt in range(4):
        pairs = itertools.product(range(4 * prompt, 4 * prompt + 4), repeat=2)
        leads = [scores[i] - scores[j] for i, j in pairs if points[i] >= 2 > points[j]]
        wins += [(1 + lead.sign().item()) / 2 for lead in leads]  # a tie is half of one
    error = t["return"] - t["old_values"]
    found = {
        "lr": 1e-3,
        "optim/grad_norm": gradient_norm(t["loss"], lm),
        "optim/critic_lr": 2e-3,
        "optim/critic_grad_norm": gradient_norm(t["value_loss"], critic),
        "optim/updates": 1,
        "episode": 3 * 16,
        "objective/kl": charged,
        "objective/kl1_avg": per_response(t["d"]),
        "objective/kl2_avg": per_response(t["d"] ** 2 / 2),
        "objective/kl3_avg": per_response(t["k3"]),
        "objective/kl4_avg": per_response(t["ratio"] * t["d"]),
        "objective/kl_exact": per_response(t["kl"]),
        "objective/entropy": per_response(-t["old_logprobs"]),
        "objective/scores": scores.mean(),
        "objective/kl_coef": 0.3,
        "objective/non_score_reward": -0.3 * charged,
        "objective/rlhf_reward": scores.mean() - 0.3 * charged,
        "policy/approxkl_avg": (t["log_ratio"] ** 2 / 2).mean(),
        "policy/clipfrac_avg": t["clipped"].mean(),
        "policy/entropy_avg": t["true_entropy"].mean(),
        "loss/policy_avg": t["policy_loss"],
        "loss/total_avg": t["loss"],
        "loss/value_avg": t["value_loss"],
        "val/clipfrac_avg": t["value_clipped"].mean(),
        "val/ratio": t["ratio"].mean(),
        "val/first_ratio": t["ratio"].mean(),
        "val/ratio_var": t["ratio"].var(unbiased=False),
        "val/var_explained": 1 - error.var() / t["return"].var(),
        "val/num_eos_tokens": sum(stopped),
        "val/stop_rate": sum(stopped) / 16,
        "val/win_rate": sum(wins) / len(wins),
        "completions/mean_length": per.mean(),
        "completions/min_length": per.min(),
        "completions/max_length": per.max(),
        "completions/clipped_ratio": 1 - sum(stopped) / 16,
        "rewards/points/mean": points.mean(),
        "rewards/points/std": points.std(unbiased=False),
        "rewards/points/none": 0,
    }
    return {key: torch.as_tensor(value).item() for key, value in found.items()}


@pytest.mark.parametrize(("kl_in", "sets"), [("reward", False), ("loss", True)])
def test_every_metric_of_a_step_is_its_definition_in_two_micro_batches_on_two_ranks(
    folders, kl_in, sets
):
    first, second = run_distributed(step_of_a_rank, 2, folders, kl_in, sets, timeout=200)
    expected = definitions(folders, kl_in, sets)
    assert abs(expected["val/ratio"] - 1) > 0.05 and abs(expected["objective/kl"]) > 0.05
    named = {key for key in tiny.usual("ppo") if not key.startswith("eval/")} - {"time/save"}
    assert {key for key in first if not key.startswith("rewards/")} == named
    of_time = {key for key in first if key.startswith(("time/", "perf/"))}
    assert first.keys() - of_time == expected.keys()
    for key, value in expected.items():
        assert first[key] == pytest.approx(value, rel=5e-5, abs=1e-7), key
        assert second[key] == first[key], key
