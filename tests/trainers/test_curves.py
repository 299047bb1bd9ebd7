"""What stands in curves.png."""

from matplotlib.figure import Figure

from fused_rl.trainers import cli
from fused_rl.trainers.run.logger import columns_of, draw_curves
from fused_rl.trainers.run.metrics import METRICS, keys_by
from tests.trainers import figures, tiny

HISTORY = [
    {"step": 0, "eval/accuracy_greedy": 0.1, "eval/score": None},
    {"step": 1, "reward": 0.2},
    {"step": 2, "reward": 0.4, "eval/accuracy_greedy": 0.5, "policy/entropy_avg": 1.0},
    {"step": 3, "reward": 0.3},
]


def test_a_panel_has_the_keys_that_the_run_has(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *a, **k: made.append(figure) or figures.draw(figure, *a, **k),
    )
    draw_curves(HISTORY, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG" and len(
        list(tmp_path.iterdir())
    ) == 1
    lines = {}
    for axes in made[0].axes:
        lines |= {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {
        "reward": [[1, 0.2], [2, 0.4], [3, 0.3]],
        "eval/accuracy_greedy": [[0, 0.1], [2, 0.5]],
        "policy/entropy_avg": [[2, 1.0]],
    }
    assert columns_of(HISTORY[0] | HISTORY[2]) == "reward 0.4  held-out 0.5"


def test_what_is_shown_is_logged_and_every_trainer_has_a_loss_that_the_doctor_reads():
    documented = {name: tiny.usual(name) for name in cli.TRAINERS}
    every = set().union(*documented.values())
    every |= {"frac_groups_all_solved", "frac_groups_none_solved"}  # not of every run
    assert METRICS.keys() <= every
    losses = {*keys_by("meaning")["loss"]}
    assert [name for name, keys in documented.items() if not losses & keys] == []
