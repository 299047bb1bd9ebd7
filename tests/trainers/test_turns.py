"""Responses of several turns: what the policy did not draw is context, and nothing else, in GRPO and PPO alike."""

import functools
import json

import pytest
import torch

import fused_rl
from fused_rl import TokenSupport, reference
from fused_rl.recipes import demo
from fused_rl.recipes import tool as tool_recipe
from fused_rl.recipes import turns as recipe
from fused_rl.trainers import grpo, ppo
from fused_rl.trainers.data import encode
from fused_rl.trainers.models import packing
from fused_rl.trainers.policy import critic, groups, policy
from fused_rl.trainers.policy.critic import Critic
from fused_rl.trainers.rollouts.roll_out import batch_of
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt, Response, Sample, after_turn, of_turn
from tests.trainers import steps, tiny
from tests.trainers.steps import EOS, TEMPERATURE, Plain

LENGTH = 9
PROMPTS = [Prompt([1, 70, 71], {}), Prompt([1, 80], {})]
SCORES = [0.0, 2, 1, 2, 3, 0, 1, 1]


def spoken(seed: int = 0) -> list[Response]:
    """Four responses to each prompt: turns of two speakers, one of nothing but the other's, one of the policy's."""
    made = torch.Generator().manual_seed(seed)
    patterns = ["ttoot", "oott", "toto", "ooo", "t", "otttottot", "ttttt", "tot"]
    responses = []
    for i, pattern in enumerate(patterns):
        ids = torch.randint(10, 200, (len(pattern),), generator=made).tolist()
        trained = None if i == 6 else [speaker == "t" for speaker in pattern]
        ids = [
            EOS if speaker == "o" and i % 2 else token
            for token, speaker in zip(ids, pattern, strict=True)
        ]
        responses.append(Response(ids, "length", trained=trained))
    return responses


config_of = functools.partial(
    steps.config_of, max_new_tokens=LENGTH, kl_coef=0.1, kl_estimator="rk3"
)


def policy_of(config, lm, responses, packed: bool) -> policy.Policy:
    made = steps.fake_policy(config, Plain(lm), responses, SCORES)
    made.sampling = Sampling(TEMPERATURE, LENGTH, (EOS,))
    made.costs = packing.Costs(token=1.0, pair=0.0) if packed else None
    return made


def made_up(rollout) -> policy.BeforeUpdate:
    """Of before the update, from a token and its place among those that the policy drew: the same for equal turns."""
    batch = rollout.batch
    mask = batch.response_mask
    places = (mask.cumsum(1) + 7 * batch.input_ids[:, 1:]).double()
    waves = [torch.cos(places * k).float() for k in (1.0, 1.7, 2.3, 2.9)]
    values = (0.2 * waves[0] - 5.5, waves[1].abs(), 0.2 * waves[2] - 5.4, waves[3].abs())
    return policy.BeforeUpdate(*(torch.where(mask, value, 0) for value in values))


def grpo_step(config, prompts, responses, packed: bool):
    """The sums of a minibatch in three parts, and the gradient of every weight."""
    lm = tiny.load_lm(config)
    made = policy_of(config, lm, responses, packed)
    drawn = groups.collect(made, prompts, None, 1)
    advantages = groups.advantages_of(config, drawn.rollout.rewards, drawn.included)
    measured, parts = made_up(drawn.rollout), list(torch.arange(8).split(3))
    sums = grpo.accumulate(made, drawn, measured, advantages, parts, 1, on_policy=False)
    return sums, {name: weight.grad for name, weight in lm.named_parameters()}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo"])
def test_turns_in_between_leave_every_denominator_to_the_policys_own_ids(folder, preset, packed):
    """Against the formula in fp64, on the log-probabilities of these ids alone, one row of the model each."""
    config, responses = config_of(folder, preset=preset), spoken()
    sums, gradients = grpo_step(config, PROMPTS, responses, packed)
    lm = tiny.load_lm(config, trainable=False).base.double().requires_grad_(True)
    made = policy_of(config, tiny.load_lm(config), responses, packed=False)
    drawn = groups.collect(made, PROMPTS, None, 1)
    measured = made_up(drawn.rollout)

    # (8, LENGTH) of the ids that the policy drew, and nothing between them.
    compact = torch.zeros(4, 8, LENGTH, dtype=torch.float64)
    there = torch.zeros(8, LENGTH, dtype=torch.bool)
    for i, response in enumerate(responses):
        prompt = PROMPTS[i // 4].ids
        logits = lm(input_ids=torch.tensor([prompt + response.ids])).logits[0] / TEMPERATURE
        at = [len(prompt) - 1 + j for j in response.sampled(range(len(response.ids)))]
        logp = (
            logits[at]
            .log_softmax(-1)
            .gather(1, torch.tensor(response.sampled(response.ids)).long()[:, None])[:, 0]
        )
        compact[0, i, : len(at)] = logp
        compact[1, i, : len(at)] = measured.old_logprobs[i, at].double()
        compact[2, i, : len(at)] = measured.ref_logprobs[i, at].double()
        there[i, : len(at)] = True
    advantages = groups.advantages_of(config, drawn.rollout.rewards, drawn.included).double()
    options = {"preset": preset, "kl_coef": 0.1, "kl_estimator": "rk3", "max_length": LENGTH}
    loss, metrics = fused_rl.policy_loss(
        *compact[:2], advantages, there, ref_logprobs=compact[2], **options
    )
    loss.backward()
    for name in ("loss", "policy_loss", "approx_kl", "clipfrac", "ratio_minus_1", "kl", "kl1"):
        assert sums[name] == pytest.approx(metrics[name].item(), rel=2e-5, abs=1e-7), name
    for name, weight in lm.named_parameters():
        found, scale = gradients[f"lm.{name}"], weight.grad.abs().max().item()
        torch.testing.assert_close(
            found.double(), weight.grad, atol=2e-5 * scale + 1e-8, rtol=1e-4, msg=name
        )


# PPO.


def test_advantages_pass_over_turns_in_between_and_the_last_own_id_is_paid(folders, monkeypatch):
    options = {"kl_coef": 0.1, "gamma": 0.97, "value_gae_lambda": 1.0, "missing_eos_penalty": 0.3}
    options |= {"prompts_per_step": 2, "group_size": 4, "minibatches": 1, "critic": folders[1]}
    config, responses = tiny.config_of("ppo", folders[0], **options), spoken()
    made = policy_of(config, tiny.load_lm(config), responses, packed=False)
    rollout = made.roll_out(PROMPTS, made.sampling, 4)
    monkeypatch.setattr(ppo, "measure", lambda *_: made_up(rollout))
    judge, parts = Plain(Critic.from_pretrained(folders[1])), list(torch.arange(8).split(3))
    experience = ppo.judge(made, judge, rollout, parts, 0.1)
    mask, batch = experience.mask, experience.rollout.batch
    assert torch.equal(mask, batch.response_mask)
    assert experience.rollout.lengths.tolist() == batch.token_counts.tolist()
    assert batch.response_lengths.tolist() == [len(response.ids) for response in responses]
    assert mask.sum(1).tolist() == [len(response.sampled(response.ids)) for response in responses]
    for values in (experience.values, experience.advantages, experience.returns, experience.kl):
        assert (values[~mask] == 0).all()
    rewards = critic.token_rewards(experience.scores, experience.kl, mask, 0.0)
    for i in range(8):
        own = mask[i].nonzero()[:, 0]
        assert rewards[i].nonzero()[:, 0].tolist() == own[-1:].tolist()
        if len(own):
            assert rewards[i, own[-1]] == experience.scores[i]
        # What a sequence of the policy's ids alone would have: the recurrence of `fused_rl.reference.gae`.
        column = (
            experience.values[i, own][None].double(),
            (rewards - 0.1 * experience.kl)[i, own][None].double(),
        )
        whole = torch.ones(1, len(own), dtype=torch.bool)
        _, returns = reference.gae(column[1], column[0], whole, gamma=0.97, gae_lambda=1.0)
        torch.testing.assert_close(
            experience.returns[i, own][None].double(), returns, atol=1e-5, rtol=1e-5
        )
    assert responses[3].sampled(responses[3].ids) == [] and not mask[3].any()


# What is told of them.


def test_parts_of_a_batch_keep_their_turns_and_their_kept_sets():
    responses = spoken()
    made = torch.Generator().manual_seed(2)
    for response in responses:
        others = torch.randint(200, 250, (len(response.ids),), generator=made).tolist()
        kept = [[token, other] for token, other in zip(response.ids, others, strict=True)]
        flags = response.trained or [True] * len(kept)
        response.support = [ids if flag else [] for ids, flag in zip(kept, flags, strict=True)]
    samples = [
        Sample({}, PROMPTS[i // 4].ids, response, "") for i, response in enumerate(responses)
    ]
    batch = batch_of(samples, 0, torch.device("cpu"))
    assert len(batch.support) == batch.response_mask.sum() == batch.token_counts.sum()
    for index in ([0, 1, 2, 3, 4, 5, 6, 7], [5, 2], [3], [7, 3, 0]):
        part = batch.rows(torch.tensor(index))
        row, column = part.response_tokens()
        assert torch.equal(torch.stack([row, column], 1), part.response_mask.nonzero())
        assert torch.equal(part.places(), part.response_mask.flatten().nonzero()[:, 0])
        assert part.token_counts.tolist() == part.response_mask.sum(1).tolist()
        drawn = part.input_ids[:, 1:][part.response_mask].tolist()
        kept = [
            ids.tolist() for ids in part.support.ids.split(part.support.offsets.diff().tolist())
        ]
        assert all(token in ids for token, ids in zip(drawn, kept, strict=True))


# The recipe.


class Scripted:
    """A built sampler that says what is next in a list."""

    tells_logprobs, records_support = False, False

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.prompts = tokenizer, turns, []

    def sample(self, prompts, sampling):
        self.prompts += prompts
        said = [self.turns.pop(0) for _ in prompts]
        ids = [self.tokenizer(text, add_special_tokens=False).input_ids for text in said]
        return [Response([*each, self.tokenizer.eos_token_id], "stop") for each in ids]


def test_the_calculator_answers_calls_and_nothing_else(tmp_path):
    tool_recipe.prepare(tmp_path, 1)
    tokenizer = encode.load_tokenizer(str(tmp_path / "init"))
    built = Scripted(tokenizer, ["43", "calc 17 + 26", "calc 17 +", "43"])
    sampler = tool_recipe.Calculator(built, tokenizer)
    guess, call, broken = sampler.sample([[1], [2], [3]], Sampling(1.0, 36, (EOS,)))
    assert all(guess.trained) and all(broken.trained) and len(built.prompts) == 4
    text = tokenizer.decode(call.ids)
    assert text == "calc 17 + 26<eos><tool>43<assistant>43<eos>"
    assert tokenizer.decode(call.sampled(call.ids)) == "calc 17 + 26<eos>43<eos>"
    answer = tokenizer("43", add_special_tokens=False).input_ids
    assert built.prompts[3] + [*answer, tokenizer.eos_token_id] == [2, *call.ids]
    row = {"answer": "43"}
    assert tool_recipe.right(text.removesuffix("<eos>"), row) == 1
    assert tool_recipe.right("calc 17 + 26<eos><tool>43<assistant>44", row) == 0


@pytest.mark.slow
def test_the_recipe_s_games_are_what_their_environment_says(tmp_path):
    recipe.prepare(tmp_path, 1)
    config = demo.grpo_config(tmp_path, 1, "turns_grpo.yaml", model="init")
    small = {"steps": 2, "prompts_per_step": 4, "eval_size": 8, "group_size": 4, "eval_samples": 2}
    grpo.train(config.replace(**small))
    for line in (tmp_path / "grpo" / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        said = row["response"][1::2]
        assert row["reward"] == float("=" in said) and "=" not in said[:-1]


def test_turns_are_joined_with_their_records_and_have_seeds_of_their_own():
    first = Response([5, 6], "stop", [-0.1, -0.2], TokenSupport.from_lists([[5], [6, 7]]))
    second = Response([8], "length", [-0.3], TokenSupport.from_lists([[8, 9]]))
    whole = after_turn(after_turn(None, first, [70, 71]), second)
    assert whole.ids == [5, 6, 70, 71, 8] and whole.trained == [True, True, False, False, True]
    assert whole.logprobs == [-0.1, -0.2, 0.0, 0.0, -0.3] and whole.finish == "length"
    assert whole.support.offsets.tolist() == [0, 1, 3, 3, 3, 5]
    sampling = Sampling(1.0, 20, (EOS,), seeds=(7, 8, 2**31 - 1))
    one, other = (of_turn(sampling, turn, [0, 2], 3) for turn in (0, 1))
    assert one.seeds == (7, 2**31 - 1) and one.max_new_tokens == 3
    assert not {*one.seeds} & {*other.seeds} and all(0 <= seed < 2**31 for seed in other.seeds)
