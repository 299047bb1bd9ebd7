"""The PPO demo's pairs are right against wrong, its recipe parses, and its table and panel say what was measured."""

from fused_rl.recipes import demo, demo_ppo
from fused_rl.trainers import ppo
from fused_rl.trainers.run.parse import parse


def test_miscounts_stand_next_to_the_right_answer():
    rows = demo_ppo.miscounts([{"question": "3 - 4 - 1 = ?", "answer": "-2"}])
    assert [(row["chosen"], row["rejected"]) for row in rows] == [("-2", "-3"), ("-2", "-1"), ("-2", "0")]


def test_the_recipe_pays_the_reward_model_and_shows_the_truth():
    config = parse(ppo.PPOConfig, ["--config", str(demo.RECIPES / "demo_ppo.yaml")])
    ppo.arithmetic(config, 1)
    ppo.arithmetic(config, 2)
    assert config.verifiers == ["reward_model:runs/demo_ppo/reward/model", "reasoning_gym"]
    assert config.verifier_weights == [1, 0]
