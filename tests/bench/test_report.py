"""Results survive the way to a file and to the page; the page that stands here is that of its results."""

import shutil
from types import SimpleNamespace

import pytest

from bench import compare, plots, quoted, report, results, run
from bench.cases.case import Spec
from bench.cases.linear import LinearCase
from bench.machine import ROOT
from tests.bench.cases import one_case

PAGES = ["docs/numerics.md", *quoted.QUOTED]


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Results and pages of a folder of its own."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(plots, "DOCS", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    for name in PAGES:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.slow
def test_results_survive_the_round_trip_and_the_report(pages, clock, monkeypatch):
    rows = run.run_case(one_case(), "plain torch", 1e9, 1e9)
    wrong = rows[-1] | {"implementation": "a peer", "status": results.WRONG, "reason": "entropy off by 2 nats"}
    rows += [wrong, results.not_run("TRL", results.NOT_INSTALLED, "not installed", "token_logprobs")]
    args = SimpleNamespace(device="cpu", out=str(pages), group="kernels")
    path = results.save(args, rows, copy_bytes_per_s=1e9)
    found = results.load(path)
    assert {"command", "commit", "device", "versions"} <= set(found["environment"])
    assert str(ROOT) not in path.read_text()
    assert len(found["rows"][0]["samples_ms"]["both"]) >= 3
    assert report.command("report", []) == 0
    page = (pages / "docs" / "benchmarks.md").read_text()
    assert results.number(found["rows"][0]["ms"]["both"]) in page
    assert "WRONG: entropy off by 2 nats" in page
    assert "Not run: TRL (not installed)." in page
    assert (pages / "docs" / "benchmarks-cpu.png").stat().st_size > 5000


@pytest.mark.slow
def test_the_report_leaves_out_what_it_cannot_read_and_says_so(pages, clock, monkeypatch, capsys):
    assert report.command("report", []) == 1
    assert "no results" in capsys.readouterr().out
    assert not (pages / "docs" / "benchmarks.md").exists(), "what was there stays"
    rows = run.run_case(LinearCase(Spec((256, 64, 500), "bf16"), "cpu"), "none", 1e10, 1e9)
    args = SimpleNamespace(device="cpu", out=str(pages), group="linear")
    whole = results.save(args, rows, copy_bytes_per_s=1e10).read_text()
    (pages / "kernels-cpu.json").write_text(whole[:-200])
    (pages / "topk-cpu.json").write_text(whole.replace('"status"', '"state"'))
    assert report.command("report", []) == 1
    printed = capsys.readouterr().out
    assert "left out: kernels-cpu.json: JSONDecodeError" in printed
    assert "left out: topk-cpu.json: KeyError: 'status'" in printed
    assert "fused_rl one pass" in (pages / "docs" / "benchmarks.md").read_text()
    assert (pages / "docs" / "benchmarks-linear-cpu.png").stat().st_size > 5000


@pytest.mark.slow
def test_the_pages_that_stand_here_are_those_of_the_results(pages, monkeypatch):
    """So is every figure that README and docs quote between their markers."""
    monkeypatch.setattr(report, "RESULTS", results.RESULTS)
    assert report.command("report", []) == 0
    for name in ("docs/benchmarks.md", *PAGES):
        assert (pages / name).read_text() == (ROOT / name).read_text()


def test_two_runs_are_compared_by_their_ratios(tmp_path, capsys):
    row = {"op": "o", "status": "ok", "implementation": "a peer", "shape": [8, 9], "dtype": "bf16"}
    for folder, of_peer, of_other in (("a", 2.0, 5.0), ("b", 2.1, 6.0)):
        rows = [row | {"time_over": {"fused_rl": of_peer}}]
        rows += [row | {"implementation": "another", "time_over": {"fused_rl": of_other}}]
        rows += [row | {"implementation": "fused_rl", "time_over": {"fused_rl": 1.0}}]
        rows += [row | {"implementation": "fused_rl", "task": "a task", "steps_over_trl": of_other}]
        rows += [{"kernel": "a row that is no comparison", "status": "ok"}]
        results.save(SimpleNamespace(device="cpu", out=str(tmp_path / folder), group="kl"), rows)
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert compare.command("compare", folders) == 1
    printed = capsys.readouterr().out
    assert "o bf16 8 9" in printed and "+20 %" in printed and "a peer" not in printed
    assert "o a task" in printed
    assert "1 of 3 ratios agree within 10%" in printed
    assert compare.command("compare", [folders[0], folders[0]]) == 0
