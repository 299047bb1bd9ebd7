"""Held-out evaluation during a run: every metric by hand, without the rows that only fill a rank's share up."""

import random
import re
from types import SimpleNamespace

import pytest
import torch

from fused_rl.trainers.policy import evaluate
from fused_rl.trainers.rollouts.roll_out import roll_out, sample_rows_of
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Prompt, Response, Sample
from tests.trainers import tiny

EOS = 3


RIGHT = [[1, 0, 1], [0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]]


class Sampler(tiny.Sampler):
    """Greedy: right for the first problem. Sampled: 1, 0 and 4 of 4 right, of 1, 2, 3 and 4 tokens, the last cut."""

    def sample(self, prompts, sampling):
        responses = []
        for i, right in enumerate(RIGHT[sampling.temperature > 0]):
            ids = [70 + right] * (i % 4 + 1)
            finish = "length" if i % 4 == 3 else "stop"
            responses.append(Response([*ids[:-1], EOS] if finish == "stop" else ids, finish))
        return responses


class Judge:
    """Right is what the sampler meant, half a point beside it."""

    name, weight, solved_at = "judge", 0.5, 1.0

    def __call__(self, samples):
        return [1.0 if right else 0.25 for right in RIGHT[len(samples) > 3]]


def test_every_metric_is_its_definition(monkeypatch, capsys):
    tokenizer, device, judge = tiny.tokenizer(), torch.device("cpu"), Judge()
    config = SimpleNamespace(eval_samples=4, seed=1)
    monkeypatch.setattr(evaluate, "SHOWN", 2)

    def sampled(prompts, sampling, copies, seeds=None):
        return roll_out(Sampler(), [judge], prompts, sampling, tokenizer, device, copies=copies)

    def measure(policy, batch, parts, *, exact_kl):
        each = torch.where(batch.response_mask, 2.0 ** torch.arange(12)[:, None], 0.0)
        return SimpleNamespace(kl=each, entropy=3 * each)

    monkeypatch.setattr(evaluate, "measure", measure)
    trained = [{"of": "training", "prompt": "a", "response": "b", "reward": 0.25}]
    policy = SimpleNamespace(config=config, sampling=Sampling(1.0, 4, (EOS,)), roll_out=sampled)
    policy.tokenizer, policy.reference, policy.scorers = tokenizer, True, [judge]
    policy.sample_rows = trained
    policy.divide = lambda batch, index: list(index.split(5))
    # The third problem is another rank's.
    held_out = evaluate.HeldOut([Prompt([1, 60 + i], {}) for i in range(3)], 2)
    metrics, shown, by_row = evaluate.evaluate(policy, held_out)
    by_token = sum(2**i * (i % 4 + 1) for i in range(8))
    assert metrics == pytest.approx(
        {
            "eval/accuracy_greedy": 1 / 2,
            "eval/accuracy_sampled": 1 / 8,
            "eval/pass_at_k": 1 / 2,
            "eval/pass_at_1": 1 / 4 / 2,
            # Of the first problem 3 of 6 pairs hold the right one.
            "eval/pass_at_2": 1 / 2 / 2,
            "eval/pass_at_4": 1 / 2,
            "eval/score": (0.5 + 7 * 0.125) / 8,
            "eval/score_std": 0.375 * 7**0.5 / 8,
            "eval/frac_reward_zero_std": 1 / 2,
            "eval/kl_exact": by_token / 8,
            "eval/entropy": 3 * by_token / 20,
            "eval/mean_length": 20 / 8,
            "eval/mean_length_solved": 2.0,
            "eval/mean_length_unsolved": (1 + 3 + 4 + 1 + 2 + 3 + 4) / 7,
            "eval/clipped_ratio": 2 / 8,
            "eval/commonest_ratio": 2 / 8,
        }
    )
    assert by_row == {
        "eval/accuracy_greedy": [[1.0, 0.0]],
        "eval/accuracy_sampled": [[0.25, 0.0]],
        "eval/pass_at_k": [[1.0, 0.0]],
        "eval/score": [[pytest.approx(0.21875), pytest.approx(0.125)]],
    }
    assert [row["of"] for row in shown] == ["held-out, greedy", "training"]
    assert shown[0]["reward"] in (0.5, 0.125) and shown[1] == trained[0]
    assert shown[0]["row"] == "a row" and shown[0]["prompt_tokens"] == 2
    assert shown[0]["scores"] == {judge.name: 2 * shown[0]["reward"]}  # by its weight, half
    assert shown[0]["prompt"] in [tokenizer.decode([1, 60 + i]) for i in range(2)]
    capsys.readouterr()

    # Nobody says what is solved: no figure of it, and a line.
    for judge.solved_at, why in (
        (None, "no scorer here says what"),
        (1.0, "judge returned None for all 10 responses"),
    ):
        monkeypatch.setattr(Judge, "__call__", lambda self, samples: [None] * len(samples))
        found = evaluate.evaluate(policy, held_out).metrics
        gone = {name for name in metrics if name not in found}
        assert gone == {name for name in metrics if re.search("accuracy|pass_at|solved", name)}
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"solved: {why}")


def test_what_is_shown_is_drawn_at_random_and_the_same_for_a_seed():
    samples = [Sample({}, [i], Response([i, EOS], "stop"), "") for i in range(50)]
    rollout = SimpleNamespace(samples=samples, rewards=torch.arange(50) / 10, scores={})
    tokenizer = SimpleNamespace(decode=lambda ids: ids[0])

    def shown(count, seed, among=50):
        rows = sample_rows_of("training", rollout, range(among), count, seed, tokenizer)
        return [row["prompt"] for row in rows]

    before = torch.get_rng_state(), random.getstate()
    picked = [shown(8, seed) for seed in range(20)]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert shown(3, 7) == picked[7][:3]  # fewer are the first of more
    assert all(len({*few}) == 8 for few in picked) and len({*sum(picked, [])}) > 40
    assert {*shown(8, 1, among=5)} == {*range(5)}
