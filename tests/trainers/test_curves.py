"""What stands in curves.png."""

import json

import pytest
from matplotlib.figure import Figure

from fused_rl.trainers import grpo, ppo
from fused_rl.trainers.run.curves import Against, draw_curves
from tests.trainers import figures, tiny
from tests.trainers.runs import grpo_config

HISTORY = [
    {"step": 0, "eval": 0.1},
    {"step": 1, "reward": 0.2, "length": 9.0},
    {"step": 2, "reward": 0.4, "length": 7.0, "eval": 0.5},
    {"step": 3, "reward": 0.3},
]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """`drawn(history, curves)` are the axes of the picture that it writes."""
    made = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: made.append(figure) or figures.draw(figure, *a, **k))

    def draw(history, curves):
        draw_curves(history, curves, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG" and len(list(tmp_path.iterdir())) == 1
        return {axes.get_title(): axes for axes in made[-1].axes}

    return draw


def test_a_panel_is_over_steps_or_over_another_metric(drawn):
    axes = drawn(HISTORY, {"a": ["reward", "eval", "absent"], "b": Against("length", "reward"), "c": ["absent"]})
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes["a"].lines}
    assert lines == {"reward": [[1, 0.2], [2, 0.4], [3, 0.3]], "eval": [[0, 0.1], [2, 0.5]]}
    (points,) = axes["b"].collections
    assert points.get_offsets().tolist() == [[9.0, 0.2], [7.0, 0.4]] and points.get_array().tolist() == [1, 2]
    assert (axes["b"].get_xlabel(), axes["b"].get_ylabel()) == ("length", "reward")
    assert not axes["c"].lines


@pytest.mark.parametrize("trainer", [grpo, ppo])
def test_the_panels_of_a_trainer_are_of_its_metrics(trainer):
    """Of what a preset or an option adds, too: the groups' fractions are not of every run."""
    keys = []
    for panel in trainer.CURVES.values():
        keys += list(panel)
    groups = {"frac_groups_all_solved", "frac_groups_none_solved"} if trainer is grpo else set()
    assert set(keys) - groups <= tiny.usual(trainer.__name__.rpartition(".")[2])
    against = [panel for panel in trainer.CURVES.values() if isinstance(panel, Against)]
    assert {panel.x for panel in against} == {"completions/mean_length", "objective/kl_exact"}


@pytest.mark.slow
def test_samples_are_of_the_same_held_out_rows_and_of_training(files, tmp_path, capsys):
    grpo.train(grpo_config(files, tmp_path / "run", eval_every=2, steps=3, show_samples=3))
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    of = {(row["step"], row["of"]): [] for row in rows}
    for row in rows:
        of[row["step"], row["of"]].append(row["prompt"])
    assert {key: len(prompts) for key, prompts in of.items()} == {
        (0, "held-out, greedy"): 3,
        (2, "held-out, greedy"): 2,
        (2, "training"): 1,
        (3, "held-out, greedy"): 2,
        (3, "training"): 1,
    }
    held_out = of[0, "held-out, greedy"]
    assert of[2, "held-out, greedy"] == of[3, "held-out, greedy"] == held_out[:2]
    assert of[2, "training"][0] not in held_out
    assert "samples at step 2" in capsys.readouterr().out
