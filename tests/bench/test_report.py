"""Results survive the way to a file and to the page; the page that stands here is that of its results."""

import shutil
from types import SimpleNamespace

import pytest

from bench import plots, report, results, run
from bench.cases.case import Spec
from bench.cases.linear import LinearCase
from bench.machine import ROOT
from tests.bench.cases import one_case


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Results and docs of a folder of its own."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(plots, "DOCS", tmp_path)
    return tmp_path


def test_results_survive_the_round_trip_and_the_report(pages, clock, monkeypatch):
    rows = run.run_case(one_case(), "plain torch", 1e9, 1e9)
    wrong = rows[-1] | {"implementation": "a peer", "status": results.WRONG, "reason": "entropy off by 2 nats"}
    rows += [wrong, results.not_run("TRL", results.NOT_INSTALLED, "not installed", "token_logprobs")]
    args = SimpleNamespace(device="cpu", out=str(pages), group="kernels")
    path = results.save(args, rows, copy_bytes_per_s=1e9)
    found = results.load(path)
    assert {"command", "commit", "device", "versions", "load"} <= set(found["environment"])
    assert str(ROOT) not in path.read_text()
    assert len(found["rows"][0]["samples_ms"]["both"]) >= 3
    assert report.command("report", []) == 0
    page = (pages / "benchmarks.md").read_text()
    assert results.number(found["rows"][0]["ms"]["both"]) in page
    assert "WRONG: entropy off by 2 nats" in page
    assert "Not run: TRL (not installed)." in page
    assert (pages / "benchmarks-cpu.png").stat().st_size > 5000


def test_the_report_leaves_out_what_it_cannot_read_and_says_so(pages, clock, monkeypatch, capsys):
    assert report.command("report", []) == 1
    assert "no results" in capsys.readouterr().out
    assert not (pages / "benchmarks.md").exists(), "what was there stays"
    rows = run.run_case(LinearCase(Spec((256, 64, 500), "bf16"), "cpu"), "none", 1e10, 1e9)
    args = SimpleNamespace(device="cpu", out=str(pages), group="linear")
    whole = results.save(args, rows, copy_bytes_per_s=1e10).read_text()
    (pages / "kernels-cpu.json").write_text(whole[:-200])
    (pages / "growth-cpu.json").write_text(whole.replace('"status"', '"state"'))
    assert report.command("report", []) == 1
    printed = capsys.readouterr().out
    assert "left out: kernels-cpu.json: JSONDecodeError" in printed
    assert "left out: growth-cpu.json: KeyError: 'status'" in printed
    assert "fused_rl one pass" in (pages / "benchmarks.md").read_text()
    assert (pages / "benchmarks-linear-cpu.png").stat().st_size > 5000


def test_the_page_that_stands_here_is_that_of_its_results(pages, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", results.RESULTS)
    shutil.copy(ROOT / "docs" / "numerics.md", pages)
    assert report.command("report", []) == 0
    for name in ("benchmarks.md", "numerics.md"):
        assert (pages / name).read_text() == (ROOT / "docs" / name).read_text()
