"""The PPO demo's pairs are right against wrong, its recipe parses, and its table and panel say what was measured."""

from fused_rl.recipes import demo, demo_ppo
from fused_rl.trainers import ppo
from fused_rl.trainers.options.parse import parse


def test_miscounts_stand_next_to_the_right_answer():
    rows = demo_ppo.miscounts([{"question": "3 - 4 - 1 = ?", "answer": "-2"}])
    assert [(row["chosen"], row["rejected"]) for row in rows] == [("-2", "-3"), ("-2", "-1"), ("-2", "0")]


def test_the_recipe_pays_the_reward_model_and_shows_the_truth():
    config = parse(ppo.PPOConfig, ["--config", str(demo.RECIPES / "demo_ppo.yaml")])
    ppo.arithmetic(config, 1)
    ppo.arithmetic(config, 2)
    assert config.verifiers == ["reward_model:runs/demo_ppo/reward/model", "reasoning_gym"]
    assert config.verifier_weights == [1, 0]


def test_table_and_panel(tmp_path):
    before = {
        "step": 0,
        "eval/score": 0.25,
        "eval/accuracy_greedy": 0.4,
        "eval/accuracy_sampled": 0.3,
        "eval/kl_exact": 0,
    }
    after = {
        "step": 2,
        "eval/score": 1.5,
        "eval/accuracy_greedy": 0.9,
        "eval/accuracy_sampled": 0.7,
        "eval/kl_exact": 2,
    }
    steps = [
        {"step": step, demo_ppo.PROXY: 0.1 * step, demo_ppo.TRUTH: 0.5, "objective/kl_exact": 0.5}
        | {"completions/mean_length": 3.0, "val/win_rate": 0.8}
        for step in (1, 2)
    ]
    history = [before, steps[0], steps[1] | after]
    row = demo_ppo.row_of(history)
    assert row == ["0.25 -> 1.50", "40.0 -> 90.0 %", "30.0 -> 70.0 %", "2.00 (at most 2.00)"]
    demo_ppo.draw({"seed 1": history}, tmp_path / "panel.png")
    assert (tmp_path / "panel.png").stat().st_size > 0
