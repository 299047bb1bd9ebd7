"""The page of `fused-rl report`: what stands in it, that nothing of it runs, and what is refused."""

import base64
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fused_rl.trainers import sft
from fused_rl.trainers.commands import report
from tests.trainers import figures
from tests.trainers.runs import run_config

RUNS = "document.title = 'ran'"
HOSTILE = f'<script>{RUNS}</script><img src=x onerror="{RUNS}"> $a_b$ \u202e\x1b[2J & {{{{ 7 * 7 }}}}'


def made(folder: Path, rewards: list[float], samples: list[dict] = (), **config) -> Path:
    """A folder as a run leaves it."""
    folder.mkdir(parents=True)
    lines = []
    for step, reward in enumerate(rewards):
        metrics = {
            "step": step,
            "reward": reward,
            "completions/mean_length": 9.0 + step,
            "objective/kl_exact": step / 8,
        }
        lines.append(json.dumps(metrics | {"rewards/own/mean": None if step == 1 else reward}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if samples:
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    told = "".join(f"{name}: {json.dumps(value)}\n" for name, value in ({"lr": 0.1} | config).items())
    (folder / "config.yaml").write_text(f"# fused-rl grpo --config <this file>\n{told}")
    return folder


class Page(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, path: Path):
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    def of(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


def read(*argv: object) -> Page:
    """The page of a command."""
    with figures.drawn():
        report.main([*map(str, argv)])
    output = argv[argv.index("--output") + 1] if "--output" in argv else Path(argv[0]) / "report.html"
    return Page(Path(output))


def test_a_page_has_curves_samples_and_configs(tmp_path, capsys):
    rows = [{"step": 2, "of": "training", "prompt": "t", "response": "r", "reward": 0.5}]
    for step, response in ((0, "no"), (2, "yes")):
        rows += [{"step": step, "of": "held-out, greedy", "prompt": p, "response": response} for p in ("p1", "p2")]
    page = read(made(tmp_path / "run", [0.1, 0.2, 0.4], rows, model="m", lr=0.25))
    assert capsys.readouterr().out == f"report: {tmp_path / 'run' / 'report.html'}\n"
    titles = [image["alt"] for image in page.of("img")]
    first = ["reward", "objective/kl_exact", "completions/mean_length"]
    against = ["reward over completions/mean_length", "reward over objective/kl_exact"]
    assert titles == [*first, *against, "rewards/own/mean"]
    for image in page.of("img"):
        kind, _, data = image["src"].partition("base64,")
        assert kind == "data:image/svg+xml;" and b"<svg" in base64.b64decode(data)
    assert [section["id"] for section in page.of("section")] == ["doctor", "curves", "samples", "configs"]
    cells = [text.strip() for text in page.texts if text.strip()]
    start = cells.index("Samples over time")
    samples = cells[start + 7 : cells.index("Configs")]
    held_out = ["0", "held-out, greedy", "p1", "no", "2", "held-out, greedy", "p1", "yes"]
    assert samples[:8] == held_out  # one prompt over time
    assert samples[-5:] == ["2", "training", "t", "r", "0.5"]
    assert cells[cells.index("lr") + 1] == "0.25" and "grpo" in cells and not page.of("h3")


def test_text_of_models_and_datasets_is_text(tmp_path):
    """Nothing of it becomes an element, and nothing that runs is in the page or may be loaded by it."""
    rows = [{"step": 0, "of": "training", "prompt": HOSTILE, "response": HOSTILE, HOSTILE: 1}]
    folder = made(tmp_path / "<b>run</b>", [0.1], rows, model=HOSTILE, system_prompt=HOSTILE)
    metrics = {"step": 1, f"rewards/{HOSTILE}/mean": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    other = made(tmp_path / "other", [0.1])
    path = tmp_path / "page.html"
    page = read(folder, other, "--output", path)
    assert not page.of("script") and page.of("b") != [] and len(page.of("b")) == len(page.of("figure"))
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in page.of("img"))
    assert not [a for _, attributes in page.elements for a in attributes if a.startswith("on") or a == "href"]
    (policy,) = [meta["content"] for meta in page.of("meta") if "content" in meta]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    text = path.read_text(encoding="utf-8")
    assert "\u202e" not in text and "\x1b" not in text and "{{ 7 * 7 }}" in text
    assert any("<script>document.title" in data for data in page.texts)


def test_runs_are_over_each_other_and_what_differs_is_told(tmp_path):
    a = made(tmp_path / "a", [0.1, 0.3], lr=0.1, seed=1, group_size=8)
    b = made(tmp_path / "b", [0.2, 0.5, 0.9], lr=0.1, seed=2)
    page = read(a, b, "--output", tmp_path / "out" / "page.html")
    assert len(page.of("img")) == 6  # a picture for both
    assert [section["id"] for section in page.of("section")] == ["doctor", "curves", "configs"]  # no samples
    cells = [text.strip() for text in page.texts if text.strip()]
    differ = cells[cells.index("What differs") + 1 :]
    assert differ[:9] == ["option", str(a), str(b), "seed", "1", "2", "group_size", "8", "—"]
    svg = base64.b64decode(page.of("img")[0]["src"].partition("base64,")[2]).decode()
    assert "#1f77b4" in svg and "#ff7f0e" in svg  # a colour for each
    swatches = [span["style"] for span in page.of("span")]
    assert swatches == ["background: #1f77b4", "background: #ff7f0e"]


def test_what_the_doctor_says_has_a_place(tmp_path, monkeypatch):
    found = report.read_run(made(tmp_path / "run", [0.1]))
    assert found.verdict[0].startswith("unfinished: ") and not found.healthy
    found.verdict.append("entropy <gone>")
    monkeypatch.setattr(report, "read_run", lambda folder: found)
    page = read(tmp_path / "run")
    assert [section["id"] for section in page.of("section")] == ["doctor", "curves", "configs"]
    assert "entropy <gone>" in page.texts


def test_a_healthy_run_is_called_healthy(tmp_path):
    run = made(tmp_path / "run", [0.1])
    (run / "model").mkdir()
    assert "healthy: " in "".join(read(run).texts)


def test_what_is_no_run_is_one_line(tmp_path):
    run = made(tmp_path / "run", [0.1])
    (tmp_path / "empty").mkdir()
    broken = made(tmp_path / "broken", [0.1])
    (broken / "config.yaml").write_text("a: [\n")
    refused = {
        ("none",): "there is no folder .*none; give the output_dir of a run",
        ("run", "empty"): "empty is no run",
        ("run", "run"): "run is named twice",
        ("broken",): "broken/config.yaml cannot be read: .*",
        ("run", "--output", "empty"): "empty is a folder; name a file",
    }
    for words, message in refused.items():
        argv = [word if word.startswith("--") else str(tmp_path / word) for word in words]
        with pytest.raises(SystemExit, match=f"fused-rl report: error: .*{message}") as stopped:
            report.main(argv)
        assert "\n" not in stopped.value.code
    assert not (run / "report.html").exists()
    (run / "metrics.jsonl").write_text("")  # begun, and no step yet
    (run / "config.yaml").unlink()
    page = read(run)
    assert "none yet" in page.texts and not page.of("img")


def test_the_page_of_a_real_run(files, tmp_path):
    sft.train(run_config(files, tmp_path / "run", steps=2, save_every=0))
    page = read(tmp_path / "run")
    titles = [image["alt"] for image in page.of("img")]
    assert titles[:3] == ["train/loss", "eval/loss", "eval/accuracy"] and "optim/grad_norm" in titles
    assert "sft" in page.texts
