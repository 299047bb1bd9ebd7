"""`make test-browser`: the page of a report in a browser without a screen, its picture left in runs/report.png."""

import math
import os
import subprocess
from pathlib import Path

import matplotlib
import numpy
import pytest
from matplotlib.colors import to_rgb

from fused_rl.trainers.commands import report
from tests.trainers.test_report import HOSTILE, made

matplotlib.use("agg")
SIZE = (1400, 2200)
PICTURE = Path("runs/report.png")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Of two runs, one of which has met text that would like to be a program."""
    folder = tmp_path_factory.mktemp("runs")
    samples = []
    for step in (0, 50, 99):
        for prompt, response in (("12 + 30 =", str(40 + step)), ("<b>2 + 2</b> =", HOSTILE)):
            row = {"step": step, "of": "held-out, greedy", "prompt": prompt, "response": response, "reward": step / 99}
            samples.append(row)
    rising = [1 - math.exp(-step / 30) for step in range(100)]
    falling = [0.5 * math.exp(-step / 60) for step in range(100)]
    a = made(folder / "a", rising, samples, model="m", lr=0.1, system_prompt=HOSTILE)
    b = made(folder / "b", falling, model="m", lr=0.2)
    report.main([str(a), str(b), "--output", str(folder / "page.html")])
    return folder / "page.html"


def browse(page: Path, *options: str) -> str:
    """What the browser prints; it may run whatever the page lets it run."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # which Chromium refuses to root
    command = [os.environ.get("BROWSER", "chromium"), "--headless", "--disable-gpu", *sandbox, *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_is_shown(page):
    PICTURE.parent.mkdir(exist_ok=True)
    size = ",".join(map(str, SIZE))
    browse(page, f"--screenshot={PICTURE.absolute()}", f"--window-size={size}", "--hide-scrollbars")
    pixels = matplotlib.image.imread(PICTURE)[..., :3]
    assert pixels.shape[:2] == (SIZE[1], SIZE[0])
    curves = pixels[250:900]  # under the table of runs: the pictures
    for colour in ("C0", "C1"):
        near = numpy.abs(curves - to_rgb(colour)).max(-1) < 0.02
        assert near.sum() > 300, f"no curve in the colour {colour}"


def test_nothing_of_a_sample_runs(page):
    shown = browse(page, "--dump-dom")
    assert "<title>fused-rl report</title>" in shown and "<script" not in shown
    assert "&lt;script&gt;" in shown and "&lt;b&gt;2 + 2&lt;/b&gt;" in shown


def test_the_browser_would_run_it(page, tmp_path):
    """So that the test above says something: the same text, unescaped and with no policy, does run."""
    (tmp_path / "open.html").write_text(f"<title>fused-rl report</title><body>{HOSTILE}</body>", encoding="utf-8")
    assert "<title>ran</title>" in browse(tmp_path / "open.html", "--dump-dom")
