"""A run that cannot learn says so, once."""

from types import SimpleNamespace

import pytest
import torch

from fused_rl.trainers.rollouts.stuck import Stuck

NAN = float("nan")


def rollout(rewards, **scores):
    return SimpleNamespace(
        rewards=torch.tensor(rewards), scores={name: torch.tensor(values) for name, values in scores.items()}
    )


@pytest.mark.parametrize(
    ("made", "group_size", "said"),
    [
        (
            rollout([0.0, 0.0, 1.0, 1.0], f=[0.0, 0.0, 1.0, 1.0]),
            2,
            "for 10 steps all rewards of every group were equal",
        ),
        (
            rollout([0.0, 0.5, 1.0, 1.0], f=[NAN] * 4, g=[1.0] * 4),
            2,
            "scorer 'f' returned None for every response of 10",
        ),
        (rollout([0.0] * 4, f=[NAN] * 4), None, "scorer 'f' returned None"),
    ],
)
def test_what_teaches_nothing_for_ten_steps_is_told_once(made, group_size, said, capsys):
    stuck = Stuck()
    for step in range(1, 25):
        stuck.look(made, group_size)
        assert (said in capsys.readouterr().out) == (step == 10)


def test_a_step_that_teaches_something_begins_the_count_again(capsys):
    stuck, equal = Stuck(), rollout([0.0, 0.0], f=[0.0, NAN])
    for step in range(1, 25):
        stuck.look(rollout([0.0, 1.0], f=[0.0, 1.0]) if step % 10 == 0 else equal, 2)
    stuck = Stuck()
    for _ in range(24):  # one reward per prompt is not compared with others
        stuck.look(equal, None)
    assert not capsys.readouterr().out
