"""Responses of several turns: what the policy did not draw is context, and nothing else, in GRPO and PPO alike."""

import json

import pytest

from fused_rl import TokenSupport
from fused_rl.recipes import demo
from fused_rl.recipes import turns as recipe
from fused_rl.trainers import grpo
from fused_rl.trainers.rollouts.sampling import Sampling
from fused_rl.trainers.rollouts.types import Response, after_turn, of_turn
from tests.trainers.steps import EOS

# The recipe.


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
