"""The picture of docs/tutorial.md: the curves.png of its run of GRPO, in the style of the pages.

python -m bench.tutorial grpo            the folder of that run; draws docs/tutorial-curves.svg
"""

import sys
import tempfile
from pathlib import Path

import matplotlib

from bench import plots
from fused_rl.trainers.run.logger import draw_curves, read_metrics, rows_by_step

if __name__ == "__main__":
    run = Path(sys.argv[1])
    cycle = matplotlib.cycler(color=[colour for colour, _ in plots.LOOKS])
    matplotlib.rcParams.update(plots.STYLE | {"axes.prop_cycle": cycle})
    rows = rows_by_step(read_metrics(run / "held_out.jsonl"))
    with tempfile.TemporaryDirectory() as folder:
        figure = draw_curves(read_metrics(run / "metrics.jsonl"), Path(folder) / "curves.png", rows)
    plots.save(figure, "tutorial-curves.svg")
