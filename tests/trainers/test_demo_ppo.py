"""The PPO demo's pairs are right against wrong."""

from fused_rl.recipes import demo_ppo


def test_miscounts_stand_next_to_the_right_answer():
    rows = demo_ppo.miscounts([{"question": "3 - 4 - 1 = ?", "answer": "-2"}])
    assert [(row["chosen"], row["rejected"]) for row in rows] == [
        ("-2", "-3"),
        ("-2", "-1"),
        ("-2", "0"),
    ]
