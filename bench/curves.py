"""Pictures of the pages that are the curves.png of a run, in the style of the pages.

python -m bench.curves grpo tutorial-curves.svg        the tutorial's run of GRPO, by its folder
python -m bench.curves runs/tool/grpo tools.svg        that of `python -m fused_rl.recipes.tool`
"""

import sys
import tempfile
from pathlib import Path

import matplotlib

from bench import plots
from fused_rl.trainers.run.logger import draw_curves, read_metrics, rows_by_step

if __name__ == "__main__":
    run, picture = Path(sys.argv[1]), sys.argv[2]
    cycle = matplotlib.cycler(color=[colour for colour, _ in plots.LOOKS])
    matplotlib.rcParams.update(plots.STYLE | {"axes.prop_cycle": cycle})
    rows = rows_by_step(read_metrics(run / "held_out.jsonl"))
    with tempfile.TemporaryDirectory() as folder:
        figure = draw_curves(read_metrics(run / "metrics.jsonl"), Path(folder) / "curves.png", rows)
    plots.save(figure, picture)
