"""What stands in curves.png."""

import re
from pathlib import Path

from fused_rl.trainers import cli
from fused_rl.trainers.run.logger import Logger, columns_of, draw_curves
from fused_rl.trainers.run.metrics import METRICS
from fused_rl.trainers.run.rules import RULES
from tests.trainers import figures, tiny

HISTORY = [
    {"step": 0, "eval/accuracy_greedy": 0.25, "eval/score": None},
    {"step": 1, "reward": 0.2, "objective/scores": 0.2},
    {
        "step": 2,
        "reward": 0.4,
        "objective/scores": 0.401,
        "eval/accuracy_greedy": 0.5,
        "policy/entropy_avg": 1.0,
    },
    {"step": 3, "reward": 0.3, "objective/scores": 0.3},
]


def test_a_panel_has_the_keys_that_the_run_has(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    made = []

    def saved(figure, *args, **options):
        made.append(figure)
        return figures.draw(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    by_row = {0: {"eval/accuracy_greedy": [[0, 0, 0, 1]]}}
    draw_curves(HISTORY, tmp_path / "curves.png", by_row, "a title")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    assert made[0].get_suptitle() == "a title"
    shown = {}
    for axes in made[0].axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            line, *_ = handle if isinstance(handle, tuple) else [handle]
            shown[name] = line.get_xydata().tolist()
    (((_, _, (bars,)),),) = (axes.containers for axes in made[0].axes if axes.containers)
    assert bars.get_segments()[0].tolist() == [[0, 0], [0, 0.5]]  # the standard error is 0.25
    # What nobody could tell from another curve is not drawn again.
    assert shown == {
        "reward": [[1, 0.2], [2, 0.4], [3, 0.3]],
        "eval/accuracy_greedy": [[0, 0.25], [2, 0.5]],
        "policy/entropy_avg": [[2, 1.0]],
    }
    # A running mean neither lags behind nor ends early.
    draw_curves([{"step": i, "reward": i} for i in range(90)], tmp_path / "curves.png")
    means = made[1].axes[0].lines[0].get_ydata()
    assert (len(means), *means[[2, 45, 89]]) == (90, 2.5, 45, 87.5)
    assert columns_of(HISTORY[2]) == "reward 0.4  held-out greedy 0.5"
    assert columns_of({"perf/tokens_per_second": 1000.0}) == "tokens/s 1000"


def test_a_line_shows_a_held_out_figure_only_where_it_was_measured(tmp_path, capsys):
    logger = Logger(tiny.config_of("grpo", output_dir=str(tmp_path), steps=9), 0)
    evaluation = {"eval/accuracy_greedy": 0.5, "eval/accuracy_sampled": 0.25, "eval/score": 0.75}
    logger.log(3, {"reward": 0.1})
    # Printed although the last line is not 10 seconds old.
    logger.log(4, {"reward": 0.2} | evaluation)
    logger.log(9, {"reward": 0.3})
    logger.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 3/9  reward 0.1",
        "step 4/9  reward 0.2  held-out greedy 0.5  sampled 0.25  score 0.75",
        "step 9/9  reward 0.3",
    ]


def test_what_is_shown_is_logged_and_every_trainer_has_a_loss_that_the_doctor_reads():
    documented = {name: tiny.usual(name) for name in cli.TRAINERS}
    every = set().union(*documented.values())
    every |= {"frac_groups_all_solved", "frac_groups_none_solved"}  # not of every run
    assert METRICS.keys() <= every
    finite = next(rule.keys for rule in RULES if rule.name == "not-finite")
    for name, keys in documented.items():
        losses = [key for key in keys if "grad_norm" not in key and re.fullmatch(finite, key)]
        assert losses, name


def test_a_panel_has_the_unit_that_the_page_says():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    # What has neither of these is a plain number, on the page and in the panel.
    units = re.compile(r"\((?:nats|tokens)\b")
    panels = {}
    for names, text in re.findall(r"^- (\*\*.+?\*\*):\s(.+?)(?=\n[-\n])", page, re.M | re.S):
        for key in {*re.findall("`(.+?)`", names)} & METRICS.keys():
            if not text.strip().startswith("the same of"):
                panels[key] = METRICS[key].panel
                assert units.findall(text)[:1] == units.findall(panels[key]) or not panels[key], key
    assert len(panels) > 30
